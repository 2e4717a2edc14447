"""What the C library's heap keeps for activations, by the page faults that the kernel counts."""

import resource
import subprocess
import sys

import pytest

LAYERS = """
import ctypes, resource, sys
import torch
from hmt.memory import keep_freed_activations

MIB = 1 << 18  # numbers in f32
PR_SET_THP_DISABLE = 41  # how many huge pages the kernel has would decide how many faults there are
# Plain ints leave the upper halves of registers as they are, and the kernel may refuse those.
refused = ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, *map(ctypes.c_ulong, (1, 0, 0, 0)))
assert not refused
keep_freed_activations(int(sys.argv[1]))
keep_freed_activations(0)  # another model, which needs less


def layer(hidden):
    heads = torch.ones(12 * MIB)
    out = torch.ones(8 * MIB)
    del heads
    gate_up = torch.ones(24 * MIB)
    product = torch.ones(12 * MIB)
    del gate_up
    return hidden + out


for step in range(8):
    hidden = torch.ones(8 * MIB)
    for _ in range(3):
        hidden = layer(hidden)
    if step == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of_layers(kept_bytes: int) -> int:
    command = [sys.executable, "-c", LAYERS, str(kept_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="options of glibc's heap")
def test_freed_activations_are_used_again_without_page_faults() -> None:
    """Less than the pages of one of the 18 layers: what a heap keeps by itself is by chance."""
    assert faults_of_layers(256 << 20) < (64 << 20) // resource.getpagesize()
