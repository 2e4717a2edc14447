"""Model families: one readable file each, in forward order."""

from hmt.models.dflash import DFLASH_ARCHITECTURES, DraftBlock, open_dflash
from hmt.models.drafter_config import VERIFIER_HEAD, VERIFIER_TABLE
from hmt.models.eagle3 import EAGLE3_ARCHITECTURES, open_eagle3
from hmt.models.gemma4_assistant import ASSISTANTS, TOKEN_ORDER, open_gemma4_assistant
from hmt.models.mixture_of_recursions import MixtureOfRecursions
from hmt.models.next_token import open_predictor
from hmt.models.registry import open_model, supported_architectures, with_architecture
from hmt.models.vision import IMAGES_REFUSED, with_vision
