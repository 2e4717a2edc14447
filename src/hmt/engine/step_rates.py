"""What steps cost whatever they read: measured with the small model that comes with HMT.

Its layers are so small that nearly all of a step's time is what every step of every model pays:
scheduling, choosing tokens, and calls.  Two numbers of layers tell a step's part from a layer's,
and two numbers of users a user's part.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from statistics import median
from typing import Any

from hmt.contracts.request import Request

_LAYERS = (2, 8)
_USERS = (1, 8)
_PROMPT = 16
_CHUNK = 512
_WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds.

    step     of a decoding step of `users` users and `layers` layers, by (layers, users)
    prompt   of a step of `CHUNK` tokens of a prompt, by layers
    process_bytes   memory of a process in which a small model runs, less what the plan counts
    """

    step: dict[tuple[int, int], float]
    prompt: dict[int, float]
    process_bytes: int


def step_times(seconds: float, **options: Any) -> StepTimes:
    """Times of the small model, with `seconds` for each; `options` are an engine's."""
    # Not above: the engine asks for a machine, and a machine's probe for this.
    from hmt.engine.engine import Engine
    from hmt.memory import resident_bytes

    step, prompt, process = {}, {}, 0
    for layers in _LAYERS:
        with (
            _small_model(layers) as folder,
            Engine(
                host_memory="256MiB", context=4096, max_batch=max(_USERS), prefill_chunk=_CHUNK,
                check_weights=False, **options,
            ) as engine,
        ):  # fmt: skip
            with engine.load_model(folder) as model:
                for users in _USERS:
                    step[layers, users] = _decoding_s(model, users, seconds)
                prompt[layers] = _prompt_s(model, seconds)
                process = resident_bytes() - sum(model.plan.reserved.values())
    return StepTimes(step, prompt, process)


def _decoding_s(model: Any, users: int, seconds: float) -> float:
    request = Request(input=[20] * _PROMPT, max_new_tokens=512 - _PROMPT, ignore_eos=True)
    with ExitStack() as stack:
        streams = [
            stack.enter_context(closing(one)) for one in model.stream_batch([request] * users)
        ]
        times: list[float] = []
        end = 0.0
        for number in range(480):
            begin = time.perf_counter()
            for stream in streams:
                next(stream)
            if number == _WARM_STEPS:
                end = begin + seconds
            if number >= _WARM_STEPS:
                times.append(time.perf_counter() - begin)
                if time.perf_counter() > end:
                    break
    return median(times)


def _prompt_s(model: Any, seconds: float) -> float:
    request = Request(input=[20] * _CHUNK, max_new_tokens=1, ignore_eos=True)
    model.infer(request)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        model.infer(request)
        times.append(time.perf_counter() - begin)
    return median(times)


@contextmanager
def _small_model(layers: int) -> Iterator[Path]:
    """The embedded model with so many of its layers."""
    with as_file(files("hmt") / "embedded" / "mini-dense") as source:
        with tempfile.TemporaryDirectory() as folder:
            for file in source.iterdir():
                (Path(folder) / file.name).symlink_to(file)
            config = json.loads((source / "config.json").read_text())
            written = Path(folder) / "config.json"
            written.unlink()
            written.write_text(json.dumps(config | {"num_hidden_layers": layers}))
            yield Path(folder)
