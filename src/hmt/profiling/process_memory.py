"""Memory of processes that run a model, beside what plans reserve: each measured in a separate one.

`python -m hmt.profiling.process_memory FOLDER OPTIONS TOKENS`: OPTIONS are an engine's, as JSON;
prompts have so many TOKENS.  Prints by how many bytes the process grew behind its plan, less the
weights and what they pass through; and less the rest of the plan, which long prompts have all
touched.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from hmt.base.errors import HMTError
from hmt.base.units import MIB
from hmt.hardware.machine import ProcessBytes
from hmt.profiling.probe_models import FEW, MANY, small_model, wide_experts, wide_model
from hmt.profiling.step_overheads import OPTIONS, memory_for, prompt_tokens

_PROMPTS = 3
_PROMPT, _ANSWER = 24, 24  # tokens
_LONG_CONTEXT = 1536  # two chunks or more
_TIMEOUT_S = 120
# By which the same run takes more one time than another: 1 to 5 MiB were seen, and of runs that
# stream 7 to 31.
_CHANCE_BYTES, _STREAMING_CHANCE_BYTES = 8 * MIB, 40 * MIB
_RESIDENT_SHARE = 0.1  # of the weights, where the others are streamed
_CONVERTED = {"quantization": "w4a8"}

ProbeModel = Callable[[int], AbstractContextManager[Path]]


def measured_process_bytes() -> ProcessBytes:
    """Of runs that keep all weights, that stream them, and that convert what they stream."""
    # How the allocator's arenas are cut up is chance: the same run took 438 to 457 MiB.
    measures = (
        partial(process_bytes, {}, small_model, FEW),
        partial(process_bytes, {}, wide_experts, MANY, _RESIDENT_SHARE),
        partial(process_bytes, {}, wide_experts, MANY, _RESIDENT_SHARE),
        partial(process_bytes, _CONVERTED, wide_model, FEW, _RESIDENT_SHARE),
    )
    with ThreadPoolExecutor() as pool:
        alone, *streaming, converting = pool.map(lambda measure: measure(), measures)
    return ProcessBytes(
        process_bytes=alone + _CHANCE_BYTES if alone else 0,
        streaming_bytes=max(0, max(streaming) - alone) + _STREAMING_CHANCE_BYTES,
        converting_bytes=max(0, converting - alone),
    )


def process_bytes(
    options: Mapping[str, Any], model: ProbeModel, layers: int, resident_share: float = 1.0
) -> int:
    """The most memory of a process that runs a model, beside its weights; 0 where it fails.

    What else the plan reserves may not have been touched: all of it counts as the process's, unless
    weights are streamed: then prompts are so long that the whole plan is touched, and it does not.

    resident_share   of the weights
    """
    streams = resident_share < 1
    given = {**OPTIONS, **options} | ({"context": _LONG_CONTEXT} if streams else {})
    tokens = _LONG_CONTEXT - 2 * _PROMPT if streams else _PROMPT
    try:
        with model(layers) as folder:
            if streams:
                given["host_memory"] = memory_for(folder, resident_share, given)
            command = [sys.executable, "-m", __name__, str(folder), json.dumps(given), str(tokens)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
            )
        return int(done.stdout.split()[streams])
    except (HMTError, OSError, ValueError, subprocess.SubprocessError):
        return 0


def main() -> None:
    """Measure, as the module's docstring says."""
    from hmt.contracts.request import Request
    from hmt.engine.engine import Engine
    from hmt.engine.loading.prepare import prepare
    from hmt.memory import peak_resident_bytes, reset_peak_resident, resident_bytes

    folder, options, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with Engine(**json.loads(options)) as engine:
        prepare(Path(folder), engine.config, None, engine.devices, engine.device_left())
        # What a configuration imports is loaded by now.  Measuring the link took 860 MiB for a
        # moment.
        reset_peak_resident()
        before = resident_bytes()
        model = engine.load_model(folder)
        for first in range(_PROMPTS):
            prompt = prompt_tokens(tokens, first)
            model.infer(Request(input=prompt, max_new_tokens=_ANSWER, ignore_eos=True))
        grown, reserved = peak_resident_bytes() - before, model.plan.reserved
        weights = sum(reserved[name] for name in ("resident", "slots", "staging"))
        print(grown - weights, grown - sum(reserved.values()), flush=True)
        os._exit(0)  # nothing is left to be done


if __name__ == "__main__":
    main()
