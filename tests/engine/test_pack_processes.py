"""Conversions as processes of their own: killed, without room, and in how much memory."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hmt.base.units import MIB
from hmt.engine import EngineConfig
from hmt.engine.loading.packs import convert, verify
from hmt.profiling.random_model import Shape, write_random_model

pytestmark = pytest.mark.usefixtures("quick_processes")

# Weights of 4 bits take four times as long, most of it to find their scales.
CONFIG = EngineConfig.resolve(quantization="w8a8")
# Converts, and prints a line for everything that is done; at the end its peak of memory.
CHILD = """
import json, resource, sys
from pathlib import Path
from hmt.base.errors import DiskWriteError
from hmt.engine import EngineConfig
from hmt.engine.loading.packs import convert
from hmt.memory import peak_resident_bytes
checkpoint, out, scheme, largest_file = sys.argv[1:]
if int(largest_file):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest_file), int(largest_file)))
config = EngineConfig.resolve(quantization=scheme, threads=2, host_memory="256MiB")
begin = peak_resident_bytes()
try:
    convert(Path(checkpoint), Path(out), config, progress=lambda *told: print(*told, flush=True))
except DiskWriteError as error:
    sys.exit(str(error))
print(json.dumps(peak_resident_bytes() - begin))
"""


def child(checkpoint: Path, out: Path, scheme: str, largest_file: int = 0) -> subprocess.Popen:
    arguments = [str(checkpoint), str(out), scheme, str(largest_file)]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By their layers, of 8 MB each."""
    folder = tmp_path_factory.mktemp("models")
    for layers in (4, 20):
        write_random_model(folder / str(layers), Shape(layers, 512, 2048, heads=8, kv_heads=4))
    return {layers: folder / str(layers) for layers in (4, 20)}


@pytest.fixture(scope="module")
def whole(models: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack of a conversion that nothing disturbs."""
    out = tmp_path_factory.mktemp("packs") / "whole"
    convert(models[4], out, CONFIG)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_conversion_that_is_killed_goes_on(
    models: dict[int, Path], whole: Path, tmp_path: Path
) -> None:
    chance, out = random.Random(1), tmp_path / "pack"
    for _ in range(2):
        running = child(models[4], out, "w8a8")
        assert running.stdout is not None
        for _ in range(chance.randrange(1, 8)):
            assert running.stdout.readline()
        running.kill()
        running.communicate()
    if not out.exists():  # a kill may come too late
        convert(models[4], out, CONFIG)
    assert not verify(out, CONFIG).damages
    assert contents(out) == contents(whole)
    assert not (tmp_path / "pack.partial").exists()


def test_a_full_drive_leaves_no_pack_and_the_rest_is_made_later(
    models: dict[int, Path], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "pack"
    failed = child(models[4], out, "w8a8", largest_file=9 * MIB)
    _, said = failed.communicate()
    assert failed.returncode == 1, said
    assert "data-00001.hmt failed: File too large" in said and "goes on where it stopped" in said
    assert not out.exists()
    convert(models[4], out, CONFIG)
    assert contents(out) == contents(whole)


def test_memory_does_not_grow_with_the_model(models: dict[int, Path], tmp_path: Path) -> None:
    grown = {}
    for layers, checkpoint in models.items():
        out = tmp_path / f"{layers}"
        running = child(checkpoint, out, "w8a8")
        told, error = running.communicate()
        assert running.returncode == 0, error
        grown[layers] = json.loads(told.splitlines()[-1])
    added = sum(file.stat().st_size for file in models[20].glob("*.safetensors"))
    added -= sum(file.stat().st_size for file in models[4].glob("*.safetensors"))
    assert added > 120 * MIB
    # What torch's allocator keeps for each of the disk's workers, most of which work either way.
    assert grown[20] - grown[4] < added / 4, grown
