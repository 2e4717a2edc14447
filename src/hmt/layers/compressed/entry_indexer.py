"""Which entries a token attends to: those that an indexer scores highest."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.model import KVKind, KVLayer
from hmt.contracts.step import Segment
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.layers.compressed.compressor import GroupRows
from hmt.layers.linear import Params, linear_params, project


@dataclass(frozen=True, slots=True)
class EntryIndexer:
    """Scores entries for every token, and selects the best (DeepSeek-V4, section 2.3.1).

    An entry's score is the sum of weight * relu(query . key / sqrt(dim)) over the heads, with
    weights of the token.  Keys are entries, too, narrower ones.

    q_rank   width of the compressed queries that the indexer's are made of
    rows     how keys lie in the KV cache
    top_k    entries that are selected, where a token sees more
    """

    hidden_size: int
    q_rank: int
    heads: int
    rows: GroupRows
    top_k: int

    @property
    def keys(self) -> KVLayer:
        """What it keeps per token."""
        return self.rows.kv(KVKind.INDEX, self.heads)

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: queries and turned ones, weights, entries' numbers in int64."""
        return 3 * self.heads * self.rows.dim + 2 * self.heads + 4 * self.top_k

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + wq_b and weights_proj in the checkpoint."""
        width = self.heads * self.rows.dim
        weights = (f"{at}weights_proj.weight",)
        # VECTOR: rounding them changes which entries are selected, and they are small.
        return (
            *linear_params("index_query", width, self.q_rank, f"{at}wq_b"),
            ParamSpec("index_weights", (self.heads, self.hidden_size), weights, Role.VECTOR),
        )

    def queries(self, compressed: Tensor, params: Params) -> Tensor:
        """[tokens, heads, dim], not turned, of compressed [tokens, q_rank]."""
        return project(compressed, params, "index_query").unflatten(1, (self.heads, -1))

    def select(
        self,
        x: Tensor,
        query: Tensor,
        number: int,
        runs: tuple[Segment, ...],
        params: Params,
        kv: KVCache,
    ) -> Iterator[tuple[Segment, Tensor] | None]:
        """For each of `runs` its end that sees more entries than it selects, and which it selects.

        int64 [tokens, top_k], ascending; None where all tokens attend to all entries that they see.
        x [tokens, hidden_size]; query [tokens, heads, dim], turned; keys are in layer `number`.
        """
        weights = None
        for run in runs:
            first = max(run.start, (self.top_k + 1) * self.rows.positions - 1)
            if first >= run.context:
                yield None
                continue
            if weights is None:
                weights = ops.linear(x.float(), params["index_weights"])
                weights = weights * self.heads**-0.5
            skipped = first - run.start
            end = replace(
                run, start=first, offset=run.offset + skipped, length=run.length - skipped
            )
            yield (
                end,
                ops.index_topk(
                    query[end.tokens],
                    weights[end.tokens],
                    self.rows.read_all(number, run, kv, x.device).to(x.dtype),
                    start=first,
                    top_k=self.top_k,
                    scale=self.rows.dim**-0.5,
                    positions=self.rows.positions,
                ),
            )
