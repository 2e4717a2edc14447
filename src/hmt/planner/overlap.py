"""What of the drive's time passes while layers compute, where blocks come and go in few slots.

Where a layer's dense blocks fit beside those that compute, all of it does.  With less room they
take turns, as they do where slots are of one size each: the next one is read while one of another
size computes.
"""

from dataclasses import dataclass

from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.plan import Plan, Tier
from hmt.planner.footprint import Demand


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of dense blocks that come from the drive.

    hidden          the share of them that may come while layers compute, whatever else does: all
                    where a layer's blocks fit beside those that compute, none where one layer's do
    largest_share   of a layer's bytes, that of blocks of its largest size; 1 where no block is read
                    beside one of another size
    """

    hidden: float = 1.0
    largest_share: float = 1.0

    def waited_s(self, computing_s: float, disk_s: float, *, many: bool) -> float:
        """Beyond the longer one of both; `many`: in a step of many tokens.

        Blocks compute for a time that goes by their bytes, as reading does.  With few tokens
        nothing hides: a network came together with the attention behind it, for which there was a
        place while it was read, and nothing was read while it computed.
        """
        rest = 1 - self.largest_share if many else 0.0
        large = max((1 - rest) * disk_s, rest * computing_s)
        small = max(rest * disk_s, (1 - rest) * computing_s)
        return (1 - self.hidden) * (large + small - max(computing_s, disk_s))


def overlap_of(demand: Demand, plan: Plan) -> Overlap:
    """How dense blocks overlap under `plan`."""
    layers: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for block in demand.blocks:
        if _streamed(block.id, plan):
            layers[block.id.layer] = layers.get(block.id.layer, 0) + block.slot_bytes
            sizes[block.slot_bytes] = sizes.get(block.slot_bytes, 0) + block.slot_bytes
    room = plan.reserved.get("slots", 0)
    if len(layers) < 2 or not room:
        return Overlap()
    hidden = min(1.0, max(0.0, room / max(layers.values()) - 1.0))
    by_turns = len(sizes.keys() & plan.slot_counts.keys()) > 1
    return Overlap(hidden, max(sizes.values()) / sum(sizes.values()) if by_turns else 1.0)


def _streamed(block: BlockId, plan: Plan) -> bool:
    dense = block.kind is not BlockKind.EXPERT and block.layer != TRUNK
    return dense and plan.homes[block] is Tier.DISK
