"""What models of GGUF files with encoders of images answer, beside transformers."""

from pathlib import Path
from typing import Any

import torch
from vision_families import Case, family_logits, publish_family
from vision_models import BEGIN, END, IMAGE, logprobs_of, picture, scored_request

import hmt
from hmt.contracts.request import Completion, Request

OPTIONS: dict[str, Any] = {"dtype": "float32", "context": 512, "host_memory": "64MiB"}
IMAGES = (picture(37, 21), picture(18, 50, 1))
PROMPT = [300, 17, BEGIN, IMAGE, END, 81, 99, 2000, BEGIN, IMAGE, END, 45, 46]


def answer(path: Path, request: Request, **options: Any) -> Completion:
    with hmt.Engine(**OPTIONS, **options) as engine:
        return engine.load_model(path).infer(request)


def asked(prompt: Any = PROMPT, images: Any = IMAGES) -> Request:
    return scored_request(prompt, images, max_new_tokens=4)


def spoken(file: Path, words: list[int]) -> tuple[list[int], Completion]:
    """Tokens of a prompt as it is written with `IMAGES`, and the answer."""
    with hmt.Engine(**OPTIONS) as engine:
        loaded = engine.load_model(file)
        request = asked(words)
        return loaded._input.process(request, None).state.tokens, loaded.infer(request)


def check_logprobs(case: Case, model: Any, folder: Path, whole: list[int], got: Completion) -> None:
    """Log-probabilities are transformers', whose image processor is that of `folder`."""
    publish_family(case, model, folder)
    tokens = [*whole, *got.token_ids]
    wanted = family_logits(model, folder, tokens, list(IMAGES)).log_softmax(-1)
    expected = wanted[range(len(tokens) - 1), tokens[1:]]
    torch.testing.assert_close(torch.tensor(logprobs_of(got)), expected, atol=1e-4, rtol=0)
