"""Keys and values at several levels through the engine: many requests, faults, and bad input."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import MINI_DENSE

import hmt
from hmt.base.errors import (
    BudgetError,
    ConfigError,
    ContextLengthError,
    DiskReadError,
    MachineError,
)
from hmt.contracts.plan import Tier
from hmt.engine import LoadedModel
from hmt.engine.loading import disk
from hmt.memory import PreadReader

OPTIONS: dict[str, Any] = {
    "host_memory": "256MiB", "dtype": "float32", "max_prefill_tokens": 32, "max_batch": 4,
}  # fmt: skip


def text(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 500) for _ in range(tokens)]


def load(engine: hmt.Engine) -> LoadedModel:
    return engine.load_model(MINI_DENSE)


@pytest.mark.parametrize("gpu", [{}, {"gpus": "fake", "gpu_memory": "64MiB"}])
def test_requests_that_run_together_answer_as_if_alone(tmp_path: Path, gpu: dict[str, str]) -> None:
    requests = [hmt.Request(text(450 - 50 * n, n), 20, ignore_eos=True) for n in range(5)]
    with hmt.Engine(context=2048, **OPTIONS) as engine:
        wanted = [one.token_ids for one in load(engine).infer_batch(requests)]
    levels = {"kv_gpu_memory": "7MiB", "kv_host_memory": "2MiB", "kv_offload_dir": str(tmp_path)}
    with hmt.Engine(context=2048, **levels, **gpu, **OPTIONS) as engine:
        model = load(engine)
        assert [one.token_ids for one in model.infer_batch(requests)] == wanted
        kv = model.summary().kv
        assert kv is not None and kv.peak["near"] <= kv.capacity["near"] < 2048 // 16
        assert kv.moved["near to host"] and kv.moved["host to disk"] and kv.disk_bytes
        assert kv.fragmentation is not None and 0 < kv.fragmentation < 0.2
    assert engine._ledger.reserved_bytes(Tier.HOST) == 0
    assert not list(tmp_path.iterdir())


def test_fp8_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    tokens, rows = text(900, 3), range(890, 900)
    levels = {"kv_gpu_memory": "1MiB", "kv_host_memory": "512KiB", "kv_offload_dir": str(tmp_path)}
    found, kept = [], []
    for options in ({}, {"kv_quant": "fp8"}, {"kv_quant": "fp8"} | levels):
        with hmt.Engine(context=1024, **options, **OPTIONS) as engine:
            model = load(engine)
            found.append(model.logits(tokens, rows))
            kept.append(model.prepared.demand.kv_token_bytes)
            kv = model.summary().kv
    assert kv is not None and kv.moved["near to host"] and kv.moved["host to disk"]
    exact, near, levelled = found
    assert kept[0] == 4 * kept[1] == 4 * kept[2]
    lost = (near - exact).norm() / exact.norm()
    assert 1e-3 < lost < 0.1, "E4M3 has 4 bits of each number"
    # Parts are added in another order, so that now and then a number is rounded the other way.
    assert (levelled - near).norm() / exact.norm() < lost / 4


def test_the_plan_counts_what_pages_are_chosen_by() -> None:
    """2 numbers of 2 bytes for each channel of a page's keys: 1/16 of what f32 pages take."""
    levels = {"kv_gpu_memory": "7MiB", "kv_policy": "select"}
    prompts = [hmt.Request(text(600, n), 20, ignore_eos=True) for n in range(2)]
    reserved = {}
    for policy in ("exact", "select"):
        with hmt.Engine(context=2048, **levels | {"kv_policy": policy}, **OPTIONS) as engine:
            model = load(engine)
            assert [len(one.token_ids) for one in model.infer_batch(prompts)] == [20, 20]
            reserved[policy] = model.plan.reserved["kv"]
            used = model._core.memory.used_bytes()["kv"]
            assert used <= reserved[policy] < used + 4096
    pages, bounds = 2048 // 16, 8 * 2 * 64 * 2 * 2
    assert reserved["select"] - reserved["exact"] == pages * bounds


