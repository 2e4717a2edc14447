"""What `hmt quantize` makes: folders that hold what the method returned, and load."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import DENSE, MOE, checkpoint, options
from transformers import AutoModelForCausalLM

from hmt.base.errors import CheckpointError, ConfigError, NumericsError
from hmt.contracts.request import Request
from hmt.engine import Engine
from hmt.engine.config import EngineConfig
from hmt.engine.drift import ActivationStatistics, calibrate_activations, statistics_beside
from hmt.engine.loading.packs import convert
from hmt.formats import open_checkpoint
from hmt.profiling.random_model import Shape
from hmt.quant.methods.interface import Statistics, Target
from hmt.quantizing import calibration_sequences, quantize
from hmt.quantizing.methods import open_method

MINI = Path(__file__).parents[2] / "src" / "hmt" / "embedded" / "mini-dense"
MINI_MOE = Path(__file__).parents[2] / "assets" / "mini-moe"
TOKENS = list(range(40, 90))
FORMS = {
    "int4": Target(),
    "int3": Target(bits=3),
    "int8-rows": Target(bits=8, group_size=0),
    "zeros4": Target(symmetric=False),
    "zeros5": Target(bits=5, group_size=16, symmetric=False),
    "nvfp4": Target("nvfp4", 4, 16),
    "mxfp4": Target("mxfp4", 4, 32),
}


def logits(folder: Path) -> torch.Tensor:
    """HMT's, of f32 activations."""
    with Engine(host_memory="256MiB", dtype="float32", activations="exact", context=64) as engine:
        return engine.load_model(folder).logits(TOKENS, range(len(TOKENS)))


