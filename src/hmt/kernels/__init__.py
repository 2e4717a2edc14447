"""What computes: one set of operations, on the kernels that this machine has."""

from hmt.kernels import ops
