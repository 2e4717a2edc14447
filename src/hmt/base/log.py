"""The logger of HMT.  Nothing is configured here: that is up to the program that runs."""

import logging

logger = logging.getLogger("hmt")

_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Log `message` as a warning, unless one with the same `key` was logged before."""
    if key not in _warned:
        _warned.add(key)
        logger.warning(message)
