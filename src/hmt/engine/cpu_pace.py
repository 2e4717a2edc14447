"""How fast this machine is at the moment, beside how fast it was when it was measured.

What the CPU computes with belongs to others as well where a host is shared: a neighbour takes
memory's bandwidth, or the other thread of a core.  So some work of each kind is timed together with
what a probe measures, and can be timed again, for a quarter of a second, before something is
predicted from that.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from math import log
from statistics import median
from typing import NamedTuple, Self

import torch

from hmt.base.units import MIB, parse_bytes, round_up
from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.contracts.machine import Machine
from hmt.engine.by_turns import by_turns, middle_half
from hmt.engine.pace import at_pace, python_work
from hmt.engine.product_rates import ProductRates, weights_in
from hmt.kernels import ops
from hmt.kernels.cpu.threads import usable_threads
from hmt.memory import PAGE_BYTES, HostBuffer, available_host_bytes, cache_bytes
from hmt.quant import Format

_SHAPE = (4096, 4096)
_FORMATS = (
    Format(Encoding.BF16),
    Format(Encoding.INT4_GROUP, 32, activations=Activations.INT8_TOKEN),
)
_TOKENS = 128  # of arithmetic
_CACHES, _LEAST_BYTES = 2, 128 * MIB  # a weight is gone from them when its turn comes again
# What steps read again and again: caches are shared with other guests of a host, who take of them
# what lies there for a while.  With a pause as long as a step's Python 16 MiB were read in 0.23 to
# 0.41 ms from one minute to the next, and 4 MiB in 0.064 to 0.079.
_HELD, _HELD_COLUMNS, _FEW_HELD = 2, 1024, 1 / 16  # of the caches a half; and a part of that
_HELD_ROUNDS, _COLD_ROUNDS = 8, 2
_KERNEL, _LEAST_HELD = "bf16", 0.01
_NUMBERS = 0x38  # each byte: small positive numbers in every float format
_READ = ("ram_read_rate", "cpu_attention_rate", "cpu_attention_short_rate")
_COMPUTED = ("number_s", "latent_number_s", "expert_number_s")


@dataclass(frozen=True, slots=True)
class CpuPace:
    """Seconds that some work took, of each kind; 0: not known.

    calls_s        of Python
    reading_s      of products with one token, in which memory is read
    arithmetic_s   of one with many
    cached_s       of products with one token whose weights caches hold, some Python behind the last
    """

    calls_s: float = 0.0
    reading_s: float = 0.0
    arithmetic_s: float = 0.0
    cached_s: float = 0.0

    def over(self, other: "CpuPace") -> "CpuPace":
        """How many times as long all takes as at the `other` pace; 1 where one is not known."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return CpuPace(*(mine / others if mine and others else 1.0 for mine, others in pairs))


def usual_pace(paces: Sequence[CpuPace]) -> CpuPace:
    """In the middle of several that were measured one after the other; one of three may be off."""
    return CpuPace(*(median(each) for each in zip(*map(astuple, paces), strict=True)))


class Held(NamedTuple):
    """What products with weights that caches hold took, their bytes, and the rows of these."""

    seconds: float
    nbytes: int
    rows: int


class Yardstick:
    """The work that tells the pace; none where there is too little memory for it.

    It takes memory, which `close` gives back.
    """

    def __init__(self) -> None:
        size = max(_LEAST_BYTES, _CACHES * cache_bytes())
        self._buffer: HostBuffer | None = None
        self._weights: list[list[WeightTensor]] = []
        if size > available_host_bytes() // 4:
            return
        self._buffer = HostBuffer(round_up(size, PAGE_BYTES))
        self._buffer.tensor.fill_(_NUMBERS)
        self._weights = [weights_in(self._buffer.tensor, form, _SHAPE) for form in _FORMATS]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back."""
        self._weights.clear()
        if self._buffer is not None:
            self._buffer.discard()

    def calls(self) -> list[Callable[[int], object]]:
        """What is to be timed; `pace` makes a pace of their seconds."""

        def product(form: int, tokens: int) -> Callable[[int], object]:
            weights = self._weights[form]
            x = torch.ones(tokens, _SHAPE[1], dtype=torch.bfloat16)
            return lambda number: ops.linear(x, weights[number % len(weights)])

        if self._buffer is None:
            return []
        reading = [product(form, 1) for form in range(len(_FORMATS))]
        return [python_work, *reading, product(0, _TOKENS)]

    def held(self, share: float = 1.0, rounds: int = _HELD_ROUNDS) -> Held:
        """Time products with weights that caches hold, or a `share` of these.

        It is what they take beyond a few weights, which a call takes whatever it reads.
        """
        if self._buffer is None:
            return Held(0.0, 0, 0)
        matrices = [self._held(_FEW_HELD), self._held(share)]
        x = torch.ones(1, _HELD_COLUMNS, dtype=torch.bfloat16)
        times: tuple[list[float], list[float]] = ([], [])
        with _all_cores():
            for _ in range(_COLD_ROUNDS + rounds):
                for matrix, taken in zip(matrices, times, strict=True):
                    python_work()
                    begin = time.perf_counter()
                    ops.linear(x, matrix)
                    taken.append(time.perf_counter() - begin)
        few_s, all_s = (middle_half(taken[_COLD_ROUNDS:]) for taken in times)
        few, whole = matrices
        rows = whole.shape[0] - few.shape[0]
        return Held(max(0.0, all_s - few_s), whole.nbytes - few.nbytes, rows)

    def _held(self, share: float) -> WeightTensor:
        """A matrix as large as a share of what caches hold."""
        assert self._buffer is not None
        row_bytes = 2 * _HELD_COLUMNS
        rows = max(1, round(share * (cache_bytes() // _HELD) / row_bytes))
        memory = self._buffer.tensor[: round_up(rows * row_bytes, PAGE_BYTES)]
        return weights_in(memory, _FORMATS[0], (rows, _HELD_COLUMNS))[0]

    @staticmethod
    def pace(seconds: list[float]) -> CpuPace:
        """Of what `calls` took."""
        if not seconds:
            return CpuPace()
        calls_s, *reading_s, arithmetic_s = seconds
        return CpuPace(calls_s, sum(reading_s), arithmetic_s)

    def with_rates(self, pace: CpuPace, products: ProductRates) -> CpuPace:
        """Between the `pace` that was measured beside `products`, and what these say of it.

        The yardstick's products are among them, in other memory and behind others: both differed
        by up to an eighth.
        """
        found = 0.0
        for (weight, *_), form in zip(self._weights, _FORMATS, strict=True):
            rate = products.bytes_per_s.get(form.kernel)
            if not rate:
                return pace
            row_s = products.row_s.get(f"{form.kernel}@1", 0.0)
            found += weight.nbytes / rate + weight.shape[0] * row_s
        return replace(pace, reading_s=(pace.reading_s + found) / 2) if found else pace

    def measured(self, seconds: float) -> CpuPace:
        """The pace now."""
        with _all_cores():
            found = self.pace(by_turns(self.calls(), seconds))
            return replace(found, cached_s=self.held().seconds)


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Computing with all of them, as steps do."""
    before = torch.get_num_threads()
    torch.set_num_threads(usable_threads())
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)