def transformers_logits(
    folder: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """transformers' of the model in `folder`, with other `weights` by module."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for module, weight in weights.items():
            _put(parameters, module, weight)
        return model(torch.tensor([TOKENS])).logits[0]


def _put(parameters: dict[str, torch.nn.Parameter], module: str, weight: torch.Tensor) -> None:
    """transformers keeps all experts of a layer in one tensor, gates above ups."""
    at, _, rest = module.partition(".experts.")
    if not rest:
        parameters[f"{module}.weight"].copy_(weight)
        return
    expert, kind = rest.split(".")
    if kind == "down_proj":
        parameters[f"{at}.experts.down_proj"][int(expert)].copy_(weight)
        return
    both = parameters[f"{at}.experts.gate_up_proj"][int(expert)]
    both.chunk(2)[kind == "up_proj"].copy_(weight)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def rounded(folder: Path, report: dict) -> dict[str, torch.Tensor]:
    """What rounding to nearest makes of the weights that a report lists, with scales in bf16."""
    published, nearest = tensors(folder), open_method("rtn")
    weights = {}
    for line in report["weights"]:
        weight, target = published[f"{line['module']}.weight"].float(), Target(**line["target"])
        made = nearest.quantize(weight, Statistics(0), target)
        if target.kind == "int":
            made = replace(made, scales=made.scales.bfloat16().float())
        weights[line["module"]] = made.dequantized()
    return weights


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("dense"), DENSE)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_in_each_form_computes_what_its_codes_stand_for(
    dense: Path, form: str, tmp_path: Path
):
    made = quantize(dense, tmp_path / "out", options(target=FORMS[form]))
    expected = transformers_logits(dense, rounded(dense, dict(made.report)))
    torch.testing.assert_close(logits(tmp_path / "out"), expected, atol=1e-4, rtol=0)
    assert len(made.report["weights"]) == 7 * DENSE.layers


@pytest.mark.parametrize(
    ("shape", "form"),
    [(DENSE, form) for form in ("int4", "int8-rows", "nvfp4", "mxfp4")]
    + [(replace(MOE, layers=2, intermediate_size=64), form) for form in ("int4", "mxfp4")],
)
def test_transformers_computes_the_same_with_the_folder(shape: Shape, form: str, tmp_path: Path):
    """With compressed-tensors, which unpacks to bfloat16.

    transformers 5.24 takes one form for all experts, whose groups have to divide both widths, and
    leaves out the factor of NVFP4 that all scales of an expert share.
    """
    model = checkpoint(tmp_path / "model", shape)
    made = quantize(model, tmp_path / "out", options(target=FORMS[form]))
    with torch.compiler.set_stance("force_eager"):  # the package would have 4-bit floats compiled
        found = transformers_logits(tmp_path / "out", {}, torch.bfloat16)
    expected = transformers_logits(model, rounded(model, dict(made.report)), torch.bfloat16)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_a_mixture_of_experts_with_other_bits_for_some(tmp_path: Path):
    model = checkpoint(tmp_path / "model", MOE)
    chosen = options(bits_of=(("down_proj", 8), (r"experts\.3\.", 5)), keep=("q_proj",))
    made = quantize(model, tmp_path / "out", chosen)
    expected = transformers_logits(model, rounded(model, dict(made.report)))
    torch.testing.assert_close(logits(tmp_path / "out"), expected, atol=1e-4, rtol=0)
    bits = {
        line["module"].split("layers.1.")[-1]: line["target"]["bits"]
        for line in made.report["weights"]
    }
    assert bits["mlp.experts.3.down_proj"] == 5 and bits["mlp.experts.2.down_proj"] == 8
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.self_attn.q_proj" in config["ignore"]
    assert "model.layers.0.mlp.gate" in config["ignore"]
    assert made.report["kept"]["model.layers.0.self_attn.q_proj"] == "kept as asked"


def test_the_embedded_model_keeps_its_answers_and_becomes_a_pack(tmp_path: Path):
    made = quantize(MINI, tmp_path / "out", options(target=Target(bits=8)))
    found, before = logits(tmp_path / "out"), logits(MINI)
    assert (found.argmax(-1) == before.argmax(-1)).float().mean() > 0.9
    torch.testing.assert_close(
        found, transformers_logits(MINI, rounded(MINI, dict(made.report))), atol=1e-4, rtol=0
    )
    convert(tmp_path / "out", tmp_path / "pack", EngineConfig.resolve(host_memory="64MiB"))
    assert torch.equal(logits(tmp_path / "pack"), found)


def test_requests_of_a_model_that_saw_text_are_watched(tmp_path: Path):
    """Statistics lie beside the weights, as the model's own activations would give them."""
    text = options(method="gptq", sequences=4, length=256, target=Target(bits=8))
    quantize(MINI, tmp_path / "out", text)
    found, _ = ActivationStatistics.read(statistics_beside(tmp_path / "out"))
    with Engine(host_memory="256MiB", context=512) as engine:
        model = engine.load_model(tmp_path / "out")
        assert model.summary().drift is not None
        texts = calibration_sequences("builtin", model.tokenizer, 4, 256)
        wanted = calibrate_activations(model, texts).statistics
        alone = model.infer(Request([777] * 80, 4, ignore_eos=True))
    assert alone.raised_at == 80
    off = abs(found.mean - wanted.mean) / wanted.deviation
    assert off.mean() < 0.02 and off.max() < 0.2
    assert abs(found.deviation / wanted.deviation - 1).max() < 0.2


def test_fp8_tiles_are_read_and_what_stays_is_written_in_16_bits(tmp_path: Path):
    quantize(MINI_MOE, tmp_path / "out", options(target=Target(bits=8)))
    written, published = tensors(tmp_path / "out"), tensors(MINI_MOE)
    assert not any(name.endswith("_scale_inv") for name in written)
    # The layer that predicts the token after the next is no part of the model, and is kept.
    name = "model.layers.5.mlp.experts.7.up_proj.weight"
    scales = published[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    rows, columns = published[name].shape
    numbers = published[name].float() * scales[:rows, :columns]
    assert torch.equal(written[name], numbers.bfloat16())
    agreed = logits(tmp_path / "out").argmax(-1) == logits(MINI_MOE).argmax(-1)
    assert agreed.float().mean() > 0.85


def test_what_is_named_as_sensitive_stays_as_published(dense: Path, tmp_path: Path):
    model = checkpoint(tmp_path / "model", DENSE)
    (model / "sensitive_layers.json").write_text('[{"layer": 1, "op": "ffn"}]')
    made = quantize(model, tmp_path / "out", options())
    kept = {name for name, why in made.report["kept"].items() if "sensitive" in why}
    assert kept == {f"model.layers.1.mlp.{kind}_proj" for kind in ("gate", "up", "down")}
    written, published = tensors(tmp_path / "out"), tensors(model)
    assert all(torch.equal(written[f"{n}.weight"], published[f"{n}.weight"]) for n in kept)


def test_what_is_quantised_already_is_refused(dense: Path, tmp_path: Path):
    quantize(dense, tmp_path / "out", options())
    with pytest.raises(CheckpointError, match="quantised already, as compressed-tensors"):
        quantize(tmp_path / "out", tmp_path / "again", options())


def test_infinite_weights_are_named(tmp_path: Path):
    model = checkpoint(tmp_path / "model", DENSE)
    name = "model.layers.1.self_attn.q_proj.weight"
    file = open_checkpoint(model).records[name].file
    held = load_file(file)
    held[name][3, 5] = torch.inf
    save_file(held, file)
    with pytest.raises(NumericsError, match="NaN or infinite"):
        quantize(model, tmp_path / "out", options())


def test_a_text_for_a_method_that_reads_none_is_refused(dense: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="rtn reads no text"):
        quantize(dense, tmp_path / "out", options(calibration="some.txt"))


def test_keeping_everything_is_refused(dense: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nothing of .* would be quantised"):
        quantize(dense, tmp_path / "out", options(keep=("",)))


def test_the_language_part_of_a_model_that_sees_is_quantised(tmp_path: Path):
    seeing = Path(__file__).parents[2] / "assets" / "mini-vision"
    made = quantize(seeing, tmp_path / "out", options(method="gptq", target=Target(bits=8)))
    assert all(".language_model." in line["module"] for line in made.report["weights"])
    agreed = logits(tmp_path / "out").argmax(-1) == logits(seeing).argmax(-1)
    assert agreed.float().mean() > 0.9
