"""Commands as processes that torchrun starts, several at once."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hmt.engine.ranks.torchrun import Launch


def launch() -> "Launch | None":
    """What torchrun says of this process; None: it did not start it, or it alone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # nothing is imported for most
        return None
    from hmt.engine.ranks.torchrun import Launch

    return Launch.of_this_process()


def join_torchrun() -> None:
    """Compute with the first of the processes that torchrun has started; nothing in that one."""
    found = launch()
    if found is not None and found.rank:
        from hmt.engine.ranks.worker import main

        found.join(main)
