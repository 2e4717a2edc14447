"""What becomes of each field of a request: it is used, has no effect, is refused, or is unknown.

Clients of OpenAI's and Anthropic's APIs send more than a server needs, and each release of theirs
sends more.  Most of it cannot change an answer, and refusing it only breaks the client.  Three
kinds of fields can: those that a model's schema has, those that are known and not implemented
(`REFUSED`), and misspelt ones.  Only the latter two are refused.  All other fields are accepted,
and each is named once in the log.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar, Final, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from hmt.base.log import logger
from hmt.server.json_shape import fail_fast

_MOST_UNKNOWN: Final = 32  # in one object: each is compared with all known names
_MOST_LOGGED: Final = 100  # clients choose the names, and the log must stay small
_LOGGED_LENGTH: Final = 64  # characters of a name
_OFF: Final[tuple[Any, ...]] = (False, "", [])  # 0 equals False


@dataclass(frozen=True, slots=True)
class Refusal:
    """What to do instead of sending a field, and the values of it that ask for nothing, as null."""

    why: str
    neutral: tuple[Any, ...] = _OFF

    def concerns(self, value: object) -> bool:
        """Whether `value` would change the answer."""
        return value is not None and value not in self.neutral


class Fields(BaseModel):
    """A JSON object of a request.  Values are not converted: no text where a number is meant.

    IGNORED   fields that are accepted and have no effect, each with the reason
    REFUSED   fields that would change the answer and are not implemented
    Subclasses extend both.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    IGNORED: ClassVar[Mapping[str, str]] = {}
    REFUSED: ClassVar[Mapping[str, Refusal]] = {}

    @model_validator(mode="after")
    def _check_others(self) -> Self:
        if self.__pydantic_extra__:
            _check(type(self), self.__pydantic_extra__)
            self.__pydantic_extra__.clear()
        return self

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """The same, with lists that end at their first wrong item: see `fail_fast`."""
        schema = handler(source)
        fail_fast(schema)
        return schema

    @classmethod
    def accepted(cls) -> list[str]:
        """Names of the fields that are used, as JSON has them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


def wrong(param: str, why: str) -> PydanticCustomError:
    """What a check of several fields raises; `param` is the one that should change.

    Relative to the object that is checked: empty for all of it.
    """
    return PydanticCustomError("disagreement", "{why}", {"param": param, "why": why})


def unsupported(param: str, why: str) -> PydanticCustomError:
    """The same for a field that would change the answer and is not implemented."""
    return PydanticCustomError("unsupported", "{why}", {"param": param, "why": why})


def _check(kind: type[Fields], others: Mapping[str, Any]) -> None:
    """Raise PydanticCustomError where one of the `others` must not be left aside."""
    unknown = []
    for name, value in others.items():
        if name in kind.IGNORED:
            continue
        refusal = kind.REFUSED.get(name)
        if refusal is None:
            unknown.append(name)
        elif refusal.concerns(value):
            raise unsupported(name, refusal.why)
    if len(unknown) > _MOST_UNKNOWN:
        raise wrong(
            "", f"{len(unknown)} fields of it are unknown; at most {_MOST_UNKNOWN} are accepted"
        )
    for name in unknown:
        short = len(name) <= _LOGGED_LENGTH
        meant = nearest(kind, name) if short and others[name] is not None else None
        if meant is not None:
            why = f"there is no such field; did you mean {meant!r}?"
            raise PydanticCustomError("unknown_parameter", "{why}", {"param": name, "why": why})
        _log_once(kind.__name__, name)


@lru_cache(maxsize=4096)
def nearest(kind: type[Fields], name: str) -> str | None:
    """The field of `kind` that `name` is a misspelling of; None where it is like none of them.

    A name counts as misspelt where only case and underscores differ (`maxTokens`), or up to two
    letters: one in a name of five or six, none in a shorter one (`mode` is not `model`).
    """
    squeezed, letters, known = _squeezed(name), _letters(_squeezed(name)), _known(kind)
    most = 0 if len(squeezed) < 5 else 1 if len(squeezed) < 7 else 2
    best, least = None, most + 1
    for other, other_squeezed, other_letters in known:
        if (letters ^ other_letters).bit_count() > 2 * most:
            continue
        if abs(len(other_squeezed) - len(squeezed)) > most:
            continue
        distance = _distance(squeezed, other_squeezed)
        if distance < least:
            best, least = other, distance
    return best


@cache
def _known(kind: type[Fields]) -> list[tuple[str, str, int]]:
    """Of each field that has an effect: its name, that squeezed, and its letters as bits."""
    names = [*kind.accepted(), *kind.REFUSED]
    return [(name, _squeezed(name), _letters(_squeezed(name))) for name in names]


def _squeezed(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _letters(name: str) -> int:
    """A bit for each character that occurs; far ones share bits.  Tells most pairs apart fast."""
    bits = 0
    for character in name:
        bits |= 1 << (ord(character) % 64)
    return bits


def _distance(left: str, right: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours (optimal string alignment)."""
    two_above: list[int] = []
    above = list(range(len(right) + 1))
    for i, letter in enumerate(left, 1):
        row = [i]
        for j, other in enumerate(right, 1):
            cost = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == right[j - 2] and left[i - 2] == other:
                cost = min(cost, two_above[j - 2] + 1)
            row.append(cost)
        two_above, above = above, row
    return above[-1]


_logged: set[tuple[str, str]] = set()


def _log_once(place: str, name: str) -> None:
    """Name an unknown field in the log, once in the life of the process."""
    key = place, name[:_LOGGED_LENGTH]
    if key in _logged or len(_logged) >= _MOST_LOGGED:
        return
    _logged.add(key)
    logger.warning("the field %r of a %s is unknown here and has no effect", key[1], place)
    if len(_logged) == _MOST_LOGGED:
        logger.warning("%d unknown fields were named; others are not", _MOST_LOGGED)


def reasons(why: str, names: Iterable[str]) -> dict[str, str]:
    """Fields that are ignored for one reason."""
    return dict.fromkeys(names, why)
