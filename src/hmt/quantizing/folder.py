"""The unfinished result: a folder beside the place where the quantised model will be.

OUT.partial/begun.json says what is made of what.  OUT.partial/work has hidden states and what is to
be reported; OUT.partial/model becomes OUT when everything in it is durable.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import ConfigError, DiskWriteError
from hmt.base.folders import sync_folder, writing
from hmt.base.log import logger
from hmt.base.units import format_bytes

REPORT: Final = "quantization_report.json"
_BEGUN: Final = "begun.json"
_FILES: Final = "files"  # of an identity: what is known of each by its name


class PartialFolder:
    """A model on its way to `out`.  Holds a lock until it is closed.

    model, work   folders for what stays, and for what does not
    begun         what `remember` was told when it was begun; None before
    """

    def __init__(
        self,
        out: Path,
        identity: Mapping[str, Any],
        *,
        force: bool,
        report: str = REPORT,
        made_by: str = "hmt quantize",
    ) -> None:
        """Begin it, or go on with what an earlier run of equal `identity` has left.

        report    a file that every complete result has
        made_by   the command that makes such results

        Raises ConfigError where `out` cannot be, or exists (with `force` a quantised model there is
        replaced in the end); where another run is making it, or made it as `identity` does not say.
        """
        self.out = out.resolve()
        self.folder = self.out.with_name(self.out.name + ".partial")
        self.model, self.work = self.folder / "model", self.folder / "work"
        self._force, self._report, self._made_by = force, report, made_by
        if (self.out / report).is_file() and not self.model.exists() and _is_ours(self.folder):
            shutil.rmtree(self.folder)  # a run was killed after the model was in its place
        self._check_place()
        _check_ours(self.folder)
        with writing(f"making {self.folder}"):
            self.model.mkdir(parents=True, exist_ok=True)
            self.work.mkdir(exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.begun = self._claim(identity)
        except BaseException:
            os.close(self._lock)
            raise

    def _claim(self, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """Lock the folder; what an earlier run remembered."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another run is writing in {self.folder}: wait for it, or end it"
            ) from None
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))
        wanted, begun = self._identity, self.folder / _BEGUN
        if not begun.exists():
            return None
        said = json.loads(begun.read_bytes())
        known = said["identity"]
        differs = sorted(key for key in {*known, *wanted} if known.get(key) != wanted.get(key))
        if differs:
            first = differs[0]
            if first == _FILES:
                raise ConfigError(
                    f"{self.folder} was begun before {_changed(known[_FILES], wanted[_FILES])} of "
                    "the model changed: restore that, or delete the folder to begin anew"
                )
            raise ConfigError(
                f"{self.folder} was begun with {first} {_brief(known.get(first))}, not "
                f"{_brief(wanted.get(first))}: give what it was begun with, or delete the folder"
            )
        found: dict[str, Any] = said["remembered"]
        return found

    def remember(self, facts: Mapping[str, Any]) -> None:
        """Let later runs know `facts` as `begun`.  Raises DiskWriteError."""
        said = {"identity": self._identity, "remembered": dict(facts)}
        self.write_file(self.folder / _BEGUN, json.dumps(said, indent=1).encode())

    def check_room(self, nbytes: int) -> None:
        """Raise DiskWriteError unless `nbytes` fit on the disk, an earlier run's files included."""
        there = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        free = shutil.disk_usage(self.folder).free
        if nbytes > free + there:
            raise DiskWriteError(
                f"{self.out} and hidden states on the way to it take {format_bytes(nbytes)}, and "
                f"its disk has {format_bytes(free + there)}: make room, or choose another disk"
            )

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a small file, which is there whole or not at all.  Raises DiskWriteError."""
        partial = path.with_name(path.name + ".partial")
        with writing(f"writing {path}"):
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
            sync_folder(path.parent)

    def publish(self) -> None:
        """Make it `out`.  All files must be durable.  Raises DiskWriteError and ConfigError."""
        self._check_place()
        old = self.folder / "old"
        with writing(f"moving the complete model from {self.model} to {self.out}"):
            for leftover in self.model.glob("*.partial"):
                leftover.unlink()
            sync_folder(self.model)
            if self.out.exists():
                if old.exists():  # of a replacement that was killed
                    shutil.rmtree(old)
                self.out.rename(old)
            self.model.rename(self.out)
            sync_folder(self.out.parent)
        try:
            shutil.rmtree(self.folder)
        except OSError as error:  # the model is where it shall be
            logger.warning("%s is complete; delete %s, which could not be (%s)", self.out,
                           self.folder, error)  # fmt: skip

    def _check_place(self) -> None:
        out = self.out
        if not out.parent.is_dir():
            raise ConfigError(
                f"{out.parent} is not a folder; make it, or choose another for the model"
            )
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return
        if not (out / self._report).is_file():
            raise ConfigError(
                f"{out} exists and is no model that `{self._made_by}` made; choose another place"
            )
        if not self._force:
            raise ConfigError(f"{out} exists; choose another place, or replace it with --force")

    def close(self) -> None:
        """Unlock it; what was written stays, for the next time, once it was begun."""
        if self.model.exists() and not (self.folder / _BEGUN).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _changed(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first file that is not what it was."""
    names = {*known, *wanted}
    return min(name for name in names if known.get(name) != wanted.get(name))


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else f"{text[:150]} ..."


def _is_ours(folder: Path) -> bool:
    return (folder / _BEGUN).is_file()


def _check_ours(folder: Path) -> None:
    """The folder is deleted at the end: it must hold nothing but what an unfinished model does."""
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a symbolic link: remove it, or choose another place")
    known = {_BEGUN, f"{_BEGUN}.partial", "model", "work", "old"}
    if folder.exists() and (
        not folder.is_dir() or {entry.name for entry in folder.iterdir()} - known
    ):
        raise ConfigError(
            f"{folder} would hold the unfinished model, and is something else: rename it, or "
            "choose another place for the model"
        )
