"""Answers to a device that asks for experts through shared memory; a thread stands for it."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from encoded import random_weight

from hmt.contracts.encoding import (
    BLOCK_SHAPES,
    PANEL_ROWS,
    Activations,
    Encoding,
    WeightTensor,
)
from hmt.kernels import ops
from hmt.kernels.cpu import extension
from hmt.kernels.cpu.abi import ACTIVATIONS, DTYPES
from hmt.kernels.cpu.experts import native_expert
from hmt.quant import Format, pack_codes, pack_groups

NATIVE = extension.load()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the extension was not built")
HIDDEN, WIDTH, EXPERTS, TOP, LAYERS = 64, 48, 9, 3, 5
Expert = tuple[int, Mapping[str, WeightTensor]]


def make_layer(seed: int) -> list[Expert]:
    shapes = {
        "gate_proj": (WIDTH, HIDDEN),
        "up_proj": (WIDTH, HIDDEN),
        "down_proj": (HIDDEN, WIDTH),
    }

    def weight(name: str, number: int) -> WeightTensor:
        kind = Encoding.INT8_CHANNEL
        return random_weight(kind, *shapes[name], activations=Activations.INT8_TOKEN, seed=number)

    return [
        (expert, {name: weight(name, 31 * seed + 3 * expert + n) for n, name in enumerate(shapes)})
        for expert in range(EXPERTS)
    ]


class Boxes:
    """What both sides share."""

    def __init__(self, layers: list[list[Expert]], tokens: int) -> None:
        self.x = torch.zeros(tokens, HIDDEN)
        self.total = torch.full((tokens, HIDDEN), float("nan"))
        self.chosen = torch.full((LAYERS, tokens, TOP), -1)
        self.scales = torch.zeros(LAYERS, tokens, TOP)
        self.flags = torch.zeros(LAYERS, 2, 16, dtype=torch.int32)
        self.cut = torch.full((LAYERS, 2), -1, dtype=torch.int32)
        served = []
        for layer, experts in enumerate(layers):
            parts = (
                *(self.x, self.chosen[layer], self.scales[layer], self.total),
                *(self.flags[layer, 0], self.flags[layer, 1], self.cut[layer]),
            )
            natives = [native_expert(NATIVE, *expert) for expert in experts]
            served.append((natives, *(part.data_ptr() for part in parts)))
        sizes = DTYPES[torch.float32], HIDDEN, HIDDEN, TOP, ACTIVATIONS["silu"]
        self.service: Any = NATIVE.ExpertService(tuple(served), *sizes)  # type: ignore[union-attr]


def serve(service: Any, *step: Any) -> tuple[bool, int, float, float]:
    """Begin a step and end it."""
    service.begin(*step)
    ended: tuple[bool, int, float, float] = service.end()
    return ended


def beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("tokens", [1, 4])
def test_every_layer_is_answered_in_its_turn(tokens: int) -> None:
    layers = [make_layer(seed) for seed in range(LAYERS)]
    boxes = Boxes(layers, tokens)
    random = torch.Generator().manual_seed(tokens)
    for step in (1, 2, 2**31 - 1):
        answers: list[tuple[torch.Tensor, torch.Tensor]] = []
        asked = 0
        questions = []
        for layer in range(LAYERS):
            x = torch.randn(tokens, HIDDEN, generator=random)
            chosen = torch.rand(tokens, EXPERTS, generator=random).argsort(1)[:, :TOP]
            mine = torch.rand(tokens, TOP, generator=random) < (0.5, 0.0, 1.0)[layer % 3]
            scales = torch.rand(tokens, TOP, generator=random)
            questions.append((x, torch.where(mine, -1, chosen), scales))
            asked += len(set(questions[-1][1].flatten().tolist()) - {-1})

        def device(
            step: int = step,
            questions: list[Any] = questions,
            answers: list[tuple[torch.Tensor, torch.Tensor]] = answers,
        ) -> None:
            for layer, (x, chosen, scales) in enumerate(questions):
                boxes.chosen[layer], boxes.scales[layer] = chosen, scales
                left = bool((chosen >= 0).any())
                if left:
                    boxes.x.copy_(x)
                    boxes.total.fill_(float("nan"))
                boxes.flags[layer, 0, 0] = step
                if left:
                    while int(boxes.flags[layer, 1, 0]) != step:
                        pass
                    wanted = ops.experts(x, layers[layer], chosen, scales, "silu", last=False)
                    answers.append((boxes.total.clone(), wanted))

        thread = beside(device)
        complete, experts, waited_s, computed_s = serve(boxes.service, step, tokens, 1, 60.0)
        thread.join()
        assert complete and experts == asked and waited_s > 0 and computed_s >= 0
        assert (boxes.flags[:, 1, 0] == step).all()
        assert answers and all(torch.equal(*pair) for pair in answers)


def test_nobody_waits_for_ever_where_a_device_falls_silent() -> None:
    boxes = Boxes([make_layer(seed) for seed in range(LAYERS)], 1)
    boxes.flags[:2, 0, 0] = 7  # two layers ask, and then nothing
    complete, experts, _, _ = serve(boxes.service, 7, 1, 1, 0.05)
    assert not complete and experts == 0
    assert (boxes.flags[:, 1, 0] == 7).all(), "kernels that wait for later layers end"


def test_steps_are_answered_in_the_order_in_which_they_were_begun() -> None:
    layers = [make_layer(seed) for seed in range(LAYERS)]
    boxes = Boxes(layers, 1)
    x, scales = torch.ones(1, HIDDEN), torch.ones(1, TOP)
    answers: dict[tuple[int, int], torch.Tensor] = {}

    def device() -> None:
        for step in (1, 2, 3):
            for layer in range(LAYERS):
                boxes.x.copy_(step * x)
                boxes.chosen[layer], boxes.scales[layer] = torch.arange(TOP), scales
                boxes.flags[layer, 0, 0] = step
                while int(boxes.flags[layer, 1, 0]) != step:
                    pass
                answers[step, layer] = boxes.total.clone()

    for step in (1, 2, 3):  # before anything was asked
        boxes.service.begin(step, 1, 1, 60.0)
    thread = beside(device)
    for _ in range(3):
        complete, experts, _, _ = boxes.service.end()
        assert complete and experts == LAYERS * TOP
    thread.join()
    for (step, layer), answer in answers.items():
        wanted = ops.experts(
            step * x, layers[layer], torch.arange(TOP)[None], scales, "silu", last=False
        )
        assert torch.equal(answer, wanted), (step, layer)


def test_a_step_that_was_not_begun_cannot_be_ended() -> None:
    boxes = Boxes([make_layer(seed) for seed in range(LAYERS)], 1)
    with pytest.raises(RuntimeError, match="no step was begun"):
        boxes.service.end()
    assert not serve(boxes.service, 1, 1, 1, 0.01)[0]


def test_a_service_that_goes_answers_what_was_begun() -> None:
    boxes = Boxes([make_layer(seed) for seed in range(LAYERS)], 1)
    boxes.service.begin(5, 1, 1, 0.05)
    del boxes.service
    assert (boxes.flags[:, 1, 0] == 5).all()


def codes_of(rows: int, columns: int, seed: int, activations: Activations) -> dict[str, Any]:
    """Numbers per code and per group, as they lie in no memory yet."""
    random = torch.Generator().manual_seed(seed)
    return {
        "codes": torch.randint(0, 16, (rows, columns), generator=random, dtype=torch.uint8),
        "scales": torch.rand(rows, columns // 32, generator=random).add(0.1).bfloat16(),
        "activations": activations,
    }


def packed(codes: torch.Tensor, scales: torch.Tensor, activations: Activations) -> WeightTensor:
    return WeightTensor(
        Encoding.INT4_GROUP,
        (codes.shape[0], codes.shape[1]),
        pack_codes(codes.contiguous()).contiguous(),
        pack_groups(scales.contiguous()),
        32,
        activations=activations,
    )


# INT8_BLOCK is for weights in blocks only: see below.
@pytest.mark.parametrize(
    "activations", [Activations.FLOAT, Activations.INT8_TOKEN, Activations.INT8_GROUP]
)
@pytest.mark.parametrize("skipped", [32, 96])
def test_an_expert_of_which_the_device_computes_a_part(activations, skipped) -> None:
    width = 128
    layers, whole, rests = [], [], []
    for number in range(LAYERS * EXPERTS):
        plain = {
            "gate_proj": codes_of(width, HIDDEN, 3 * number, activations),
            "up_proj": codes_of(width, HIDDEN, 3 * number + 1, activations),
            "down_proj": codes_of(HIDDEN, width, 3 * number + 2, activations),
        }
        rest = {name: dict(parts) for name, parts in plain.items()}
        for name in ("gate_proj", "up_proj"):
            for part in ("codes", "scales"):
                rest[name][part] = rest[name][part][skipped:]
        rest["down_proj"]["codes"] = rest["down_proj"]["codes"][:, skipped:]
        rest["down_proj"]["scales"] = rest["down_proj"]["scales"][:, skipped // 32 :]
        index = number % EXPERTS
        whole.append((index, {name: packed(**parts) for name, parts in plain.items()}))
        rests.append((index, {name: packed(**parts) for name, parts in rest.items()}))
    layers = [whole[at : at + EXPERTS] for at in range(0, len(whole), EXPERTS)]
    boxes = Boxes(layers, 1)
    random = torch.Generator().manual_seed(5)
    x = torch.randn(1, HIDDEN, generator=random)
    chosen, scales = torch.tensor([[7, 2, -1]]), torch.rand(1, TOP, generator=random)
    boxes.x.copy_(x)
    boxes.chosen[1], boxes.scales[1] = chosen, scales
    boxes.cut[1] = torch.tensor([2, skipped], dtype=torch.int32)
    boxes.cut[0] = torch.tensor([2, skipped], dtype=torch.int32)  # and nothing is asked
    boxes.flags[:, 0, 0] = 1
    complete, experts, _, _ = serve(boxes.service, 1, 1, 2, 60.0)
    assert complete and experts == 2
    given = [rests[EXPERTS + 2], whole[EXPERTS + 7]]
    wanted = ops.experts(x, given, chosen, scales, "silu", last=False)
    torch.testing.assert_close(boxes.total, wanted)


@pytest.mark.parametrize("activations", [Activations.FLOAT, Activations.INT8_BLOCK])
@pytest.mark.parametrize("down", [Encoding.IQ2_XXS, Encoding.Q2_K, Encoding.Q4_K, Encoding.Q8_0])
def test_the_rest_of_an_expert_in_blocks(activations, down) -> None:
    hidden, width, skipped = 256, 768, 256
    own = Format(down).with_activations(activations).activations
    shapes = {
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (HIDDEN, width),
    }
    whole = {
        name: random_weight(
            down if name == "down_proj" else Encoding.IQ2_XXS, *shape,
            activations=own if name == "down_proj" else activations, seed=number,
        )
        for number, (name, shape) in enumerate(shapes.items())
    }  # fmt: skip
    rest = {name: behind(w, skipped, columns=name == "down_proj") for name, w in whole.items()}
    boxes = Mail(1, hidden, HIDDEN)
    boxes.x.copy_(torch.randn(1, hidden, generator=torch.Generator().manual_seed(4)))
    boxes.chosen[:], boxes.scales[:] = torch.tensor([[0]]), 0.75
    boxes.cut[:] = torch.tensor([0, skipped], dtype=torch.int32)
    boxes.flags[0, 0] = 1
    service = boxes.service_of([native_expert(NATIVE, 0, whole)])
    complete, experts, _, _ = serve(service, 1, 1, 2, 60.0)
    assert complete and experts == 1
    wanted = ops.experts(boxes.x, [(0, rest)], boxes.chosen, boxes.scales, "silu", last=False)
    assert wanted.isfinite().all() and wanted.norm() > 0
    torch.testing.assert_close(boxes.total, wanted)


def behind(w: WeightTensor, skipped: int, *, columns: bool) -> WeightTensor:
    """The weight without its first rows, or without its first columns."""
    first = skipped // BLOCK_SHAPES[w.encoding].numbers if columns else skipped // PANEL_ROWS
    rows, width = w.shape
    shape = (rows, width - skipped) if columns else (rows - skipped, width)

    def part(numbers: torch.Tensor | None) -> torch.Tensor | None:
        if numbers is None:
            return None
        return (numbers[:, first:] if columns else numbers[first:]).contiguous()

    data = part(w.data)
    assert data is not None
    return replace(w, shape=shape, data=data, scales=part(w.scales))


class Mail:
    """One layer's, of one expert for each token."""

    def __init__(self, tokens: int, hidden: int, rows: int) -> None:
        self.x = torch.zeros(tokens, hidden)
        self.total = torch.full((tokens, rows), float("nan"))
        self.chosen = torch.full((tokens, 1), -1)
        self.scales = torch.zeros(tokens, 1)
        self.flags = torch.zeros(2, 16, dtype=torch.int32)
        self.cut = torch.full((2,), -1, dtype=torch.int32)

    def service_of(self, experts: list[Any]) -> Any:
        parts = (self.x, self.chosen, self.scales, self.total, *self.flags, self.cut)
        layer = (experts, *(part.data_ptr() for part in parts))
        sizes = self.x.shape[1], self.total.shape[1], 1, ACTIVATIONS["silu"]
        return NATIVE.ExpertService((layer,), DTYPES[torch.float32], *sizes)  # type: ignore[union-attr]
