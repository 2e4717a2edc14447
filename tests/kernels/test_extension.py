"""How HMT_KERNELS chooses between the extension and plain torch."""

import logging
import sys

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
