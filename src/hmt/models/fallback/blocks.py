"""From a module tree to blocks: which parameters move together, and who reads them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.models.decoder import head_chunk_rows
from hmt.models.fallback.interfaces import usual_activation
from hmt.models.fallback.key_map import Published
from hmt.models.fallback.module_tree import Tree, refused
from hmt.models.fallback.modules import (
    Layer,
    LazyTable,
    LeasedHead,
    LeasedLinear,
    Unit,
    Value,
)
from hmt.models.fallback.trace import LayerTrace

_COUNT = "num_batches_tracked"  # of batch norms, which only training reads
HEAD = BlockId(TRUNK, BlockKind.HEAD)


@dataclass
class Parts:
    """A tree whose modules have been replaced.

    layers    as they are called, by index
    tables    what is looked up outside of the layers, with its name
    trunk     other modules with parameters outside of the layers
    """

    layers: list[Layer]
    head: LeasedHead
    tables: list[tuple[str, BlockId]] = field(default_factory=list)
    trunk: list[Unit] = field(default_factory=list)


def split_blocks(tree: Tree, architecture: str) -> Parts:
    """Replace modules that have parameters.  Raises UnknownArchitectureError."""
    head, head_path = find_head(tree.model, architecture)
    put(tree.model, head_path, head)
    parts = Parts([wrap_layer(layer) for layer in tree.layers], head)
    inside = f"{tree.path}."
    inputs = tree.model.get_input_embeddings()
    found = [(n, m) for n, m in tree.model.named_modules() if not n.startswith(inside)]
    found.sort(key=lambda pair: pair[1] is not inputs)  # tokens come first
    for name, module in found:
        own = own_params(module)
        if not own or name == head_path:
            continue
        if isinstance(module, nn.Embedding):
            parts.tables.append((name, LazyTable.replace(module, len(parts.tables))))
        elif not name or any(True for _ in module.children()):
            named = f"{name or 'the model'} has its own parameters ({', '.join(own)})"
            raise refused(architecture, named)
        else:
            unit = Unit(leaf(module), name)
            put(tree.model, name, unit)
            parts.trunk.append(unit)
    return parts


def find_head(model: Any, architecture: str) -> tuple[LeasedHead, str]:
    """What takes the place of the output layer, and where.  Raises UnknownArchitectureError."""
    output = model.get_output_embeddings()
    if output is None:
        raise refused(architecture, "it has no output layer")
    if type(output) is not nn.Linear:
        raise refused(architecture, f"its output layer is a {type(output).__name__}")
    path, *others = [name for name, module in model.named_modules() if module is output]
    if others:
        raise refused(architecture, "its output layer has several places")
    return LeasedHead(output), path


def leaf(module: nn.Module) -> nn.Module:
    """A module of the trunk, or what takes the place of a Linear."""
    return LeasedLinear(module) if type(module) is nn.Linear else module


def wrap_layer(layer: nn.Module) -> Layer:
    """Wrap a layer's children that have parameters, and replace its Linears."""
    wrapped = Layer(layer)
    for holder, prefix in _holders(layer):
        for name, child in list(holder.named_children()):
            if not any(True for _ in child.parameters()) and not any(own_params(child)):
                continue
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                continue
            for path, module in list(child.named_modules()):
                if type(module) is nn.Linear and path:
                    put(child, path, LeasedLinear(module))
            inner = leaf(child)
            setattr(holder, name, Unit(inner, f"{prefix}{name}"))
    return wrapped


