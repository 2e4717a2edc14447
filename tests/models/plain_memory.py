"""Weights and KV in plain memory, and random checkpoints written by transformers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from hmt.contracts.blocks import BlockId, BlockKind, ParamSpec, Role
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.contracts.model import Model, ModelSpec
from hmt.contracts.step import Segment, SegmentRequest, Step
from hmt.contracts.store import LeasedGroup, Priority, RecurrentState, StateRun
from hmt.kernels import ops
from hmt.models import open_model

TOKENS = 768  # of the small tokenizer
_MOST = 64  # sequences that have recurrent state
_ENCODINGS = {
    torch.float32: Encoding.F32,
    torch.float16: Encoding.F16,
    torch.bfloat16: Encoding.BF16,
}


class ResidentWeights:
    """Weights over tensors by their published names; notes what is leased and requested."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, torch.Tensor],
        tile: tuple[int, int] | None = None,
    ) -> None:
        self.tensors = tensors
        self.tile = tile
        self.used: set[str] = set()
        self.blocks = {
            block.id: {param.name: self._bind(param) for param in block.params}
            for block in spec.blocks
        }
        self.leased: list[BlockId] = []
        self.requested: list[tuple[tuple[BlockId, ...], Priority]] = []
        self.requested_rows: dict[BlockId, torch.Tensor] = {}

    def _bind(self, param: ParamSpec) -> WeightTensor:
        source = next(name for name in param.sources if name in self.tensors)
        self.used.add(source)
        data = self.tensors[source]
        if param.rows is not None:
            data = data.flatten(0, -2) if data.dim() > 1 else data
            data = data[slice(*param.rows)]
        assert tuple(data.shape) == param.shape, source
        if data.dtype is not torch.float8_e4m3fn:
            return WeightTensor(_ENCODINGS[data.dtype], param.shape, data)
        assert param.role is Role.LINEAR and self.tile is not None
        self.used.add(f"{source}_scale_inv")
        scales = self.tensors[f"{source}_scale_inv"]
        return WeightTensor(Encoding.FP8_BLOCK, param.shape, data, scales, tile=self.tile)

    @contextmanager
    def lease(self, block: BlockId) -> Iterator[Mapping[str, WeightTensor]]:
        self.leased.append(block)
        yield self.blocks[block]

    @contextmanager
    def lease_each(self, blocks: Sequence[BlockId]) -> Iterator[Iterator[LeasedGroup]]:
        """In groups of three."""
        self.leased += blocks
        starts = range(0, len(blocks), 3)
        yield ([(block, self.blocks[block]) for block in blocks[n : n + 3]] for n in starts)

    def resident(self, blocks: Sequence[BlockId]) -> None:
        return None

    def count(self, nbytes: int) -> None:
        raise AssertionError("nothing is standing")

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        self.requested.append((tuple(blocks), priority))

    def moe_backend(self, layer: int) -> None:
        return None

    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        assert len(hidden) == len(experts)

    def request_rows(self, block: BlockId, name: str, ids: torch.Tensor) -> None:
        self.requested_rows[block] = ids

    def rows(self, block: BlockId, name: str, ids: torch.Tensor) -> torch.Tensor:
        if block in self.requested_rows:
            assert torch.equal(self.requested_rows.pop(block), ids)
        return self.blocks[block][name].data[ids]

    @property
    def leased_experts(self) -> list[BlockId]:
        return [block for block in self.leased if block.kind is BlockKind.EXPERT]


