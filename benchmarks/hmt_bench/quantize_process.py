"""Quantising in a separate process: `python -m hmt_bench.quantize_process MODEL OUT OPTIONS`.

OPTIONS are fields of QuantizeOptions, as JSON.  Prints one JSON object a line: what the process
takes before it begins, then work as it is done, and in the end how memory was shared.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

_EVERY_S = 0.5


def main() -> None:
    """See the module's text."""
    from hmt.quantizing import QuantizeOptions, quantize

    model, out, options = sys.argv[1:]
    _say(process_bytes=_peak_bytes())
    last = [0.0]

    def progress(what: str, done: int, total: int | None) -> None:
        if time.monotonic() - last[0] >= _EVERY_S:
            last[0] = time.monotonic()
            _say(done=done, total=total)

    made = quantize(
        Path(model), Path(out), QuantizeOptions(**json.loads(options)), progress=progress
    )
    _say(
        plan=asdict(made.plan) | {"total": made.plan.total},
        tokens=made.tokens,
        read_bytes=made.read_bytes,
        written_bytes=made.written_bytes,
    )


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
