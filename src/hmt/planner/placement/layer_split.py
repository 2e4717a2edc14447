"""Which layers each of several devices gets: a row of neighbours each, the first ones the first.

Steps of a long prompt follow each other through the rows, so each takes as long as the slowest
device needs for its row, and rows are cut where that is least: the time that the device reads its
memory, and that its link carries what has no room.  A decode step computes rows in turn: what
counts there is that all memory is used, which such cuts do as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from hmt.base.errors import BudgetError
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockId
from hmt.contracts.kv import KVTiers
from hmt.contracts.machine import DeviceRates, Machine
from hmt.contracts.plan import DevicePlan
from hmt.planner.cost.demand import Demand
from hmt.planner.placement.device import DeviceChoice, DevicePart, DeviceRoom, share_of_device

# Of a device that was not measured: what cards of these years have, as one compares to the other.
_READ_RATE, _LINK_RATE = 1e12, 25e9
_COPIES = 2  # slots for what is copied, of the largest network


def shares_of_devices(
    demand: Demand,
    device_bytes: Sequence[int],
    machine: Machine,
    *,
    chunk: int,
    context: int,
    host_bytes: int = 0,
    levels: KVTiers | None = None,
    asked: DeviceChoice | None = None,
) -> tuple[tuple[DevicePlan, ...], list[BlockId], int]:
    """`share_of_device` for each device, of its row of layers; of host bytes what all can map.

    device_bytes   budgets, in the order in which layers come
    levels, asked  for one device alone

    Raises BudgetError, also for more devices than layers.
    """
    if len(device_bytes) == 1:
        share, stays, mapped = share_of_device(
            demand, device_bytes[0], machine, chunk=chunk, context=context, host_bytes=host_bytes,
            levels=levels, asked=asked,
        )  # fmt: skip
        return (share,), stays, mapped
    assert levels is None and asked is None
    if len(device_bytes) > demand.spec.layers:
        raise BudgetError(
            f"{len(device_bytes)} GPUs were asked for, and {demand.spec.architecture} has "
            f"{demand.spec.layers} layers: give at most as many"
        )
    rooms = [
        DeviceRoom(
            demand, nbytes, chunk=chunk, context=context, host_bytes=host_bytes,
            part=DevicePart(index, range(demand.spec.layers)),
        )
        for index, nbytes in enumerate(device_bytes)
    ]  # fmt: skip
    shares, homes, mapped = list[DevicePlan](), list[BlockId](), host_bytes
    for index, layers in enumerate(split_layers(rooms, machine)):
        try:
            share, stays, those = share_of_device(
                demand, device_bytes[index], _seen_by(machine, index), chunk=chunk,
                context=context, host_bytes=host_bytes, part=DevicePart(index, layers),
            )  # fmt: skip
        except BudgetError as error:
            raise BudgetError(
                f"GPU {index + 1} of {len(rooms)}, with {format_bytes(device_bytes[index])} for "
                f"layers {layers.start} to {layers.stop - 1}: {error}"
            ) from error
        shares.append(share)
        homes += stays
        mapped = min(mapped, those)
    return tuple(shares), homes, mapped


def split_layers(rooms: Sequence[DeviceRoom], machine: Machine) -> list[range]:
    """A row of at least one layer for each device, so that the slowest takes least time.

    rooms   of the devices, each as if all layers were its

    Dynamic programming over where rows end.
    """
    devices = [_Device(room, rates_of(machine, index)) for index, room in enumerate(rooms)]
    layers, last = len(rooms[0].layers), len(rooms) - 1
    # By the layer behind a row's last: the most time any device takes until there, and the cuts.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for index, device in enumerate(devices):
        ends = [layers] if index == last else range(index + 1, layers - (last - index) + 1)
        best = {
            end: min(
                (max(before, device.seconds(begin, end, head=index == last)), [*cuts, end])
                for begin, (before, cuts) in best.items()
                if begin < end
            )
            for end in ends
        }
    ((_, cuts),) = best.values()
    return [range(begin, end) for begin, end in pairwise(cuts)]


def rates_of(machine: Machine, index: int) -> DeviceRates | None:
    """Of a device; None where the machine was not measured."""
    return machine.devices[index] if index < len(machine.devices) else None


def _seen_by(machine: Machine, index: int) -> Machine:
    """The machine as one of its devices has it: while its row computes, the others wait."""
    rates = rates_of(machine, index)
    return replace(machine, devices=() if rates is None else (rates,))


@dataclass(frozen=True)
class _Device:
    """Sums over a device's possible rows."""

    room: DeviceRoom
    rates: DeviceRates | None

    @cached_property
    def _sums(self) -> list[int]:
        """Bytes of the first layers, KV cache included, by their number."""
        sizes = (layer.core_bytes + layer.wide_bytes for layer in self.room.layers)
        return list(accumulate(sizes, initial=0))

    def seconds(self, begin: int, end: int, *, head: bool) -> float:
        """That a step takes it for the layers from `begin` to `end`."""
        nbytes = self._sums[end] - self._sums[begin]
        nbytes += sum(block.slot_bytes for block in self.room.head) if head else 0
        read_rate = link_rate = 0.0
        if self.rates is not None:
            read_rate, link_rate = self.rates.compute.read_rate, self.rates.link_rate
        copied = 0
        if nbytes > self.room.room:
            largest = max(layer.slot_bytes for layer in self.room.layers[begin:end])
            copied = nbytes - max(0, self.room.room - _COPIES * largest)
        return nbytes / (read_rate or _READ_RATE) + copied / (link_rate or _LINK_RATE)
