#!/usr/bin/env python3
"""Users on HMT's server and on llama.cpp's, the same weights in both, by turns.

    python benchmarks/serve_beside_llama.py LLAMA_SERVER FOLDER [--users 1,4,16,64] [--json FILE]

A Llama of 1.1 billion random weights, every one a 4-bit code times a scale, is written to FOLDER
unless it is there: as a checkpoint, which HMT keeps as w4a8:32, and as GGUF in Q4_0.  LLAMA_SERVER
is llama.cpp's `llama-server`.  Both servers are loaded all the time, and one at a time is asked.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from hmt.bench.load import Matrix, run
from hmt.bench.load.own_server import own_server
from hmt.cli.eval import held_out_text
from hmt_bench.four_bits import SHAPES, write_four_bit_model
from hmt_bench.gguf_model import write_gguf

_START_S = 300
_FIGURES = ("tokens_per_s", "requests_per_s", "ttft_s", "tpot_s", "e2e_s")


def main() -> int:
    """Measure and print; 1 where a request failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("llama_server", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--users", default="1,4,16,64")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--per-user", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--llama-options", default="", help="further ones of llama-server")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    users = [int(n) for n in given.users.split(",")]
    model, gguf = _written(given.folder)
    each = given.prompt + given.prompt // 4 + given.output + 128
    room = max(users) * each
    options = ["--quant", "w4a8:32", "--context", str(room), "--max-batch", str(max(users))]
    options += ["--threads", str(given.threads)]
    content: dict[str, Any] = {"benchmark": "serve-beside-llama", "rounds": given.rounds}
    results: list[dict[str, Any]] = []
    with own_server(model, options) as ours, _llama(given, gguf, max(users), room) as theirs:
        for count in users:
            found: dict[str, list[dict[str, Any]]] = {"hmt": [], "llama.cpp": []}
            for number in range(given.rounds):
                for name, url in (("hmt", ours.url), ("llama.cpp", theirs)):
                    matrix = Matrix(
                        (given.prompt,), (given.output,), (count,),
                        requests=given.per_user * count, warmup=count, seed=number,
                    )  # fmt: skip
                    made = run(matrix, held_out_text(None), model=model, url=url)
                    [cell] = made["results"]
                    found[name].append({k: v for k, v in cell.items() if k != "each"})
                    content.setdefault("machine", made["machine"])
                    print(count, name, {k: cell.get(k) for k in _FIGURES}, flush=True)
            rates = {name: median(c["tokens_per_s"] for c in cells)
                     for name, cells in found.items()}  # fmt: skip
            ratio = rates["hmt"] / rates["llama.cpp"]
            results.append({"users": count, "tokens_per_s": rates, "ratio": ratio, "cells": found})
            print(f"{count} users: {rates['hmt']:.1f} and {rates['llama.cpp']:.1f}: {ratio:.2f}")
    content |= {"serve_options": options, "llama_options": given.llama_options, "results": results}
    if given.json is not None:
        given.json.write_text(json.dumps(content, indent=1))
    cells = [c for one in results for some in one["cells"].values() for c in some]
    return int(any(c["failures"] for c in cells))


def _written(folder: Path) -> tuple[Path, Path]:
    model, gguf = folder / "model", folder / "model-q4_0.gguf"
    if not gguf.is_file():
        write_four_bit_model(model, SHAPES["llama-1b"])
        unfinished = gguf.with_suffix(".partial")
        write_gguf(model, unfinished)
        unfinished.rename(gguf)
    return model, gguf


@contextmanager
def _llama(given: argparse.Namespace, gguf: Path, users: int, room: int) -> Iterator[str]:
    """llama.cpp's server with room for all users; its address."""
    url = f"http://127.0.0.1:{given.port}"
    command = [str(given.llama_server), "-m", str(gguf), "--port", str(given.port)]
    command += ["-t", str(given.threads), "-tb", str(given.threads), "-np", str(users)]
    command += ["-c", str(room), "-fa", "on", *shlex.split(given.llama_options)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        break
            except (urllib.error.URLError, OSError):
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{given.llama_server} does not start: {' '.join(command)}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
