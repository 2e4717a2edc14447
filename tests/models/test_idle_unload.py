"""The tower leaves memory when no image comes: by the ledger, and by what the process has."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from vision_models import CASES, IMAGE, file_of, picture, publish, vision_model

import hmt
from hmt.base.errors import ConfigError, MachineError
from hmt.contracts.blocks import BlockKind
from hmt.contracts.request import Request, Sampling
from hmt.contracts.store import Presence
from hmt.engine import EngineConfig
from hmt_bench.cgroup_run import memory_group

OPTIONS: dict[str, Any] = {"dtype": "float32", "context": 128, "max_batch": 2}
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "depth": 3}
PROMPT = [9, IMAGE, 30]
# The shell becomes the process, so that nothing of it is outside.
ENTERS = 'test -z "$0" || echo $$ > "$0/cgroup.procs"; exec "$@"'


def asked(*images: Any) -> Request:
    prompt = PROMPT if images else [9, 30]
    return Request(
        input=prompt,
        images=images,
        max_new_tokens=3,
        ignore_eos=True,
        sampling=Sampling(logprobs=0),
    )


def numbers(model: hmt.LoadedModel, image: bytes) -> list[float]:
    return [one.logprob for one in model.infer(asked(image)).logprobs]


def tower_bytes(model: hmt.LoadedModel) -> int:
    """Bytes of the tower in memory.  Asks nothing of the engine's thread."""
    store = model._core.memory.weights
    blocks = [b for b in model.plan.homes if b.kind is BlockKind.VISION]
    return sum(store.slot_bytes(b) for b in blocks if store.presence(b) is not Presence.MISS)


@contextmanager
def image_held(model: hmt.LoadedModel, image: bytes) -> Iterator[None]:
    """As a request does that has not ended."""
    held = model._core.memory.images.hold([image])
    yield
    del held


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end, "nothing has left memory"
        time.sleep(0.01)


def used(model: hmt.LoadedModel) -> dict[str, int]:
    return model._core.memory.used_bytes()


def resident_bytes() -> int:
    """Of this process alone, that no file has."""
    fields = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in fields if line.startswith("Anonymous:")) << 10


def grouped_bytes(group: str) -> int | None:
    """What the kernel charges a control group for memory that no file has; None without one."""
    if not group:
        return None
    fields = dict(line.split() for line in Path(group, "memory.stat").read_text().splitlines())
    return int(fields.get("anon") or fields["rss"])  # cgroup v2, v1


def in_a_process(folder: str, group: str) -> dict[str, Any]:
    """What a process in control group `group` has of text, with an image, and a while after it."""
    image = file_of(picture(37, 21))
    with hmt.Engine(host_memory="160MiB", idle_unload=0.5, **OPTIONS) as engine:
        model = engine.load_model(folder)
        model.infer(asked())
        before = tower_bytes(model), used(model)["slots"]
        text, text_group = resident_bytes(), grouped_bytes(group)
        with image_held(model, image):
            first = numbers(model, image)
            tower, with_tower = tower_bytes(model), used(model)["slots"]
            seen = resident_bytes()
        wait_for(lambda: tower_bytes(model) == 0)
        wait_for(lambda: used(model)["slots"] == before[1])
        without, without_group = resident_bytes(), grouped_bytes(group)
        with image_held(model, image):
            again = numbers(model, image)
            return {
                "before": before[0], "tower": tower, "slots": with_tower - before[1],
                "taken": seen - text, "given_back": seen - without,
                "text": [text, text_group], "without": [without, without_group],
                "same": first == again, "back": tower_bytes(model),
            }  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's account of a process")
def test_a_process_gives_the_tower_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, text, vision, own = CASES["qwen2_5_vl"]
    monkeypatch.setitem(CASES, "wide", (kind, text, vision | WIDE, own))
    publish(vision_model("wide"), tmp_path)
    with ExitStack() as after:
        group = ""
        with suppress(MachineError):  # where none may be made, the process's own account is asked
            group = str(after.enter_context(memory_group(4 << 30)))
        done = subprocess.run(
            ["sh", "-c", ENTERS, group, sys.executable, __file__, str(tmp_path), group],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["before"] == 0 and seen["tower"] > 30 << 20 and seen["same"]
    assert seen["slots"] == seen["tower"] == seen["back"]
    # Beside the tower the C library may keep more or less of its heap.
    assert min(seen["taken"], seen["given_back"]) > 0.9 * seen["tower"]
    # With text alone no child process decodes, and the group has what the process has.
    for process, charged in (seen["text"], seen["without"]):
        assert charged is None or charged == pytest.approx(process, abs=8 << 20)


def test_text_goes_on_while_it_leaves(tmp_path: Path) -> None:
    publish(vision_model("llava"), tmp_path)
    image = file_of(picture(18, 50, 1))
    with hmt.Engine(host_memory="64MiB", idle_unload=0.2, **OPTIONS) as engine:
        model = engine.load_model(tmp_path)
        images = model._core.memory.images
        with image_held(model, image):
            first = numbers(model, image)
            assert images._idle_s() == 0, "a request has an image"
            assert tower_bytes(model) and images._decoder._sandbox._process
        wait_for(lambda: not (model.infer(asked()) and tower_bytes(model)))
        assert images._decoder._sandbox._process is None
        assert numbers(model, image) == first


def test_only_a_time_is_one() -> None:
    assert EngineConfig.resolve(idle_unload=90).idle_unload_s == 90.0
    assert EngineConfig.resolve().idle_unload_s is None
    for given in (0, -1.0, float("nan"), float("inf"), True, "soon"):
        with pytest.raises(ConfigError, match="seconds above 0"):
            EngineConfig.resolve(idle_unload=given)


if __name__ == "__main__":
    print(json.dumps(in_a_process(*sys.argv[1:])))
