"""What watching requests costs, and what it finds: a share of steps, false alarms, drift caught.

Statistics are made of the builtin calibration text.  Alarms are counted on text that it does not
hold, and on text that is built to be of another kind.  Time is the engine thread's, with the watch
and without.
"""

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from statistics import quantiles
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
    runs: int = 25,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Shares of steps, medians of `runs` pairs, and alarms by kind of text.

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
        # Of several threads that compute, the time that one waits for another would count.
        usual = {"context": 16 * _LENGTH, "speculate": "off", "threads": 1}
        options = usual | options | {"max_batch": 8}
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


def _costs(model: LoadedModel, sequences: list[list[int]], runs: int) -> list[dict[str, Any]]:
    """The engine thread's processor time with the watch over that without, less one.

    The two take turns, in pairs that begin with either, so that what else the machine does falls on
    both; processor time, as others interrupt what takes longer more often.
    """
    runner = model._core.runner
    watch = runner.watch
    assert watch is not None, "statistics lie beside the weights"
    # Nothing drifts meanwhile: what is raised is computed otherwise.
    limits = tuple(limit._replace(kl=inf, skew=inf) for limit in watch._statistics.limits)
    object.__setattr__(watch._statistics, "limits", limits)

    def begin(watched: bool) -> float:
        runner.watch = watch if watched else None
        runner.executor.watch(runner.watch)
        return time.thread_time()

    costs = []
    for case, users, prompt, new in (
        ("one user decodes", 1, 16, 96),
        ("eight users decode", 8, 16, 48),
        ("prompts", 1, _LENGTH, 1),
    ):
        asked = [hmt.Request(ids[:prompt], new, ignore_eos=True) for ids in sequences[:users]]

        def seconds(watched: bool, asked: list[hmt.Request] = asked) -> float:
            since = model._loop.call(lambda: begin(watched))
            model.infer_batch(asked)
            return model._loop.call(time.thread_time) - since

        for watched in (False, True):  # caches
            seconds(watched)
        model.reset_summary()
        shares = []
        for number in range(runs):
            taken = {
                watched: seconds(watched) for watched in ((False, True), (True, False))[number % 2]
            }
            shares.append(taken[True] / taken[False] - 1)
        found = model.summary()
        phase = found.prompt if case == "prompts" else found.generation
        middle = quantiles(shares, n=4) if runs > 1 else shares * 3
        costs.append(
            {"case": case, "share": middle[1], "quartiles": [middle[0], middle[2]], "pairs": runs}
            | {"tokens_per_s": phase.tokens_per_s}
        )
    return costs
