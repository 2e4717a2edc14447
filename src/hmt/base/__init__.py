"""Errors, units, logging, flags, trace: what every room may use."""
