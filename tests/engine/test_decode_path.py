"""docs/structure.md lists the files to follow one decode step; here such steps run."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from reference import MINI_DENSE

import hmt
from hmt.contracts.plan import Tier
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "hmt"
STRUCTURE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
SECTION = STRUCTURE.split("## One decode step")[1].split("\n## ")[0]
BEFORE_GPU, GPU_AND_REST = SECTION.split("On a GPU,")
CPU = re.findall(r"^\d+\. `([a-z_0-9/]+\.py)`", BEFORE_GPU, re.MULTILINE)
GPU = re.findall(r"^\d+\. `([a-z_0-9/]+\.py)`", GPU_AND_REST, re.MULTILINE)
CLOSED = set(re.findall(r"`(?:\w+/)*(\w+\.py)`", GPU_AND_REST.split("What these call besides")[1]))
READ_ONLY = {"models/llama.py"}  # on a CPU: its layers are computed in one call
REAL_GPU = {"memory/device/cuda.py"}  # and kernels/triton: a fake device computes without them


def files_of_a_step(**options: Any) -> tuple[set[str], Any]:
    """The files of this package that a decode step enters, and the model's account after it."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            entered.add(path.relative_to(SOURCE).as_posix())

    options |= {"host_memory": "320MiB", "context": 1024, "max_prefill_tokens": 64}
    with hmt.Engine(**options) as engine:
        model = engine.load_model(MINI_DENSE)
        steps = 0

        def advance() -> bool:
            nonlocal steps
            steps += 1
            sys.setprofile(note if steps == 20 else None)  # the eighth token's
            try:
                return model._core.advance()
            finally:
                sys.setprofile(None)

        model._loop.run_steps(advance)
        request = hmt.Request([20 + n % 400 for n in range(700)], 20, ignore_eos=True)
        assert len(model.infer(request).token_ids) == 20 and steps > 25
        away = [block for block, home in model.plan.homes.items() if home is not Tier.DEVICE]
        return entered, (model._core.runner.executor.graphs, model.summary(), away)


def check(listed: list[str], entered: set[str], absent: set[str]) -> None:
    assert [name for name in listed if not (SOURCE / name).exists()] == []
    assert len(listed) == len(set(listed))
    assert {name for name in listed if name not in entered} == absent
    engine = {name for name in entered if name.startswith(("engine/", "models/"))}
    assert {name for name in engine - set(listed) if Path(name).name not in CLOSED} == set()


def test_on_a_cpu_it_is_at_most_15_files() -> None:
    entered, _ = files_of_a_step()
    assert len(CPU) <= 15
    check(CPU, entered, READ_ONLY)


def test_on_a_gpu_with_levels_it_is_at_most_30_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    options = {"gpus": "fake", "gpu_memory": "16MiB", "kv_gpu_memory": "2MiB"}
    entered, (graphs, summary, away) = files_of_a_step(**options)
    assert graphs.host_ffn and graphs.graphs[True] and summary.kv.host_s and away
    assert len(GPU) <= 30
    check(GPU, entered, {name for name in GPU if "triton" in name} | REAL_GPU)
