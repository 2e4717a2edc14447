"""What the scheduler reports: the next step with its sequences, and how much there is to do."""

from dataclasses import dataclass

from hmt.contracts.step import Step
from hmt.engine.scheduling.batch_limit import MemoryPressure
from hmt.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step, and the sequences that its logits belong to.

    sampled         sequences in the order of the step's logit rows
    advanced        (sequence, tokens of it in this step)
    prompt_tokens   tokens in this step that belong to prompts
    scored          (sequence, position) of the step's scored rows, which tell of the token behind
    pooled          (sequence, position) of its pooled rows
    """

    step: Step
    sampled: tuple[Sequence, ...]
    advanced: tuple[tuple[Sequence, int], ...]
    prompt_tokens: int
    scored: tuple[tuple[Sequence, int], ...] = ()
    pooled: tuple[tuple[Sequence, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that wait and that run, and positions of the KV cache: all, and unreserved.

    pressure      how scarce these are, and `used` the share that is in use
    most          requests that may run at once for now
    parked        times that one gave way to others and its KV pages stayed, where there is a lower
                  tier in that
    dropped       times that they did not, and are computed again
    batches       steps by how many requests had tokens in them
    """

    waiting: int
    running: int
    capacity_tokens: int
    free_tokens: int
    pressure: MemoryPressure
    used: float
    most: int
    parked: int
    dropped: int
    batches: dict[int, int]
