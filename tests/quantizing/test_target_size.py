"""Bits that are chosen for a size, and weights that are measured as sensitive."""

import json
import os
from pathlib import Path

import pytest
import torch
from small_models import DENSE, contents, options

from hmt.base.errors import ConfigError
from hmt.profiling.random_model import Shape, write_random_model
from hmt.quantizing import QuantizeOptions, quantize
from hmt.quantizing.job import prepare, with_forms

NEVER = Shape(
    layers=2, hidden_size=64, intermediate_size=48, heads=4, kv_heads=2, experts=5,
    experts_per_token=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer whose attention says nothing, so that its bits are worth least."""
    folder = tmp_path_factory.mktemp("dense")

    def edit(name: str, matrix: torch.Tensor) -> None:
        if "layers.1.self_attn.o_proj" in name:
            matrix *= 1e-3

    write_random_model(folder, DENSE, shard_bytes=1 << 18, edit=edit)
    return folder


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def uniform(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes at 4 bits."""
    out = tmp_path_factory.mktemp("uniform") / "out"
    quantize(dense, out, options())
    return size_of(out)


@pytest.mark.parametrize("more", [0, 60_000])
def test_the_result_is_within_a_hundredth_below_the_size(
    dense: Path, uniform: int, more: int, tmp_path: Path
):
    target = uniform + more
    made = quantize(dense, tmp_path / "out", options(target_bytes=target))
    assert 0.99 * target <= size_of(tmp_path / "out") == made.written_bytes <= target
    bits = {(g["layer"], g["name"]): g["bits"] for g in made.report["groups"]}
    assert len(bits) == 4 * DENSE.layers
    silent = bits[1, "attention/q_proj"]
    assert silent <= min(bits[0, "attention/q_proj"], bits[2, "attention/q_proj"])
    assert silent < max(bits.values())
    written = {line["module"]: line["target"]["bits"] for line in made.report["weights"]}
    fused = [written.get(f"model.layers.2.self_attn.{n}_proj", 16) for n in "qkv"]
    assert fused == [bits[2, "attention/q_proj"]] * 3


def test_a_run_that_was_ended_while_it_measured_or_wrote_goes_on(
    dense: Path, uniform: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chosen = options(method="gptq", target_bytes=uniform + 60_000, sensitivity=True)
    quantize(dense, tmp_path / "whole", chosen)
    write = os.pwrite
    left = 0

    def ended(*args: object) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return write(*args)  # type: ignore[arg-type]

    for left in (1, 6, 20, 45):  # noqa: B007  # counted down by `ended`
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", ended)
            with pytest.raises(KeyboardInterrupt):
                quantize(dense, tmp_path / "out", chosen)
    quantize(dense, tmp_path / "out", chosen)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_bits_that_were_given_stay_and_widths_are_chosen_from(
    dense: Path, uniform: int, tmp_path: Path
):
    chosen = options(target_bytes=uniform, widths=(3, 8), bits_of=(("down_proj", 5),))
    made = quantize(dense, tmp_path / "out", chosen)
    for group in made.report["groups"]:
        known = {5} if group["name"] == "ffn/down_proj" else {3, 8, 16}
        assert group["bits"] in known


def test_a_size_that_nothing_has_is_refused(dense: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"with 2 bits .* it takes"):
        quantize(dense, tmp_path / "out", options(target_bytes=1000))
    with pytest.raises(ConfigError, match="nothing would be quantised"):
        quantize(dense, tmp_path / "out", options(target_bytes=1 << 30))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"widths": (3, 4)}, "give --target-size"),
        ({"widths": (), "target_bytes": 1}, "names none"),
        ({"widths": (9,), "target_bytes": 1}, "2 to 8 bits, not 9"),
    ],
    ids=str,
)
def test_widths_that_cannot_be_are_refused(fields: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=says):
        QuantizeOptions(**fields)  # type: ignore[arg-type]


def test_a_weight_in_one_direction_is_kept_named_and_known_again(tmp_path: Path):
    def edit(name: str, matrix: torch.Tensor) -> None:
        if "layers.1.mlp.up_proj" in name:
            matrix += 0.2

    model = tmp_path / "model"
    write_random_model(model, DENSE, shard_bytes=1 << 18, edit=edit)
    made = quantize(model, tmp_path / "out", options(sensitivity=True))
    named = json.loads((tmp_path / "out" / "sensitive_layers.json").read_text())
    mine = [entry for entry in named if entry["energy"] > 0.42]
    assert [(e["layer"], e["op"], e["flag"]) for e in mine] == [(1, "up_proj", "bf16")]
    assert made.report["kept"]["model.layers.1.mlp.up_proj"] == "measured as sensitive"
    (model / "sensitive_layers.json").write_text(json.dumps(named))
    again = quantize(model, tmp_path / "again", options())
    assert {m for m, why in again.report["kept"].items() if "sensitive" in why} == {
        m for m, why in made.report["kept"].items() if "sensitive" in why
    }


@pytest.mark.parametrize(
    ("fields", "option"),
    [({"sensitivity": True}, "--sensitivity"), ({"keep": (".",)}, "some --keep")],
)
def test_where_all_weights_stay_the_option_that_keeps_them_is_named(
    dense: Path, fields: dict[str, object], option: str
):
    with pytest.raises(ConfigError, match=f"every linear layer is kept; leave {option} out"):
        job = prepare(dense, options(**fields))
        modules = [unit.module for work in job.works for unit in work.units]
        with_forms(job, dict.fromkeys(modules, "sensitive"))


def test_experts_that_no_token_came_to_are_named_and_rounded(tmp_path: Path):
    def edit(name: str, matrix: torch.Tensor) -> None:
        if name.endswith("mlp.gate.weight"):  # two of the first four are above 0 for any input
            matrix[1], matrix[2], matrix[3], matrix[4] = 1.5 * matrix[0], -matrix[0], 0, 0
            matrix[3] = -1.5 * matrix[0]

    model = tmp_path / "model"
    write_random_model(model, NEVER, shard_bytes=1 << 18, edit=edit)
    made = quantize(model, tmp_path / "out", options(method="gptq"))
    lines = {line["module"]: line for line in made.report["weights"]}
    for layer in range(NEVER.layers):
        at = f"model.layers.{layer}.mlp.experts.4"
        notes = [lines[f"{at}.{kind}_proj"]["note"] for kind in ("gate", "up", "down")]
        assert all(note.startswith("0 tokens came to this expert") for note in notes)
        assert notes[0].endswith("statistics of the layer") and notes[0] == notes[1]
        down = lines[f"{at}.down_proj"]
        assert notes[2].endswith("rounded to nearest") and down["error"] == down["nearest"]
    seen = [line for module, line in lines.items() if ".experts.0." in module]
    assert seen and not any(line["note"] for line in seen)
