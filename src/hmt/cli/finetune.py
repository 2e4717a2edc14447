"""`hmt finetune`: low-rank adapters of a model that may be larger than memory."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hmt.base.units import format_bytes, format_seconds
from hmt.cli.quantize_options import Force

if TYPE_CHECKING:
    from hmt.finetuning import Finetuned

_INTERRUPTED = 130  # as shells count: 128 + SIGINT
_LINES = 50  # that tell of losses, at most


def finetune(
    model: Annotated[Path, typer.Argument(help="Folder of a checkpoint, or a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; of peft.")],
    data: Annotated[
        Path,
        typer.Option(
            help='A .jsonl file: {"messages": [...]} on a line, of whose answers is learned, or '
            '{"text": ...}.'
        ),
    ],
    rank: Annotated[int, typer.Option(help="Of each adapter.")] = 16,
    alpha: Annotated[
        float | None,
        typer.Option(help="What is added is multiplied with alpha / rank; twice the rank."),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Linear layers that get adapters, such as q_proj,v_proj; all of attention, and "
            "of networks in models without experts, when left out.",
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 2e-4,
    epochs: Annotated[int, typer.Option(help="Times that the file is read.")] = 1,
    batch: Annotated[int, typer.Option(help="Examples of a step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of an example, at most.")] = 512,
    seed: Annotated[int, typer.Option(help="Of first numbers, and of the order.")] = 0,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for weights, adapters, optimizer and activations; 80% of what is "
            "available when left out."
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Train adapters block by block, as a folder that peft and `--adapter` load.

    A run that was ended goes on when the same command is given again.
    """
    from hmt.cli.console import notes
    from hmt.engine import EngineConfig
    from hmt.finetuning import FinetuneOptions
    from hmt.finetuning import finetune as run

    options = FinetuneOptions(
        rank=rank,
        alpha=2.0 * rank if alpha is None else alpha,
        targets=tuple(part.strip() for part in targets.split(",")) if targets else (),
        learning_rate=learning_rate,
        epochs=epochs,
        batch=batch,
        length=length,
        seed=seed,
        host_memory_bytes=EngineConfig.resolve(host_memory=host_memory).host_memory_bytes,
    )
    begin = time.perf_counter()

    def tell(step: int, steps: int, loss: float) -> None:
        if step == steps or step % max(1, steps // _LINES) == 0:
            passed = format_seconds(time.perf_counter() - begin)
            notes().print(f"step {step} of {steps}: loss {loss:.4f}, {passed}", highlight=False)

    places = model.expanduser(), out.expanduser(), data.expanduser()
    try:
        done = run(*places, options, force=force, progress=tell)
    except KeyboardInterrupt:
        notes().print("stopped; the same command goes on from some steps before")
        raise typer.Exit(_INTERRUPTED) from None
    _print(done, out, length, time.perf_counter() - begin)


def _print(done: "Finetuned", out: Path, length: int, seconds: float) -> None:
    from rich.console import Console

    examples = done.examples
    learned = sum(one.count for one in examples.all)
    told = Console(highlight=False)
    told.print(
        f"[bold]{out}[/]: adapters of {len(done.modules)} linear layers, {done.numbers} numbers, "
        f"from {learned} tokens of {len(examples.all)} examples, in "
        f"{format_seconds(seconds)}; {format_bytes(done.plan.total)} of memory",
        soft_wrap=True,
    )
    if examples.left_out:
        told.print(f"{examples.left_out} lines have nothing to learn within {length} tokens")
    if examples.skipped:
        told.print(
            f"{examples.skipped} answers were left out: the chat template writes them in another "
            "way once others follow"
        )
