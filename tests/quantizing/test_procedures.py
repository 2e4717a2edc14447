"""Rotations and factors in front of rounding: they change what is rounded, and nothing else."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import DENSE, MOE, checkpoint, options
from transformers import AutoConfig, AutoModelForCausalLM

from hmt.base.errors import ConfigError
from hmt.contracts.blocks import TRUNK
from hmt.engine import Engine
from hmt.quant.methods.awq import AWQ, Clipping
from hmt.quant.methods.gptq import GPTQ
from hmt.quant.methods.interface import Target
from hmt.quant.methods.rounding import Rounding
from hmt.quant.methods.smoothquant import SmoothQuant
from hmt.quantizing import quantize
from hmt.quantizing.changes import Changes
from hmt.quantizing.job import Job, prepare
from hmt.quantizing.methods import open_procedure

MINI = Path(__file__).parents[2] / "src" / "hmt" / "embedded" / "mini-dense"
MINI_MOE = Path(__file__).parents[2] / "assets" / "mini-moe"
TOKENS = list(range(40, 72))


def numbers(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors f64; of FP8, what its codes stand for."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= {name: tensor.double() for name, tensor in load_file(file).items()}
    for name in [name for name in found if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        scales = found.pop(name).repeat_interleave(128, 0).repeat_interleave(128, 1)
        found[weight] *= scales[: found[weight].shape[0], : found[weight].shape[1]]
    return found


def rotated(job: Job, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a job's rotation makes of all that is written."""
    assert job.rotation is not None
    written = {}
    for work in job.works:
        places = {f"{unit.module}.weight": unit.places for unit in work.units} | dict(work.places)
        norms = {
            place: tensors[name]
            for name, own in places.items()
            for place in own
            if place in job.rotation.norms(work.index)
        }
        if work.index == TRUNK:
            changes = job.rotation.trunk(norms, Changes())
        else:
            changes = job.rotation.layer(work.index, norms, Changes())
        names = [f"{unit.module}.weight" for unit in work.units]
        for name in names + [record.name for record in work.copied]:
            tied = tensors["model.embed_tokens.weight"]
            own = places.get(name, ())
            before = tensors.get(name, tied)
            written[name] = changes.of(own[0], before) if own else before
    return written


def _norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.weight * x * (x.square().mean(-1, True) + module.variance_epsilon).rsqrt()


