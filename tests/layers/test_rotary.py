"""Rotary positions against transformers' frequencies, at sizes that models publish."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hmt.base.errors import CheckpointError
from hmt.contracts.step import SegmentRequest, Step
from hmt.layers import Rotary

POSITIONS = 4096
THETAS = st.sampled_from([1e4, 5e5, 4e6])
FACTORS = st.floats(1.0, 40.0)
TRAINED = st.sampled_from([512, 2048])


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(ROPE_INIT_FUNCTIONS.keys() - {"proportional"})))
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(THETAS)}
    if kind in ("llama3", "yarn", "longrope"):
        found["original_max_position_embeddings"] = draw(TRAINED)
    if kind != "longrope":
        found["factor"] = draw(FACTORS)
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": draw(st.floats(1.5, 8.0))}
    if kind == "yarn":
        optional = {
            "beta_fast": st.floats(8, 64),
            "beta_slow": st.floats(0.5, 4),
            "mscale": st.floats(0.5, 1.5),
            "mscale_all_dim": st.floats(0.5, 1.5),
            "attention_factor": st.floats(0.5, 2.0),
            "truncate": st.booleans(),
        }
        found |= draw(st.fixed_dictionaries({}, optional=optional))
    if kind == "longrope":
        factors = st.lists(st.floats(1.0, 60.0), min_size=32, max_size=32)
        found |= {"short_factor": draw(factors), "long_factor": draw(factors)}
        found |= draw(st.fixed_dictionaries({}, optional={"factor": FACTORS}))
    return found


def config_of(found: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        rope_parameters=dict(found),
    )


@given(parameters(), st.integers(1, 3 * POSITIONS))
@settings(max_examples=150, deadline=None)
def test_frequencies_and_scaling_are_those_of_transformers(
    found: dict[str, Any], context: int
) -> None:
    rotary = Rotary(64, found, POSITIONS)
    compute = ROPE_INIT_FUNCTIONS[found["rope_type"]]
    frequencies, scaling = compute(config_of(found), device=None, seq_len=context)
    torch.testing.assert_close(rotary.frequencies(context), frequencies, rtol=2e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(scaling)


def test_partial_rotary_turns_a_part_of_the_head() -> None:
    found = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    cos, sin = Rotary(64, found, POSITIONS).cos_sin(Step.build([(1, 5, [0, 0], 0)]))
    assert cos.shape == sin.shape == (2, 48)
    angles = 5 / 1e4 ** (torch.arange(0, 48, 2, dtype=torch.float64) / 48)
    torch.testing.assert_close(cos[0].double(), angles.cos().repeat(2))
    torch.testing.assert_close(sin[0].double(), angles.sin().repeat(2))


def test_layers_of_one_step_share_the_angles() -> None:
    rotary = Rotary(8, {"rope_type": "default", "rope_theta": 1e4}, POSITIONS)
    first, second = (Step.build([(1, start, [0], 0)]) for start in (3, 4))
    assert rotary.cos_sin(first)[0] is rotary.cos_sin(first)[0]
    assert not torch.equal(rotary.cos_sin(first)[0], rotary.cos_sin(second)[0])
    assert torch.equal(rotary.cos_sin(first)[0], rotary.cos_sin(first)[0])


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_each_run_is_turned_by_its_own_length(kind: str) -> None:
    found = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
    }
    rotary = Rotary(8, found, 16)
    runs = [(1, 2, [0] * 3, 0), (2, 14, [0] * 5, 0), (3, 7, [0], 0)]
    together = rotary.cos_sin(Step.build(runs))[0]
    alone = torch.cat([rotary.cos_sin(Step.build([run]))[0] for run in runs])
    assert torch.equal(together, alone)
    short = Rotary(8, found | {"long_factor": [1.0] * 4, "factor": 1.0}, 16)
    assert torch.equal(rotary.frequencies(16), short.frequencies(16))
    assert not torch.equal(rotary.frequencies(17), short.frequencies(17))


def test_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="'spiral' is not supported; HMT has default, linear"):
        Rotary(64, {"rope_type": "spiral", "rope_theta": 1e4}, POSITIONS)


def test_longrope_goes_by_what_is_there() -> None:
    """A prompt is rotated as a whole, however it is cut; room for an answer changes nothing."""
    rotary = Rotary(
        8,
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 32,
        },
        128,
    )
    whole = Step.build([SegmentRequest(1, 0, [0] * 40, 1, whole=40)])
    first = Step.build([SegmentRequest(1, 0, [0] * 16, 0, whole=40)])
    for table, start in zip(rotary.cos_sin(whole), rotary.cos_sin(first), strict=True):
        assert torch.equal(table[:16], start)
    short = Step.build([SegmentRequest(1, 0, [0] * 16, 0, whole=24)])
    assert not torch.equal(rotary.cos_sin(short)[0], rotary.cos_sin(first)[0])
    room = Step.build([SegmentRequest(1, 0, [0] * 16, 0, 4000, 4000, whole=24)])
    assert torch.equal(rotary.cos_sin(short)[0], rotary.cos_sin(room)[0])


@given(st.integers(1, 40), st.lists(st.integers(1, 9), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_dynamic_goes_by_the_prompt_and_behind_it_by_each_position(
    prompt: int, sizes: list[int]
) -> None:
    """Tokens that are computed again in chunks have the angles that they had one by one."""
    found = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    rotary = Rotary(8, found, 16)
    at, rows = 0, []
    for size in sizes:
        rows.append(
            rotary.cos_sin(Step.build([SegmentRequest(1, at, [0] * size, 0, whole=prompt)]))[0]
        )
        at += size
    for position, row in enumerate(torch.cat(rows)):
        angles = position * rotary.frequencies(max(prompt, position + 1))
        torch.testing.assert_close(row, angles.cos().repeat(2), atol=1e-5, rtol=0)
