"""Settings of keys and values, what they take, and a small measurement of the embedded model."""

from pathlib import Path

import pytest
import torch

from hmt.base.errors import ConfigError
from hmt.contracts.kv import PinnedPages, min_device_pages
from hmt.engine import Engine, EngineConfig
from hmt.engine.loading.prepare import prepare
from hmt.kvcache.codecs import STATIC, Int8PerToken, Residual
from hmt_bench.kv_quality import SETTINGS, KVMemory, Setting, Sizes, prompt_slice, run

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "src" / "hmt" / "embedded" / "mini-dense"
TEXT = (ROOT / "assets" / "text" / "valid.txt").read_text(encoding="utf-8")


def test_settings_are_read():
    assert Setting.parse("full") == Setting("full")
    assert Setting.parse("warm:int8,cold:int4").cold == "int4"
    assert Setting.parse("cold:int8/int4+parts") == Setting(
        "cold:int8/int4+parts", cold="int8/int4+parts"
    )
    assert Setting.parse("select:bound@0.1") == Setting(
        "select:bound@0.1", warm="exact", select=0.1
    )
    assert Setting.parse("cold:int8,select:bound@0.05").warm is None
    for wrong in ("bound", "bound@", "bound@2", "lru@0.1", "bound@0"):
        with pytest.raises(ConfigError, match=r"as in select:bound@0\.1"):
            Setting.parse(f"select:{wrong}")
    for wrong in ("", "int8", "near:int8", "warm:", "warm:int8,full"):
        with pytest.raises(ConfigError, match="write full, near:fp8, warm:NAME"):
            Setting.parse(wrong)
    assert len({Setting.parse(name) for name in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize("length", [1024, 2048, 8192, 32768])
def test_a_prompt_is_read_in_pieces_that_leave_room_for_the_share(length):
    chunk = prompt_slice(length, 0.12)
    assert min_device_pages(chunk, 1, PinnedPages()) <= max(length / 16 * 0.12, 25)


@pytest.fixture(scope="module")
def prepared():
    options = {"host_memory": "1GiB", "context": 2048, "max_batch": 1}
    return prepare(MODEL, EngineConfig.resolve(**options))


def test_bytes_are_those_of_the_codec(prepared):
    row = Int8PerToken(2, 64)
    for name, far in (
        ("full", 4096.0),
        ("warm:int8", 2 * row.unit_bytes * 8 / 16),
        ("cold:int8+parts", 2 * Residual(row).unit_bytes * 8 / 16),
    ):
        memory = KVMemory.of(Setting.parse(name), 8192, 0.12, prepared, {})
        assert sum(memory.pages.values()) == 512
        told = memory.as_json()
        assert told["near_share"] == (1 if name == "full" else 61 / 512)
        mean = 4096 * told["near_share"] + far * (1 - told["near_share"])
        assert told["mean_bytes_per_token"] == pytest.approx(mean)
    both = KVMemory.of(Setting.parse("warm:int8,cold:int4"), 8192, 0.12, prepared, {})
    assert both.pages == {"near": 61, "warm": 225, "cold": 226}


def test_a_small_measurement():
    settings = ["full", "warm:exact", "cold:int8+parts", f"cold:{STATIC}@prose", "cold:sparse24"]
    content = run(MODEL, TEXT, settings, Sizes({768: 1}, tasks=2, windows=0))
    results = {result["setting"]: result for result in content["results"]}
    assert [*results] == settings
    assert content["machine"]["hmt"]
    for name, result in results.items():
        assert result["tasks"] == results["full"]["tasks"], "tasks are short"
        assert result["retrieval"]["768"][1] == 8
        far = {"full": "near", "warm:exact": "warm"}.get(name, "cold")
        assert result["bytes_per_token"].keys() == {"near", far}
    for name in settings[:3]:
        assert results[name]["retrieval"]["768"] == [8, 8]
    bytes_per_token = [results[name]["mean_bytes_per_token"] for name in settings[1:4]]
    assert bytes_per_token == sorted(bytes_per_token, reverse=True)


def test_what_is_selected_matters_only_where_something_is_left_out():
    settings = ["select:bound@1.0", "select:bound@0.01"]
    content = run(MODEL, TEXT, settings, Sizes({1024: 1}, tasks=2, windows=0))
    every, few = (result["retrieval"]["1024"] for result in content["results"])
    assert every == [8, 8]
    assert few[0] < 8, "later questions are decoded, which sees the pages that always stay"


def test_settings_of_unknown_codecs_are_told_before_anything_is_measured():
    with pytest.raises(ConfigError, match="no way to keep keys and values"):
        run(MODEL, TEXT, ["full", "cold:int7"], Sizes({768: 1}, tasks=0, windows=0))


def test_keys_and_values_are_those_of_the_tokens_up_to_then():
    with Engine(host_memory="1GiB", context=64, max_batch=1, dtype="float32") as engine:
        model = engine.load_model(MODEL)
        found = []
        for count in (40, 23):
            layers = {}
            model.keys_and_values(
                range(5, 5 + count),
                lambda index, key, value, into=layers: into.update({index: (key, value)}),
            )
            assert [*layers] == [*range(8)]
            found.append(layers)
        for index in range(8):
            for longer, shorter in zip(found[0][index], found[1][index], strict=True):
                assert longer.shape == (40, 2, 64) and shorter.shape == (23, 2, 64)
                assert torch.allclose(longer[:23], shorter, atol=1e-4)
