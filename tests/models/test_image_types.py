"""Types that see, beside transformers, or refused with what is not computed or not installed.

A subset; `scripts/fallback-table --images` asks all of them and writes docs/images.md.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from default_part import after_first
from every_image_type import (
    config_of,
    model_of,
    needs_torchvision,
    outcome_of,
    publish,
    types,
)
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.core_model_loading import revert_weight_conversion
from vision_models import BEGIN, END, IMAGE, logprobs_of, picture, scored_request

import hmt
from hmt.contracts.step import Segment
from hmt.models.fallback import key_map
from hmt.models.fallback.whole import WholeForward

# Each for what others have not: a grid and positions that are not named here, text around rows by a
# class without and with a part for videos, several arrays of pixels, a mark that is no row, tokens
# for tiles, streams of a family of HMT's own, sizes of patches in each image, features of tokens
# around an image's rows, positions on four axes.
EQUAL = (
    "paddleocr_vl", "idefics2", "minicpmv4_6", "deepseek_vl_hybrid", "qianfan_ocr", "aya_vision",
    "glm5_next", "video_llama_3", "ovis2",
    *after_first(("glm_ocr", "glmga", "lfm3_vl", "lighton_ocr", "vipllava", "got_ocr2"), 0),
    *after_first(("hunyuan_vl", "qwen3_omni_moe_thinker", "deepseek_ocr2", "granite_docling"), 0),
)  # fmt: skip
TORCHVISION = ("kimi_k25", "cohere2_vision", "llama4", "gemma4_unified")
REFUSED = {
    "git": "names no token that stands for images",
    "video_llava": "its image processor makes no pixel_values",
    "qwen4_exp": "its language model is also given ple_input_ids",
    "molmo2": "what its tokens of images see is unknown",
    "mllama": "attend to an encoder's states",
    "minicpmv4_7": "how its positions follow from images is unknown",
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


@pytest.mark.parametrize("kind", ["lfm2_vl", *after_first(TORCHVISION, 0)])
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


def answered(folder: Path, prompt: list[int], memory: str = "64MiB", **more: Any) -> list[float]:
    options = {"dtype": "float32", "context": 512, "max_batch": 1, "threads": 1}
    with hmt.Engine(host_memory=memory, **options | more) as engine:
        model = engine.load_model(folder)
        assert not model._input.images_refused
        request = scored_request(prompt, (picture(37, 21),), max_new_tokens=3)
        return logprobs_of(model.infer(request))


def test_budgets_change_no_bit_where_layers_add_features(tmp_path: Path) -> None:
    """Of a model that runs through transformers' modules as a whole: Cohere Compass."""
    kind, folder = "cohere_compass", tmp_path / "model"
    model = model_of(kind)
    publish(kind, model, folder)
    prompt = [300, 17, model.config.image_token_id, *range(400, 420)]
    found = answered(folder, prompt, max_prefill_tokens=32)
    assert answered(folder, prompt, "3MiB", executor="plain", max_prefill_tokens=32) == found
    assert answered(folder, prompt, max_prefill_tokens=24) == pytest.approx(found, abs=1e-5)


def test_of_a_model_that_also_speaks_the_part_that_writes_is_read(tmp_path: Path) -> None:
    """As Qwen2.5-Omni is published, with tensors of the same ends for speech."""
    kind, folder = "qwen2_5_omni_thinker", tmp_path / "model"
    publish(kind, model_of(kind), folder)
    prompt = [300, BEGIN, IMAGE, END, 9]
    wanted = answered(folder, prompt)
    tensors = load_file(folder / "model.safetensors")
    whole = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    whole |= {f"talker.{name}": torch.zeros(4, 4) for name in tensors}
    save_file(whole, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    published = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"]}
    (folder / "config.json").write_text(json.dumps(published | {"thinker_config": config}))
    assert answered(folder, prompt) == wanted


def test_tokens_of_an_image_see_each_other_in_the_masks_that_say_so() -> None:
    """Gemma 4's that has no encoder; also of what a window hides."""
    config = config_of("gemma4_unified")
    whole = WholeForward(config, "Gemma4UnifiedForConditionalGeneration", torch.float32)
    calls = whole.take_images(config.image_token_id, 0)
    assert calls.masks == {"full_attention": True, "sliding_attention": True}
    run = Segment(0, 10, 0, 12, blocks=((12, 20),))
    given = calls.inputs(torch.zeros(1, 12, dtype=torch.int64), torch.zeros(8, 64), (), run)
    for kind, mask in given["attention_mask"].items():
        for row, at in enumerate(range(10, 22)):
            for other in range(22):
                near = kind == "full_attention" or other > at - calls.window
                block = 12 <= at < 20 and 12 <= other < 20
                assert (mask[0, 0, row, other] == 0) == ((other <= at and near) or block)


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
