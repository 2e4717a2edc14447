"""What goes to the terminal beside answers: all of it to stderr, so that answers can be piped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

Report = Callable[[int, int], None]


def notes() -> Console:
    """The console for people who watch."""
    return Console(stderr=True, highlight=False)


@contextmanager
def loading(what: str) -> Iterator[Report]:
    """A bar that fills as `report(bytes done, bytes in all)` is called; only on a terminal.

    It pulses until the first report, and is gone at the end.
    """
    console = notes()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
