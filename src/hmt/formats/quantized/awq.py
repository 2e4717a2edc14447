"""AWQ checkpoints (AutoAWQ, llm-awq's GEMM packing), and that packing for others that use it."""

from typing import Any

from hmt.formats.quantized.scan import Quantized, whole

_PER_WORD = 8


def find_awq(found: Quantized) -> None:
    """Every MODULE.qweight with its qzeros and scales."""
    found.choose("bits", found.config.get("w_bit", 4), 4)
    found.choose("version", "gemm", "gemm")
    found.choose("zero_point", True, True)
    given = found.config.get("group_size", found.config.get("q_group_size", 128))
    for module, _ in list(found.modules("qweight")):
        add_awq(found, module, given)


def add_awq(found: Quantized, module: str, given: Any) -> None:
    """MODULE.qweight of 4 bits; `given` inputs share a scale, -1 for all of a row."""
    if type(given) is not int or (given < 1 and given != -1):
        raise found.refuse(f"group_size {given!r}", "groups of 1 or more, or -1 for whole rows")
    codes = found.tensor(module, "qweight")
    columns, words = found.matrix(codes, "I32")
    group = given if given > 0 else columns
    if columns % group:
        shape = f"{module}.qweight {list(codes.shape)}"
        raise found.refuse(shape, f"[in, out / 8] with in in groups of {group}")
    groups, outputs = columns // group, words * _PER_WORD
    zeros, scales = found.tensor(module, "qzeros"), found.tensor(module, "scales")
    parts = {
        "qweight": whole(codes),
        "qzeros": whole(found.check(zeros, ("I32",), (groups, words))),
        "scales": whole(found.check(scales, ("F16",), (groups, outputs))),
    }
    options = {"outputs": outputs, "group_size": 0 if groups == 1 else group}
    found.add(f"{module}.weight", "awq", (outputs, columns), parts, **options)
