"""Attention with grouped queries."""

from dataclasses import dataclass

from torch import Tensor

from hmt.contracts.blocks import ParamSpec
from hmt.contracts.model import KVKind, KVLayer
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.layers.linear import Params, linear_params, project, project_many
from hmt.layers.norm import RMSNorm
from hmt.layers.rope import Rotary


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary positions (arXiv 2305.13245, 2104.09864).

    scale        what query . key is multiplied with
    window       a position sees this many positions, itself included; 0 means all before it
    softcap      bound of the scores; 0 for none
    head_norm    norm of each head of queries and keys, before they are rotated
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary
    scale: float
    window: int = 0
    softcap: float = 0.0
    bias: bool = False  # of the query, key and value projections
    output_bias: bool = False
    head_norm: RMSNorm | None = None

    @property
    def kv(self) -> KVLayer:
        """What one layer keeps per token."""
        kind = KVKind.SLIDING if self.window else KVKind.FULL
        return KVLayer(kind, self.kv_heads, self.head_dim, self.head_dim, self.window)

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: residual, input, q and k before and after rotation, v, out."""
        return 2 * self.hidden_size + 3 * (self.heads + self.kv_heads) * self.head_dim

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + q_proj and so on in the checkpoint."""
        hidden = self.hidden_size
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            *linear_params("q_proj", query, hidden, f"{at}q_proj", bias=self.bias),
            *linear_params("k_proj", kv, hidden, f"{at}k_proj", bias=self.bias),
            *linear_params("v_proj", kv, hidden, f"{at}v_proj", bias=self.bias),
            *self.head_norm_params(at),
            *linear_params("o_proj", hidden, query, f"{at}o_proj", bias=self.output_bias),
        )

    def head_norm_params(self, at: str) -> tuple[ParamSpec, ...]:
        """Weights of `head_norm` for queries and keys, if there is one."""
        if self.head_norm is None:
            return ()
        return (
            self.head_norm.param("q_norm", f"{at}q_norm.weight"),
            self.head_norm.param("k_norm", f"{at}k_norm.weight"),
        )

    def __call__(self, x: Tensor, layer: int, step: Step, params: Params, kv: KVCache) -> Tensor:
        """x [tokens, hidden_size] to [tokens, hidden_size].  Appends to `kv`."""
        heads = project_many(x, params, ("q_proj", "k_proj", "v_proj"))
        heads = heads.view(x.shape[0], -1, self.head_dim)
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.head_norm is not None:
            self.head_norm.in_place(query, params["q_norm"])
            self.head_norm.in_place(key, params["k_norm"])
        ops.rope_inplace(query, key, *self.rotary.cos_sin(step))
        kv.append(layer, step, key, value)
        out = kv.attend(layer, step, query, scale=self.scale, softcap=self.softcap)
        return project(out.flatten(1), params, "o_proj")
