"""A real device: copies in parts, their times, and work that is captured in pieces."""

import subprocess
import sys

import pytest
import torch

from hmt.memory.device import Device, SegmentKind, SegmentRecorder, open_device, rates_at_once
from hmt.memory.device.link import Link

pytestmark = pytest.mark.gpu

SIZES = (16, 1 << 20, 3 << 20, 4096)


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cuda:0")


def test_copies_arrive_whole_and_tell_how_long_they_took(device: Device) -> None:
    size = (65 << 20) + 24
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True).random_(0, 256)
    target = device.allocate(size).fill_(7)
    torch.cuda.synchronize()
    copy = device.copy(target, source)
    copy.wait()
    assert copy.reached() and torch.equal(target.cpu(), source)
    rate = size / copy.elapsed_s()
    assert 1e8 < rate < 1e12


def test_many_copies_arrive_together(device: Device) -> None:
    sources = [torch.empty(n, dtype=torch.uint8, pin_memory=True).random_(0, 256) for n in SIZES]
    targets = [device.allocate(n) for n in SIZES]
    with device.compute_stream():
        for target in targets:
            target.fill_(7)
        copy = device.copy_each(targets, sources, [device.record_event()])
        device.wait_event(copy)
        again = [target.clone() for target in targets]
        device.synchronize()
    assert copy.reached() and copy.elapsed_s() > 0
    for found, source in zip(again, sources, strict=True):
        assert torch.equal(found.cpu(), source)


def test_pieces_run_in_order_with_the_cpus_part_between_them(device: Device) -> None:
    state = torch.zeros(1000, device=device.where)
    there, back = (device.pinned((1000,), torch.float32) for _ in "ab")
    done = []

    def on_cpu(factor: float) -> None:
        device.record_event().wait()
        torch.mul(there, factor, out=back)
        done.append(float(there[0]))

    def compute(recorder: SegmentRecorder) -> torch.Tensor:
        kept = state + 1  # made in the first piece, read in the last one
        for factor in (2.0, 3.0):
            there.copy_(state, non_blocking=True)
            recorder.host_call(lambda factor=factor: on_cpu(factor))
            state.copy_(back, non_blocking=True)
            state.add_(1)
        return state + kept

    with device.compute_stream():
        captured = device.capture_segments(compute)
        graph, call = SegmentKind.DEVICE_GRAPH, SegmentKind.HOST_CALL
        assert [one.kind for one in captured.segments] == [graph, call, graph, call, graph]
        assert not done, "nothing is computed while it is captured"
        for start in (5.0, 11.0, -2.0):
            state.fill_(start)
            result = captured.replay()
            device.synchronize()
            first = 2 * start + 1
            assert done[-2:] == [start, first]
            assert result.eq(3 * first + 1 + start + 1).all()


def test_what_is_written_back_was_computed_before(device: Device) -> None:
    state = torch.zeros(1 << 20, device=device.where)
    there = device.pinned(state.shape, torch.float32)
    with device.compute_stream():
        for value in (3.0, 4.0):
            for _ in range(50):
                state.add_(1).fill_(value)

            def send() -> None:
                there.copy_(state, non_blocking=True)

            written = device.write_back(send)
            written.wait()
            assert written.reached() and there.eq(value).all()


def test_a_capture_that_fails_leaves_the_device_usable(device: Device) -> None:
    state = torch.ones(10, device=device.where)

    def compute(recorder: SegmentRecorder) -> torch.Tensor:
        recorder.wait(lambda: None)
        return state + state.sum().item()  # waits, which nothing captured may do

    with device.compute_stream():
        with pytest.raises(RuntimeError):
            device.capture_segments(compute)
        result = device.capture_segments(lambda recorder: state * 3).replay()
    device.synchronize()
    assert result.eq(3).all()


def test_the_link_keeps_going_beside_the_cpu(device: Device) -> None:
    source = torch.ones(8 << 20, dtype=torch.uint8, pin_memory=True)
    target = device.allocate(8 << 20)
    numbers = torch.ones(1 << 20)

    def read() -> int:
        numbers.sum()
        return numbers.nbytes

    link, cpu = rates_at_once(Link(device, target, source), read, 0.05)
    assert link > 1e8 and cpu > 1e8


_OTHER = """
import torch
held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
input()
"""


def test_what_other_programs_take_is_not_counted(device: Device) -> None:
    before = device.used_bytes()
    own = torch.empty(256 << 20, dtype=torch.uint8, device=device.where)
    with_own = device.used_bytes()
    assert 256 << 20 <= with_own - before <= 260 << 20
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert abs(device.used_bytes() - with_own) < 64 << 20
    finally:
        other.communicate("\n")
    del own
    device.empty_cache()
    assert device.used_bytes() <= before
