"""Files that are truncated, replaced or deleted while a model reads them, for every reader.

In separate processes: with a mapping a file that becomes shorter was a SIGBUS, which no error
handling survives.  The logits before are the oracle of those after.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from gguf_files import ModelFile, bytes_vocabulary
from reference import MINI_DENSE
from safetensors.torch import load_file
from transformers import AutoConfig

from hmt.engine import EngineConfig
from hmt.engine.loading.packs import convert
from hmt.memory import READERS

pytestmark = pytest.mark.usefixtures("quick_processes")

WORK = """
import pathlib, sys, threading
import torch
import hmt
from hmt.base.errors import DiskReadError
from hmt.contracts.plan import Tier
from hmt.engine import EngineConfig, prepare
from hmt.planner import PlanOptions, smallest_budget

TOKENS = [5, 80, 1200, 33, 7]
OPTIONS = dict(context=64, max_batch=1, max_prefill_tokens=16)


def outcome(model):
    try:
        return model.logits(TOKENS, [4])
    except DiskReadError as error:
        assert "ended" in str(error) or "failed" in str(error), error
        return None


def check(path, file, reader):
    config = EngineConfig.resolve(host_memory="64MiB", **OPTIONS)
    least = smallest_budget(prepare(path, config).demand, PlanOptions(0, 64, 16))
    with hmt.Engine(host_memory=least, disk_reader=reader, **OPTIONS) as engine:
        model = engine.load_model(path)
        assert Tier.DISK in model.plan.homes.values()
        wanted, whole = outcome(model), file.read_bytes()
        with open(file, "r+b") as opened:
            for size in (0, len(whole) // 2 // 4096 * 4096):
                opened.truncate(size)
                found = outcome(model)  # right where it needed nothing of what is gone
                assert found is None if not size else found is None or torch.equal(found, wanted)
                try:
                    model.infer(hmt.Request(TOKENS, 2, ignore_eos=True))
                    assert size, "an answer without weights"
                except DiskReadError:
                    pass
                opened.seek(0)
                opened.write(whole)
                opened.flush()
                assert torch.equal(outcome(model), wanted)
            done, failed, right = threading.Event(), 0, 0

            def disturb():
                while not done.is_set():
                    opened.truncate(len(whole) // 4)
                    done.wait(0.002)
                    opened.seek(0)
                    opened.write(whole)
                    opened.flush()
                    done.wait(0.01)

            thread = threading.Thread(target=disturb)
            thread.start()
            for _ in range(8):
                found = outcome(model)
                assert found is None or torch.equal(found, wanted)
                failed += found is None
                right += found is not None
            done.set()
            thread.join()
        assert torch.equal(outcome(model), wanted)
        new = file.with_name("new")
        new.write_bytes(bytes(len(whole)))
        new.replace(file)  # what was opened stays what it was
        assert torch.equal(outcome(model), wanted)
        file.unlink()
        assert torch.equal(outcome(model), wanted)
        assert len(model.infer(hmt.Request(TOKENS, 2, ignore_eos=True)).token_ids) == 2
        print("through", path.name, reader, failed, right, flush=True)


for reader, path, file in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    check(pathlib.Path(path), pathlib.Path(file), reader)
"""


def models(folder: Path) -> list[tuple[Path, Path]]:
    """A folder, a pack and a GGUF file of one model; and of each the file with the weights."""
    shutil.copytree(MINI_DENSE, folder / "folder")
    convert(MINI_DENSE, folder / "pack", EngineConfig.resolve(quantization="w8a16"))
    file = ModelFile(
        gguf.MODEL_ARCH.LLAMA, AutoConfig.from_pretrained(MINI_DENSE), lambda name: "Q8_0"
    )
    file.add(load_file(MINI_DENSE / "model.safetensors"))
    single = file.write(folder / "model.gguf", bytes_vocabulary(MINI_DENSE))
    packed = max((folder / "pack").iterdir(), key=lambda one: one.stat().st_size)
    return [
        (folder / "folder", folder / "folder" / "model.safetensors"),
        (folder / "pack", packed),
        (single, single),
    ]


def test_a_file_that_changes_fails_requests_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    made, given = models(tmp_path / "made"), []
    for number, reader in enumerate(READERS):
        shutil.copytree(tmp_path / "made", tmp_path / reader)
        pair = [tmp_path / reader / one.relative_to(tmp_path / "made") for one in made[number % 3]]
        given += [reader, *map(str, pair)]
    work = subprocess.run(
        [sys.executable, "-c", WORK, *given],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert work.returncode == 0, work.stderr[-3000:]
    assert work.stdout.count("through") == len(READERS)
