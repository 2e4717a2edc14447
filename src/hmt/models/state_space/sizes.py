"""What families with state spaces share: their layers, by the fields that describe them."""

import math

from hmt.base.errors import CheckpointError
from hmt.layers import Mamba2, RMSNorm
from hmt.models.config import Config, require
from hmt.models.hybrid import convolution_taps


def mamba2(config: Config, norm: RMSNorm, inner: int, **differences: object) -> Mamba2:
    """Mamba-2 by fields that begin with "mamba_", `inner` numbers wide (Bamba, Granite, Falcon-H1).

    `differences` are fields of Mamba2.  Raises CheckpointError where sizes do not go together.
    """
    require(config, "hidden_act", "silu")
    fields = {
        "heads": config.mamba_n_heads,
        "head_dim": config.mamba_d_head,
        "groups": config.mamba_n_groups,
        "state_dim": config.mamba_d_state,
        "conv": convolution_taps(config, "mamba_d_conv"),
        "steps": time_step_limit(config),
        "eps": config.rms_norm_eps,
        "bias": config.mamba_proj_bias,
        "output_bias": config.mamba_proj_bias,
        "conv_bias": config.mamba_conv_bias,
    }
    return checked(config, norm, inner, fields | differences)


def checked(config: Config, norm: RMSNorm, inner: int, fields: dict[str, object]) -> Mamba2:
    """Mamba-2 with `fields`.  Raises CheckpointError where sizes do not go together."""
    heads, dim, groups = fields["heads"], fields["head_dim"], fields["groups"]
    if not all(type(size) is int and size > 0 for size in (heads, dim, groups)):
        raise CheckpointError(
            f"Mamba-2 layers have {heads!r} heads of {dim!r} numbers in {groups!r} groups; all of "
            "these must be numbers"
        )
    layer = Mamba2(config.hidden_size, norm=norm, **fields)  # type: ignore[arg-type]
    if layer.inner != inner:
        raise CheckpointError(
            f"{heads} heads of {dim} numbers in Mamba-2 layers are not the {inner} that these are "
            "wide"
        )
    if layer.heads % layer.groups:
        raise CheckpointError(
            f"{heads} heads of Mamba-2 layers cannot share the keys of {groups} groups evenly"
        )
    return layer


def time_step_limit(config: Config) -> tuple[float, float]:
    """The shortest and the longest time step.  Raises CheckpointError where there is none."""
    given = config.time_step_limit
    shortest, longest = map(float, (0.0, math.inf) if given is None else given)
    if not 0 <= shortest <= longest:
        raise CheckpointError(
            f"time_step_limit is {given}; it must be from 0 on, the shorter first"
        )
    return shortest, longest
