"""Files and folders that commands write to: refused before hours of measuring, not behind them.

json: Annotated[Path | None, file_to_write("File to write the results to.")] = None
...
write_text(json, content)
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from hmt.base.errors import ConfigError, DiskWriteError, os_reason


def file_to_write(text: str) -> Any:
    """An option whose file can be written; the folders that it is in are made."""
    return typer.Option(help=text, callback=_writable)


def folder_to_write(text: str) -> Any:
    """An option whose folder takes files, and is made if it is not there."""
    return typer.Option(help=text, callback=taking_files)


def taking_files(parameter: typer.CallbackParam, folder: Path | None) -> Path | None:
    """The folder of an option or argument, made if need be.  Raises ConfigError."""
    if folder is not None:
        with _refused(parameter, folder, "folder that takes files"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    return folder


def write_text(file: Path, content: str) -> None:
    """Write a file, and make the folders that it is in.  Raises DiskWriteError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise DiskWriteError(
            f"{file} could not be written ({os_reason(error)}): make room, or name another file"
        ) from error


def write_json(content: dict[str, Any], file: Path | None) -> None:
    """Write a benchmark's results, where a file was asked for."""
    if file is not None:
        write_text(file, json.dumps(content, indent=1) + "\n")


def _writable(parameter: typer.CallbackParam, file: Path | None) -> Path | None:
    if file is not None:
        with _refused(parameter, file, "file that can be written"):
            file.parent.mkdir(parents=True, exist_ok=True)
            there = file.exists()
            if not there or file.is_file() or file.is_dir():  # a pipe's reader may not be there yet
                file.open("a").close()
            if not there:
                file.unlink()
    return file


@contextmanager
def _refused(parameter: typer.CallbackParam, path: Path, wanted: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        name = f"--{parameter.name}" if parameter.param_type_name == "option" else "the folder"
        why = os_reason(error) if isinstance(error, OSError) else error
        raise ConfigError(f"{name} {path} cannot be used ({why}): name a {wanted}") from None
