"""Current models that people run, with the sizes of their files: what `hmt` shows first.

`catalogue.json` has a row for each; its sizes are those of the shapes in `shapes`, written by
`scripts/write-model-sizes`.  Published files are within a few percent of them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from hmt.base.errors import MissingFileError


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model of the list.

    name        what commands call it; also its shape's name
    title       what its maker calls it
    repository  owner/name on the Hugging Face hub
    sizes       bytes of its file, by GGUF file type, the largest first; "" is the type of a
                repository whose weights are safetensors
    """

    name: str
    title: str
    repository: str
    sizes: Mapping[str, int]

    def source(self, file_type: str) -> str:
        """What `located` takes: owner/name:TYPE."""
        return f"{self.repository}:{file_type}" if file_type else self.repository

    def shape(self, file_type: str) -> str:
        """What `read_shape` takes."""
        return f"{self.name}:{file_type}" if file_type else self.name

    def largest_within(self, limit_bytes: int) -> str:
        """The file type of the largest file that has at most so many bytes; else the smallest."""
        return next(
            (kind for kind, size in self.sizes.items() if size <= limit_bytes), self.types[-1]
        )

    @property
    def types(self) -> list[str]:
        """The file types, the largest first."""
        return list(self.sizes)


@cache
def known_models() -> tuple[KnownModel, ...]:
    """All of the list, the smallest first."""
    text = (files("hmt.planner") / "catalogue.json").read_text(encoding="utf-8")
    return tuple(KnownModel(**row) for row in json.loads(text))


def resolved(name: str) -> str:
    """`owner/name:TYPE` for NAME or NAME:TYPE of the list; anything else as it is.

    Without a type it is Q4_K_M, or the one that there is.  Raises MissingFileError for a type that
    a model of the list does not have.
    """
    first, colon, file_type = name.partition(":")
    known = next((model for model in known_models() if model.name == first), None)
    if known is None:
        return name
    if not colon:
        file_type = "Q4_K_M" if "Q4_K_M" in known.sizes else known.types[0]
    if file_type.upper() not in known.sizes:
        raise MissingFileError(
            f"{first} has no file of type {file_type!r:.40} in the list: choose "
            f"{', '.join(known.types)}, or name owner/name:TYPE"
        )
    return known.source(file_type.upper())
