"""`hmt inspect`: what a checkpoint or pack holds, without reading a weight."""

import json as json_format
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hmt.base.units import format_bytes
from hmt.cli.options import ModelArgument, choose_model

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hmt.engine.loading.inspection import Inspection

_SHOWN = 5  # names of tensors


def inspect(
    model: ModelArgument = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a model's files hold and which kernels would compute on it here."""
    from rich.console import Console

    from hmt.engine.loading import inspection

    found = inspection.inspect(choose_model(model))
    if json:
        print(json_format.dumps(_as_json(found), indent=1))
    else:
        Console().print(_view(found))


def _as_json(found: "Inspection") -> dict[str, Any]:
    from dataclasses import asdict

    content = asdict(found) | {"path": str(found.path)}
    content["kv_tokens_per_gib"] = found.kv_tokens_per_gib
    content["stored"] = [
        asdict(one) | {"bits": one.bits, "published_bits": one.published_bits}
        for one in found.stored
    ]
    return content


def _view(found: "Inspection") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from hmt.formats import shown_name

    kind = "pack" if found.is_pack else "checkpoint"
    size = format_bytes(found.published_bytes)
    what = found.architecture or "no architecture"
    head = f"{shown_name(found.path)}: a {kind} of {what}, {size}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, side in (("blocks", "left"), ("published as", "left"), ("bits", "right"),
                       ("in memory as", "left"), ("bits", "right"), ("size", "right"),
                       ("kernel", "left")):  # fmt: skip
        table.add_column(name, justify=side, header_style="dim", overflow="fold")  # type: ignore[arg-type]
    for one in found.stored:
        size = format_bytes(one.nbytes)
        table.add_row(
            one.kind, one.published, f"{one.published_bits:.2f}", one.encoding, f"{one.bits:.2f}",
            size, one.kernel,
        )  # fmt: skip
    return Group(head, Text(), table, Text(), *map(Text, _lines(found)))


def _lines(found: "Inspection") -> list[str]:
    lines = []
    if found.largest is not None:
        name, nbytes = found.largest
        lines.append(f"largest block: {name}, {format_bytes(nbytes)} in memory")
    if found.kv_token_bytes:
        lines.append(
            f"keys and values: {format_bytes(found.kv_token_bytes)} a position, "
            f"{found.kv_tokens_per_gib} positions in a GiB; at most {found.max_context}"
        )
    for what, names in (("missing", found.missing), ("not used", found.extra)):
        if names:
            more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"{what}: {', '.join(names[:_SHOWN])}{more}")
    if found.remark:
        lines.append(f"it {found.remark}")
    if found.problem:
        lines.append(f"it cannot be run: {found.problem}")
    return lines
