"""`hmt convert` and `hmt verify`, and packs where other commands take a checkpoint."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from hmt.cli import console
from hmt.cli.options import embedded_model
from hmt.engine.loading import packs
from hmt.weights.pack import read_manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("packs")


@pytest.fixture
def pack(hmt, folder):
    """The embedded model in 8 bits."""
    if not (folder / "pack").exists():
        done = hmt("convert", embedded_model(), folder / "pack", "--quant", "w8a8")
        assert done.code == 0, done.err
        assert "(w8a8)" in done.out and "from 14.0 MiB" in done.out
    return folder / "pack"


def test_what_was_converted_answers_plans_and_is_whole(hmt, pack):
    answer = json.loads(hmt("run", pack, "What is 12 + 30?", "--json").out)
    assert answer["text"] == "42"
    plan = json.loads(hmt("plan", pack, "--host-memory", "6MiB", "--json").out)
    published = json.loads(hmt("plan", embedded_model(), "--json").out)["published_bytes"]
    assert plan["published_bytes"] == published and "disk" in plan["homes"].values()
    done = hmt("verify", pack)
    assert done.code == 0 and "28 extents and files are what was written" in done.out


def test_what_is_no_pack_is_named_so(hmt, pack, tmp_path):
    """Not a file, not a folder without one; and not a pack that lacks its manifest."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "data-00001.hmt").write_bytes(b"")
    for name, said in ((".", "is no pack"), ("model.gguf", "is no pack"), ("half", "unfinished")):
        done = hmt("verify", tmp_path / name)
        assert done.code == 1 and said in done.err and "hmt convert" in done.err


def test_damage_is_listed_and_fails(hmt, pack, tmp_path):
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in pack.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    content = bytearray((bad / "data-00001.hmt").read_bytes())
    extents = dict(read_manifest(bad).extents())
    content[extents["layer 4 ffn"].offset + 1000] ^= 1
    (bad / "data-00001.hmt").write_bytes(content)
    (bad / "tokenizer_config.json").write_text("{}")
    done = hmt("verify", bad)
    assert done.code == 1 and "2 of 28 extents and files damaged" in done.out
    assert "data-00001.hmt: layer 4 ffn, " in done.out and "tokenizer_config.json" in done.out
    (bad / "manifest.json").write_text("{}")
    done = hmt("verify", bad)
    assert done.code == 1 and "manifest.json" in done.err


def test_an_existing_pack_is_replaced_only_by_force(hmt, folder, tmp_path):
    out = tmp_path / "out"
    assert hmt("convert", embedded_model(), out).code == 0
    done = hmt("convert", embedded_model(), out, "--quantization", "w4a8")
    assert done.code == 2 and "--force" in done.err
    assert hmt("convert", embedded_model(), out, "--quant", "w4a8", "--force").code == 0
    done = hmt("run", out, "hello", "--quant", "w8a8")
    assert done.code == 2 and "is a pack of w4a8:32, and w8a8 was asked for" in done.err


def test_too_little_memory_is_said_with_what_would_do(hmt, tmp_path):
    done = hmt("convert", embedded_model(), tmp_path / "out", "--host-memory", "1MiB")
    assert done.code == 1 and "give --host-memory" in done.err
    enough = done.err.split("--host-memory ")[1].split()[0]
    done = hmt("convert", embedded_model(), tmp_path / "out", "--host-memory", enough)
    assert done.code == 0, done.err


def test_an_interrupted_conversion_says_how_to_go_on(hmt, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(packs, "convert", interrupted)
    done = hmt("convert", embedded_model(), tmp_path / "out")
    assert done.code == 130 and "goes on from here" in done.err


def test_the_bar_says_what_is_done(monkeypatch):
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=120)
    monkeypatch.setattr(console, "notes", lambda: terminal)
    with console.working("opening") as report:
        report("checking", 1 << 20, 2 << 20)
        report("converting", 1 << 30, 4 << 30)
    assert "converting" in shown.getvalue() and "1.00 GiB of 4.00 GiB" in shown.getvalue()


def test_the_option_of_the_engine_is_checked(hmt, pack: Path):
    done = hmt("run", pack, "hello", "--verify-reads", "sometimes")
    assert done.code == 2 and "first, always, never" in done.err