def pace_at(machine: Machine) -> CpuPace:
    """That at which the machine's rates were measured."""
    return CpuPace(machine.pace, machine.reading_pace, machine.arithmetic_pace, machine.cached_pace)


def at_cpu_pace(machine: Machine, now: CpuPace) -> Machine:
    """The machine as it is at another pace than that at which it was measured."""
    times = now.over(pace_at(machine))
    machine = at_pace(machine, now.calls_s)

    def products(name: str) -> float:
        _, at, tokens = name.partition("@")
        # Bound by reading with one token, by arithmetic with many, and between them by both.
        share = min(1.0, log(int(tokens)) / log(_TOKENS)) if at else 1.0
        return float(times.reading_s ** (1 - share) * times.arithmetic_s**share)

    return replace(
        machine,
        reading_pace=machine.reading_pace * times.reading_s,
        arithmetic_pace=machine.arithmetic_pace * times.arithmetic_s,
        cached_pace=machine.cached_pace * times.cached_s,
        cpu_rates={name: rate / times.reading_s for name, rate in machine.cpu_rates.items()},
        cpu_ops={name: rate / products(name) for name, rate in machine.cpu_ops.items()},
        cpu_row_s={name: each * products(name) for name, each in machine.cpu_row_s.items()},
        cpu_attention_cold_s=machine.cpu_attention_cold_s * times.reading_s,
        cpu_attention_ops=machine.cpu_attention_ops / times.arithmetic_s,
        cpu_attention_short_ops=machine.cpu_attention_short_ops / times.arithmetic_s,
        cached_rates=_cached_rates(machine, times),
        **{name: getattr(machine, name) / times.reading_s for name in _READ},
        **{name: getattr(machine, name) * times.arithmetic_s for name in _COMPUTED},
    )


def _cached_rates(machine: Machine, times: CpuPace) -> dict[str, float]:
    """Machine.cached_rates where all takes so many `times` as long.

    What others take of the caches is read from memory: it is of the yardstick's weights what its
    products took longer, and of less that is read again and again it is less.
    """
    if times.cached_s == times.reading_s == 1.0:
        return dict(machine.cached_rates)
    slow, most = (
        rates.get(_KERNEL, 0.0) for rates in (machine.cpu_rates, machine.cpu_cached_rates)
    )
    sizes = {size: parse_bytes(size) for size in machine.cached_rates}
    half = max(1, machine.cache_bytes // _HELD)
    whole = max((size for size in sizes if sizes[size] <= half), key=lambda s: sizes[s], default="")
    if not whole or most <= slow * max(1.0, 1 / times.reading_s):
        return {size: rate / times.reading_s for size, rate in machine.cached_rates.items()}

    def held(product_s: float, memory_s: float) -> float:
        """The share that is not read from memory, of which a byte takes `memory_s` there."""
        return min(1.0, max(_LEAST_HELD, (memory_s - product_s) / (memory_s - 1 / most)))

    def product_s(size: str) -> float:
        return machine.ram_read_rate / machine.cached_rates[size] / slow

    memory_s, memory_now_s = 1 / slow, times.reading_s / slow
    before = held(product_s(whole), memory_s)
    left = held(product_s(whole) * times.cached_s, memory_now_s) / before
    found = {}
    for size, nbytes in sizes.items():
        share = held(product_s(size), memory_s) * left ** min(1.0, nbytes / half)
        share = min(1.0, share)
        now_s = (1 - share) * memory_now_s + share / most
        found[size] = machine.ram_read_rate / times.reading_s * memory_now_s / now_s
    return found


class PaceProcess:
    """A yardstick in a process of its own, whose memory is not that of whoever asks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hmt.engine.cpu_pace"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measured(self, seconds: float) -> CpuPace:
        """The pace now.  Raises OSError where the process is gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        found = self._process.stdout.readline().split()
        if not found:
            raise OSError("the process that measures the CPU's pace has ended")
        return CpuPace(*map(float, found))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # what was asked of a process that is gone
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def main() -> None:
    """Answers each line on stdin, seconds, with the pace."""
    with Yardstick() as yardstick:
        for line in sys.stdin:
            print(*astuple(yardstick.measured(float(line))), flush=True)


if __name__ == "__main__":
    main()
