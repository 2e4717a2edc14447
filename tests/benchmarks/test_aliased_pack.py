"""Tiled packs: as many layers as asked for, each where the one that it repeats lies."""

from pathlib import Path

import torch

import hmt
from hmt.contracts.blocks import BlockKind
from hmt.contracts.encoding import Encoding
from hmt.engine import EngineConfig
from hmt.engine.loading.packs import verify
from hmt.profiling.random_model import Shape
from hmt_bench.aliased_pack import write_tiled_deepseek, write_tiled_pack
from hmt_bench.random_deepseek import DeepSeekShape


def test_a_tiled_pack_is_a_model_of_all_its_layers(tmp_path: Path) -> None:
    shape = Shape(7, 64, 96, 4, 2, vocab_size=512)
    write_tiled_pack(tmp_path, shape, "w4a8:32", written_layers=2)
    found = []
    for memory in ("64MiB", "1MiB"):
        with hmt.Engine(host_memory=memory, context=64, max_prefill_tokens=16) as engine:
            model = engine.load_model(tmp_path / "pack")
            assert model.prepared.model.spec.layers == 7
            reads = {b: layout.reads for b, layout in model.prepared.layouts.items()}
            for block, own in reads.items():
                if block.layer >= 2:
                    assert own == reads[block._replace(layer=block.layer % 2)]
            found.append(model.logits(list(range(20)), range(20)))
    assert torch.equal(*found) and found[0].isfinite().all()
    assert not verify(tmp_path / "pack", EngineConfig.resolve()).damages


def test_a_tiled_deepseek_has_one_kind_of_dense_layers_and_one_of_sparse_ones(
    tmp_path: Path,
) -> None:
    shape = DeepSeekShape(
        layers=5, dense_layers=2, hidden_size=128, intermediate_size=96,
        moe_intermediate_size=64, heads=4, experts=16, experts_per_token=4, groups=4,
        kept_groups=2, q_rank=64, kv_rank=32, nope_dim=16, rope_dim=16, value_dim=16,
        vocab_size=None,
    )  # fmt: skip
    write_tiled_deepseek(tmp_path, shape, "w4a8:32")
    found = []
    for memory in ("64MiB", "2MiB"):
        with hmt.Engine(host_memory=memory, context=64, max_prefill_tokens=16) as engine:
            model = engine.load_model(tmp_path / "pack")
            kinds = {b.layer: b.kind for b in model.plan.homes if b.index == 0 and b.layer >= 0}
            assert [kinds[layer].value for layer in range(5)] == ["ffn"] * 2 + ["expert"] * 3
            found.append(model.logits(list(range(20)), range(20)))
    assert torch.equal(*found) and found[0].isfinite().all() and found[0].std() > 0


def test_a_tiled_deepseek_in_a_file_type_has_its_layers_types(tmp_path: Path) -> None:
    shape = DeepSeekShape(
        layers=17, dense_layers=1, hidden_size=256, intermediate_size=256,
        moe_intermediate_size=512, heads=2, experts=16, experts_per_token=4, groups=4,
        kept_groups=2, q_rank=256, kv_rank=256, nope_dim=64, rope_dim=64, value_dim=64,
        vocab_size=None,
    )  # fmt: skip
    write_tiled_deepseek(tmp_path, shape, "IQ2_XXS")
    found = []
    for memory in ("128MiB", "16MiB"):
        with hmt.Engine(host_memory=memory, context=64, max_prefill_tokens=16) as engine:
            model = engine.load_model(tmp_path / "pack")
            experts = {
                block.layer: {p.param.spec.name: p.format.encoding for p in layout.placed}
                for block, layout in model.prepared.layouts.items()
                if block.kind is BlockKind.EXPERT
            }
            assert sorted(experts) == list(range(1, 17))
            downs = [kinds["down_proj"] for kinds in experts.values()]
            assert downs == [Encoding.Q2_K] + 15 * [Encoding.IQ2_XXS], "the first eighth"
            assert {kinds["up_proj"] for kinds in experts.values()} == {Encoding.IQ2_XXS}
            found.append(model.logits(list(range(20)), range(20)))
    assert torch.equal(*found) and found[0].isfinite().all() and found[0].std() > 0
    disk = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    memory_bytes = sum(layout.slot_bytes for layout in model.prepared.layouts.values())
    assert disk < memory_bytes / 2
