"""Metadata of a GGUF file, read with the checks that a stranger's file needs."""

import re
from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from hmt.base.errors import CheckpointError, HeaderError

REQUIRED: Final = object()

# Keys that say nothing about numbers, or what tensors say as well.  Below "vision.", "audio." and
# "mm." are parts of a model that HMT leaves aside.
_SAY_NOTHING: Final = re.compile(
    r"vocab_size|context_length|embedding_length_out|pooling_type|tensor_data_layout|"
    r"expert_shared_feed_forward_length|expert_feed_forward_length|feed_forward_length|"
    r"attention\.head_count_kv|attention\.layer_norm(_rms)?_epsilon|decoder_start_token_id|"
    r"(vision|audio|mm|clip)\..*|n_deepstack_layers|"
    r"rope\.(?!(freq_base|dimension_count)_swa).*"
)


class Keys:
    """Metadata of one architecture, by keys without its name; remembers which were read.

    tensors   names of the file's tensors
    factors   numbers of those with factors of rotary frequencies, by name without ".weight"
    what      the file, for messages
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        architecture: str,
        what: str,
        tensors: Container[str] = (),
        factors: Mapping[str, list[float]] = MappingProxyType({}),
    ) -> None:
        self._metadata, self._at, self.what = metadata, f"{architecture}.", what
        self._tensors, self.factors = tensors, factors
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._at + key in self._metadata

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self._tensors

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        return self._metadata.get(self._at + key, default)

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """A number; of an array whose items are equal, the item.

        Raises HeaderError for what is no number and without a default, CheckpointError for an array
        of different items.
        """
        value = self._get(key, default)
        if value is REQUIRED:
            raise HeaderError(
                f"{self.what} has no {self._at}{key}: convert it again with a current llama.cpp"
            )
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise CheckpointError(
                    f"{self.what} has {self._at}{key} that differs by layer, which HMT does not "
                    "compute"
                )
            value = value[0]
        if value is not default and type(value) not in (int, float):
            raise HeaderError(f"{self.what} has {self._at}{key} {value!r}, which is no number")
        return value

    def by_layer(self, key: str, layers: int) -> list[Any]:
        """A number for each layer, of an array or one for all.  Raises HeaderError."""
        value = self._get(key, REQUIRED)
        numbers = value[:layers] if isinstance(value, list) else [value] * layers
        if len(numbers) < layers or any(type(item) not in (int, float) for item in numbers):
            raise HeaderError(
                f"{self.what} has {self._at}{key} {value!r:.60}; wanted is a number for each of "
                f"{layers} layers"
            )
        return numbers

    def numbers(self, key: str) -> list[Any]:
        """The numbers of an array, however many.  Raises HeaderError."""
        value = self._get(key, REQUIRED)
        if not isinstance(value, list) or any(type(item) not in (int, float) for item in value):
            raise HeaderError(f"{self.what} has {self._at}{key} {value!r:.60}, not an array")
        return value

    def count(self, key: str, default: Any = REQUIRED) -> Any:
        """A whole number above 0, however it is written.  Raises as `number`."""
        value = self.number(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not default and (type(value) is not int or not 0 < value < 1 << 31):
            raise HeaderError(f"{self.what} has {self._at}{key} {value!r}; wanted is a count")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Whether something is so.  Raises HeaderError."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise HeaderError(f"{self.what} has {self._at}{key} {value!r}, which is no truth")
        return value

    def text(self, key: str) -> str:
        """Text, empty where the file has none.  Raises HeaderError."""
        value = self._get(key, "")
        if not isinstance(value, str):
            raise HeaderError(f"{self.what} has {self._at}{key} {value!r}, which is no text")
        return value

    def windows(self, every: int, layers: int, full_first: bool = False) -> list[bool]:
        """Which layers see a window, by attention.sliding_window_pattern, by layer or a period.

        every   the period where the file has none; 0: all layers do, 1: none
        Raises HeaderError.
        """
        return self.pattern("attention.sliding_window_pattern", every, layers, full_first)

    def pattern(self, key: str, every: int, layers: int, last_first: bool = False) -> list[bool]:
        """A truth for each layer, of an array, or a period whose last layer is the other one.

        every        the period where the file has no such key; 0: all are true, 1: none is
        last_first   the first of each period is the other one
        Raises HeaderError.
        """
        value = self._get(key, every)
        if isinstance(value, list):
            if len(value) < layers or any(item not in (0, 1) for item in value):
                raise HeaderError(
                    f"{self.what} has {self._at}{key} of {len(value)} items for {layers} layers; "
                    "wanted is a truth for each"
                )
            return [bool(item) for item in value[:layers]]
        if type(value) is not int or value < 0:
            raise HeaderError(f"{self.what} has {self._at}{key} {value!r}; wanted is a period")
        if value == 0:
            return [True] * layers
        other = 0 if last_first else value - 1
        return [index % value != other for index in range(layers)]

    def check_all_read(self) -> None:
        """Raise CheckpointError for a key that nothing has read and that may change numbers."""
        for key, value in self.below(""):
            if key in self._read or _SAY_NOTHING.fullmatch(key):
                continue
            # What is 0, false or empty asks for nothing, nor does what windows share with the rest.
            items = value if isinstance(value, list) else [value]
            everywhere = self._metadata.get(self._at + key.removesuffix("_swa"))
            if any(items) and (value != everywhere or not key.endswith("_swa")):
                raise self.unread(key)

    def below(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """Keys that begin so, without it, and their values."""
        at = self._at + prefix
        for key, value in self._metadata.items():
            if key.startswith(at):
                yield key.removeprefix(at), value

    def unread(self, key: str, why: str = "") -> CheckpointError:
        """The error for a key that would change the model's numbers and is not computed."""
        value = self._metadata.get(self._at + key)
        reason = why or "which HMT does not compute for this architecture"
        return CheckpointError(f"{self.what} has {self._at}{key} {value!r:.60}, {reason}")
