"""Which of some models a machine can run, from where, and how fast, by the planner's prediction."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hmt import __version__
from hmt.base.errors import BudgetError
from hmt.base.folders import cache_folder
from hmt.base.json_store import write_atomically
from hmt.base.units import round_down
from hmt.cli.console import working
from hmt.planner.catalogue import KnownModel

if TYPE_CHECKING:
    from hmt.contracts.machine import Machine
    from hmt.engine import EngineConfig
    from hmt.planner.what_if.scenario import PlanResult

CONTEXT: Final = 8192
_ROOM: Final = 0.85  # of memory for weights; the rest is for the KV cache and computation
_IN_MEMORY, _WITH_GPU, _FROM_DISK = "fits in RAM", "fits with GPU", "from disk"
DOES_NOT_RUN: Final = "does not run"


@dataclass(frozen=True, slots=True)
class Fit:
    """How one model would run here: its file type, where it would be, tokens per second.

    tokens_per_s   0 where no rate of this machine is known, or it does not run
    """

    file_type: str
    place: str
    tokens_per_s: float


def fits_of(
    models: Sequence[KnownModel], machine: "Machine", config: "EngineConfig", host_bytes: int
) -> dict[str, Fit]:
    """By name.  What was planned before for the same machine and memory is read from a file.

    host_bytes   of host memory; all of the machine's GPU memory counts besides
    """
    from hmt.engine.loading.what_if import scenario_of, scenarios_for

    file = cache_folder() / "first-run.json"
    shown = json.dumps([__version__, asdict(machine), host_bytes], default=str, sort_keys=True)
    key = sha256(shown.encode()).hexdigest()
    fits = _read(file, key)
    room_bytes = host_bytes + machine.device_bytes
    missing = [model for model in models if model.name not in fits]
    with working("planning") as report:
        for number, model in enumerate(missing):
            report(f"planning {model.title}", number, len(missing))
            kind = model.largest_within(int(room_bytes * _ROOM))
            asked = scenario_of(
                config,
                machine,
                prompt_tokens=None,
                host_bytes=host_bytes,
                device_bytes=machine.device_bytes,
            )
            try:
                planned = scenarios_for(model.shape(kind), config).plan(asked)
            except BudgetError:
                fits[model.name] = Fit(kind, DOES_NOT_RUN, 0.0)
            else:
                fits[model.name] = Fit(kind, _place(planned), planned.prediction.tokens_per_s)
    if missing:
        content = {"key": key, "fits": {name: asdict(fit) for name, fit in fits.items()}}
        write_atomically(file, json.dumps(content))
    return fits


def this_machine() -> "tuple[Machine, EngineConfig, int]":
    """This machine with a GPU where there is one, options for one user, and host memory in bytes.

    Host memory is in sixteenths of all: what other programs take at the moment hardly changes it.
    """
    from hmt.engine import EngineConfig
    from hmt.engine.loading.device import device_budgets, open_devices
    from hmt.hardware.machine import machine_for, with_device
    from hmt.memory.device import gpu_is_usable

    gpu: dict[str, Any] = {"gpus": "0"} if gpu_is_usable() else {}
    config = EngineConfig.resolve(context=CONTEXT, max_batch=1, **gpu)
    devices = open_devices(config)
    machine = machine_for(_models_folder())
    if devices:
        device_bytes = device_budgets(devices, config)[0]
        machine = with_device(machine, devices[0]).with_device_bytes(device_bytes)
    host_bytes = config.host_memory_bytes
    rounded = round_down(host_bytes, max(1, machine.ram_bytes // 16))
    return machine, config, rounded or host_bytes


def _models_folder() -> Path:
    """Where models would be, or the folder that it would be made in: its disk is measured."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    return next(folder for folder in (cache, *cache.parents) if folder.exists())


def _place(planned: "PlanResult") -> str:
    from hmt.contracts.blocks import BlockKind
    from hmt.contracts.plan import Tier

    homes = {
        home for block, home in planned.plan.homes.items() if block.kind is not BlockKind.EMBEDDING
    }
    if Tier.DISK in homes:
        return _FROM_DISK
    return _WITH_GPU if planned.plan.device.stages else _IN_MEMORY


def _read(file: Path, key: str) -> dict[str, Fit]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["key"] != key:
            return {}
        return {name: Fit(**fit) for name, fit in content["fits"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}  # nothing yet, or something else has written it