class PlainKV:
    """A KVCache that keeps each sequence's rows in one growing tensor per layer."""

    def __init__(self, spec: ModelSpec) -> None:
        self.layers = spec.kv_layers
        self.slots: dict[int, int] = {}  # by sequence
        self.kept = {
            layer: {one.name: torch.full((_MOST, *one.shape), 7.0) for one in state}
            for layer, state in spec.state_layers.items()
        }
        self.keys: dict[tuple[int, int], torch.Tensor] = {}
        self.values: dict[tuple[int, int], torch.Tensor] = {}

    def append(self, layer: int, step: Step, key: torch.Tensor, value: torch.Tensor | None) -> None:
        kept = self.layers[layer]
        assert key.shape[1:] == (kept.heads, kept.key_dim)
        assert value is None or value.shape[1:] == (kept.heads, kept.value_dim)
        at = 0
        for run in step.segments:
            place = (layer, run.sequence)
            for rows, new in ((self.keys, key), (self.values, value)):
                if new is not None:
                    old = rows.get(place, new[:0])
                    assert len(old) == run.start
                    before = run.start % kept.grouped
                    own = new[at : at + before + run.length]
                    rows[place] = torch.cat((old[: run.start - before], own))
            at += run.start % kept.grouped + run.length

    def attend(
        self,
        layer: int,
        step: Step,
        query: torch.Tensor,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        window = self.layers[layer].window
        parts = []
        for run in step.segments:
            key, value = self.read(layer, run)
            options = {"start": run.start, "scale": scale, "window": window, "softcap": softcap}
            if sinks is None:
                parts.append(ops.attention_output(query[run.tokens], key, value, **options))
            else:
                rows = query[run.tokens]
                parts.append(ops.attention(rows, key, value, sinks=sinks, **options)[0])
        return torch.cat(parts)

    def append_attend(
        self, layer: int, step: Step, heads: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        kept = self.layers[layer].heads
        query, key, value = heads.split((heads.shape[1] - 2 * kept, kept, kept), dim=1)
        self.append(layer, step, key, value)
        return self.attend(layer, step, query, **options).flatten(1)

    def state(self, layer: int, step: Step) -> RecurrentState:
        runs = [
            StateRun(
                self.slots.setdefault(run.sequence, len(self.slots)),
                run.offset,
                run.length,
                run.start == 0,
            )
            for run in step.segments
        ]
        return RecurrentState(self.kept[layer], runs)

    def kernel_place(self, layer: int, step: Step) -> None:
        return None

    def truncate(self, sequence: int, tokens: int) -> None:
        """Let a sequence hold its first tokens only."""
        for rows in (self.keys, self.values):
            for place in rows:
                rows[place] = rows[place][:tokens] if place[1] == sequence else rows[place]

    def read(self, layer: int, run: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.keys[layer, run.sequence]
        assert len(key) >= run.context
        value = self.values.get((layer, run.sequence), key[..., : self.layers[layer].value_dim])
        return key[: run.context], value[: run.context]

    def gather(
        self, layer: int, run: Segment, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert not len(positions) or positions[-1] < run.context
        assert (positions.diff() > 0).all(), "ascending"
        key = self.keys[layer, run.sequence][positions]
        value = self.values.get((layer, run.sequence))
        return key, key[..., : self.layers[layer].value_dim] if value is None else value[positions]


class Bench:
    """A model of HMT on plain memory."""

    def __init__(
        self, model: Model, tensors: Mapping[str, torch.Tensor], tile: tuple[int, int] | None = None
    ) -> None:
        self.model = model
        self.weights = ResidentWeights(model.spec, tensors, tile)
        self.kv = PlainKV(model.spec)
        self.tokens_of: dict[int, list[int]] = {}  # tokens by sequence

    def run(self, *parts: tuple[int, int, list[int]]) -> torch.Tensor:
        """Logits of all tokens of one step; parts are (sequence, start, token ids)."""
        return self.compute(*(SegmentRequest(*part, len(part[2])) for part in parts))

    @torch.inference_mode()
    def compute(self, *parts: SegmentRequest) -> torch.Tensor:
        """Logits of the rows that the parts of one step ask for: f32 [rows, vocab]."""
        step = Step.build(map(self._with_preceding, parts))
        hidden = self.model.embed(step, self.weights)
        for index in range(self.model.spec.layers):
            hidden = self.model.layer(index, hidden, step, self.weights, self.kv)
        assert hidden.dtype is self.model.dtype
        return self.model.head(hidden[step.logit_rows], self.weights)

    def _with_preceding(self, part: SegmentRequest) -> SegmentRequest:
        text = self.tokens_of.setdefault(part.sequence, [])
        text[part.start :] = part.tokens
        first = max(0, part.start - self.model.spec.token_window)
        return part._replace(preceding=tuple(text[first : part.start]))


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter and router bias random values that keep logits far from uniform."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator) * std

    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.copy_(tensor + normal(tensor, 0.3))
            else:
                tensor.copy_(normal(tensor, 0.15))
        for name, tensor in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.copy_(normal(tensor, 0.2))
            if name.endswith("tid2eid"):  # of each token some of the router's experts, in any order
                router = model.get_submodule(name.rpartition(".")[0])
                order = torch.rand(len(tensor), router.num_experts, generator=generator).argsort(1)
                tensor.copy_(order[:, : tensor.shape[1]])
            if name.endswith("layer_scalar"):
                tensor.copy_(tensor + normal(tensor, 0.2))


def random_reference(config: Any, seed: int, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """transformers' model of `config` with random weights, in f32 and eager attention."""
    model = kind.from_config(
        config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    randomise(model, seed)
    return model


def published(model: PreTrainedModel, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, tensors by name) as transformers publishes `model`."""
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tensors = _experts_apart(_joined(load_file(folder / "model.safetensors")))
    # Tables of numbers of experts are floats, as hmt.formats finds them.
    tensors = {n: t if t.is_floating_point() else t.float() for n, t in tensors.items()}
    return json.loads((folder / "config.json").read_text()), tensors


def put_tokenizer(folder: Path) -> None:
    """A tokenizer of TOKENS tokens, for models of no more: reading all 4096 takes 12 ms a load."""
    (folder / "tokenizer.json").write_text(_small_tokenizer())


@cache
def _small_tokenizer() -> str:
    """The embedded model's: tokens that are no merge come first, and merges in their order."""
    file = files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    content["model"]["vocab"] = {text: n for text, n in vocabulary.items() if n < TOKENS}
    content["model"]["merges"] = merges[: TOKENS - (len(vocabulary) - len(merges))]
    return json.dumps(content)


def _joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convolutions of queries, keys and values, and shards of tables, as hmt.formats joins them."""
    end = "_conv1d.weight"
    for name in [name for name in tensors if name.endswith(f".q{end}")]:
        at = name.removesuffix(f"q{end}")
        parts = [tensors.pop(f"{at}{part}{end}") for part in "qkv"]
        tensors[f"{at}conv1d.weight"] = torch.cat(parts)
    end = ".shard_0.weight"
    for name in [name for name in tensors if name.endswith(end)]:
        at, shards = name.removesuffix(end), []
        while (shard := tensors.pop(f"{at}.shard_{len(shards)}.weight", None)) is not None:
            shards.append(shard)
        tensors[f"{at}.weight"] = torch.cat(shards)
    return tensors


def _experts_apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss' stacked experts as tensors of their own, as hmt.formats finds them."""
    apart = {}
    for name, stacked in tensors.items():
        if ".experts." in name and ".mlp." not in name and stacked.dim() == 3:  # Gemma 4's
            at, _, kind = name.rpartition(".")
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for expert, own in enumerate(stacked):
                for one, rows in zip(names, own.chunk(len(names)), strict=True):
                    apart[f"{at}.{expert}.{one}.weight"] = rows.contiguous()
            continue
        at, _, kind = name.partition(".mlp.experts.")
        if not kind or kind[0].isdigit():
            apart[name] = stacked
            continue
        end = "bias" if kind.endswith("_bias") else "weight"
        names = ("gate_proj", "up_proj") if kind.startswith("gate_up") else ("down_proj",)
        for expert, own in enumerate(stacked):
            for turn, one in enumerate(names):
                rows = (own.T if own.dim() == 2 else own)[turn :: len(names)].contiguous()
                apart[f"{at}.mlp.experts.{expert}.{one}.{end}"] = rows
    return apart


def bench_of(reference: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32) -> Bench:
    """HMT's model over what transformers publishes of `reference`."""
    config, tensors = published(reference, folder)
    return Bench(open_model(config, folder, dtype), tensors)
