"""What is known of a model before any of its weights is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hmt.base.errors import RequestError
from hmt.contracts.blocks import BlockId
from hmt.contracts.machine import Machine
from hmt.contracts.model import Model
from hmt.contracts.plan import Plan
from hmt.engine.config import EngineConfig
from hmt.engine.loading.adapters import NamedAdapters
from hmt.engine.loading.copies import Copies
from hmt.engine.loading.source import Divided, Source
from hmt.kvcache import KeyRange
from hmt.models import DraftBlock
from hmt.planner import Demand
from hmt.weights import BlockLayout


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint or pack that was opened, checked and planned for; no weight has been loaded.

    headless   it has no output layer, and can be asked for embeddings only
    copies     blocks in higher precision, for which the plan leaves room; None: there are none
    adapters   by name, those that options name
    divided    what several processes compute, of which this one has a share; None: it has all
    ranges     of keys, by layer, where tiers keep them in fewer bits: see `key_ranges`
    """

    source: Source
    model: Model
    layouts: dict[BlockId, BlockLayout]
    published_bytes: int
    demand: Demand
    machine: Machine
    plan: Plan
    headless: bool = False
    copies: Copies | None = None
    adapters: NamedAdapters = field(default_factory=dict)
    divided: Divided | None = None
    ranges: Mapping[int, KeyRange] = field(default_factory=dict)

    def check_head(self, *, needed: bool) -> None:
        """Raise RequestError where an output layer is needed and there is none."""
        if needed and self.headless:
            raise RequestError(
                f"{self.source.path} has no output layer: it holds the bare model, and its "
                "configuration does not tie a head to the embedding; only embeddings can be asked "
                "of it"
            )


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What a draft model computes from besides tokens: hidden states of the model that verifies.

    kind     that its draft tokens are counted under
    layers   as many layers come before each of the hidden states, which are joined; (): those
             behind the final norm
    tokens   int64 [vocab_size of the draft model]: what each of its tokens is of the other's; None:
             the same
    block    that it drafts at once; None: it drafts one token after the other
    shares_kv   it attends to the KV cache of the model that verifies, and has none
    """

    kind: str
    layers: tuple[int, ...] = ()
    tokens: torch.Tensor | None = None
    block: DraftBlock | None = None
    shares_kv: bool = False


@dataclass(frozen=True, slots=True)
class PreparedDraft:
    """A draft model that was planned for, and its options.

    inputs   None: it computes from tokens alone
    remark   why it computes on the CPU although there is a GPU; "" where it does not
    """

    prepared: Prepared
    config: EngineConfig
    inputs: DraftInputs | None = None
    remark: str = ""

    @property
    def host_bytes(self) -> int:
        """Of the host's budget, what it takes."""
        return sum(self.prepared.plan.reserved.values())

    @property
    def device_bytes(self) -> int:
        """Of the device's budget; 0: all of it computes on the CPU."""
        return sum(sum(share.reserved.values()) for share in self.prepared.plan.devices)
