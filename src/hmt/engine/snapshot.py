"""A loaded model as a monitor sees it: where its bytes lie, which experts are wanted."""

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hmt.contracts.blocks import BlockKind
from hmt.contracts.plan import Tier
from hmt.engine.engine_core import EngineCore
from hmt.engine.experts.predictor import expert_count, expert_layers
from hmt.engine.loading.prepared import Prepared
from hmt.engine.run_summary import RunSummary
from hmt.engine.scheduling.sequence import Load
from hmt.kernels.reference import SCORE_DECAY
from hmt.weights import WeightStore

_WEIGHTS = ("resident", "slots", "experts")  # purposes of accounts; the block says which it is


class ExpertTier(enum.IntEnum):
    """Where an expert is."""

    DEVICE = 0
    HOST = 1  # where it stays
    SLOT = 2  # in host memory until another block needs the room
    DISK = 3


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What lies in one tier, in bytes.

    budget_bytes    that may be used; 0: no limit is set
    weights_bytes   of blocks that every token needs
    experts_bytes   of routed experts
    kv_bytes        of keys and values, and of them
    kv_taken_bytes  what sequences have reserved
    other_bytes     activations, staging, tables
    """

    budget_bytes: int = 0
    weights_bytes: int = 0
    experts_bytes: int = 0
    kv_bytes: int = 0
    kv_taken_bytes: int = 0
    other_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """Routed experts by layer.

    layers   their numbers, ascending
    heat     f32 [layers, experts], 0..1: the share of steps that needed each expert, where a step
             counts 3% less than the one after it
    counted  bool [layers]: false where whoever computes does not tell; heat is 0 there
    places   int8 [layers, experts]: a Place
    """

    layers: tuple[int, ...]
    heat: NDArray[np.float32]
    counted: NDArray[np.bool_]
    places: NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """A loaded model at one moment, between two steps.

    at_s      time.perf_counter()
    summary   its phases are copies
    experts   None for a dense model
    """

    at_s: float
    summary: RunSummary
    load: Load
    fills: Mapping[Tier, TierUsage]
    experts: ExpertMap | None


class SnapshotReader:
    """Looks at a model from the engine's thread, between steps.

    A look at the 14,848 experts of DeepSeek-V3 takes 2 ms.  Heat is as exact as looks are frequent:
    uses between two of them are taken to be spread evenly.
    """

    def __init__(self, prepared: Prepared, weights: WeightStore) -> None:
        """`weights` have just been loaded."""
        demand, plan, spec = prepared.demand, prepared.plan, prepared.model.spec
        sizes = *demand.blocks, *demand.vision
        self._budgets = plan.budgets
        self._blocks = [size.id for size in sizes]
        self._bytes = np.array([size.slot_bytes for size in sizes])
        self._is_expert = np.array([block.kind is BlockKind.EXPERT for block in self._blocks])
        homes = [plan.homes[block] for block in self._blocks]
        self._at = {tier: np.array([home is tier for home in homes]) for tier in Tier}
        text = len(demand.blocks)  # a tower is read for images alone
        self.home_bytes = {
            tier: int(self._bytes[:text][at[:text]].sum()) for tier, at in self._at.items()
        }
        self._layers = tuple(expert_layers(spec))
        row = {layer: number for number, layer in enumerate(self._layers)}
        experts = [block for block in self._blocks if block.kind is BlockKind.EXPERT]
        cells = [(row[b.layer], b.index) for b in experts]
        self._cells = tuple(np.array(cells, dtype=np.int64).reshape(-1, 2).T)
        self._weights = weights
        self._uses = np.array(weights.seen()[0])[self._is_expert]  # those of loading
        self._heat = np.zeros((len(self._layers), expert_count(spec)), dtype=np.float32)
        self._steps = 0

    def read(self, core: EngineCore, summary: RunSummary) -> EngineSnapshot:
        """What there is now.  `summary` is of this moment."""
        memory, load = core.memory, core.scheduler.load
        uses, is_there = map(np.array, self._weights.seen())
        experts = None
        if self._layers:
            self._in_slots(uses[self._is_expert] + self._beside_budget(core), core.steps)
            places = self._places(is_there)
            counted = (places != ExpertTier.DEVICE).all(1)
            heat = self._heat * counted[:, None]
            experts = ExpertMap(self._layers, heat, counted, places)
            for there in memory.on_devices:
                _add_shared_out(experts, there.weights.moe_backends.seen())
        prompt, generation = replace(summary.prompt), replace(summary.generation)
        fills = self._fills(summary, load, is_there)
        return EngineSnapshot(
            time.perf_counter(),
            replace(summary, prompt=prompt, generation=generation),
            load,
            fills,
            experts,
        )

    def _beside_budget(self, core: EngineCore) -> NDArray[np.int64]:
        """Uses of each expert that needed no lease."""
        uses = np.zeros(self._heat.shape, dtype=np.int64)
        for layer, counts in core.runner.executor.expert_uses.items():
            uses[self._layers.index(layer), : len(counts)] = counts
        return uses[self._cells]

    def _in_slots(self, uses: NDArray[np.int64], steps: int) -> None:
        """Let heat fade by the steps since the last look, and add what was used in them."""
        passed = steps - self._steps
        if passed > 0:
            left = SCORE_DECAY**passed
            rate = np.minimum((uses - self._uses) / passed, 1.0)
            self._heat *= left
            self._heat[self._cells] += (1 - left) * rate
            self._uses, self._steps = uses, steps

    def _places(self, is_there: NDArray[np.bool_]) -> NDArray[np.int8]:
        found = np.full(len(self._blocks), ExpertTier.DISK, dtype=np.int8)
        found[is_there] = ExpertTier.SLOT
        found[self._at[Tier.HOST]] = ExpertTier.HOST
        found[self._at[Tier.DEVICE]] = ExpertTier.DEVICE
        places = np.full(self._heat.shape, ExpertTier.DISK, dtype=np.int8)
        places[self._cells] = found[self._is_expert]
        return places

    def _fills(
        self, summary: RunSummary, load: Load, is_there: NDArray[np.bool_]
    ) -> dict[Tier, TierUsage]:
        taken = 1 - load.free_tokens / load.capacity_tokens
        in_host = is_there & ~self._at[Tier.DEVICE]
        fills = {
            Tier.HOST: self._fill(
                self._budgets[Tier.HOST], summary.used_bytes, self._split(in_host), taken
            )
        }
        if (device := summary.device) is not None:
            weights, experts = self._split(self._at[Tier.DEVICE])
            weights += device.used_bytes["slots"]
            experts += device.used_bytes["experts"]
            fills[Tier.DEVICE] = self._fill(
                device.budget_bytes, device.used_bytes, (weights, experts), taken
            )
        if self.home_bytes[Tier.DISK]:
            fills[Tier.DISK] = TierUsage(0, *self._split(self._at[Tier.DISK]))
        return fills

    def _split(self, which: NDArray[np.bool_]) -> tuple[int, int]:
        """Bytes of blocks that every token needs, and of experts."""
        experts = int(self._bytes[which & self._is_expert].sum())
        return int(self._bytes[which].sum()) - experts, experts

    def _fill(
        self, budget: int, used: Mapping[str, int], blocks: tuple[int, int], taken: float
    ) -> TierUsage:
        kv = used.get("kv", 0)
        other = sum(n for purpose, n in used.items() if purpose not in (*_WEIGHTS, "kv"))
        return TierUsage(budget, *blocks, kv, round(kv * taken), other)


def _add_shared_out(experts: ExpertMap, seen: Mapping[int, tuple[list[float], list[bool]]]) -> None:
    """Of layers whose experts are shared out between device and host the device knows more."""
    for layer, (scores, cached) in seen.items():
        row = experts.layers.index(layer)
        experts.counted[row] = True
        experts.heat[row, : len(scores)] = np.array(scores) * (1 - SCORE_DECAY)
        experts.places[row, : len(cached)][cached] = ExpertTier.DEVICE
