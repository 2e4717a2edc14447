"""What watching requests costs, and what it finds: a share of steps, false alarms, drift caught.

Statistics are made of the builtin calibration text.  Alarms are counted on text that it does not
hold, and on text that is built to be of another kind.  Time is the engine thread's inside the
watch, as a share of all of its time.
"""

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import hmt
from hmt.bench.environment import describe
from hmt.engine import LoadedModel
from hmt.engine.drift import calibrate_activations, statistics_beside
from hmt.engine.drift.calibration import drifts
from hmt.engine.loading.kv_scales import identity
from hmt.hardware.machine import machine_for
from hmt.quantizing import calibration_sequences
from hmt.text import Tokenizer

_LENGTH = 512  # tokens of a text


def run(
    model: Path,
    text: str,
    options: dict[str, Any],
    *,
    sequences: int = 128,
    pieces: int = 110,
    runs: int = 3,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Shares of steps, medians of `runs`, and alarms by kind of text.

    text       held-out text, of which so many `pieces` are read
    sequences  of the builtin text, that calibrate
    """
    with tempfile.TemporaryDirectory(prefix="hmt-drift-") as made:
        folder = Path(made) / model.name
        if model.is_dir():
            folder.mkdir()
        for file in model.iterdir() if model.is_dir() else (model,):
            link = folder / file.name if model.is_dir() else folder
            link.symlink_to(file.resolve())
        options = {"context": 16 * _LENGTH, "max_batch": 8, "speculate": "off"} | options
        progress("calibrating")
        with hmt.Engine(**options) as engine:
            loaded = engine.load_model(folder)
            calibration = calibration_sequences("builtin", loaded.tokenizer, sequences, _LENGTH)
            found = calibrate_activations(loaded, calibration)
            beside = statistics_beside(folder)
            beside.unlink(missing_ok=True)  # a link to the model's own
            found.statistics.write(beside, identity(loaded.prepared.source))
        with hmt.Engine(**options) as engine:
            loaded = engine.load_model(folder)
            progress("reading held-out text")
            kinds = _kinds(loaded.tokenizer, text, pieces)
            alarms = {
                kind: [
                    sum(drifts(found.statistics, loaded.hidden_rows(ids)) for ids in some),
                    len(some),
                ]
                for kind, some in kinds.items()
            }
            progress("timing")
            costs = _costs(loaded, kinds["held-out"], runs)
    return {
        "model": model.name,
        "options": {name: str(value) for name, value in options.items()},
        "calibration_tokens": found.tokens,
        "limits": [limit._asdict() for limit in found.statistics.limits],
        "alarms": alarms,
        "costs": costs,
        "machine": describe(machine_for(model)),
    }


def _kinds(tokenizer: Tokenizer, text: str, pieces: int) -> dict[str, list[list[int]]]:
    rng, count = random.Random(1), min(20, pieces)
    every = tokenizer.encode(text)
    held_out = [every[at : at + _LENGTH] for at in range(0, len(every) - _LENGTH + 1, _LENGTH)]

    def written(letters: Sequence[str]) -> list[list[int]]:
        return [
            tokenizer.encode("".join(rng.choices(letters, k=3 * _LENGTH)))[:_LENGTH]
            for _ in range(count)
        ]

    few = [rng.choices(range(16, 4000), k=3) for _ in range(count)]
    return {
        "held-out": held_out[:pieces],
        "digits": written("0123456789"),
        "another script": written([chr(code) for code in range(0x4E00, 0x5000)]),
        "three tokens again and again": [rng.choices(some, k=_LENGTH) for some in few],
        "words of the text, shuffled": [rng.sample(one, len(one)) for one in held_out[:count]],
    }


class _Timer:
    """Adds up the processor time of the calling thread inside functions, without the clock's own.

    Processor time, since other programs interrupt what takes long more often.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        begin = time.thread_time()
        for _ in range(10_000):
            time.thread_time()
        self._clock_s = (time.thread_time() - begin) / 10_000

    def around(self, inner: Callable[..., None]) -> Callable[..., None]:
        """`inner`, timed."""

        def timed(*args: Any, **named: Any) -> None:
            begin = time.thread_time()
            inner(*args, **named)
            self.seconds += time.thread_time() - begin - self._clock_s

        return timed


def _costs(model: LoadedModel, sequences: list[list[int]], runs: int) -> list[dict[str, Any]]:
    watch, timer = model._core.runner.watch, _Timer()
    assert watch is not None, "statistics lie beside the weights"
    for name in ("see", "computed"):
        setattr(watch, name, timer.around(getattr(watch, name)))
    costs = []
    for case, users, prompt, new in (
        ("one user decodes", 1, 16, 256),
        ("eight users decode", 8, 16, 128),
        ("prompts", 1, _LENGTH, 1),
    ):
        shares, rates = [], []
        for _ in range(runs + 1):  # the first warms caches
            asked = [hmt.Request(ids[:prompt], new, ignore_eos=True) for ids in sequences[:users]]
            model.reset_summary()
            begin, timer.seconds = model._loop.call(time.thread_time), 0.0
            model.infer_batch(asked)
            seconds = model._loop.call(time.thread_time) - begin
            found = model.summary()
            phase = found.prompt if case == "prompts" else found.generation
            shares.append(timer.seconds / seconds)
            rates.append(phase.tokens_per_s)
        costs.append({"case": case, "share": median(shares[1:]), "tokens_per_s": median(rates[1:])})
    return costs
