"""`hmt` alone, presets, and settings that are remembered for a model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hmt.base.errors import ConfigError
from hmt.cli import first_run, machine_fit, models
from hmt.cli.options import EngineOptions
from hmt.cli.presets import PRESETS
from hmt.cli.remembered import settings_file, with_settings
from hmt.engine import EngineConfig
from hmt.hardware.machine_file import read_machine
from hmt.planner.catalogue import KnownModel, known_models

GIB = 1 << 30


@pytest.fixture(autouse=True)
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HMT_CACHE", str(tmp_path / "cache"))


def dense(*names: str) -> list[KnownModel]:
    return [model for model in known_models() if model.name in names]


def test_models_are_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.resolve(context=8192, max_batch=1)
    some = dense("qwen3-0.6b", "llama-3.1-8b", "qwen3-32b", "llama-3.1-70b")
    desktop = read_machine("rtx-4090-desktop")
    alone = replace(desktop, devices=())
    fits = machine_fit.fits_of(some, alone, config, 20 * GIB)
    assert [fit.place for fit in fits.values()] == ["fits in RAM"] * 3 + ["from disk"]
    assert [fit.file_type for fit in fits.values()] == ["Q8_0", "Q8_0", "Q3_K_M", "IQ2_XXS"]
    speeds = [fit.tokens_per_s for fit in fits.values()]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > 0
    # With a GPU all of them are faster, and larger files fit.
    faster = machine_fit.fits_of(some, desktop, config, 20 * GIB)
    assert [fit.place for fit in faster.values()] == ["fits with GPU"] * 4
    assert faster["qwen3-32b"].file_type == "Q8_0"
    assert faster["llama-3.1-8b"].tokens_per_s > 3 * fits["llama-3.1-8b"].tokens_per_s
    tiny = machine_fit.fits_of(some[2:3], alone, config, GIB)
    assert tiny["qwen3-32b"].place == "does not run"
    lines = "\n".join(first_run.table(desktop, some, faster, {some[0].source("Q8_0")}))
    assert "* qwen3-0.6b" in " ".join(lines.split()) and "RTX 4090" in lines

    # What was planned is remembered, for the same machine and memory only.
    monkeypatch.setattr(KnownModel, "shape", lambda self, kind: 1 / 0)
    assert machine_fit.fits_of(some[2:3], alone, config, GIB) == tiny
    with pytest.raises(ZeroDivisionError):
        machine_fit.fits_of(some[2:3], alone, config, 2 * GIB)
    (file,) = Path(settings_file().parents[2] / "cache").glob("first-run.json")
    for broken in ("{", "[]", json.dumps({"key": 1, "fits": 3})):
        file.write_text(broken)
        with pytest.raises(ZeroDivisionError):
            machine_fit.fits_of(some[2:3], alone, config, GIB)


def test_without_a_terminal_the_table_is_printed_and_that_is_all(hmt, monkeypatch):
    few = tuple(dense("qwen3-0.6b", "qwen3-4b"))
    monkeypatch.setattr(first_run, "known_models", lambda: few)
    monkeypatch.setattr(models, "installed_sources", lambda: {few[1].source("Q8_0")})
    done = hmt()
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()]
    assert ["qwen3-0.6b", "762", "MiB", "Q8_0"] in [row[:4] for row in rows]
    assert "*" in [row[0] for row in rows if "qwen3-4b" in row]
    assert "hmt pull NAME" in done.out
    assert hmt("--help").out.count("Without a command") == 1


def test_a_preset_and_remembered_settings_fill_what_was_not_given(hmt):
    for name in PRESETS:
        resolved = EngineConfig.resolve(**EngineOptions(preset=name).arguments())
        assert resolved.host_memory_bytes > 0
    given = EngineOptions(preset="long-context", context=4096)
    assert given.arguments()["context"] == 4096 and given.arguments()["kv_quant"] == "fp8"
    with pytest.raises(ConfigError, match="choose coding"):
        EngineOptions(preset="fast").arguments()

    prompt = ("What is 12 + 30?", "--no-summary")
    model = "mini-dense-unknown"
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text(f'["{model}"]\ncontext = 256\ntrace = "a.json"\n')
    options = with_settings(EngineOptions(threads=1), model)
    assert (options.context, options.threads, options.trace) == (256, 1, Path("a.json"))
    assert with_settings(EngineOptions(context=64), model).context == 64
    assert with_settings(EngineOptions(), "another") == EngineOptions()

    from hmt.cli.options import embedded_model

    folder = str(embedded_model())
    options = ("--context", "512", "--no-prefix-cache", "--remember")
    assert hmt("run", folder, *prompt, *options).out.strip() == "42"
    kept = with_settings(EngineOptions(), folder)
    assert (kept.context, kept.prefix_cache) == (512, False)
    assert with_settings(EngineOptions(), model).context == 256  # others stay
    refused = hmt("run", *prompt, "--remember")
    assert refused.code == 2 and "name one" in refused.err

    for text, says in (
        ("context = ", "cannot be read"),
        ("[a]\nspeed = 1", "no option"),
        ('[a]\ncontext = "x"', "int is wanted"),
        ("[a]\nprefix_cache = 1", "bool is wanted"),
        ("a = 1", "no table"),
    ):
        settings_file().write_text(text)
        with pytest.raises(ConfigError, match=says):
            with_settings(EngineOptions(), "a")
