"""Requests through a plan that nobody runs: the scheduler's rules, predicted steps."""
