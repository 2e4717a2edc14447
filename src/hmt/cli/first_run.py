"""`hmt` alone: which current models this machine can run, how fast, and a choice among them."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from hmt.base.errors import HMTError
from hmt.base.units import format_bytes
from hmt.cli import models
from hmt.cli.console import complain
from hmt.cli.machine_fit import CONTEXT, DOES_NOT_RUN, Fit, fits_of, this_machine
from hmt.planner.catalogue import KnownModel, known_models

if TYPE_CHECKING:
    from hmt.contracts.machine import Machine


def first_run() -> None:
    """Print the table; on a terminal, let a model be chosen, download it and chat."""
    machine, config, host_bytes = this_machine()
    fits = fits_of(known_models(), machine, config, host_bytes)
    print("\n".join(table(machine, known_models(), fits, models.installed_sources())))
    if sys.stdin.isatty() and sys.stdout.isatty():
        _choose(fits)


def table(
    machine: "Machine",
    listed: Sequence[KnownModel],
    fits: dict[str, Fit],
    installed: set[str],
) -> list[str]:
    """The lines that are printed."""
    gpu = "".join(f", {one.name} with {format_bytes(one.memory_bytes)}" for one in machine.devices)
    rows = [("", "name", "size", "type", "", "tokens/s", "other types")]
    for model in listed:
        fit = fits[model.name]
        speed = f"{fit.tokens_per_s:.3g}" if fit.tokens_per_s else "?"
        others = [
            f"{kind} {format_bytes(size)}"
            for kind, size in model.sizes.items()
            if kind != fit.file_type
        ]
        rows.append(
            (
                "*" if model.source(fit.file_type) in installed else "",
                model.name,
                format_bytes(model.sizes[fit.file_type]),
                fit.file_type or "published",
                fit.place,
                "" if fit.place == DOES_NOT_RUN else speed,
                ", ".join(others),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"This machine: {machine.name}, {machine.cores} cores, {format_bytes(machine.ram_bytes)}"
        f" of RAM{gpu}",
        f"Predicted for one user and a context of {CONTEXT}; measured better after `hmt probe`.",
        "",
    ]
    lines += [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [
        *lines,
        "",
        "* is on this machine. hmt pull NAME downloads, hmt run NAME chats, hmt serve NAME has a "
        "page.",
        "hmt --help shows all commands.",
    ]


def _choose(fits: dict[str, Fit]) -> None:
    from hmt.cli.options import EngineOptions, SamplingOptions, choose_model
    from hmt.cli.remembered import with_settings
    from hmt.cli.run import Job, answer_or_chat

    while True:
        given = typer.prompt("\nModel (Enter: none)", default="", show_default=False).strip()
        if not given:
            return
        name = given.partition(":")[0]
        if name not in fits:
            complain(f"{given} is not in the list")
            continue
        source = (
            given if ":" in given or not fits[name].file_type else f"{name}:{fits[name].file_type}"
        )
        try:
            models.pull(source)
            options = with_settings(EngineOptions(), name)
            answer_or_chat(Job(choose_model(source), None, options, SamplingOptions()))
        except HMTError as error:
            complain(str(error))
        else:
            return
