"""Programs whose own process may grow by so much and no more: the kernel holds them to it."""

import json
import os
import subprocess
import sys
from typing import Any

_BEFORE = """
import json, resource, sys
from importlib.resources import files
from pathlib import Path
from hmt.base.errors import HMTError
from hmt.contracts.request import Grammar, GrammarKind
from hmt.text import Tokenizer
from hmt.text.chat_template import ChatTemplate
MINI = Path(str(files("hmt") / "embedded" / "mini-dense"))
given = json.load(sys.stdin)
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20),) * 2)
"""
_AFTER = """
def tried(case):
    try:
        return ["answer", work(case)]
    except HMTError as error:
        return [type(error).__name__, str(error)]
print(json.dumps([tried(case) for case in given]))
"""


def run_limited(program: str, cases: list[Any]) -> list[tuple[str, Any]]:
    """What `work(case)`, which `program` defines, has answered or raised for each case."""
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE + program + _AFTER],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"MALLOC_ARENA_MAX": "2"},  # each has 64 MiB of addresses
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [(kind, value) for kind, value in json.loads(done.stdout)]
