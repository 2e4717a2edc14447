"""Kernels of the compiled extension."""
