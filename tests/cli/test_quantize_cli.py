"""`hmt quantize`: what its flags become."""

import pytest

from hmt import quantizing
from hmt.base.errors import ConfigError
from hmt.base.units import GIB
from hmt.cli.options import embedded_model
from hmt.memory import device


@pytest.fixture
def options(hmt, monkeypatch, tmp_path):
    """What the command asks for, on a machine with a GPU or without."""

    def asked(*flags: str, gpu: bool) -> quantizing.QuantizeOptions:
        seen = []

        def stop(model, out, options, **rest):
            seen.append(options)
            raise ConfigError("enough")

        monkeypatch.setattr(quantizing, "quantize", stop)
        monkeypatch.setattr(device, "gpu_is_usable", lambda: gpu)
        done = hmt("quantize", embedded_model(), tmp_path / "out", *flags)
        assert done.code == 2 and "enough" in done.err
        return seen[0]

    return asked


def test_the_first_gpu_quantises_where_there_is_one(options):
    assert options(gpu=False).gpu is None
    assert options(gpu=True).gpu == "0" and options(gpu=True).gpu_memory_bytes is None
    assert options("--gpu-memory", "0", gpu=True).gpu is None
    assert options("--gpus", "1", gpu=False).gpu == "1"
    some = options("--gpu-memory", "2GiB", gpu=False)
    assert (some.gpu, some.gpu_memory_bytes) == ("0", 2 * GIB)


def test_several_gpus_are_refused(hmt, tmp_path):
    done = hmt("quantize", embedded_model(), tmp_path / "out", "--gpus", "0,1")
    assert done.code == 2 and "--gpus 0,1: one GPU quantises; name one" in done.err
