"""First tokens behind an image, and the encoder alone, beside transformers on the same device.

Each round has another image, given as a PIL.Image to both.  The first round of HMT is told apart:
it reads the encoder from the disk.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from hmt.bench.environment import describe
from hmt.contracts.plan import Tier
from hmt.contracts.request import Request
from hmt.engine import Engine, LoadedModel
from hmt_bench.random_vision import BEGIN, END, IMAGE, SHAPES, VisionShape, picture, written

_BEFORE: Final = [16 + (n * 37) % 480 for n in range(16)]
_BEHIND: Final = [16 + (n * 53) % 480 for n in range(32)]


@dataclass(frozen=True, slots=True)
class Task:
    """What is measured.

    shape    of SHAPES
    device   "cpu" or "cuda"
    memory   (of the GPU, of the host) for each of HMT's runs; "" for the GPU: none
    layers   of the language model; 0: all
    side     pixels in each direction
    tokens   of each answer
    peer     whether transformers is measured, too
    encoder_layers   of the encoder; 0: all
    """

    shape: str
    device: str
    memory: tuple[tuple[str, str], ...]
    layers: int = 0
    side: int = 1024
    tokens: int = 33
    rounds: int = 3
    peer: bool = True
    encoder_layers: int = 0


@dataclass(slots=True)
class _Times:
    """Seconds of each round: the image processor, the encoder, until the first token; and rates.

    memory_s   of HMT, for having the encoder's memory ready and giving back what is not kept
    """

    prepared_s: list[float] = field(default_factory=list)
    encoded_s: list[float] = field(default_factory=list)
    memory_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, Any]:
        return {name: median(values) if values else None for name, values in asdict(self).items()}


def run(
    folder: Path, task: Task, progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Measure; checkpoints are kept in `folder`."""
    shape, name = SHAPES[task.shape], task.shape
    if task.layers:
        shape = replace(shape, text=shape.text | {"num_hidden_layers": task.layers})
        name += f"-{task.layers}"
    if task.encoder_layers:
        shape = replace(shape, vision=shape.with_layers(task.encoder_layers))
        name += f"-encoder-{task.encoder_layers}"
    progress(f"writing {name}")
    model = written(folder / name, shape)
    runs, features = [], None
    machine: dict[str, Any] = {}
    for gpu, host in task.memory:
        found, features, machine = _hmt(model, task, gpu, host, progress)
        runs.append(found)
    content = {
        "benchmark": "images",
        "machine": machine,
        "task": asdict(task),
        "tokens_of_image": None if features is None else len(features),
        "results": runs,
    }
    if task.peer:
        progress("transformers")
        content["transformers"] = _peer(model, shape, task, features)
    return content


def _prompt(image_tokens: int = 1) -> list[int]:
    return [*_BEFORE, BEGIN, *[IMAGE] * image_tokens, END, *_BEHIND]


def _hmt(
    folder: Path, task: Task, gpu: str, host: str, progress: Callable[[str], None]
) -> tuple[dict[str, Any], torch.Tensor, dict[str, Any]]:
    options: dict[str, Any] = {"host_memory": host, "context": 4096, "max_batch": 1}
    options |= {"check_weights": False, "speculate": "off", "gpu_memory": gpu or 0}
    if gpu:
        options["gpus"] = "0"
    progress(f"loading with {gpu or 'no GPU'} and {host}")
    times, first = _Times(), _Times()
    with Engine(**options) as engine:
        model = engine.load_model(folder)
        with _watched(model, times) as seen:
            for number in range(task.rounds + 1):
                progress(f"{gpu or 'no GPU'}, {host}: round {number} of {task.rounds}")
                _answer(model, task, times, number)
                if not number:
                    first = _Times(**asdict(times))
                    for name in asdict(times):
                        getattr(times, name).clear()
            text = _text_rate(model, task)
        plan, summary = model.plan, model.summary()
        found = {
            "gpu_memory": gpu,
            "host_memory": host,
            "weights": {
                tier.value: sum(model.prepared.layouts[b].slot_bytes for b in plan.blocks_in(tier))
                for tier in Tier
            },
            "encoder_bytes_on_gpu": plan.device.reserved.get("encoder", 0),
            "encoder_bytes": model.prepared.demand.vision_bytes,
            "first_image": first.medians(),
            **times.medians(),
            "rounds": asdict(times),
            "text_tokens_per_s": text,
            "notes": list(summary.notes),
        }
        return found, seen[-1], describe(model.prepared.machine)


