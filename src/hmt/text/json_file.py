"""Reading the small JSON files that lie beside a tokenizer."""

import json
from pathlib import Path
from typing import Any

from hmt.base.errors import CheckpointError


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; empty without the file.  Raises CheckpointError for all else."""
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{file} holds a JSON {type(value).__name__} where an object is wanted: "
            "download it again"
        )
    return value
