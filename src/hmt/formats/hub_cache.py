"""What has been downloaded from the hub: listed, checked against the hub's hashes, deleted.

The cache of `huggingface_hub` names each file by its hash: SHA-256 of large ones, and of the others
that of a git blob (https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from hmt.base.errors import CheckpointError, DiskReadError, MissingFileError, os_reason
from hmt.formats.gguf.header import SPLIT
from hmt.formats.hub import gguf_files

_PIECE_BYTES: Final = 1 << 22
_NAMED: Final = re.compile(r"(?P<name>[^:@]+)(?:@[^:]+)?(?::(?P<type>.+))?")


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A model in the cache.

    source    what `located` takes for it: owner/name, or owner/name:TYPE of a GGUF file
    paths     its files
    """

    source: str
    nbytes: int
    paths: tuple[Path, ...]


def downloaded() -> list[Downloaded]:
    """All models in the cache, by name.  Files of several revisions count once."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    found = []
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    for repository in sorted(repositories, key=lambda one: str(one.repo_id)):
        if repository.repo_type != "model":
            continue
        files = {file.blob_path: file for one in repository.revisions for file in one.files}
        groups: dict[str, list[Path]] = {}
        rest = []
        for file in files.values():
            name = SPLIT.sub(r"\1.gguf", file.file_path.name)
            if name.endswith(".gguf"):
                groups.setdefault(name, []).append(file.file_path)
            else:
                rest.append(file.file_path)
        if any(path.name.endswith(".safetensors") for path in rest):
            groups[""] = rest
        found += [
            Downloaded(_source(repository.repo_id, name), _size(paths), tuple(sorted(paths)))
            for name, paths in sorted(groups.items())
            if not name.lower().startswith("mmproj")
        ]
    return found


def verify_downloaded(path: Path, progress: Callable[[int, int], None]) -> int:
    """Compare the files of a model that `located` gave with their hashes; bytes that were read.

    Files that the cache of the hub does not have are left alone.  A file that differs is deleted,
    so that the next download fetches it again.  `progress(bytes done, bytes in all)`.  Raises
    CheckpointError for such a file, and DiskReadError.
    """
    folder = path if path.is_dir() else path.parent
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    if path.is_file():
        together = SPLIT.sub(r"\1", path.name)
        files = [file for file in files if SPLIT.sub(r"\1", file.name) == together]
    total = sum(file.stat().st_size for file in files)
    done = 0
    for file in files:
        blob = file.resolve()
        if blob.parent.name != "blobs":
            continue
        found = _hash_of(blob, partial(_counted, progress, done, total))
        done += blob.stat().st_size
        if found != blob.name:
            file.unlink(missing_ok=True)
            blob.unlink(missing_ok=True)
            raise CheckpointError(
                f"{file.name} is not what the hub has: its hash is {found[:16]}..., and the hub's "
                f"{blob.name[:16]}...; it is deleted, and the same command downloads it again"
            )
    return done


def remove_downloaded(source: str) -> int:
    """Delete a model of the cache; the bytes that are free then.  Raises MissingFileError.

    source   owner/name for all of a repository, owner/name:TYPE for a GGUF file of it
    """
    from huggingface_hub import constants, scan_cache_dir

    match = _NAMED.fullmatch(source)
    models = [one for one in downloaded() if match and one.source.split(":")[0] == match["name"]]
    missing = MissingFileError(f"{source} is not in the cache: hmt list shows its models")
    if not match or not models:
        raise missing
    if match["type"] is not None:
        names = {path.name: path for one in models for path in one.paths}
        chosen = [name for name in gguf_files(names, match["type"]) if "mmproj" not in name.lower()]
        if not chosen:
            raise missing
        if len(chosen) < len(names):  # others of the repository stay
            return sum(_delete(names[name]) for name in chosen)
    cache = scan_cache_dir(constants.HF_HUB_CACHE)
    repository = next(one for one in cache.repos if one.repo_id == match["name"])
    strategy = cache.delete_revisions(*(one.commit_hash for one in repository.revisions))
    strategy.execute()
    return int(strategy.expected_freed_size)


def _counted(progress: Callable[[int, int], None], before: int, total: int, more: int) -> None:
    progress(before + more, total)


def _delete(path: Path) -> int:
    blob = path.resolve()
    size = blob.stat().st_size
    path.unlink()
    blob.unlink(missing_ok=True)
    return size


def _size(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _source(repository: str, gguf_name: str) -> str:
    """A GGUF file by the type in its name, as in Model-Q4_K_M.gguf."""
    if not gguf_name:
        return repository
    return f"{repository}:{Path(gguf_name).stem.rpartition('-')[2]}"


def _hash_of(blob: Path, progress: Callable[[int], None]) -> str:
    """As the cache names it: of 64 digits SHA-256, of 40 that of a git blob; else the name."""
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
        return blob.name
    size = blob.stat().st_size
    wanted = hashlib.sha256() if len(blob.name) == 64 else hashlib.sha1(b"blob %d\0" % size)
    read = 0
    try:
        with blob.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                wanted.update(piece)
                read += len(piece)
                progress(read)
    except OSError as error:
        raise DiskReadError(f"{blob} cannot be read ({os_reason(error)})") from error
    return wanted.hexdigest()
