"""What becomes of a quantisation that was ended: it goes on, to the same bytes."""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_models import MOE, checkpoint, contents, options, use_observing

from hmt.base.errors import BudgetError, ConfigError, DiskWriteError
from hmt.quantizing import quantize

pytestmark = pytest.mark.usefixtures("quick_processes")

CALIBRATED = "rotate,smoothquant,observing"  # what is done to weights before, too


class Killed(BaseException):
    """Ends a run wherever it is."""


@pytest.fixture(scope="module", autouse=True)
def _observing() -> Iterator[None]:
    with use_observing():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), MOE)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What an undisturbed run makes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    quantize(model, out, options(method=CALIBRATED))
    return contents(out)


def ends_at(number: int, error: BaseException, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which raises `error` when it is called for the n-th time."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        return call(*args, **kwargs)

    return counted


def test_runs_that_are_ended_anywhere_go_on_to_the_same_bytes(
    model: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    draw = random.Random(5)
    for _layer in range(10):  # a layer takes some 50 writes, and is begun anew
        with monkeypatch.context() as patch:
            name, most = draw.choice([("pwrite", 160), ("fsync", 8), ("preadv", 8)])
            patch.setattr(os, name, ends_at(draw.randrange(1, most), Killed(), getattr(os, name)))
            with pytest.raises(Killed):
                quantize(model, out, options(method=CALIBRATED))
    quantize(model, out, options(method=CALIBRATED))
    assert contents(out) == whole
    assert not out.with_name("out.partial").exists()


def test_a_killed_process_leaves_what_another_goes_on_with(
    model: Path, whole: dict[str, str], tmp_path: Path
):
    out = tmp_path / "out"
    program = (
        "import sys; from pathlib import Path; from small_models import options, use_observing\n"
        "from hmt.quantizing import quantize\n"
        "use_observing()\n"
        "quantize(Path(sys.argv[1]), Path(sys.argv[2]), options(method=sys.argv[3]),\n"
        "    progress=lambda what, done, total: print(done, flush=True))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, model, out, CALIBRATED],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    ) as process:
        assert process.stdout is not None
        for _ in range(20):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    done: list[int] = []
    quantize(model, out, options(method=CALIBRATED), progress=lambda what, n, _: done.append(n))
    assert contents(out) == whole


def test_a_full_disk_is_named_and_loses_nothing(
    model: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", ends_at(30, full, os.pwrite))
        with pytest.raises(DiskWriteError, match=r"No space left.*same command again"):
            quantize(model, out, options(method=CALIBRATED))
    quantize(model, out, options(method=CALIBRATED))
    assert contents(out) == whole


def begun(model: Path, out: Path) -> None:
    def end(what: str, done: int, total: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        quantize(model, out, options(), progress=end)


def test_other_options_are_refused_and_say_which(model: Path, tmp_path: Path):
    begun(model, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"begun with keep \[\], not \[\"down\"\]"):
        quantize(model, tmp_path / "out", options(keep=("down",)))


def test_another_text_is_refused(model: Path, tmp_path: Path):
    begun(model, tmp_path / "out")
    with pytest.raises(ConfigError, match="begun with method"):
        quantize(model, tmp_path / "out", options(method=CALIBRATED))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_model_that_changed_is_refused(model: Path, tmp_path: Path, name: str):
    """Its shapes and names are as before: what is written already may still be of another."""
    other = shutil.copytree(model, tmp_path / "model")
    begun(other, tmp_path / "out")
    (other / name).write_text((other / name).read_text() + " ")
    with pytest.raises(ConfigError, match=f"begun before {name} of the model changed"):
        quantize(other, tmp_path / "out", options())


def test_more_memory_does_not_change_a_run_that_was_begun(
    model: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", ends_at(40, Killed(), os.pwrite))
        with pytest.raises(Killed):
            quantize(model, tmp_path / "out", options(method=CALIBRATED))
    more = options(method=CALIBRATED, host_memory_bytes=1 << 30)
    quantize(model, tmp_path / "out", more)
    assert contents(tmp_path / "out") == whole


def test_a_complete_model_is_replaced_only_by_force(model: Path, tmp_path: Path):
    out = tmp_path / "out"
    quantize(model, out, options())
    first = contents(out)
    with pytest.raises(ConfigError, match="--force"):
        quantize(model, out, options(keep=("down",)))
    assert contents(out) == first
    quantize(model, out, options(keep=("down",)), force=True)
    assert contents(out) != first


def test_a_model_is_complete_although_its_working_folder_stays(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """And the folder goes with the next run."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", ends_at(1, OSError(30, "Read-only"), shutil.rmtree))
        quantize(model, out, options())
    assert partial.exists() and f"{out} is complete" in caplog.text
    first = contents(out)
    quantize(model, out, options(), force=True)
    assert contents(out) == first and not partial.exists()


def test_a_folder_of_somebody_else_is_never_replaced(model: Path, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="no model that `hmt quantize` made"):
        quantize(model, out, options(), force=True)


def test_a_budget_that_is_too_small_is_refused_and_leaves_nothing(model: Path, tmp_path: Path):
    with pytest.raises(BudgetError, match="give --host-memory") as raised:
        quantize(model, tmp_path / "out", options(host_memory_bytes=1 << 16))
    assert list(tmp_path.iterdir()) == []
    least = int(str(raised.value).split("--host-memory ")[1].split()[0])
    quantize(model, tmp_path / "out", options(host_memory_bytes=least))
