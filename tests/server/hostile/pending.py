"""Attacks that the server does not bear yet, and why.  Empty it as faults are fixed."""

PENDING: dict[str, str] = {}
