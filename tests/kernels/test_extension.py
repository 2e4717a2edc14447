"""How HMT_KERNELS chooses between the extension and plain torch."""

import importlib
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hmt.base import log
from hmt.base.errors import ConfigError, MachineError
from hmt.kernels.cpu import extension


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(log, "_warned", set())
    extension.load.cache_clear()
    yield
    extension.load.cache_clear()


def test_reference_means_no_extension(monkeypatch):
    monkeypatch.setenv("HMT_KERNELS", "reference")
    assert extension.load() is None


def test_an_unknown_choice_is_an_error(monkeypatch):
    monkeypatch.setenv("HMT_KERNELS", "fast")
    with pytest.raises(ConfigError, match="auto, reference, native"):
        extension.load()


def test_without_the_extension_auto_says_so_once(monkeypatch, caplog):
    monkeypatch.setenv("HMT_KERNELS", "auto")
    monkeypatch.setitem(sys.modules, "hmt._native", None)  # importing it raises ImportError
    with caplog.at_level(logging.WARNING, logger="hmt"):
        assert extension.load() is None
        extension.load.cache_clear()
        assert extension.load() is None
    assert len(caplog.records) == 1 and "plain torch" in caplog.text


def test_without_the_extension_native_is_an_error(monkeypatch):
    monkeypatch.setenv("HMT_KERNELS", "native")
    monkeypatch.setitem(sys.modules, "hmt._native", None)
    with pytest.raises(MachineError, match="HMT_NATIVE=on"):
        extension.load()


def test_the_instruction_set_is_the_one_that_was_asked_for(monkeypatch):
    native = extension.load()
    if native is None:
        pytest.skip("the extension was not built, or HMT_KERNELS=reference")
    before = native.isa()
    try:
        for isa in native.isas():
            monkeypatch.setenv("HMT_ISA", isa)
            extension.load.cache_clear()
            assert extension.load().isa() == isa
    finally:
        native.set_isa(before)


def test_products_alone_use_tiles():
    """Of other kernels there is no version with AMX, and their tests leave it out."""
    root = Path(__file__).parents[2]
    names = re.search(r'INCLUDE REGEX\s+"/(.*)\[.\]isa', (root / "CMakeLists.txt").read_text())
    compiled = {
        str(file.relative_to(root / "csrc")).removesuffix(".isa.cpp")
        for file in (root / "csrc").glob("*/*.isa.cpp")
        if re.fullmatch(names[1], str(file.relative_to(root / "csrc")).removesuffix(".isa.cpp"))
    }
    used = {
        file.relative_to(root / "csrc")
        for file in (root / "csrc").glob("*/*")
        if "HMT_AMX" in file.read_text()
    }
    tables = {str(file).removesuffix(".isa.cpp") for file in used if file.name.endswith(".cpp")}
    assert tables == compiled - {"linear/panels_float"}  # whose functions linear/panels calls
    assert {str(file.parent) for file in used} == {"base", "linear"}


@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_an_instruction_set_that_does_not_run_here_is_an_error(monkeypatch, kernels):
    without = SimpleNamespace(isas=lambda: ["portable", "avx2"])
    monkeypatch.setenv("HMT_KERNELS", kernels)
    monkeypatch.setenv("HMT_ISA", "amx")
    monkeypatch.setattr(importlib, "import_module", lambda name: without)
    with pytest.raises(MachineError, match="HMT_ISA=amx, but this machine runs portable, avx2"):
        extension.load()


def test_an_unknown_instruction_set_is_an_error(monkeypatch):
    monkeypatch.setenv("HMT_ISA", "mmx")
    monkeypatch.setenv("HMT_KERNELS", "native")
    with pytest.raises(ConfigError, match="auto, portable, avx2, avx512, avx512-bf16, amx"):
        extension.load()


@pytest.mark.parametrize("file", ["/nowhere/_native.so", "/nowhere/_native"])
def test_a_file_of_kernels_that_is_not_there_is_an_error(monkeypatch, file):
    monkeypatch.delitem(sys.modules, "hmt._native", raising=False)
    monkeypatch.setenv("HMT_KERNELS", "native")
    monkeypatch.setenv("HMT_EXTENSION", file)
    with pytest.raises(MachineError, match="/nowhere/_native"):
        extension.load()


_COUNT = """
import os, sys, torch
from hmt.kernels.cpu import extension, threads
usable = threads.usable_threads()
assert 1 <= usable <= os.cpu_count()
torch.set_num_threads(usable + 7)
assert threads.set_threads(None) == usable  # torch's setting is too large
native = extension.load()
for wanted in (3, 1):
    assert threads.set_threads(wanted) == wanted == torch.get_num_threads()
    assert native is None or native.threads() == wanted
assert threads.set_threads(None) == 1  # as torch was told
"""


def test_one_number_of_threads_for_torch_and_the_extension():
    subprocess.run([sys.executable, "-c", _COUNT], check=True, timeout=100)
