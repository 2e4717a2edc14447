"""Gemma 4: tables of which a token reads rows for all layers, and layers that use others' keys."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_memory import bench_of, published, put_tokenizer, random_reference
from random_configs import Case, cases

import hmt
from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.plan import Tier
from hmt.engine import EngineConfig, prepare
from hmt.engine.loading.packs import convert
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.models import open_model
from hmt.planner import PlanOptions, smallest_budget

# With more, threads would only wait for one another.
pytestmark = pytest.mark.usefixtures("one_thread")

GEMMA4 = cases("gemma4_text")
ROWS = BlockId(TRUNK, BlockKind.EMBEDDING, 1)
EXPERTS = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"context": 64, "dtype": "float32", "max_batch": 2}


def written(case: Case, folder: Path) -> list[int]:
    """Tokens for a checkpoint that is written to `folder`."""
    published(random_reference(case.config, case.seed), folder)
    put_tokenizer(folder)
    rng = random.Random(case.seed)
    return [rng.randrange(case.config.vocab_size) for _ in range(40)]


def logits_of(folder: Path, tokens: list[int], **options: Any) -> tuple[torch.Tensor, Any]:
    with hmt.Engine(**OPTIONS | options) as engine:
        model = engine.load_model(folder)
        return model.logits(tokens, range(len(tokens)), prefill=30), model


@pytest.mark.parametrize("packed", [False, True], ids=["checkpoint", "pack"])
def test_a_table_on_the_disk_gives_the_bits_of_one_in_memory(packed: bool, tmp_path: Path) -> None:
    tokens, path = written(GEMMA4[0], tmp_path / "model"), tmp_path / "model"
    if packed:
        quantized = EngineConfig.resolve(host_memory="64MiB", quantization="w8a16", **OPTIONS)
        convert(path, tmp_path / "pack", quantized)
        path = tmp_path / "pack"
    wanted, model = logits_of(path, tokens, host_memory="64MiB")
    assert model.plan.homes[ROWS] is Tier.HOST
    config = EngineConfig.resolve(host_memory="64MiB", **OPTIONS)
    least = smallest_budget(prepare(path, config).demand, PlanOptions(0, 64))
    for budget in (least, least + 4096):
        found, model = logits_of(path, tokens, host_memory=budget)
        assert model.plan.homes[ROWS] is Tier.DISK and torch.equal(found, wanted)


def test_the_smaller_table_stays_in_memory_where_one_fits(tmp_path: Path) -> None:
    written(GEMMA4[4], tmp_path)
    seen = []
    config = EngineConfig.resolve(host_memory="64MiB", **OPTIONS)
    demand = prepare(tmp_path, config).demand
    least = smallest_budget(demand, PlanOptions(0, 64))
    most = sum(block.slot_bytes for block in demand.blocks) + (1 << 20)
    for budget in range(most, least, -(32 << 10)):
        config = EngineConfig.resolve(host_memory=budget, **OPTIONS)
        plan = prepare(tmp_path, config).plan
        blocks = {home for block, home in plan.homes.items() if block.kind is not ROWS.kind}
        seen.append((plan.homes[ROWS._replace(index=0)], plan.homes[ROWS], blocks))
    both, one, none = (Tier.HOST, Tier.HOST), (Tier.HOST, Tier.DISK), (Tier.DISK, Tier.DISK)
    order = [tables for *tables, blocks in seen if blocks == {Tier.HOST}]
    assert list(dict.fromkeys(map(tuple, order))) == [both, one, none], "before other blocks"


def test_layers_that_share_keep_nothing_and_read_the_last_of_their_kind(tmp_path: Path) -> None:
    case = GEMMA4[0]
    bench = bench_of(random_reference(case.config, case.seed), tmp_path)
    spec = bench.model.spec
    assert [kv is not None for kv in spec.kv] == [True] * 3 + [False] * 3
    kinds = case.config.layer_types
    assert spec.kv_sources == {3: 1, 4: 2, 5: 1}
    assert all(kinds[layer] == kinds[source] for layer, source in spec.kv_sources.items())
    asked: list[int] = []
    attend = bench.kv.attend
    bench.kv.attend = lambda layer, *rest, **options: (  # type: ignore[method-assign]
        asked.append(layer) or attend(layer, *rest, **options)
    )
    bench.run((0, 0, [5, 6, 7]))
    assert asked == [0, 1, 2, 1, 2, 1]
    assert not any(
        f"layers.{layer}.self_attn.k_proj" in n for layer in (3, 4, 5) for n in bench.weights.used
    )


@pytest.mark.parametrize("name", ["gemma4_text-0", "gemma4_text-4"])
def test_layers_on_a_device_read_keys_of_others(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the CPU computes some of them."""
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    [case] = (case for case in GEMMA4 if case.name == name)
    tokens = written(case, tmp_path)
    wanted, _ = logits_of(tmp_path, tokens, host_memory="64MiB")
    split = False
    for memory in ("64MiB", "500KiB", "400KiB", "300KiB"):
        where = {"gpus": "fake", "gpu_memory": memory, "host_memory": "64MiB"}
        try:
            found, model = logits_of(tmp_path, tokens, **where)
        except hmt.BudgetError:
            continue
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()
        stages = {
            model.plan.stage_devices.get(layer) for layer in range(case.config.num_hidden_layers)
        }
        split |= len(stages) > 1
    assert split, "none of these budgets divides the layers"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
        ({"vocab_size_per_layer_input": 30}, "need as many rows"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"hidden_activation": "softplus"}, "softplus"),
        ({"enable_moe_block": True}, "enable_moe_block"),
        (EXPERTS | {"top_k_experts": 5}, "5 of 4 experts"),
    ],
)
def test_what_has_no_keys_or_rows_is_refused(
    fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    config, _ = published(random_reference(GEMMA4[0].config, 0), tmp_path)
    with pytest.raises(CheckpointError, match=says):
        open_model(config | fields, tmp_path, torch.float32)
