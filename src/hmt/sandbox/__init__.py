"""Limited child processes, in which what strangers wrote is compiled, rendered and encoded."""

from hmt.sandbox.process import Ended, Limits, Lost, Refused, Reply, Sandbox, Worker
