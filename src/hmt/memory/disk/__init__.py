"""Reads from disk: backends, the I/O scheduler, the read queue."""
