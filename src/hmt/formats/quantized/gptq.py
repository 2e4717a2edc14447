"""GPTQ checkpoints (AutoGPTQ, GPTQModel), and their packing for others that use it."""

import re
from collections.abc import Mapping
from typing import Any

from hmt.formats.quantized.scan import Quantized, table, whole

_BITS = (2, 3, 4, 8)


def find_gptq(found: Quantized) -> None:
    """Every MODULE.qweight with its qzeros, scales and g_idx."""
    less_one = found.choose("checkpoint_format", "gptq", "gptq", "gptq_v2") == "gptq"
    for module, _ in list(found.modules("qweight")):
        fields = _fields_of(module, found)
        bits, group = fields.get("bits"), fields.get("group_size", -1)
        if bits not in _BITS:
            asked = f"bits {bits!r} and group_size {group!r} for {module}"
            raise found.refuse(asked, f"{', '.join(map(str, _BITS))} bits in groups, or -1")
        add_gptq(found, module, fields, less_one=less_one)


def add_gptq(found: Quantized, module: str, fields: Mapping[str, Any], *, less_one: bool) -> None:
    """MODULE.qweight of 2 to 8 bits.

    fields     bits, group_size, sym, desc_act and static_groups as they are for this module
    less_one   zero points are stored less one
    """
    bits, given = fields.get("bits"), fields.get("group_size", -1)
    symmetric, ordered = fields.get("sym", True), fields.get("desc_act", False)
    if type(bits) is not int or not 2 <= bits <= 8:
        raise found.refuse(f"bits {bits!r} for {module}", "2 to 8 bits")
    if type(given) is not int or (given < 1 and given != -1):
        asked = f"bits {bits!r} and group_size {given!r} for {module}"
        raise found.refuse(asked, "groups of 1 or more, or -1 for whole rows")
    codes = found.tensor(module, "qweight")
    words, outputs = found.matrix(codes, "I32")
    columns = words * 32 // bits
    group = given if given > 0 else columns
    if not columns or columns % group or words * 32 % bits or outputs * bits % 32:
        shape = f"{module}.qweight {list(codes.shape)}"
        raise found.refuse(shape, f"[in * {bits} / 32, out] with in in groups of {group}")
    groups = columns // group
    zeros = found.tensor(module, "qzeros")
    scales = found.tensor(module, "scales")
    parts = {
        "qweight": whole(codes),
        "qzeros": whole(found.check(zeros, ("I32",), (groups, outputs * bits // 32))),
        "scales": whole(found.check(scales, ("F16",), (groups, outputs))),
    }
    ordered = bool(ordered) and groups > 1
    in_order = ordered and fields.get("static_groups") is True
    if ordered:
        index = found.check(found.tensor(module, "g_idx"), ("I32",), (columns,))
        parts["g_idx"] = whole(index)
    found.spare.add(f"{module}.g_idx")
    found.add(
        f"{module}.weight",
        "gptq",
        (outputs, columns),
        parts,
        bits=bits,
        outputs=outputs,
        group_size=0 if groups == 1 else group,
        symmetric=bool(symmetric),
        ordered=ordered and not in_order,
        in_order=in_order,
        zero_offset=int(less_one),
    )


def _fields_of(module: str, found: Quantized) -> Mapping[str, Any]:
    """The config as it is for `module`: GPTQModel's `dynamic` changes it by regexes of names."""
    for pattern, changes in table(found.config, "dynamic").items():
        sign, regex = (pattern[:2], pattern[2:]) if pattern[1:2] == ":" else ("+:", pattern)
        try:
            here = re.match(regex, module)
        except re.error:
            raise found.refuse(f"dynamic {pattern!r}", "regular expressions") from None
        if here and sign == "+:" and isinstance(changes, dict):
            return {**found.config, **changes}
    return found.config