@contextmanager
def _watched(model: LoadedModel, times: _Times) -> Iterator[list[torch.Tensor]]:
    """Note how long preparing and encoding take, and the last features."""
    store = model._core.memory.images
    assert store is not None, model.summary().notes
    encoder, seen = store._encoder, list[torch.Tensor]()
    prepare, encode = encoder.prepare, encoder.encode

    def prepared(pixels: Any) -> Any:
        begin = time.perf_counter()
        found = prepare(pixels)
        times.prepared_s.append(time.perf_counter() - begin)
        return found

    def encoded(image: Any, weights: Any) -> Any:
        begin = time.perf_counter()
        found = encode(image, weights)
        times.encoded_s.append(time.perf_counter() - begin)
        seen.append(found.rows)
        return found

    features = store.features

    def with_memory(key: str) -> Any:
        begin, known = time.perf_counter(), len(seen)
        found = features(key)
        if len(seen) > known:
            times.memory_s.append(time.perf_counter() - begin - times.encoded_s[-1])
        return found

    encoder.prepare, encoder.encode = prepared, encoded  # type: ignore[method-assign]
    store.features = with_memory  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        encoder.prepare, encoder.encode = prepare, encode  # type: ignore[method-assign]
        store.features = features  # type: ignore[method-assign]


def _answer(model: LoadedModel, task: Task, times: _Times, seed: int) -> None:
    request = Request(_prompt(), task.tokens, images=(picture(task.side, seed),), ignore_eos=True)
    begin = time.perf_counter()
    moments = [time.perf_counter() for _ in model.stream(request)]
    times.first_token_s.append(moments[0] - begin)
    if len(moments) > 2:  # what is captured first counts as waiting
        times.tokens_per_s.append((len(moments) - 2) / (moments[-1] - moments[1]))


def _text_rate(model: LoadedModel, task: Task) -> float | None:
    """Tokens per second behind a prompt of as many tokens without an image."""
    if task.tokens < 3:
        return None
    ids = [16 + (n * 37) % 480 for n in range(1024)]
    rates = []
    for number in range(task.rounds):
        request = Request([*ids, 16 + number], task.tokens, ignore_eos=True)
        moments = [time.perf_counter() for _ in model.stream(request)]
        rates.append((len(moments) - 2) / (moments[-1] - moments[1]))
    return median(rates)


def _peer(
    folder: Path, shape: VisionShape, task: Task, features: torch.Tensor | None
) -> dict[str, Any]:
    """transformers with the same checkpoint, all of it on the device."""
    import transformers

    kind = getattr(transformers, shape.architecture)
    model = kind.from_pretrained(folder, dtype=torch.bfloat16).eval().to(task.device)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    times, last = _Times(), None
    for number in range(task.rounds + 1):
        if number == 1:
            times = _Times()
        last = _peer_round(model, processor, task, times, number)
    assert last is not None
    found = {
        "version": transformers.__version__,
        "torch": torch.__version__,
        **times.medians(),
        "rounds": asdict(times),
    }
    if features is not None:
        error = (features.float() - last.float()).norm() / last.float().norm()
        found["difference_of_features"] = float(error)
    return found


@torch.inference_mode()
def _peer_round(model: Any, processor: Any, task: Task, times: _Times, seed: int) -> torch.Tensor:
    where, image = torch.device(task.device), picture(task.side, seed)
    begin = _now(where)
    inputs = {k: v.to(where) for k, v in processor(images=[image], return_tensors="pt").items()}
    prepared = _now(where)
    out = model.get_image_features(
        inputs["pixel_values"].to(torch.bfloat16), inputs["image_grid_thw"], return_dict=True
    )
    encoded = _now(where)
    pooled: Sequence[torch.Tensor] | torch.Tensor = out.pooler_output
    rows = pooled if isinstance(pooled, torch.Tensor) else torch.cat(list(pooled))
    ids = torch.tensor([_prompt(len(rows))], device=where)
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    given = inputs | {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
    heard = _Moments()
    again = _now(where)
    model.generate(
        **given, max_new_tokens=task.tokens, min_new_tokens=task.tokens, streamer=heard,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    moments = heard.moments[1:]  # the first is the prompt's
    times.prepared_s.append(prepared - begin)
    times.encoded_s.append(encoded - prepared)
    times.first_token_s.append(prepared - begin + moments[0] - again)
    if len(moments) > 2:
        times.tokens_per_s.append((len(moments) - 2) / (moments[-1] - moments[1]))
    return rows.cpu()


class _Moments:
    """A streamer of transformers, which is given each token once it is in host memory."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, ids: torch.Tensor) -> None:
        """A token, or the prompt."""
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        """All tokens came."""


def _now(where: torch.device) -> float:
    if where.type != "cpu":
        torch.cuda.synchronize(where)
    return time.perf_counter()