def _holders(layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The layer, and lists of modules in it, which are not called themselves."""
    yield layer, ""
    for path, child in list(layer.named_modules()):
        if path and isinstance(child, nn.ModuleList | nn.ModuleDict) and "." not in path:
            yield child, f"{path}."


def units(layer: Layer) -> dict[str, Unit]:
    """A layer's units by name."""
    return {m.name: m for m in layer.inner.modules() if isinstance(m, Unit)}


def own_params(module: nn.Module) -> list[str]:
    """Parameters and kept buffers of a module itself; not the counts of training steps."""
    named = module.named_buffers(recurse=False)
    buffers = [n for n, b in named if b is not None and b.is_meta and n != _COUNT]
    return [n for n, p in module.named_parameters(recurse=False)] + buffers


def put(root: nn.Module, path: str, module: nn.Module) -> None:
    """Let `module` be where `path` is."""
    holder, _, name = path.rpartition(".")
    setattr(root.get_submodule(holder), name, module)


class BlockMaker:
    """Makes the blocks of a model, and tells its modules which are theirs."""

    def __init__(self, tree: Tree, parts: Parts, published: Published, architecture: str) -> None:
        self._tree = tree
        self._parts = parts
        self._published = published
        self._architecture = architecture

    def values(self) -> None:
        """Tell every unit which tensors it reads, so that it can be looked at."""
        for index, layer in enumerate(self._parts.layers):
            at = self._tree.at(index)
            layer.values = self._direct_values(layer.inner, at)
            for unit in units(layer).values():
                self._unit_values(unit, f"{at}{unit.name}.", f"{unit.name}.")
        for unit in self._parts.trunk:
            self._unit_values(unit, f"{unit.name}.", f"{unit.name}.")

    def layer(self, index: int, trace: LayerTrace) -> Iterator[BlockSpec]:
        """The blocks of a layer, in the order of use."""
        layer = self._parts.layers[index]
        attention = BlockId(index, BlockKind.ATTENTION)
        second = BlockId(index, BlockKind.ROUTER if trace.experts else BlockKind.FFN)
        order = list(dict.fromkeys(trace.units))
        last = order.index(trace.attention) if trace.attention in order else -1
        params: dict[BlockId, list[ParamSpec]] = {attention: [], second: []}
        layer.block = attention
        params[attention] += self._params_of(layer.values, self._tree.at(index), "")
        by_name = units(layer)
        for place, name in enumerate([*order, *(n for n in by_name if n not in order)]):
            unit = by_name[name]
            unit.block = attention if place <= last or place >= len(order) else second
            unit.follows_attention = place == last + 1 < len(order)
            params[unit.block] += self._unit_params(unit, f"{self._tree.at(index)}{name}.")
        for block, specs in params.items():
            if specs:
                yield BlockSpec(block, tuple(specs))
        for module, name in trace.experts:
            yield from self._experts(index, module, by_name[name])

    def trunk(self, tied: bool) -> Iterator[BlockSpec]:
        """The blocks in front of the layers."""
        for number, (name, block) in enumerate(self._parts.tables):
            specs = self._specs(f"{name}.weight", "weight", Role.TABLE)
            if tied and number == 0 and len(specs) == 1:
                # transformers ties the embedding to the head where only that is in the file.
                sources = (*specs[0].sources, f"{self._head_path()}.weight")
                specs = (replace(specs[0], sources=sources),)
            yield BlockSpec(block, specs)

    def _head_path(self) -> str:
        head = self._parts.head
        return next(name for name, module in self._tree.model.named_modules() if module is head)

    def head(self, tied: bool) -> Iterator[BlockSpec]:
        """The blocks behind the layers."""
        head = self._parts.head
        path = self._head_path()
        table = f"{self._parts.tables[0][0]}.weight"
        weight, bias = f"{path}.weight", f"{path}.bias"
        own = weight if not tied else table
        step = head_chunk_rows(head.out_features, head.in_features)
        chunks = []
        for number, first in enumerate(range(0, head.out_features, step)):
            rows = (first, min(first + step, head.out_features))
            block = HEAD._replace(index=number)
            specs = [*self._specs(own, "weight", Role.LINEAR, rows)]
            if tied and len(specs) == 1:
                # A head in the file is the head, as in transformers.
                specs = [replace(specs[0], sources=(weight, *specs[0].sources))]
            if head.biased:
                specs += self._specs(bias, "bias", Role.VECTOR, rows)
            if number == 0:
                for unit in self._parts.trunk:
                    unit.block = HEAD
                    specs += self._unit_params(unit, f"{unit.name}.")
            chunks.append((block, rows[1] - rows[0]))
            yield BlockSpec(block, tuple(specs))
        head.chunks = tuple(chunks)

    def _experts(self, index: int, module: Any, unit: Unit) -> Iterator[BlockSpec]:
        path = next(p for p, m in unit.inner.named_modules() if m is module)
        at = f"{self._tree.at(index)}{unit.name}.{path}".rstrip(".") + "."
        for expert in range(module.num_experts):
            specs = self._expert_specs(module, at, expert)
            yield BlockSpec(BlockId(index, BlockKind.EXPERT, expert), tuple(specs))

    def _expert_specs(self, module: Any, at: str, expert: int) -> list[ParamSpec]:
        specs: list[ParamSpec] = []
        for name in own_params(module):
            shape = self._published.shapes[at + name]
            if len(shape) < 2 or shape[0] != module.num_experts:
                raise refused(
                    self._architecture, f"{at}{name} has shape {list(shape)}: not one per expert"
                )
            each = 1 if len(shape) == 2 else shape[1]
            begin, end = expert * each, (expert + 1) * each
            if name == "gate_up_proj" and usual_activation(module) is not None:
                middle = (begin + end) // 2
                specs += self._specs(at + name, "gate_proj", Role.LINEAR, (begin, middle))
                specs += self._specs(at + name, "up_proj", Role.LINEAR, (middle, end))
            else:
                matrix = len(shape) == 3 and not module.is_transposed
                role = Role.LINEAR if matrix else Role.VECTOR
                specs += self._specs(at + name, name, role, (begin, end))
        if len({spec.name for spec in specs if "." in spec.name}):
            raise refused(self._architecture, f"its checkpoints cut {at} in unusual pieces")
        return specs

    def _unit_values(self, unit: Unit, at: str, local: str) -> None:
        dtypes = dict(_tensors(unit.inner))
        for name, tensor in dtypes.items():
            specs = self._specs(at + name, local + name, Role.VECTOR)
            names = tuple(spec.name for spec in specs)
            unit.values[name] = Value(names, tuple(tensor.shape), tensor.dtype)
        for path, module in unit.inner.named_modules():
            if isinstance(module, LeasedLinear):
                own = f"{path}." if path else ""
                weight = self._specs(f"{at}{own}weight", f"{local}{own}weight", Role.LINEAR)
                module.names = tuple(spec.name for spec in weight)
                if f"{at}{own}bias" in self._published.shapes:
                    bias = self._specs(f"{at}{own}bias", f"{local}{own}bias", Role.VECTOR)
                    module.bias_names = tuple(spec.name for spec in bias)

    def _direct_values(self, layer: nn.Module, at: str) -> dict[str, Value]:
        found = {}
        for name in own_params(layer):
            tensor = raw(layer, name)
            names = tuple(spec.name for spec in self._specs(at + name, name, Role.VECTOR))
            found[name] = Value(names, tuple(tensor.shape), tensor.dtype)
        return found

    def _unit_params(self, unit: Unit, at: str) -> list[ParamSpec]:
        local = f"{unit.name}."
        specs = self._params_of(unit.values, at, local)
        for path, module in unit.inner.named_modules():
            if isinstance(module, LeasedLinear):
                module.block = unit.block
                own = f"{path}." if path else ""
                specs += self._specs(f"{at}{own}weight", f"{local}{own}weight", Role.LINEAR)
                if module.bias_names:
                    specs += self._specs(f"{at}{own}bias", f"{local}{own}bias", Role.VECTOR)
        return specs

    def _params_of(self, values: dict[str, Value], at: str, local: str) -> list[ParamSpec]:
        return [
            spec for name in values for spec in self._specs(at + name, local + name, Role.VECTOR)
        ]

    def _specs(
        self, param: str, name: str, role: Role, rows: tuple[int, int] | None = None
    ) -> tuple[ParamSpec, ...]:
        if not self._published.whole(param):
            raise refused(
                self._architecture, f"its checkpoints hold {param} in a form that HMT cannot read"
            )
        return self._published.specs(param, name, role, rows)


def _tensors(inner: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters and kept buffers that no replaced module reads, by name."""
    for path, module in inner.named_modules():
        if isinstance(module, LeasedLinear) or is_experts(module):
            continue
        for name in own_params(module):
            yield (f"{path}.{name}" if path else name), raw(module, name)


def raw(module: nn.Module, name: str) -> Any:
    """A parameter or buffer without numbers, also where the module reads another in its place."""
    return module._parameters.get(name, module._buffers.get(name))


def is_experts(module: nn.Module) -> bool:
    """Whether a module asks for `compute_experts`."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")
