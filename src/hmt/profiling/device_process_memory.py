"""What the driver and libraries take of a GPU, measured in a separate process.

`python -m hmt.profiling.device_process_memory OPTIONS`: OPTIONS are an engine's, as JSON.  Small
models run on the GPU one after the other, in each of the usual encodings: the driver keeps every
kernel that was ever called, and every step that was captured.  Prints the bytes of the GPU's memory
that the process has then beside what torch took for tensors.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hmt.base.errors import HMTError

_SCHEMES = (None, "w4a16:32", "w8a8")
_LAYERS = 8
_USERS = 8
_PROMPT, _TOKENS = 512, 4
_TIMEOUT_S = 180


def measured_driver_bytes(options: dict[str, Any]) -> int:
    """What the module prints for `options`; 0 where it fails."""
    command = [sys.executable, "-m", __name__, json.dumps(options)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def main() -> None:
    """Measure, as the module's docstring says."""
    print(_measured(json.loads(sys.argv[1])), flush=True)
    os._exit(0)  # nothing is left to be done


def _measured(options: dict[str, Any]) -> int:
    from hmt.profiling.probe_models import dense_model, expert_model

    found = 0
    for small, schemes in ((dense_model, _SCHEMES), (expert_model, _SCHEMES[:2])):
        with small(_LAYERS) as folder:
            for scheme in schemes:
                try:
                    found = max(found, _beside_tensors(folder, options | {"quantization": scheme}))
                except HMTError:
                    continue  # what cannot be encoded so has no kernels
    return found


def _beside_tensors(folder: Path, options: dict[str, Any]) -> int:
    """After prompts and steps of one user and of several."""
    from hmt.contracts.request import Request, Sampling
    from hmt.engine.engine import Engine

    drawn = Sampling(temperature=1.0, seed=1)
    with Engine(**{"max_batch": _USERS, **options}) as engine:
        model, device = engine.load_model(folder), engine._device
        for users in (1, _USERS):
            request = Request(
                input=[20] * (_PROMPT // users),
                max_new_tokens=_TOKENS,
                ignore_eos=True,
                sampling=drawn,
            )
            for _ in zip(*model.stream_batch([request] * users), strict=True):
                pass
        return 0 if device is None else device.used_bytes() - device.reserved_bytes()


if __name__ == "__main__":
    main()
