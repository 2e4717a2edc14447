"""Machines as files, and microbenchmarks that need no engine."""
