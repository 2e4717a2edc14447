"""Models by their name on a Hugging Face hub: what is needed of them, in the hub's usual cache.

`huggingface_hub` downloads: it goes on inside a file where a connection broke, and keeps every file
that is whole, so that a later attempt fetches the others only.  What it reads from the environment
counts: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
"""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import CheckpointError, HMTError, MachineError, MissingFileError
from hmt.base.log import logger
from hmt.base.units import format_bytes
from hmt.formats.gguf.header import SPLIT

_NAME: Final = re.compile(r"([\w][\w.-]*/[\w][\w.-]*)(?:@([\w][\w./-]*))?(?::([\w.-]+))?")
# Weights, configurations, and what tokenizers are made of; nothing of subfolders, which hold the
# same weights for other libraries.
_WANTED: Final = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_UNWANTED: Final = ("*/*", "README*", "LICENSE*", "consolidated*", "training_args*")
_ENCODER: Final = re.compile(r"mmproj.*-?(?:bf16|f16)\.gguf", re.IGNORECASE)
_LINKS: Final = "HF_ENDPOINT names another hub, HF_TOKEN who you are"


def located(name: str | Path) -> Path:
    """The folder or file of a model: itself if it is there, else that of `owner/name[@revision]`.

    `owner/name:TYPE`, such as Q4_K_M, is the GGUF file of that type there.  What is not a name of
    the hub either is returned as it is.  Downloads what is missing of the needed files, with
    progress on stderr.  Where the hub cannot be reached, what an earlier download left complete is
    used.  Raises MissingFileError, CheckpointError and MachineError.
    """
    path = Path(name).expanduser()
    match = _NAME.fullmatch(str(name))
    if match is None or _exists(path):
        return path
    return _snapshot(match[1], match[2], match[3])


def shown_name(path: Path) -> str:
    """What people call the model in `path`: its folder's name, or that on the hub."""
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return "/".join(repository.split("--")[1:])
    return path.name


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def gguf_files(names: Iterable[str], file_type: str) -> list[str]:
    """Of a repository's files those of one GGUF model of this type, the first part first.

    Where there are several, as Q4_K_M and UD-Q4_K_M, it is the one with the shortest name.  An
    encoder of images in 16 bits comes last.
    """
    wanted = re.compile(rf"(?:.*[-./])?{re.escape(file_type)}\.gguf", re.IGNORECASE)
    models: dict[str, list[str]] = {}
    encoders = []
    for name in sorted(names):
        whole = SPLIT.sub(r"\1.gguf", name)
        if Path(name).name.lower().startswith("mmproj"):
            encoders += [name] if _ENCODER.fullmatch(Path(name).name) else []
        elif wanted.fullmatch(whole):
            models.setdefault(whole, []).append(name)
    if not models:
        return []
    return models[min(models, key=lambda whole: (len(Path(whole).name), whole))] + encoders[:1]


def _snapshot(name: str, revision: str | None, file_type: str | None) -> Path:
    """The folder of the model's files in the cache, complete; or its GGUF file."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):  # type: ignore[misc]
        """No progress: nothing is downloaded yet."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})

    wanted: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": list(_WANTED) if file_type is None else ["*.gguf"],
        "ignore_patterns": list(_UNWANTED) if file_type is None else None,
        "library_name": "hmt",
    }
    try:
        files = snapshot_download(name, dry_run=True, tqdm_class=Silent, **wanted)
        if file_type is not None:
            chosen = _chosen(name, [file.filename for file in files], file_type)
            files = [file for file in files if file.filename in chosen]
            _check_room(name, files)
            wanted["allow_patterns"] = chosen
            return Path(snapshot_download(name, **wanted)) / chosen[0]
        _check(name, files)
        return Path(snapshot_download(name, **wanted))
    except HMTError:
        raise
    except Exception as error:  # of connections, in many classes of several libraries
        reason = error.__cause__ or error if isinstance(error, errors.DryRunError) else error
        if isinstance(reason, errors.GatedRepoError):
            raise CheckpointError(
                f"{name} asks for an agreement that this account has not made: accept it on the "
                "model's page, and log in (`hf auth login`) or set HF_TOKEN"
            ) from error
        if isinstance(reason, errors.RevisionNotFoundError):
            raise MissingFileError(f"{name} has no revision {revision!r} on the hub") from error
        if isinstance(reason, errors.RepositoryNotFoundError):
            raise MissingFileError(
                f"{name} is no folder here and no model that the hub shows: check the name; for a "
                "private one log in (`hf auth login`) or set HF_TOKEN"
            ) from error
        return _cached(name, wanted, reason, file_type)


def _chosen(name: str, files: list[str], file_type: str) -> list[str]:
    """See `gguf_files`.  Raises CheckpointError where there is none."""
    chosen = gguf_files(files, file_type)
    if not chosen:
        found = sorted(Path(file).name for file in files)[:12]
        raise CheckpointError(
            f"{name} has no GGUF file of type {file_type}: it has {', '.join(found) or 'none'}"
        )
    return chosen


def _cached(name: str, wanted: dict[str, Any], error: BaseException, file_type: str | None) -> Path:
    """What an earlier download has left complete.  Raises MissingFileError where it has not."""
    from huggingface_hub import constants, snapshot_download

    reason = " ".join(str(error).split())[:200] or type(error).__name__
    try:
        if file_type is not None:
            there = _local_files(name, wanted["revision"])
            chosen = _chosen(name, there, file_type)
            wanted["allow_patterns"] = [SPLIT.sub(r"\1-*.gguf", file) for file in chosen]
        folder = Path(snapshot_download(name, local_files_only=True, **wanted))
        if file_type is not None:
            folder /= chosen[0]
    except Exception as missing:
        raise MissingFileError(
            f"{name} is no folder here, the hub cannot be reached ({reason}), and its cache "
            f"{constants.HF_HUB_CACHE} has no complete copy: try again, which goes "
            f"on where it stopped ({_LINKS}), or copy the model's folder here and name it"
        ) from missing
    logger.warning("the hub cannot be reached (%s): %s is used as it is in the cache", reason, name)
    return folder


def _local_files(name: str, revision: str | None) -> list[str]:
    """The files of a repository's snapshot in the cache.  Raises OSError where there is none."""
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    reference = cached / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or "main"
    snapshot = cached / "snapshots" / commit
    return [str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file()]


def _check(name: str, files: list[Any]) -> None:
    """Refuse what cannot be run, or has no room, before it is downloaded."""
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise CheckpointError(
            f"{name} has no *.safetensors files on the hub: take another repository of this model, "
            "or name a GGUF file of it by its type, as in owner/name:Q4_K_M"
        )
    _check_room(name, files)


def _check_room(name: str, files: list[Any]) -> None:
    from huggingface_hub import constants

    needed = sum(file.file_size or 0 for file in files if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise MachineError(
            f"{name} needs {format_bytes(needed)}, and {there} has {format_bytes(free)} free: make "
            "room, or set HF_HOME to a folder on a larger disk"
        )
