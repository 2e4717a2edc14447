"""Random rotations that spread a vector's large numbers over all of it: Hadamard's matrices.

x diag(signs) H / sqrt(n), as QuaRot (arXiv 2404.00456) rotates hidden states.  H is Sylvester's
matrix of a power of two, and for other sizes its product with one of Paley's (of primes).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rotation:
    """An orthogonal matrix [size, size] of a seed, which is not held as such.

    signs   +1 and -1, int8 [size]
    core    f64 [m, m], Hadamard's; size is m * 2^k
    """

    signs: Tensor
    core: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows [..., size] times the matrix, in their dtype (f32 or f64)."""
        size, order = len(self.signs), len(self.core)
        turned = (rows * self.signs.to(rows.device)).reshape(-1, size // order, order)
        turned = turned @ self.core.to(rows)
        width = 1
        while width < turned.shape[1]:
            pairs = turned.view(len(turned), -1, 2, width * order)
            turned = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]))
            turned = turned.permute(1, 2, 0, 3).reshape(len(pairs), -1, order)
            width *= 2
        return turned.div_(math.sqrt(size)).view(rows.shape)


def random_rotation(size: int, seed: int) -> Rotation:
    """One for vectors of `size` numbers.  Raises ConfigError where there is no such matrix."""
    order = max(1, size)
    while order % 2 == 0:
        order //= 2
    while order <= size:
        core = torch.ones(1, 1, dtype=torch.float64) if order == 1 else _paley(order)
        if core is not None:
            random = torch.Generator().manual_seed(seed)
            signs = torch.randint(0, 2, (size,), generator=random, dtype=torch.int8) * 2 - 1
            return Rotation(signs, core)
        order *= 2
    raise ConfigError(
        f"no Hadamard matrix for vectors of {size} numbers is known here, so that they cannot be "
        "rotated: leave rotate out of --method"
    )


def _paley(order: int) -> Tensor | None:
    """Hadamard's matrix f64 by Paley's first or second construction; None where neither is."""
    for prime, second in ((order - 1, False), (order // 2 - 1, True)):
        fits = order % 4 == 0 and prime % 4 == (1 if second else 3) and _is_prime(prime)
        if not fits:
            continue
        residues = {number * number % prime for number in range(1, prime)}
        symbols = torch.tensor([0 if n == 0 else 1 if n in residues else -1 for n in range(prime)])
        at = torch.arange(prime)
        bordered = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
        bordered[0, 1:] = 1
        bordered[1:, 0] = 1 if second else -1
        bordered[1:, 1:] = symbols[(at[:, None] - at) % prime]
        unit = torch.eye(prime + 1, dtype=torch.float64)
        if not second:
            return bordered + unit
        signs = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(bordered, signs) + torch.kron(unit, diagonal)
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % n for n in range(2, math.isqrt(number) + 1))
