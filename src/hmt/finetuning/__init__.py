"""Training low-rank adapters of models that are larger than memory."""

from hmt.finetuning.options import FinetuneOptions
from hmt.finetuning.training import Finetuned, finetune
