"""Every family with its keys and values at several levels: the same logits as at one."""

import random
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from plain_memory import published, random_reference
from random_configs import Case, cases

import hmt
from hmt.contracts.kv import ring_pages

NEAR = 1e-5  # relative: parts of a row's attention are added in f32, in another order
OPTIONS = {"dtype": "float32", "prefill_chunk": 16, "max_batch": 1, "host_memory": "64MiB"}
POSITIONS = 700


def longer(case: Case) -> Case:
    """The same, for texts that do not fit near."""
    case.config.max_position_embeddings = POSITIONS
    return case


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_logits_do_not_depend_on_where_keys_and_values_lie(case: Case, tmp_path: Path) -> None:
    published(random_reference(longer(case).config, case.seed), tmp_path)
    shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), tmp_path)
    rng = random.Random(case.seed)
    tokens = [rng.randrange(case.config.vocab_size) for _ in range(POSITIONS)]
    rows, prefill = range(POSITIONS - 60, POSITIONS), POSITIONS - 30
    with hmt.Engine(context=POSITIONS, **OPTIONS) as engine:
        model = engine.load_model(tmp_path)
        wanted = model.logits(tokens, rows, prefill=prefill)
        sizes = model.prepared.demand.kv_sizes
    rings = [ring_pages(window, 16) * page for window, page in sizes.ring_pages.items()]
    near = sum(rings) + 25 * sizes.hot_page
    host = 10 * sizes.warm_page
    ways = [{}, {"kv_disk": str(tmp_path), "kv_host_memory": 0}]
    ways += [{"kv_disk": str(tmp_path), "kv_host_memory": host}]
    # A family has three variants or more: each tries two of the ways.
    for way in (ways[case.seed % 3], ways[(case.seed + 1) % 3]):
        with hmt.Engine(context=POSITIONS, kv_device_memory=near, **way, **OPTIONS) as engine:
            model = engine.load_model(tmp_path)
            found = model.logits(tokens, rows, prefill=prefill)
            kv = model.summary().kv
        assert kv is not None
        assert kv.most.get("near", 0) < POSITIONS // 16 or not sizes.hot_page
        assert all(kv.most[name] for name in kv.capacity if kv.capacity[name] and sizes.hot_page)
        error = float((found - wanted).norm() / wanted.norm())
        assert error <= NEAR, way
