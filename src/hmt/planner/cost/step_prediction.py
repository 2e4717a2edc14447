"""What the cost model predicts of a step, and of a plan for some users."""

from dataclasses import dataclass, field

from hmt.contracts.blocks import BlockKind
from hmt.contracts.plan import Plan, Tier


@dataclass(frozen=True, slots=True)
class RunFactors:
    """What steps of runs took over what was predicted: 1 where nothing is known of any."""

    decode: float = 1.0
    prefill: float = 1.0


@dataclass(slots=True)
class StepCost:
    """A step, predicted.

    seconds  0 where rates are missing that it depends on
    busy_s   by part: "GPU", "CPU", "link", "disk", and "overhead": what depends on no bytes
    nbytes   read of weights and KV: "GPU" (its memory), "CPU" (host memory), "link",
             "disk"
    limit    the part that bounds it
    """

    seconds: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, float] = field(default_factory=dict)
    limit: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's speed for some users at some context.

    step           of one token for each user
    prompt         one chunk of a prompt, at half of its length
    tokens_per_s   of all users together; 0: not known
    ttft_s         of one user's prompt with the machine to itself; 0: not known
    """

    users: int
    context: int
    prompt_tokens: int
    step: StepCost
    prompt: StepCost
    tokens_per_s: float
    ttft_s: float


def plan_kind(plan: Plan) -> str:
    """The tiers in which weights live, such as "device+host"; tables and towers aside.

    What runs of one kind of plan took says little of those of another.
    """
    aside = BlockKind.EMBEDDING, BlockKind.VISION
    homes = {home for block, home in plan.homes.items() if block.kind not in aside}
    return "+".join(tier.value for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK) if tier in homes)
