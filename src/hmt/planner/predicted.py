"""What is predicted of a step, and of a plan for some users: what `planner/cost.py` answers."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepCost:
    """A step, predicted.

    seconds   0 where rates are missing that it depends on
    busy_s    by part: "GPU", "CPU", "link", "disk", and "handing over" with all fixed overheads
    nbytes    read of weights, keys and values: "GPU" (its memory), "CPU" (host memory), "link",
              "disk"
    limit     the part that bounds it
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
