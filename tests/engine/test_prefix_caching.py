"""Texts that begin alike compute what they share once, also after a restart."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reference import MINI_DENSE, MINI_MOE

import hmt
from hmt.base.errors import ConfigError, RequestError
from hmt.contracts.model import RotaryBorder
from hmt.engine import LoadedModel
from hmt.engine.loading.prefix_cache import salt_of

pytestmark = pytest.mark.each_once

OPTIONS: dict[str, Any] = {"host_memory": "320MiB", "dtype": "float32", "context": 1024}
WAYS: dict[str, dict[str, Any]] = {
    "near": {},
    "levels": {"kv_gpu_memory": "5MiB", "max_prefill_tokens": 32, "max_batch": 2},
    "gpu": {"gpus": "fake", "gpu_memory": "96MiB"},
}


def text(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 500) for _ in range(tokens)]


def answer(
    model: LoadedModel, ids: list[int], owner: str = "", salt: str = ""
) -> tuple[list[int], int]:
    """What the model answers, and how many tokens of the prompt it computed."""
    before = model.summary().prompt.tokens
    request = hmt.Request(ids, 12, ignore_eos=True, owner=owner, cache_salt=salt)
    found = model.infer(request).token_ids
    return found, model.summary().prompt.tokens - before


@pytest.mark.parametrize("path", [MINI_DENSE, MINI_MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("way", WAYS)
def test_what_texts_share_is_computed_once(way: str, path: Path) -> None:
    shared = text(330, 1)
    prompts = [shared + text(20, 2), shared + text(50, 3), shared, text(40, 4)]
    with hmt.Engine(**WAYS[way], **OPTIONS) as engine:
        model = engine.load_model(path)
        wanted = [answer(model, ids) for ids in prompts]
        assert [computed for _, computed in wanted] == [350, 380, 330, 40]
    with hmt.Engine(prefix_cache=True, **WAYS[way], **OPTIONS) as engine:
        model = engine.load_model(path)
        found = [answer(model, ids) for ids in prompts]
        assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
        # 330 tokens are 20 whole pages and 10 tokens.
        assert [computed for _, computed in found] == [350, 60, 10, 40]
        # What was answered goes on as a prompt: 361 of its tokens are there, 22 pages.
        longer = [*prompts[0], *found[0][0], *text(30, 5)]
        assert answer(model, longer)[1] == len(longer) - 16 * 22
        assert model.summary().prefixes["hit_tokens"] == 320 + 320 + 16 * 22


def test_a_restart_finds_what_was_kept(tmp_path: Path) -> None:
    ids, folder = text(700, 1), tmp_path / "prefixes"
    with hmt.Engine(prefix_cache_dir=folder, **OPTIONS) as engine:
        wanted, computed = answer(engine.load_model(MINI_DENSE), ids)
        assert computed == 700
    for options in ({}, {"kv_gpu_memory": "6MiB", "max_prefill_tokens": 32, "max_batch": 1}):
        with hmt.Engine(prefix_cache_dir=folder, **options, **OPTIONS) as engine:
            model = engine.load_model(MINI_DENSE)
            found, computed = answer(model, ids)
            counted = model.summary().prefixes
        assert found == wanted
        if not options:
            assert computed == 700 - 16 * 43 and counted["drive_read_pages"] == 43


def test_other_numbers_are_other_texts(tmp_path: Path) -> None:
    ids, folder = text(300, 1), tmp_path / "prefixes"
    with hmt.Engine(prefix_cache_dir=folder, **OPTIONS) as engine:
        answer(engine.load_model(MINI_DENSE), ids)
    others: list[tuple[Path, dict[str, Any]]] = [
        (MINI_DENSE, {"quantization": "w8a8"}),
        (MINI_DENSE, {"dtype": "bfloat16"}),
        (MINI_MOE, {}),
    ]
    for path, options in others:
        with hmt.Engine(prefix_cache_dir=folder, **(OPTIONS | options)) as engine:
            assert answer(engine.load_model(path), ids)[1] == 300


def test_requests_that_wait_are_let_in_when_prefixes_have_to_go() -> None:
    requests = [hmt.Request(text(400, n), 10, ignore_eos=True) for n in range(6)]
    with hmt.Engine(prefix_cache=True, max_batch=3, **OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        answers = [one.token_ids for one in model.infer_batch(requests)]
        assert model.summary().prefixes["evicted"] > 0
        assert [one.token_ids for one in model.infer_batch(requests)] == answers
        kv = model._core.memory.kv
        model.summary()  # once the last step has ended
        assert kv.allocator.free_tokens == kv.allocator.capacity_tokens, (
            "what nobody uses counts as free"
        )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_owners_and_salts_share_nothing_unless_told(way: str, shared: bool) -> None:
    ids = text(130, 1)
    with hmt.Engine(prefix_cache=True, prefix_shared=shared, **WAYS[way], **OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        wanted, _ = answer(model, ids, "alice")
        asked = [("bob", ""), ("", ""), ("alice", "x"), ("bob", "x"), ("", '["alice", "", ""]')]
        for owner, salt in asked:
            found, computed = answer(model, ids, owner, salt)
            new = not shared or (salt != "" and (owner, salt) != ("bob", "x"))
            assert (found, computed) == (wanted, 130 if new else 2), (owner, salt)
        for owner, salt in [("alice", ""), *asked]:
            assert answer(model, ids, owner, salt) == (wanted, 2)


def test_answers_and_beams_of_one_request_share_its_prompt() -> None:
    ids = text(300, 1)
    with hmt.Engine(prefix_cache=True, max_batch=3, **OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        for owner in ("alice", "bob"):
            before = model.summary().prompt.tokens
            model.infer_choices(hmt.Request(ids, 8, owner=owner, cache_salt="x"), 5)
            assert model.summary().prompt.tokens - before == 300
            model.beam_search(hmt.Request(ids, 8, owner=owner), 3)
            assert model.summary().prompt.tokens - before == 600, "beams take no part"


def test_a_flood_of_prompts_leaves_others_their_share() -> None:
    """1,024 positions are 64 pages, of which a prompt of the flood takes 26 while it runs."""
    with hmt.Engine(prefix_cache=True, max_batch=1, **OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        kept = text(200, 1)
        wanted, _ = answer(model, kept, "quiet")
        for seed in range(2, 14):
            answer(model, text(400, seed), "noisy")
        assert model.summary().prefixes["evicted"] > 100
        assert answer(model, kept, "quiet") == (wanted, 8)


def test_another_process_with_another_key_reads_nothing(tmp_path: Path) -> None:
    """Scopes are the same after a restart, and what the folder shows does not name them."""
    ids, folder = text(400, 1), tmp_path / "prefixes"
    owners = {"alice-key": ids, "bob-key": text(400, 2)}
    for owner, prompt in owners.items():
        with hmt.Engine(prefix_cache_dir=folder, **OPTIONS) as engine:
            assert answer(engine.load_model(MINI_DENSE), prompt, owner, "pepper")[1] == 400
    shown = b"".join(file.name.encode() + file.read_bytes() for file in folder.iterdir())
    assert not any(word in shown for word in (b"alice-key", b"bob-key", b"pepper"))
    for owner, salt in (
        ("bob-key", "pepper"),
        ("alice-key", ""),
        ("", ""),
        ("alice-key", "pepper"),
    ):
        with hmt.Engine(prefix_cache_dir=folder, **OPTIONS) as engine:
            model = engine.load_model(MINI_DENSE)
            computed = answer(model, ids, owner, salt)[1]
            read = model.summary().prefixes["drive_read_pages"]
            mine = (owner, salt) == ("alice-key", "pepper")
            assert (computed, read) == ((16, 24) if mine else (400, 0)), (owner, salt)


@pytest.mark.parametrize("wrong", [{"owner": 5}, {"cache_salt": None}])
def test_owners_and_salts_are_text(wrong: dict[str, Any]) -> None:
    with hmt.Engine(**OPTIONS) as engine, pytest.raises(RequestError, match="must be text"):
        engine.load_model(MINI_DENSE).infer(hmt.Request([5, 6], 1, **wrong))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kv_gpu_memory": "8MiB", "kv_policy": "select"}, "kv-policy exact"),
        ({"gpus": "fake", "gpu_memory": "12MiB"}, "--gpu-memory"),
    ],
)
def test_where_texts_cannot_share_that_is_said(options: dict[str, Any], told: str) -> None:
    with (
        hmt.Engine(prefix_cache=True, **options, **OPTIONS) as engine,
        pytest.raises(ConfigError, match=told),
    ):
        engine.load_model(MINI_DENSE)


def test_positions_that_depend_on_a_texts_length_are_told_apart() -> None:
    """By what a prompt has, and not by what its answer may have."""
    short: Any = SimpleNamespace(whole=512, positions=640)
    long, longer = (SimpleNamespace(whole=n, positions=2000) for n in (600, 700))
    assert salt_of(short, None) == salt_of(long, None) == ""
    for gradual in (False, True):
        border = RotaryBorder(512, gradual=gradual)
        assert salt_of(short, border) == ""
        assert salt_of(long, border) != ""
        assert (salt_of(long, border) == salt_of(longer, border)) is not gradual
