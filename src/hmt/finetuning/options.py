"""What a user may choose of a training run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hmt.base.errors import ConfigError
from hmt.formats.adapters import MOST_RANK


@dataclass(frozen=True, slots=True)
class FinetuneOptions:
    """One run of training.

    rank           of each adapter
    alpha          results of adapters are multiplied with alpha / rank
    targets        last parts of the names of linear layers that get one, such as "q_proj"; empty:
                   all of attention, of mixers, and of networks in models without experts
    learning_rate  of AdamW, the same in every step
    epochs         times that all examples are read
    batch          examples of a step
    length         tokens of an example; what is behind is left out
    seed           of the adapters' first numbers and of the order of examples
    host_memory_bytes   for weights, adapters, optimizer and activations
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    learning_rate: float = 2e-4
    epochs: int = 1
    batch: int = 8
    length: int = 512
    seed: int = 0
    host_memory_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK:
            raise ConfigError(f"adapters can have ranks of 1 to {MOST_RANK}, not {self.rank}")
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"a learning rate of {self.learning_rate} is not between 0 and 1")
        if not 0 < self.alpha <= 1e6:
            raise ConfigError(f"--alpha {self.alpha} is not between 0 and a million")
        if self.epochs < 1 or self.batch < 1 or self.length < 2:
            raise ConfigError(
                f"{self.epochs} epochs, {self.batch} examples in a step and {self.length} tokens "
                "of each: training takes at least 1, 1 and 2"
            )

    def identity(self) -> Mapping[str, Any]:
        """What two runs must share for one to go on with the other, as JSON."""
        own = asdict(self)
        del own["host_memory_bytes"]  # no result depends on it but for the order of sums
        return own