def float_logits(folder: Path, tensors: dict[str, torch.Tensor], out: Path) -> torch.Tensor:
    """transformers' in f64, of a model in `folder` with other tensors; written to `out`."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config["num_nextn_predict_layers"] = 0
    config["dtype"] = "float64"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    last = f"model.layers.{config['num_hidden_layers']}."  # predicts the token after the next
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(last)}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(
        out, config=AutoConfig.from_pretrained(out), dtype=torch.float64,
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)  # theirs computes in f32
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("folder", [MINI, MINI_MOE], ids=lambda folder: folder.name)
def test_a_rotated_models_logits_are_the_same(folder: Path, tmp_path: Path):
    job = prepare(folder, options(method="rotate=7"))
    before = numbers(folder)
    after = rotated(job, before)
    expected = float_logits(folder, before, tmp_path / "before")
    found = float_logits(folder, after, tmp_path / "after")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # Everything was turned: heads' values and what is written of them as well.
    parts = ("embed_tokens", "lm_head", "o_proj", "down_proj", "gate_proj", "norm.weight")
    for name, tensor in after.items():
        if name in before and any(part in name for part in parts) and "_a_" not in name:
            assert not torch.equal(tensor, before[name]), name


def logits(folder: Path) -> torch.Tensor:
    with Engine(host_memory="256MiB", dtype="float32", activations="exact", context=64) as engine:
        return engine.load_model(folder).logits(TOKENS, range(len(TOKENS)))


@pytest.fixture(scope="module", params=[DENSE, MOE], ids=["dense", "moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("method", ["rotate", "smoothquant=0.6", "awq", "rotate=3,awq,gptq"])
def test_models_compute_what_they_did_but_for_rounding(model: Path, method: str, tmp_path: Path):
    before = logits(model)
    quantize(model, tmp_path / "plain", options(target=Target(bits=8)))
    rounding = (logits(tmp_path / "plain") - before).abs().max()
    quantize(model, tmp_path / "out", options(method=method, target=Target(bits=8)))
    assert (logits(tmp_path / "out") - before).abs().max() < 3 * rounding


def test_what_stays_in_16_bits_is_changed_all_the_same(model: Path, tmp_path: Path):
    keep = ("q_proj", r"1\.mlp", "o_proj")
    plain = options(target=Target(bits=8), keep=keep)
    quantize(model, tmp_path / "plain", plain)
    before = logits(model)
    rounding = (logits(tmp_path / "plain") - before).abs().max()
    chosen = options(method="rotate,awq", target=Target(bits=8), keep=keep)
    made = quantize(model, tmp_path / "out", chosen)
    # Numbers of 16 bits are rounded once more when they are changed.
    assert (logits(tmp_path / "out") - before).abs().max() < 4 * rounding
    written: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(file)
    assert written["model.norm.weight"].eq(1).all()
    assert not torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    assert made.report["kept"]["model.layers.0.self_attn.q_proj"] == "kept as asked"


def test_bits_are_chosen_of_rotated_weights(model: Path, tmp_path: Path):
    plain = quantize(model, tmp_path / "all", options(method="rotate", target=Target(bits=8)))
    chosen = options(method="rotate,awq", target_bytes=plain.written_bytes, widths=(4, 8))
    made = quantize(model, tmp_path / "out", chosen)
    assert 0.95 * plain.written_bytes < made.written_bytes <= plain.written_bytes
    assert {group["bits"] for group in made.report["groups"]} <= {4, 8, 16}


def test_layers_that_predict_further_tokens_are_left_out_by_name(tmp_path: Path):
    made = quantize(MINI_MOE, tmp_path / "out", options(method="rotate", target=Target(bits=8)))
    assert "shares the output layer" in made.report["kept"]["model.layers.5"]
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert not any(name.startswith("model.layers.5.") for name in index["weight_map"])
    agreed = logits(tmp_path / "out").argmax(-1) == logits(MINI_MOE).argmax(-1)
    assert agreed.float().mean() > 0.85


def test_a_search_that_is_ended_ends_with_what_ended_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def ended(*args: object) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr("hmt.quant.methods.awq._rounded", ended)
    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "out", options(method="awq"))


def test_names_of_methods():
    assert open_procedure("rtn").method == Rounding()
    assert open_procedure("awq").scaling == AWQ() and open_procedure("awq").method == Clipping()
    found = open_procedure("rotate=3,smoothquant=0.7,gptq")
    assert (found.rotation, found.scaling, found.method) == (3, SmoothQuant(0.7), GPTQ())
    assert open_procedure("rotate").rotation == 0 and open_procedure("rotate").method == Rounding()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("mystery", "'mystery' is unknown; choose rtn, gptq, signround, rotate"),
        ("gptq,rotate", "rotate cannot come as number 2"),
        ("awq,smoothquant", "smoothquant cannot come as number 2"),
        ("awq,rotate", "rotate cannot come as number 2"),
        ("rotate,rotate", "rotate cannot come as number 2"),
        ("smoothquant=2", "a share from 0 to 1"),
        ("rotate=x", "rotate=x has no number"),
        ("awq=3", "'awq=3' is unknown"),
        ("", "'' is unknown"),
    ],
)
def test_methods_that_cannot_be_are_said(method: str, message: str):
    with pytest.raises(ConfigError, match=message):
        open_procedure(method)


def test_families_of_other_structure_are_refused(tmp_path: Path):
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    folder = tmp_path / "gemma"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **small)).save_pretrained(
        folder
    )
    with pytest.raises(ConfigError, match="cannot be rotated, only those of DeepseekV2"):
        prepare(folder, options(method="rotate"))
    with pytest.raises(ConfigError, match="can be scaled is not known"):
        prepare(folder, options(method="awq"))


def test_what_sees_images_is_not_rotated(tmp_path: Path):
    folder = Path(__file__).parents[2] / "assets" / "mini-vision"
    with pytest.raises(ConfigError, match="features would have to be rotated"):
        quantize(folder, tmp_path / "out", options(method="rotate"))