def test_the_plan_counts_what_moves_between_levels() -> None:
    with hmt.Engine(context=2048, **OPTIONS) as engine:
        alone = load(engine).plan.reserved["activations"]
    with hmt.Engine(context=2048, kv_gpu_memory="7MiB", **OPTIONS) as engine:
        model = load(engine)
        sizes = model.prepared.demand.kv_sizes
        assert sizes is not None
        assert model.plan.reserved["activations"] == alone + 16 * sizes.device_page


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"kv_offload_dir": "/nowhere"}, ConfigError, "must be a folder"),
        ({"kv_host_memory": "1MiB"}, ConfigError, "kv_gpu_memory"),
        ({"kv_quant": "int8"}, ConfigError, "kv_gpu_memory"),
        ({"kv_gpu_memory": "8MiB", "kv_quant": "int5"}, ConfigError, "exact, fp8, int8, int4"),
        (
            {"kv_gpu_memory": "8MiB", "kv_offload_disk_memory": "1GiB"},
            ConfigError,
            "kv_offload_dir",
        ),
        ({"kv_gpu_memory": "8MiB", "kv_eviction": "best"}, ConfigError, "a2cr, lru, lfu"),
        ({"kv_gpu_memory": "8MiB", "kv_share": 2.0}, ConfigError, "at most 1"),
        ({"kv_gpu_memory": "64KiB"}, BudgetError, "--kv-gpu-memory 64.0 KiB is too little"),
        (
            {"kv_gpu_memory": "4MiB", "kv_host_memory": "1MiB"},
            BudgetError,
            "raise --kv-host-memory or --kv-offload-disk-memory",
        ),
    ],
)
def test_bad_options_say_what_to_do(options: Any, error: type[Exception], told: str) -> None:
    with (
        pytest.raises(error, match=told),
        hmt.Engine(context=2048, **options, **OPTIONS) as engine,
    ):
        load(engine)


def test_a_text_that_no_level_holds_is_refused_at_once(tmp_path: Path) -> None:
    with hmt.Engine(context=1024, kv_gpu_memory="5MiB", **OPTIONS) as engine:
        model = load(engine)
        with pytest.raises(ContextLengthError, match="context of 1024 is what it was loaded with"):
            model.infer(hmt.Request(text(1000, 1), 200))
        assert model.infer(hmt.Request(text(1000, 1), 20, ignore_eos=True)).token_ids


def test_a_full_drive_is_found_when_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    options = {"kv_gpu_memory": "5MiB", "kv_host_memory": 0, "kv_offload_dir": str(tmp_path)}
    with hmt.Engine(context=2048, **options, **OPTIONS) as engine:
        with pytest.raises(MachineError, match="lower --kv-offload-disk-memory"):
            load(engine)
        assert engine._ledger.reserved_bytes(Tier.HOST) == 0
    assert not list(tmp_path.iterdir())


class Drive(PreadReader):
    """Fails when it is told to."""

    broken = False

    def read_vector(self, path: Path, offset: int, views: Any) -> int:
        if self.broken and "/fd/" in str(path):
            raise DiskReadError(f"injected: {path} at {offset}")
        return super().read_vector(path, offset, views)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    made = Drive()
    monkeypatch.setattr(disk, "open_reader", lambda kind: made)
    yield made


def test_a_request_fails_when_its_pages_cannot_be_read_and_others_go_on(
    tmp_path: Path, drive: Drive
) -> None:
    options = {"kv_gpu_memory": "4MiB", "kv_host_memory": 0, "kv_offload_dir": str(tmp_path)}
    ids = text(1500, 3)
    with hmt.Engine(context=2048, **options, **OPTIONS) as engine:
        model = load(engine)
        wanted = model.logits(ids, [1499])
        drive.broken = True
        with pytest.raises(DiskReadError, match="injected"):
            model.logits(ids, [1499])
        short = model.infer(hmt.Request(text(50, 1), 8, ignore_eos=True))
        assert len(short.token_ids) == 8, "what stays near does not need the disk"
        drive.broken = False
        # What texts attended to decides which pages are near, and so the order of sums.
        torch.testing.assert_close(model.logits(ids, [1499]), wanted, rtol=1e-4, atol=1e-4)
        assert (
            model._core.memory.kv.allocator.free_tokens
            == model._core.memory.kv.allocator.capacity_tokens
        )
