"""The unfinished pack: a folder beside the place where the pack will be.

OUT.partial/journal says what is complete.  OUT.partial/pack becomes OUT when everything in it is
durable; what was in OUT before is OUT.partial/old until the new pack is in its place.
"""

import os
import shutil
from pathlib import Path
from typing import Final

from hmt.base.errors import ConfigError, DiskWriteError
from hmt.base.folders import sync_folder, writing
from hmt.base.units import format_bytes
from hmt.weights.pack.journal import Journal
from hmt.weights.pack.manifest import MANIFEST, Manifest, encode

JOURNAL: Final = "journal"


def looks_like_pack(folder: Path) -> bool:
    """Whether `folder` is, or was meant to be, a pack; also one that is damaged or unfinished."""
    if not folder.is_dir():
        return False
    if is_partial(folder) or any(folder.glob("data-*.hmt")):
        return True
    return (folder / MANIFEST).is_file() and not any(folder.glob("*.safetensors"))


def is_partial(folder: Path) -> bool:
    """Whether `folder` is that of an unfinished conversion."""
    return (folder / JOURNAL).is_file() and (folder / "pack").is_dir()


class PartialPack:
    """A pack on its way to `out`.  Holds a lock until it is closed."""

    def __init__(self, out: Path, *, force: bool) -> None:
        """Raises ConfigError where `out` cannot be, DiskWriteError where nothing can be written."""
        self.out = out.resolve()
        self.folder = self.out.with_name(self.out.name + ".partial")
        self.pack = self.folder / "pack"
        self._old = self.folder / "old"
        self._force = force
        _check_place(self.out, force)
        _check_ours(self.folder)
        with writing(f"making {self.folder}"):
            self.pack.mkdir(parents=True, exist_ok=True)
            self.journal = Journal(self.folder / JOURNAL)

    def clear(self) -> None:
        """Remove what an earlier conversion has written.  Raises DiskWriteError."""
        with writing(f"clearing {self.pack}"):
            shutil.rmtree(self.pack)
            self.pack.mkdir()

    def check_room(self, nbytes: int) -> None:
        """Raise DiskWriteError unless the disk has room for `nbytes` more."""
        free = shutil.disk_usage(self.folder).free
        if nbytes > free:
            raise DiskWriteError(
                f"{self.out} takes {format_bytes(nbytes)} more, and its disk has "
                f"{format_bytes(free)} free; make room, or choose another disk"
            )

    def write_file(self, name: str, content: bytes) -> None:
        """Write a small file, durably.  Raises DiskWriteError."""
        with writing(f"writing {self.pack / name}"), open(self.pack / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def publish(self, manifest: Manifest) -> None:
        """Make it the pack `out`.  All other files must be durable.  Raises DiskWriteError."""
        _check_place(self.out, self._force)
        self.write_file(MANIFEST, encode(manifest))
        with writing(f"moving the complete pack from {self.pack} to {self.out}"):
            sync_folder(self.pack)
            if self.out.exists():
                if self._old.exists():  # of a replacement that was killed
                    shutil.rmtree(self._old)
                self.out.rename(self._old)
            self.pack.rename(self.out)
            sync_folder(self.folder)
            sync_folder(self.out.parent)
            self.journal.path.unlink()
            shutil.rmtree(self.folder)

    def close(self) -> None:
        """Unlock it; what was written stays, for the next time."""
        self.journal.close()


def _check_place(out: Path, force: bool) -> None:
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder; make it, or choose another for the pack")
    if not out.exists():
        return
    replaceable = out.is_dir() and (looks_like_pack(out) or not any(out.iterdir()))
    if not replaceable or is_partial(out):
        raise ConfigError(f"{out} exists and is not a pack; choose another place for the pack")
    if not force:
        raise ConfigError(f"{out} exists; choose another place, or replace it with --force")


def _check_ours(folder: Path) -> None:
    """The folder is deleted at the end: it must hold nothing but what a draft does."""
    for place in (folder, folder / "pack", folder / "old"):
        if place.is_symlink():  # what it leads to is not ours to delete
            raise ConfigError(
                f"{place} would hold the unfinished pack, and is a symbolic link to "
                f"{os.readlink(place)}: remove the link, or choose another place for the pack"
            )
    if not folder.exists():
        return
    if not folder.is_dir() or {entry.name for entry in folder.iterdir()} - {JOURNAL, "pack", "old"}:
        raise ConfigError(
            f"{folder} would hold the unfinished pack, and is something else: rename it, or choose "
            "another place for the pack"
        )
