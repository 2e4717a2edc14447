"""Names of schemes, and which parameter gets which format."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hmt.base.errors import ConfigError
from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.encoding import Activations, Encoding
from hmt.quant import Scheme, parse_scheme


def linear(columns: int) -> ParamSpec:
    return ParamSpec("proj", (8, columns), ("proj.weight",))


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("none", Scheme()),
        ("W8A8", Scheme(Encoding.INT8_CHANNEL, 0, Activations.INT8_TOKEN)),
        ("w8a16", Scheme(Encoding.INT8_CHANNEL, 0, Activations.FLOAT)),
        ("W4A8", Scheme(Encoding.INT4_GROUP, 32, Activations.INT8_TOKEN)),
        ("w8a8:64", Scheme(Encoding.INT8_GROUP, 64, Activations.INT8_TOKEN)),
        ("nvfp4a8", Scheme(Encoding.NVFP4, 16, Activations.INT8_TOKEN)),
        ("MXFP4A16", Scheme(Encoding.MXFP4, 32, Activations.FLOAT)),
        (" w4a16:128 ", Scheme(Encoding.INT4_GROUP, 128, Activations.FLOAT)),
    ],
)
def test_a_name_means_a_scheme_and_the_scheme_knows_its_name(text, scheme):
    assert parse_scheme(text) == scheme
    assert parse_scheme(str(scheme)) == scheme


@pytest.mark.parametrize("text", ["", "w4", "int4", "w4a4", "w2a8", "none:32", "w4a8:", "w4a8:-32"])
def test_an_unknown_name_lists_the_choices(text):
    with pytest.raises(
        ConfigError, match="none, w8a8, w8a16, w4a8, w4a16, nvfp4a8, nvfp4a16, mxfp4a8 or mxfp4a16"
    ):
        parse_scheme(text)


def test_group_sizes_that_cannot_be():
    with pytest.raises(ConfigError, match="can be 32, 64, 128, not 48"):
        parse_scheme("w4a8:48")
    with pytest.raises(ConfigError, match="takes no group size"):
        parse_scheme("nvfp4a8:32")


def test_only_linear_weights_are_converted():
    scheme = parse_scheme("w4a8")
    for role in (Role.VECTOR, Role.TABLE):
        assert scheme.format_for(ParamSpec("x", (8, 64), ("x",), role)) is None
    assert parse_scheme("none").format_for(linear(64)) is None


@given(st.integers(1, 4096), st.sampled_from([32, 64, 128]), st.sampled_from([8, 16]))
def test_the_group_divides_the_row_or_the_row_has_one_scale(columns, group, bits):
    scheme = parse_scheme(f"w4a{bits}:{group}")
    form = scheme.format_for(linear(columns))
    assert form.activations is scheme.activations
    possible = [size for size in (32, 64, 128) if size <= group and columns % size == 0]
    if possible:
        assert (form.encoding, form.group_size) == (Encoding.INT4_GROUP, max(possible))
    else:
        assert (form.encoding, form.group_size) == (Encoding.INT8_CHANNEL, 0)
