"""What goes to the terminal beside answers: all of it to stderr, so that answers can be piped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from typing_extensions import override

from hmt.base.units import format_bytes, format_rate

Report = Callable[[int, int], None]


class _Notes(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the program and close stdout, where answers may still be read."""
        self.quiet = True


def notes() -> Console:
    """The console for people who watch."""
    return _Notes(stderr=True, highlight=False)


def complain(text: str) -> None:
    """Say in one line what went wrong."""
    notes().print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)


class _Amount(ProgressColumn):
    """How much, and how fast; nothing while the total is not known."""

    @override
    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        speed = f"  {format_rate(task.speed)}" if task.speed else ""
        return Text(f"{format_bytes(task.completed)} of {format_bytes(task.total)}{speed}")


@contextmanager
def loading(what: str) -> Iterator[Report]:
    """`working` with one thing to do: `report(bytes done, bytes in all)`."""
    with working(what) as report:
        yield lambda done, total: report(what, done, total)


@contextmanager
def working(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that fills as `report(what, bytes done, bytes in all)` is called; only on a terminal.

    It shows the rate and the time left, begins anew when `what` changes, pulses until the first
    report, and is gone at the end.
    """
    console = notes()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        _Amount(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=None)
        now: str | None = None

        def report(what: str, done: int, total: int) -> None:
            nonlocal now
            if what != now:  # the rate counts from here
                now = what
                bar.reset(task, total=total, completed=done, description=what)
            bar.update(task, completed=done, total=total)

        yield report
