"""A module tree of which any module may be called at any time, and what is seen when it is.

Nothing is assumed of what is between layers.  Candidates for layers are the lists of modules in
the tree; those of which a module is called on text are the model's, in the order of first calls.
What is not called (encoders of images) is not loaded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hmt.contracts.blocks import BlockId
from hmt.models.fallback.blocks import Parts, find_head, leaf, own_params, put, wrap_layer
from hmt.models.fallback.call_context import current_context
from hmt.models.fallback.lent import lend, lend_own
from hmt.models.fallback.module_tree import Tree
from hmt.models.fallback.modules import Layer, LazyTable, LeasedHead, Unit
from hmt.models.fallback.trace import LayerTrace


class Gate(nn.Module):
    """In place of a layer: the pass stops in front of it until the executor is there.

    index   of the layer, in the order of first calls
    """

    def __init__(self, layer: Layer, path: str) -> None:
        super().__init__()
        self.layer = layer
        self.path = path
        self.index = -1

    def __getattr__(self, name: str) -> Any:
        """What the model asks its layer for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer").inner, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's."""
        work = current_context()
        if work.weights is None:
            with work.record.layer(self):
                return self.layer.inner(*args, **kwargs)
        work.passage.reach(self.index)
        outside, work.layer, work.residual = work.layer, self.index, None
        try:
            return self.layer.inner(*args, **kwargs)
        finally:
            work.layer = outside


@dataclass
class WholeTree(Tree):
    """A tree whose layers are where `gates` are.

    first_position   of a sequence: some models do not begin at 0
    """

    gates: list[Gate] = field(default_factory=list)
    first_position: int = 0

    def at(self, index: int) -> str:
        """What the names of a layer's parameters begin with."""
        return f"{self.gates[index].path}."


class Sight:
    """What was called while the model was looked at.

    layers   by gate, in the order of first calls
    stage    how many of them have been called by now, less one
    width    most numbers of a token that a layer was given
    """

    def __init__(self) -> None:
        self.layers: dict[Gate, LayerTrace] = {}
        self.stage = -1
        self.head = False
        self.width = 0
        self.names: set[str] = set()  # of units that were called
        self.used: set[int] = set()  # ids of what owns parameters that were read
        self.tables: set[BlockId] = set()
        self._inside: LayerTrace | None = None
        self._unit = ""

    @contextmanager
    def layer(self, gate: Gate) -> Iterator[None]:
        """A layer is called in the body."""
        if gate not in self.layers:
            self.layers[gate] = LayerTrace()
        self.stage = max(self.stage, list(self.layers).index(gate))
        outside, self._inside = self._inside, self.layers[gate]
        try:
            yield
        finally:
            self._inside = outside

    @contextmanager
    def unit(self, name: str) -> Iterator[None]:
        """A unit is called in the body."""
        outside, self._unit = self._unit, name
        self.names.add(name)
        if self._inside is not None:
            self._inside.units.append(name)
        try:
            yield
        finally:
            self._unit = outside

    def read(self, owner: Unit | Layer) -> None:
        """A parameter of `owner` was read."""
        self.used.add(id(owner))

    def table(self, block: BlockId) -> None:
        """Rows of a table were looked up."""
        self.tables.add(block)

    def linear(self, width: int) -> None:
        """A linear layer was called."""
        if self._inside is not None:
            widths = self._inside.widths
            widths[self._unit] = widths.get(self._unit, 0) + width

    def attends(self) -> None:
        """A layer of the cache was given something."""
        if self._inside is not None:
            self._inside.attention = self._unit

    def experts(self, module: Any, top_k: int) -> None:
        """Experts were asked for."""
        if self._inside is not None:
            self._inside.experts.append((module, self._unit))
            self._inside.top_k = max(self._inside.top_k, top_k)

    def passed(self, hidden: Tensor, tokens: int) -> None:
        """Numbers that a layer was given."""
        self.width = max(self.width, hidden.numel() // tokens)


def open_gates(tree: WholeTree, architecture: str) -> Parts:
    """Replace modules that have parameters.  Raises UnknownArchitectureError."""
    head, head_path = find_head(tree.model, architecture)
    put(tree.model, head_path, head)
    paths = list(_layer_paths(tree.model))
    for path in paths:
        layer = wrap_layer(tree.model.get_submodule(path))
        gate = Gate(layer, path)
        tree.gates.append(gate)
        put(tree.model, path, gate)
        lend_own(layer, layer.inner)
        for unit in layer_units(layer):
            lend(unit)
    parts = Parts([gate.layer for gate in tree.gates], head)
    _open_trunk(tree, parts, paths)
    return parts


def layer_units(layer: Layer) -> list[Unit]:
    """A layer's units."""
    return [module for module in layer.inner.modules() if isinstance(module, Unit)]


def _layer_paths(model: nn.Module) -> Iterator[str]:
    """Of the modules in outermost lists, unless they are matrices and tables."""
    lists: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{p}.") for p in lists):
            continue
        if not any(any(True for _ in each.children()) for each in module):
            continue
        lists.append(path)
        for number, each in enumerate(module):
            if any(True for _ in each.parameters()):
                yield f"{path}.{number}"


def _open_trunk(tree: WholeTree, parts: Parts, layers: list[str]) -> None:
    """Replace what has parameters outside of layers."""
    inputs = tree.model.get_input_embeddings()
    inside = tuple(f"{path}." for path in layers)
    found = [
        (name, module)
        for name, module in tree.model.named_modules()
        if name not in layers and not name.startswith(inside)
    ]
    found.sort(key=lambda pair: pair[1] is not inputs)  # tokens come first
    for name, module in found:
        if not own_params(module) or isinstance(module, LeasedHead):
            continue
        if isinstance(module, nn.Embedding):
            parts.tables.append((name, LazyTable.replace(module, len(parts.tables))))
        elif not name or any(True for _ in module.children()):
            unit = Unit(_own_only(module), name)
            lend_own(unit, module)
            parts.trunk.append(unit)
        else:
            unit = Unit(leaf(module), name)
            lend(unit)
            put(tree.model, name, unit)
            parts.trunk.append(unit)


def _own_only(module: nn.Module) -> nn.Module:
    """A module with the parameters of another one, and none of its children."""
    alone = nn.Module()
    for name in own_params(module):
        tensor = getattr(module, name)
        if isinstance(tensor, nn.Parameter):
            alone.register_parameter(name, tensor)
        else:
            alone.register_buffer(name, tensor)
    return alone
