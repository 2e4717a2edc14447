"""The full probe of this machine: kernels, and whole steps with small models."""
