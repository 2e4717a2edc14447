"""A layer's experts computed on a device and on the host at once.

What is done on a device is done by its backend; see `reference.expert_cache`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.encoding import ACTIVATION_BLOCK, Packing, WeightTensor
from hmt.kernels import ops
from hmt.kernels.backend_registry import backend_of, backend_on
from hmt.kernels.cpu import extension
from hmt.kernels.cpu.abi import ACTIVATIONS, DTYPES
from hmt.kernels.cpu.experts import native_expert
from hmt.kernels.link_share import LinkShare
from hmt.kernels.reference import Cuts, Expert, ExpertShares, ExpertSlots

__all__ = [
    "Cuts",
    "ExpertShares",
    "ExpertSlots",
    "HostExpertChannel",
    "HostExpertPlaces",
    "HostExpertTimes",
    "can_read_by_address",
    "divide",
    "fetch",
    "make_channel",
]

_PATIENCE_S = 30.0  # a layer takes milliseconds


def divide(
    slots: ExpertSlots, chosen: Tensor, share: Tensor, cuts: Cuts | None = None
) -> ExpertShares:
    """See `reference.divide_experts`."""
    shares: ExpertShares = backend_of(chosen).divide_experts(slots, chosen, share, cuts)
    return shares


def fetch(slots: ExpertSlots, shares: ExpertShares, nbytes: int, cuts: Cuts | None = None) -> None:
    """See `reference.fetch_experts`."""
    backend_of(shares.sources).fetch_experts(slots, shares, nbytes, cuts)


def can_read_by_address(where: torch.device) -> bool:
    """Whether kernels of the device find experts by a table of addresses."""
    return backend_on(where).has("block_table")


class HostExpertPlaces:
    """Where experts that are laid out alike may lie on a device."""

    def __init__(
        self,
        some: int,
        view: Callable[[int], Mapping[str, WeightTensor]],
        *,
        others: bool = False,
    ) -> None:
        """`view` shows the parameters of an expert that lies at an address; `some` is one.

        others   whether these addresses also hold experts of another layout, at other times

        Raises ValueError where no kernel computes on them.
        """
        self._view = view
        # Kernels keep what they made for parameters, the expert's number with it.
        self._views: dict[tuple[int, int], Mapping[str, WeightTensor]] = {}
        self.cuts: Cuts | None = None
        sample = view(some)
        first = sample["down_proj"].data
        self._backend = backend_of(first)
        try:
            self._table: Any = self._backend.block_table(
                first.new_zeros(1, dtype=torch.int64), sample, some
            )
        except AssertionError as error:
            raise ValueError(str(error)) from error
        if self.has_table:
            self.cuts = _cuts_of(sample, some, others=others)

    @property
    def has_table(self) -> bool:
        """Whether kernels find experts by a table of addresses."""
        return self._table is not None

    def view(self, expert: int, address: int) -> Mapping[str, WeightTensor]:
        """Parameters of an expert that lies at an address."""
        if (expert, address) not in self._views:
            self._views[expert, address] = self._view(address)
        return self._views[expert, address]

    def compute(
        self,
        x: Tensor,
        here: Tensor,
        chosen: Tensor,
        scales: Tensor,
        activation: str,
        total: Tensor | None = None,
        cut: Tensor | None = None,
        *,
        last: bool = False,
        among: range | None = None,
    ) -> Tensor:
        """`total`, which is changed, and what experts add that have an address in `here`.

        f32 [tokens, hidden], in x.dtype with the `last`; int64 [experts].
        cut     see `ExpertShares`, where there are `cuts`; its slots hold finite numbers
                everywhere, or ggml's blocks, of which kernels read only what was brought
        among   experts outside of it have no address; None: any may have one
        """
        if self._table is not None:
            table = replace(self._table, addresses=here)
            out: Tensor = self._backend.experts_by_table(
                x, table, chosen, scales, activation, total, last=last, cut=cut, among=among
            )
            return out
        given = [(e, self.view(e, address)) for e, address in enumerate(here.tolist()) if address]
        if not given and total is None:
            return torch.zeros(x.shape, dtype=x.dtype if last else torch.float32)
        return ops.experts(x, given, chosen, scales, activation, total, last=last)


def scattered(given: Sequence[Expert], where: torch.device) -> Callable[..., Tensor]:
    """See `reference.scattered_experts`.  Raises ValueError where no kernel computes on them."""
    compute: Callable[..., Tensor] = backend_on(where).scattered_experts(given, where)
    return compute


_COPIED = 16  # bytes, at once
_CUT_ROWS = 128  # of a piece at least: groups of down, and what the CPU's tiles take
_CUT_BLOCKS = ACTIVATION_BLOCK  # the same of ggml's blocks: products are rounded by as many


def _cuts_of(
    sample: Mapping[str, WeightTensor], address: int, *, others: bool = False
) -> Cuts | None:
    """How experts like the one that lies at `address` may be cut; None for not at all.

    Not those with biases: down's would be added by both who compute a part.  Nor panels where
    `others` lie: zeros are multiplied with what was there before, which may be no number.
    """
    up, down = sample["up_proj"], sample["down_proj"]
    packings = {w.encoding.packing for w in sample.values()}
    if packings == {Packing.BLOCKS}:
        rows = _CUT_BLOCKS
    elif packings == {Packing.PANELS} and not others:
        rows = max(_CUT_ROWS, down.group_size)
    else:
        return None
    width = up.shape[0]
    if width % rows or width // rows < 2 or rows % (down.group_size or 1):
        return None
    regions = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        if name not in sample:
            continue  # a gate that is up_proj
        w = sample[name]
        for part in (w.data, w.scales, w.zeros, w.minima):
            if part is None:
                continue
            begin = part.data_ptr() - address
            period = part[0].nbytes if name == "down_proj" else part.nbytes
            if begin % _COPIED or period % (_COPIED * (width // rows)):
                return None
            regions.append([begin // 4, part.nbytes // 4, period // 4])
    table = torch.tensor(regions, dtype=torch.int32, device=down.data.device)
    return Cuts(width // rows, rows, table)


@dataclass(frozen=True, slots=True)
class HostExpertTimes:
    """What a step's questions cost the CPU.

    experts      that it computed, each once per layer
    waited_s     for questions
    computed_s   for answers
    """

    experts: int
    waited_s: float
    computed_s: float

    def __add__(self, other: "HostExpertTimes") -> "HostExpertTimes":
        return HostExpertTimes(
            self.experts + other.experts,
            self.waited_s + other.waited_s,
            self.computed_s + other.computed_s,
        )


class HostExpertChannel:
    """Where a device asks the CPU for experts, layer by layer, and no call is made for it.

    While it is open, backends ask here; else they call the host.  Answers to a step that was begun
    come from a thread of the extension, so that Python can prepare the next step meanwhile.

    pending   steps whose answers were begun, and not ended
    """

    def __init__(
        self,
        native: ModuleType,
        where: torch.device,
        experts: Mapping[int, Sequence[Expert]],
        *,
        tokens: int,
        hidden: int,
        top_k: int,
        dtype: torch.dtype,
    ) -> None:
        """Experts by layer, in ascending order, all in host memory where they stay.

        See `make_channel`.
        """
        self.is_open = False
        self.pending = 0
        self._backend = backend_on(where)
        self.tokens = tokens
        self._native, self._experts, self._dtype = native, experts, dtype
        self._hidden, self._top_k = hidden, top_k
        self._step = 0
        self._service: Any = None
        self._number = torch.zeros(1, dtype=torch.int32, device=where)

        def shared(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)

        x = shared(tokens, hidden, dtype=dtype)
        total = shared(tokens, hidden, dtype=torch.float32)
        # Flags in lines of their own: two of one line would slow each other down.
        flags = shared(len(experts), 2, 16, dtype=torch.int32)
        cuts = shared(len(experts), 16, dtype=torch.int32)[:, :2].fill_(-1)
        self._notes = shared(len(experts), dtype=torch.int32).fill_(-1)
        self._noted = self._notes.to(where)
        relays = torch.zeros(len(experts), 16, dtype=torch.int32, device=where)
        self.link_share: LinkShare | None = None
        self._boxes = {
            layer: self._backend.Mailbox(
                x,
                shared(tokens, top_k, dtype=torch.int64),
                shared(tokens, top_k, dtype=torch.float32),
                cuts[row],
                total,
                flags[row, 0, :1],
                flags[row, 1, :1],
                self._number,
                self._noted[row : row + 1],
                relays[row, :1],
            )
            for row, layer in enumerate(experts)
        }

    def accepts(self, x: Tensor) -> bool:
        """Whether questions for x [tokens, hidden] are asked here."""
        return self.is_open and len(x) <= self.tokens and x.dtype == self._dtype

    def submit(
        self, layer: int, x: Tensor, shares: ExpertShares, scales: Tensor, activation: str
    ) -> None:
        """Ask for what `shares` leaves to the CPU, on the device's queue."""
        if self._service is None:  # the first question tells the activation
            self._service = self._make_service(activation)
        self._backend.ask_host(self._boxes[layer], x, shares, scales)

    def collect(
        self,
        layer: int,
        total: Tensor,
        shares: ExpertShares,
        added: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`total` f32 [tokens, hidden] and the answer, in the dtype of questions, on the queue.

        With `added` (hidden, shared): hidden + (that + shared).
        """
        out: Tensor = self._backend.take_from_host(self._boxes[layer], total, shares, added)
        return out

    def tune(self, share: Tensor) -> None:
        """Learn what backends divide experts with, f32 [1] on the device; see `LinkShare`."""
        self.link_share = LinkShare(share, self._notes)

    def note(self) -> None:
        """What was noted while a step's answers were taken comes to host memory, on the queue."""
        self._notes.copy_(self._noted, non_blocking=True)

    def learn(self) -> None:
        """Learn from the notes of the last step that is complete, if nothing was learned since."""
        if self.link_share is not None:
            self.link_share.learn()

    def begin(self, tokens: int) -> None:
        """A step of `tokens` tokens comes next on the device's queue that asks here."""
        if self.link_share is not None:
            self.link_share.begin(tokens)
        self._step = self._step % 0x7FFFFFFF + 1
        self._number.fill_(self._step)

    def serve(self, tokens: int) -> None:
        """Begin to answer the step of `tokens` tokens that was put on the queue last.

        Behind the steps that were begun before; each is to be ended with `end`.
        """
        self._service.begin(self._step, tokens, torch.get_num_threads(), _PATIENCE_S)
        self.pending += 1

    def end(self) -> HostExpertTimes:
        """Wait for all answers to the first step that was not ended.

        Raises RuntimeError where the device asked nothing.
        """
        self.pending -= 1
        complete, experts, waited_s, computed_s = self._service.end()
        if not complete:
            raise RuntimeError(f"the device was silent for {_PATIENCE_S:.0f} s")
        return HostExpertTimes(experts, waited_s, computed_s)

    def _make_service(self, activation: str) -> Any:
        layers = []
        for layer, given in self._experts.items():
            box = self._boxes[layer]
            parts = (box.x, box.chosen, box.scales, box.total, box.asked, box.answered, box.cut)
            experts = [native_expert(self._native, index, params) for index, params in given]
            layers.append((experts, *(part.data_ptr() for part in parts)))
        return self._native.ExpertService(
            tuple(layers),
            DTYPES[self._dtype],
            self._hidden,
            self._hidden,
            self._top_k,
            ACTIVATIONS[activation],
        )


def make_channel(
    where: torch.device, experts: Mapping[int, Sequence[Expert]], **sizes: Any
) -> HostExpertChannel | None:
    """A channel for `where`; None where backends have to call: no GPU, or no compiled kernel.

    sizes   the most tokens of a step, hidden, top_k, and the dtype of activations
    """
    native = extension.load()
    if native is None or not backend_on(where).has("ask_host") or sizes["dtype"] not in DTYPES:
        return None
    if any(
        native_expert(native, index, params) is None
        for given in experts.values()
        for index, params in given
    ):
        return None
    return HostExpertChannel(native, where, experts, **sizes)
