"""`hmt bench serve` starts a server of its own: with room for its users, and never left behind."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hmt.base.errors import HMTError
from hmt.bench.load import Matrix
from hmt.bench.load.matrix import _with_room
from hmt.bench.load.own_server import own_server

pytestmark = pytest.mark.usefixtures("quick_processes")


def test_a_server_of_our_own_has_room_for_all_users():
    matrix = Matrix((128,), (64,), (1, 8))
    assert _with_room([], matrix) == ["--max-batch", "8", "--context", str(8 * (128 + 32 + 192))]
    assert _with_room(["--context=99"], matrix) == ["--context=99", "--max-batch", "8"]


def test_a_server_that_does_not_start_is_told(tmp_path):
    with pytest.raises(HMTError, match=r"did not start: .*config\.json"), own_server(tmp_path):
        pass


def test_a_server_of_our_own_ends_with_us(tmp_path: Path) -> None:
    """Also when we are told to end by SIGTERM."""
    serving = tmp_path / "serving"
    serving.write_text(
        f"#!{sys.executable}\nimport sys, time\n"
        "print('m is served at http://localhost:1/v1', file=sys.stderr, flush=True)\n"
        "time.sleep(60)\n"
    )
    serving.chmod(0o755)
    script = (
        "import sys, time; from pathlib import Path\n"
        "from hmt.bench.load.own_server import own_server\n"
        f"sys.executable = {str(serving)!r}\n"
        "with own_server(Path('m')) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as ours:
        assert ours.stdout is not None
        pid = int(ours.stdout.readline())
        assert psutil.pid_exists(pid)
        ours.terminate()
        assert ours.wait(30) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(pid)
