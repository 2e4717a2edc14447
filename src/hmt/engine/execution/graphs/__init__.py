"""Decode steps that a device captures: which, as what segments, and their replay."""
