"""Small hybrids with a tokenizer, and requests to them, for tests through the engine."""

import random
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

from plain_memory import published, put_tokenizer, random_reference
from random_configs import case_of
from transformers import PreTrainedModel

import hmt


def publish(
    name: str, folder: Path, positions: int, vocabulary: int | None = None
) -> PreTrainedModel:
    """The case `name` for so many positions, as transformers has it; its checkpoint to `folder`.

    vocabulary   4096 for text, as the tokenizer has it; None: the case's
    """
    case = case_of(name)
    case.config.max_position_embeddings = positions
    case.config.vocab_size = vocabulary or case.config.vocab_size
    reference = random_reference(case.config, case.seed)
    published(reference, folder)
    if vocabulary is None:
        put_tokenizer(folder)
    else:
        shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), folder)
    return reference


def ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 250) for _ in range(count)]


def drawn(tokens: list[int], seed: int, new: int = 12, **options: Any) -> hmt.Request:
    sampling = hmt.Sampling(temperature=1.5, seed=seed)
    return hmt.Request(tokens, new, sampling=sampling, ignore_eos=True, **options)
