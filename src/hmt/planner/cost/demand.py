"""What a model asks of a machine: its blocks and buffers in bytes, before anything is placed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hmt.contracts.blocks import BlockKind, BlockSize
from hmt.contracts.model import ModelSpec
from hmt.planner.cost.expert_hit_rate import HitCurve, usual_curve


@dataclass(frozen=True, slots=True)
class KVTierSizes:
    """Bytes of pages, as a cache would lay them out.

    device_page, host_page   of all layers without a window
    disk_group   `GROUP_PAGES` of them on the disk
    layer_group  of the one layer whose group is largest there
    kind_group   of the layers that are written at once
    chosen_page  host memory beside a page at any level, from which those are chosen that are
                 attended to; 0 where all are
    ring_pages   by window: of all layers that have it
    device_format, host_format, disk_format   how numbers are kept; see KVTiers
    """

    device_page: int
    host_page: int
    disk_group: int
    layer_group: int
    kind_group: int
    chosen_page: int = 0
    ring_pages: Mapping[int, int] = field(default_factory=dict)
    host_format: str = "exact"
    disk_format: str = "exact"
    device_format: str = "exact"


@dataclass(frozen=True, slots=True)
class Demand:
    """A model as the solver sees it.

    blocks          every block that takes memory, in model order
    staging_bytes   buffer for converting the largest parameter on load; 0 without conversion
    row_bytes       buffer for looking up one row of a table on disk
    row_sums_bytes  checksums of a pack's rows, which stay in memory while its table is on disk
    parameter_bytes all parameters without padding; None: blocks have none
    passing_bytes       the largest of blocks that live elsewhere and pass through a slot once
    kv_token_bytes      KV of one position over all layers
    kv_layer_bytes      KV of one position in the layer that keeps most
    kv_work_bytes       copies that are made of KV pages where these lie in several tiers
    score_bytes         the most that attention scores take at once
    sequence_bytes      recurrent state of one sequence, over all layers, with its journal
    draft_tokens        that the journal has room for
    spare_states        so many more of these than requests run at once
    batch               requests that run at once
    prefetch_experts    whether experts are read from the disk before routers choose them
    matrix_bytes        the largest matrix, or some experts, unpacked for many tokens on a device
    expert_token_bytes  activations between the matrices of one token's experts
    prefix_bytes        what pages pass through that are kept on the disk for other sequences
    kv_sizes            of pages in several tiers; None: all lie where layers compute
    experts_alike       whether any expert of a layer may take the place of any other of it
    vision          blocks of a vision tower, which are at home on the disk and pass through slots
    image_bytes     that images of prompts may take, if there is room; 0: it sees none
    adapter_bytes   that low-rank adapters may take together
    encoding_bytes  that a device takes to encode an image beside the tower's blocks: one of
                    1024 x 1024 pixels, and the largest
    hits                of caches of experts, as a trace or runs tell; None: as usual
    """

    spec: ModelSpec
    blocks: tuple[BlockSize, ...]
    staging_bytes: int
    row_bytes: int
    kv_token_bytes: int
    kv_layer_bytes: int = 0
    kv_work_bytes: int = 0
    score_bytes: int = 0
    sequence_bytes: int = 0
    draft_tokens: int = 0
    spare_states: int = 0
    batch: int = 1
    prefetch_experts: bool = False
    row_sums_bytes: int = 0
    parameter_bytes: int | None = None
    passing_bytes: int = 0
    experts_alike: bool = True
    matrix_bytes: int = 0
    expert_token_bytes: int = 0
    prefix_bytes: int = 0
    kv_sizes: KVTierSizes | None = None
    vision: tuple[BlockSize, ...] = ()
    image_bytes: int = 0
    adapter_bytes: int = 0
    encoding_bytes: tuple[int, int] = (0, 0)
    hits: HitCurve | None = None

    @property
    def state_slots(self) -> int:
        """Recurrent states that there is room for: of sequences that run, and spare ones."""
        return self.batch + self.spare_states

    @property
    def vision_bytes(self) -> int:
        """Memory that all blocks of the tower take together."""
        return sum(block.slot_bytes for block in self.vision)

    @property
    def vision_slot_bytes(self) -> int:
        """Memory that the largest of them takes."""
        return max((block.slot_bytes for block in self.vision), default=0)

    @property
    def weight_bytes(self) -> int:
        """Memory that all blocks take together when all are resident."""
        return sum(block.slot_bytes for block in self.blocks)

    @property
    def hit_curve(self) -> HitCurve:
        """Of caches of experts: what is known of this model, or the usual one for so many."""
        numbers = (b.id.index for b in self.blocks if b.id.kind is BlockKind.EXPERT)
        return self.hits or usual_curve(max(numbers, default=-1) + 1)

    def of_kind(self, *kinds: BlockKind) -> list[BlockSize]:
        """Blocks of some kinds, in model order."""
        return [block for block in self.blocks if block.id.kind in kinds]
