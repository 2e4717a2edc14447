"""The clients that people use, each as its own documentation shows, with tools and streams.

Each runs as a separate program, whose file stands beside this one.  Those that scripts/clients
installs have their own versions: what they need does not agree with what the other tests need.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from answering import Served

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
NODE = ROOT / "build" / "clients-node"
OURS = ("openai", "anthropic", "langchain")
THEIRS = ("litellm", "instructor", "pydantic_ai", "agents")
needs_clients = pytest.mark.skipif(
    not PYTHON.exists(), reason="scripts/clients makes .venv-clients, and has not been run"
)
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules").is_dir(),
    reason="needs node, and what scripts/clients installs where there is npm",
)


def check(command: list[str], surroundings: dict[str, str], seconds: int = 100) -> str:
    done = subprocess.run(
        command, env=surroundings, capture_output=True, text=True, timeout=seconds, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("name", OURS)
def test_clients_of_the_same_versions(
    name: str, served: Served, surroundings: dict[str, str]
) -> None:
    check([sys.executable, str(HERE / f"{name}_client.py"), served.url, served.name], surroundings)


@needs_clients
@pytest.mark.parametrize("name", THEIRS)
def test_clients_with_versions_of_their_own(
    name: str, served: Served, surroundings: dict[str, str]
) -> None:
    check([str(PYTHON), str(HERE / f"{name}_client.py"), served.url, served.name], surroundings)


@needs_clients
@pytest.mark.timeout(400)  # 60 s of requests; it starts for 30 s, for more than 60 on a busy host
def test_guidellm(served: Served, surroundings: dict[str, str], tmp_path: Path) -> None:
    """A minute of streams, two of them begun each second."""
    report = tmp_path / "report.json"
    command = [
        str(PYTHON.with_name("guidellm")), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={served.url},model={served.name}",
        "--profile", "kind=constant,rate=2", "--constraint", "kind=max_duration,seconds=60",
        "--tokenizer", f"kind=huggingface_auto,model={served.folder}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    check(command, surroundings | {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}, seconds=300)
    (found,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert totals["errored"] == 0
    assert totals["successful"] > 60


@needs_node
@pytest.mark.parametrize("name", ["openai", "ai", "anthropic"])
def test_clients_in_node(name: str, served: Served, surroundings: dict[str, str]) -> None:
    for file in (HERE / "node").glob("*.mjs"):  # beside what they import
        shutil.copy(file, NODE)
    check(["node", str(NODE / f"{name}.mjs"), served.url, served.name], surroundings)
