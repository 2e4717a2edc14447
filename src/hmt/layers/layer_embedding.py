"""Embeddings that a layer has of its own (Gemma 3n, Gemma 4)."""

from dataclasses import dataclass

from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.kernels import ops
from hmt.layers.linear import Params, linear_params, project
from hmt.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class LayerEmbedding:
    """Adds to hidden states what a token's own embedding for the layer lets through.

    A layer's input for a token is (norm(projection of the token's embedding) + row) / sqrt(2),
    [width] numbers of which `row` stands in a table.  It multiplies the activation of a projection
    of the hidden states; the product is projected back, normed, and added.

    layers   of the model, whose projections of embeddings are one tensor
    """

    hidden_size: int
    width: int
    layers: int
    activation: str
    eps: float

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: its embedding, rows of all layers in two dtypes, and a layer's.

        The first two stay from the first layer to the last.
        """
        return 3 * self.hidden_size + (2 * self.layers + 4) * self.width

    def params(self, index: int, at: str) -> tuple[ParamSpec, ...]:
        """Those of layer `index`, whose names in the checkpoint begin with `at`."""
        whole = ("model.per_layer_model_projection.weight",)
        rows = (index * self.width, (index + 1) * self.width)
        return (
            ParamSpec("embedding_proj", (self.width, self.hidden_size), whole, rows=rows),
            self._input_norm.param("embedding_norm", "model.per_layer_projection_norm.weight"),
            *linear_params("input_gate", self.width, self.hidden_size, f"{at}per_layer_input_gate"),
            *linear_params("input_proj", self.hidden_size, self.width, f"{at}per_layer_projection"),
            self._norm.param("input_norm", f"{at}post_per_layer_input_norm.weight"),
        )

    def table(self, rows: int) -> ParamSpec:
        """The table: for each token, rows of all layers one behind the other."""
        source = ("model.embed_tokens_per_layer.weight",)
        return ParamSpec("weight", (rows, self.layers * self.width), source, Role.TABLE)

    def __call__(self, hidden: Tensor, embedding: Tensor, row: Tensor, params: Params) -> Tensor:
        """hidden [tokens, hidden_size] with what is added.

        embedding [tokens, hidden_size] are the tokens' embeddings, as the first layer takes them;
        row [tokens, width] the layer's part of their rows.  All in one dtype.
        """
        own = project(embedding, params, "embedding_proj") * self.hidden_size**-0.5
        given = (self._input_norm(own, params["embedding_norm"]) + row) * 2**-0.5
        gate = project(hidden, params, "input_gate")
        x = project(ops.gated(gate, given, self.activation), params, "input_proj")
        return hidden + self._norm(x, params["input_norm"])

    @property
    def _input_norm(self) -> RMSNorm:
        return RMSNorm(self.width, self.eps)

    @property
    def _norm(self) -> RMSNorm:
        return RMSNorm(self.hidden_size, self.eps)
