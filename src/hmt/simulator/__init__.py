"""Requests through a plan that is not loaded: the scheduler's rules, predicted steps."""
