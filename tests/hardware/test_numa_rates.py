"""Rates of other nodes' memory, on machines in a tree like sysfs, and who measures them."""

import sys
from pathlib import Path

import pytest

from hmt.cli.probe import _node_lines
from hmt.contracts.machine import ComputeRates, Machine
from hmt.hardware import numa_rates as module
from hmt.hardware.numa_rates import NumaRates, measured_apart, numa_rates
from hmt.memory import Binding


def nodes(root: Path, cpus: list[str], gib: list[int], rows: list[str]) -> Path:
    for node, (own, memory, row) in enumerate(zip(cpus, gib, rows, strict=True)):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(own + "\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal: {memory << 20} kB\n")
        (folder / "distance").write_text(row + "\n")
    return root


def test_nodes_that_are_as_far_count_as_alike(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []
    rates = {(0, 0): 100e9, (0, 1): 80e9, (0, 2): 40e9}

    def rate_of(cpu_node: int, memory_node: int) -> float:
        asked.append((cpu_node, memory_node))
        return rates[cpu_node, memory_node]

    four = nodes(
        tmp_path / "four", ["0-3", "4-7", "8-11", "12-15"], [64] * 4,
        ["10 12 21 21", "12 10 21 21", "21 21 10 12", "21 21 12 10"],
    )  # fmt: skip
    allowed = frozenset(range(16))
    found = numa_rates(rate_of, four, allowed)
    assert asked == [*rates], "each distance once"
    assert found.own == 100e9
    assert found.other == pytest.approx(3 / (1 / 80e9 + 2 / 40e9))
    assert found.remote_share == pytest.approx(found.other / 100e9)
    assert found.together == 400e9
    # A process that may use one node's cores has that node's rate, and other nodes' memory.
    asked.clear()
    held = numa_rates(rate_of, four, frozenset({1, 2}))
    assert (held.own, held.other, held.together) == (found.own, found.other, 0.0)
    # Memory without cores (a card's, or CXL) is another's; cores without memory begin nothing.
    two = nodes(tmp_path / "two", ["", "0-7", "8"], [64, 64, 0], ["10 21 21"] * 3)
    rates_of_two = {(1, 1): 50e9, (1, 0): 20e9}
    found = numa_rates(lambda a, b: rates_of_two[a, b], two, allowed)
    assert found == NumaRates(50e9, 20e9, 1)
    assert numa_rates(lambda a, b: 0.0, four, allowed) == NumaRates(), "what fails is not known"
    assert numa_rates(rate_of, four, frozenset({99})) == NumaRates()
    assert NumaRates().remote_share == 1.0 and NumaRates().together == 0.0
    for one in (nodes(tmp_path / "one", ["0-7"], [64], ["10"]), tmp_path / "none"):
        assert numa_rates(rate_of, one) == NumaRates() and len(asked) == 3


def test_the_probe_shows_nodes_where_there_are_several() -> None:
    machine = Machine("m", 8, 1 << 36, 1e9, ComputeRates(1e11))
    assert _node_lines(machine) == []
    two = Machine(
        "m", 8, 1 << 36, 1e9, numa_nodes=2, numa_distances=((10, 21), (21, 10)),
        remote_share=0.55,
    )  # fmt: skip
    first, second = _node_lines(two)
    assert "from node 0: 10 21; from node 1: 21 10" in first and "55%" in second


def test_a_process_measures_what_it_was_bound_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bound: list[Binding] = []
    monkeypatch.setattr(Binding, "apply", lambda binding: bound.append(binding))
    monkeypatch.setattr(module, "ram_read_rate", lambda read, nbytes, seconds: seconds * 1e9)
    monkeypatch.setattr(sys, "argv", ["-c", "1", "0", "2.5"])
    module.main()
    assert bound == [Binding((1,), (0,))] and float(capsys.readouterr().out) == 2.5e9
    # The same as a process; one that fails, or says nothing, has measured nothing.
    monkeypatch.setattr(module, "_RUN", "import sys; print(float(sys.argv[2]) + 1)")
    assert measured_apart(1.0)(0, 3) == 4.0
    for fails in ("raise SystemExit(1)", "print('fast')"):
        monkeypatch.setattr(module, "_RUN", fails)
        assert measured_apart(1.0)(0, 3) == 0.0
