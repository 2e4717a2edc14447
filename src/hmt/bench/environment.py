"""The machine and the software that a measurement was made with, for the files of benchmarks."""

import platform
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

import hmt
from hmt.contracts.machine import Machine
from hmt.kernels.cpu import extension


def describe(machine: Machine) -> dict[str, Any]:
    """What tells two files of results apart: machine, rates, versions, kernels, date."""
    native = extension.load()
    return {
        **asdict(machine),
        "devices": [asdict(device) for device in machine.devices],  # as JSON has them
        "numa_distances": [list(row) for row in machine.numa_distances],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "kernels": "reference" if native is None else "native",
        "instructions": None if native is None else native.isa(),
        "runs_instructions": [] if native is None else native.isas(),
        "hmt": hmt.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
