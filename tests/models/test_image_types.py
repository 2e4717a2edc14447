"""Types that see, beside transformers, or refused with what is not computed or not installed.

A subset; `scripts/fallback-table --images` asks all of them and writes docs/images.md.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from default_part import after_first
from every_image_type import config_of, needs_torchvision, outcome_of, types
from transformers import CONFIG_MAPPING
from transformers.core_model_loading import revert_weight_conversion

from hmt.models.fallback import key_map

# Each for what others have not: a grid and positions that are not named here, text around rows by a
# class without and with a part for videos, several arrays of pixels, a mark that is no row, tokens
# for tiles, streams of a family of HMT's own, sizes of patches in each image.
EQUAL = (
    "paddleocr_vl", "idefics2", "minicpmv4_6", "deepseek_vl_hybrid", "qianfan_ocr", "aya_vision",
    "glm5_next", "video_llama_3",
    *after_first(("glm_ocr", "glmga", "lfm3_vl", "lighton_ocr", "vipllava", "got_ocr2"), 0),
)  # fmt: skip
REFUSED = {
    "git": "names no token that stands for images",
    "video_llava": "its image processor makes no pixel_values",
    "qwen4_exp": "its language model is also given ple_input_ids",
    "molmo2": "what its tokens of images see is unknown",
    "qwen2_5_omni_thinker": "how its positions follow from images is unknown",
}


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of transformers' own code
@pytest.mark.parametrize("kind", EQUAL)
def test_log_probabilities_are_transformers(kind: str, tmp_path: Path) -> None:
    outcome = outcome_of(kind, tmp_path / "model")
    assert outcome.kind == "equal", outcome


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_says_what_is_not_computed(kind: str, tmp_path: Path) -> None:
    outcome = outcome_of(kind, tmp_path / "model")
    assert outcome.kind == "refused" and re.search(REFUSED[kind], outcome.reason), outcome


@pytest.mark.parametrize("kind", ["lfm2_vl", *after_first(("kimi_k25", "cohere2_vision"), 0)])
def test_types_without_a_processor_for_pillow_need_torchvision(kind: str, tmp_path: Path) -> None:
    assert needs_torchvision(kind)
    outcome = outcome_of(kind, tmp_path / "model")
    if find_spec("torchvision") is None:
        assert outcome.kind == "refused", outcome
        assert (
            "needs torchvision, which is not installed: pip install torchvision" in outcome.reason
        )
    else:
        assert outcome.kind == "equal", outcome


def test_rows_that_are_published_in_another_order_are_found() -> None:
    """Kimi-K2.5's tower, whose queries and keys are published as pairs that are turned."""
    torch.manual_seed(5)
    model = transformers.Kimi_K25ForConditionalGeneration(config_of("kimi_k25"))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param))
    tensors = {
        name: tensor for name, tensor in model.state_dict().items() if ".experts." not in name
    }
    saved = revert_weight_conversion(model, dict(tensors))
    with torch.device("meta"):
        published = key_map.find(type(model)(model.config))
    assert published.orders
    for name in published.orders:
        assert published.whole(name, ordered=True) and not published.whole(name)
        rows = []
        for piece in published.slices[name]:
            whole = next(saved[n] for n in piece.names if n in saved)
            rows.append(whole[piece.at : piece.at + piece.end - piece.first])
        found = torch.cat(rows)
        assert not torch.equal(found, tensors[name])
        assert torch.equal(found[published.orders[name]], tensors[name])


def test_the_documentation_names_every_type() -> None:
    docs = Path(__file__).parents[2] / "docs" / "images.md"
    listed = docs.read_text().partition("## Every type that transformers has")[2]
    named = set(re.findall(r"[\w.-]+", listed.partition("\n## ")[0]))
    assert {*types()} <= named and {*types()} <= {*CONFIG_MAPPING}
