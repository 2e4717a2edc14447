"""Load for any endpoint that speaks OpenAI's language: users, arrivals, and what they waited."""

from hmt.bench.load.matrix import Matrix, run
from hmt.bench.load.report import report_html
