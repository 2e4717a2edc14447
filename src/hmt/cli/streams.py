"""Standard streams that are closed, full, or no longer read.

What is printed may be lost long after `print` has returned, when Python ends and writes what it
still holds.  `Output` says so in time, and as an error that nothing on the way takes for its own.
"""

import errno
import io
import os
import sys
from types import TracebackType
from typing import Any, Self, TextIO, cast

from hmt.base.errors import os_reason

_FAILED = 1
_NOBODY_READS = 141  # 128 + SIGPIPE, as a shell reports programs which that signal ends


class UnwrittenError(Exception):
    """Stdout takes no more; not an OSError, which Typer, Rich and commands treat in other ways."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(os_reason(cause))
        self.nobody_reads = cause.errno == errno.EPIPE


class Output:
    """Takes the place of sys.stdout for as long as the context lasts."""

    def __enter__(self) -> Self:
        self._stream = sys.stdout
        sys.stdout = cast("TextIO", self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.stdout = self._stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """See io.TextIOBase.  Raises UnwrittenError."""
        try:
            return self._stream.write(text)
        except OSError as error:
            raise UnwrittenError(error) from None

    def flush(self) -> None:
        """See io.TextIOBase.  Raises UnwrittenError."""
        try:
            self._stream.flush()
        except OSError as error:
            raise UnwrittenError(error) from None

    def drop(self) -> None:
        """Let what is still held go nowhere; else Python complains when it ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._stream.flush()


def open_all() -> None:
    """Open the standard streams that were closed, and let all text be written.

    A file that HMT opens would get a closed one's number, and what was meant for that stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _opened(number))
    # What a terminal has no letters for is written by number; so are names of files that are none.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def code_of(error: UnwrittenError, code: int) -> int:
    """Say what was lost; the exit code, where it would have been `code`."""
    if error.nobody_reads:  # who stopped reading knows
        return code or _NOBODY_READS
    from hmt.cli.console import complain

    complain(f"stdout cannot be written ({error}): what was printed is lost, or incomplete")
    return code or _FAILED


def _opened(number: int) -> TextIO:
    """A stream of that number: an empty input, an output that refuses, a place for notes."""
    try:
        os.fstat(number)
    except OSError:
        given = os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
        if given != number:
            os.dup2(given, number)
            os.close(given)
    mode = "w" if number else "r"
    return cast("TextIO", open(number, mode, errors="backslashreplace", closefd=False))
