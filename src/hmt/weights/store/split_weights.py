"""Weights of layers that compute on several devices: each block from the device that has it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from hmt.contracts.blocks import BlockId
from hmt.contracts.plan import Plan, Tier
from hmt.contracts.store import LeasedGroup, MoeBackend, Priority, ResidentBlock
from hmt.memory.device import Device
from hmt.weights.experts.moe_backends import Params
from hmt.weights.store.block_store import WeightStore
from hmt.weights.store.device_store import DeviceWeights


class SplitWeights:
    """Implements Weights over several devices' weights.  For one thread.

    What no device computes comes from host memory.  Tokens are looked up by the first device that
    can read their table, or in host memory.

    looks_up_tokens   whether any device can
    """

    def __init__(
        self, store: WeightStore, members: Mapping[int, tuple[DeviceWeights, Device]], plan: Plan
    ) -> None:
        """`members` by the devices' indices in `plan`."""
        parts = {index: weights for index, (weights, _) in members.items()}
        self._store, self._parts, self._homes = store, parts, plan.homes
        self._by_block = {
            block: parts[share.index]
            for share in plan.devices
            if share.index in parts
            for block in share.computes_prompts
        }
        self._by_layer = {
            stage: parts[index] for stage, index in plan.stage_devices.items() if index in parts
        }
        self.count, self.request_rows, self.routed = store.count, store.request_rows, store.routed
        self.looks_up_tokens = any(part.looks_up_tokens for part in parts.values())
        able = (member for member in members.values() if member[0].looks_up_tokens)
        self._lookups = next(able, next(iter(members.values())))

    def lease(self, block: BlockId) -> AbstractContextManager[Params]:
        """See Weights."""
        return self._of(block).lease(block)

    def lease_each(
        self, blocks: Sequence[BlockId]
    ) -> AbstractContextManager[Iterator[LeasedGroup]]:
        """See Weights.  The blocks are of one layer."""
        return self._of(blocks[0]).lease_each(blocks) if blocks else self._store.lease_each(blocks)

    def resident(self, blocks: Sequence[BlockId]) -> Sequence[ResidentBlock] | None:
        """See Weights."""
        found: list[ResidentBlock] = []
        for block in blocks:
            its = self._of(block).resident([block])
            if its is None:
                return None
            found += its
        return found

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        """See Weights."""
        away = [block for block in blocks if self._homes[block] is not Tier.DEVICE]
        self._store.request(away, priority)

    def rows(self, block: BlockId, name: str, ids: Tensor) -> Tensor:
        """See Weights."""
        with self._lookups[1].compute_stream():
            return self._lookups[0].rows(block, name, ids)

    def moe_backend(self, layer: int) -> MoeBackend | None:
        """See Weights."""
        part = self._by_layer.get(layer)
        return None if part is None else part.moe_backend(layer)

    def abandon(self) -> None:
        """Forget what was asked for ahead of time: the step that asked has failed."""
        for part in self._parts.values():
            part.abandon()

    def _of(self, block: BlockId) -> DeviceWeights | WeightStore:
        return self._by_block.get(block, self._store)
