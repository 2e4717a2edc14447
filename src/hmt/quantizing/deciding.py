"""From what was measured to the form of each weight: what stays, and how many bits the others have.

Weights that have an input together, and all experts of a layer, get equally many bits: engines
compute them in one product.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes
from hmt.formats.safetensors import DTYPE_BITS
from hmt.quant.methods.interface import Target
from hmt.quantizing.choosing import PUBLISHED, Option, choose
from hmt.quantizing.job import Job
from hmt.quantizing.layer_writer import shard_bytes
from hmt.quantizing.measures import Sensitivity
from hmt.quantizing.measuring import Measured
from hmt.quantizing.options import QuantizeOptions
from hmt.quantizing.published import sizes
from hmt.quantizing.units import Unit

SENSITIVE: Final = "measured as sensitive"
_ROOM: Final = "there is room for it in 16 bits"
_HEADER_BYTES: Final = 256  # by which a shard's header may grow with other widths


@dataclass(frozen=True, slots=True)
class Group:
    """Weights of one layer that have equally many bits; 16: they stay as published."""

    layer: int
    name: str
    bits: int
    numbers: int
    nbytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided.

    chosen      by module: its form, or the reason why it stays
    groups      with --target-size: bits of each, in order
    sensitive   entries of sensitive_layers.json that were found
    """

    chosen: Mapping[str, Target | str]
    groups: Sequence[Group]
    sensitive: Sequence[Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "groups": [asdict(group) for group in self.groups],
            "sensitive": [dict(entry) for entry in self.sensitive],
        }


def decide(job: Job, measured: Mapping[str, Measured]) -> Decision:
    """Forms of all weights of a job.  Raises ConfigError where no choice is as small as asked."""
    chosen: dict[str, Target | str] = {}
    entries: list[dict[str, Any]] = []
    if job.options.sensitivity:
        entries, kept = _sensitive(job, measured)
        chosen |= dict.fromkeys(kept, SENSITIVE)
    groups: list[Group] = []
    if job.options.target_bytes:
        groups, forms = _widths(job, measured, chosen)
        chosen |= forms
    return Decision(chosen, groups, entries)


def _sensitive(job: Job, measured: Mapping[str, Measured]) -> tuple[list[dict[str, Any]], set[str]]:
    """Entries of the file, and the modules that they mean.

    Experts are one entry: the means over their tokens.  Where one of several weights that have an
    input together is sensitive, all stay.
    """
    entries: list[dict[str, Any]] = []
    kept: set[str] = set()
    for work in job.works:
        groups: dict[str, list[Unit]] = {}
        for unit in work.units:
            groups.setdefault(_plain(unit.input.name), []).append(unit)
        for units in groups.values():
            ops: dict[str, list[Unit]] = {}
            for unit in units:
                for place in unit.places:
                    ops.setdefault(_plain(place.name), []).append(unit)
            found = {op: _mean([measured[unit.module] for unit in own]) for op, own in ops.items()}
            if any(one is not None and one.is_high for one in found.values()):
                kept |= {unit.module for unit in units}
                entries += [_entry(work.index, op, one) for op, one in found.items()]
    return entries, kept


def _plain(name: str) -> str:
    """As sensitive_layers.json calls it: shared experts' weights like the others'."""
    return name.removeprefix("shared_")


def _entry(layer: int, op: str, found: Sensitivity | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"layer": layer, "op": op, "flag": "bf16"}
    if found is not None:
        entry |= {
            "kl": _digits(found.kl), "R": _digits(found.spread), "energy": _digits(found.energy)
        }  # fmt: skip
    return entry


def _mean(lines: Sequence[Measured]) -> Sensitivity | None:
    seen = [(line.tokens, line.sensitivity) for line in lines if line.sensitivity is not None]
    total = sum(tokens for tokens, _ in seen)
    if not total:
        return None
    return Sensitivity(
        sum(tokens * one.kl for tokens, one in seen) / total,
        sum(tokens * one.spread for tokens, one in seen) / total,
        sum(tokens * one.energy for tokens, one in seen) / total,
    )


