"""Pages of all layers, each in one piece, as they travel to the disk and back."""

from collections.abc import Mapping

import torch

from hmt.base.units import round_up
from hmt.contracts.model import KVLayer
from hmt.kernels import ops
from hmt.kvcache.page_layout import kinds_of, layout_of

_ALIGNED = 256  # of each kind's part; kernels read words of up to 64 bytes


class PageExtents:
    """How the pages of some layers lie one after the other: uint8 [pages, page_bytes].

    In a page kinds follow each other as in a PageStore, and in a kind its layers.
    """

    def __init__(self, layers: Mapping[int, KVLayer], encoding: ops.PageEncoding) -> None:
        """In host memory's layout, whatever computes."""
        host = torch.device("cpu")
        self._kinds = [
            (layout_of(layer, encoding, host), members) for layer, members in kinds_of(layers)
        ]
        self.page_bytes = sum(
            round_up(layout.page_bytes * len(members), _ALIGNED) for layout, members in self._kinds
        )
        if not self._kinds:  # some bytes, by which files know the pages of state alone
            self.page_bytes = _ALIGNED

    @property
    def description(self) -> str:
        """All that the meaning of these bytes depends on, apart from the model's weights."""
        return "; ".join(
            f"{layout.encoding.name} {layout.heads}x{layout.key_dim}/{layout.value_dim}"
            f"{' latent' if layout.latent else ''} of {members}"
            for layout, members in self._kinds
        )

    def kinds(self, memory: torch.Tensor) -> list[tuple[ops.Pages, list[int]]]:
        """Views of `memory` [pages, page_bytes], like PageStore.kinds."""
        if not self._kinds:
            memory.zero_()
        found, begin = [], 0
        for layout, members in self._kinds:
            nbytes = layout.page_bytes * len(members)
            rows = memory[:, begin : begin + nbytes].unflatten(1, (len(members), -1))
            found.append((ops.Pages(layout, rows), members))
            begin += round_up(nbytes, _ALIGNED)
        return found