def _widths(
    job: Job, measured: Mapping[str, Measured], kept: Collection[str]
) -> tuple[list[Group], dict[str, Target | str]]:
    """Groups with their bits, and the forms of their modules."""
    keys, fixed = _groups(job, kept)
    options = [
        _options(units, measured, job.options, fixed=given) for (_, _, given), units in keys.items()
    ]
    target = job.options.target_bytes or 0
    found = choose(options, target - fixed)
    if found is None:
        raise _too_small(job, fixed + sum(min(o.nbytes for o in some) for some in options))
    groups, forms = [], dict[str, Target | str]()
    for (layer, name, _), units, option in zip(keys, keys.values(), found, strict=True):
        numbers, loss = sum(unit.numbers for unit in units), _digits(option.loss)
        groups.append(Group(layer, name, option.bits, numbers, option.nbytes, loss))
        for unit in units:
            bits = option.bits
            forms[unit.module] = _ROOM if bits == PUBLISHED else replace(unit.target, bits=bits)
    return groups, forms


def check_size(job: Job) -> None:
    """Raise ConfigError where no bits give the size that was asked for.  Nothing is read."""
    target = job.options.target_bytes
    if target is None:
        return
    keys, fixed = _groups(job, ())
    least = most = fixed
    for (_, _, given), units in keys.items():
        for unit in units:
            bits = unit.target.bits if given else min(job.options.widths)
            least += _nbytes(unit, bits)
            most += _nbytes(unit, bits if given else PUBLISHED)
    if target < least:
        raise _too_small(job, least)
    if target >= most:
        raise ConfigError(
            f"--target-size {format_bytes(target)}: the model as published takes "
            f"{format_bytes(most)} ({most} bytes), so nothing would be quantised; give a smaller "
            "size"
        )


def _too_small(job: Job, least: int) -> ConfigError:
    return ConfigError(
        f"--target-size {format_bytes(job.options.target_bytes or 0)}: with "
        f"{min(job.options.widths)} bits wherever bits are chosen it takes {format_bytes(least)} "
        f"({least} bytes); allow fewer bits (--widths), larger groups (--group-size), or a larger "
        "size"
    )


def _groups(job: Job, kept: Collection[str]) -> tuple[dict[tuple[int, str, bool], list[Unit]], int]:
    """Units by layer, name and whether their bits are given; and the bytes of all else."""
    keys: dict[tuple[int, str, bool], list[Unit]] = {}
    fixed = 0
    for work in job.works:
        fixed += shard_bytes(work) + _HEADER_BYTES
        for unit in work.units:
            fixed -= _nbytes(unit, unit.target.bits)
            if unit.module in kept:
                fixed += _nbytes(unit, PUBLISHED)
                continue
            name = f"{unit.input.block.kind}/{unit.input.name}"
            key = work.index, name, _is_fixed(unit, job.options)
            keys.setdefault(key, []).append(unit)
    return keys, fixed


def _options(
    units: Sequence[Unit],
    measured: Mapping[str, Measured],
    options: QuantizeOptions,
    *,
    fixed: bool,
) -> list[Option]:
    widths = {units[0].target.bits} if fixed else set(options.widths)
    found = []
    for bits in sorted(widths):
        loss = sum(measured[unit.module].losses[bits] for unit in units)
        found.append(Option(bits, sum(_nbytes(unit, bits) for unit in units), loss))
    if not fixed:
        found.append(Option(PUBLISHED, sum(_nbytes(unit, PUBLISHED) for unit in units), 0.0))
    return found


def _is_fixed(unit: Unit, options: QuantizeOptions) -> bool:
    return any(re.search(pattern, unit.module) for pattern, _ in options.bits_of)


def _nbytes(unit: Unit, bits: int) -> int:
    """Of a unit's tensors in a file."""
    if bits == PUBLISHED:
        return unit.numbers * DTYPE_BITS[unit.scales] // 8
    total = 0
    for dtype, shape in sizes(replace(unit.target, bits=bits), unit.shape, unit.scales).values():
        total += DTYPE_BITS[dtype] * torch.Size(shape).numel() // 8
    return total


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
