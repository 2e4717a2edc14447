"""`hmt calibrate kv`: scales of keys and values, from text that is like what will come."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hmt.base.errors import ConfigError, os_reason
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write
from hmt.cli.options import EngineOptions, ModelArgument, choose_model, expand

if TYPE_CHECKING:
    from hmt.engine.drift import CalibratedActivations
    from hmt.engine.loading.kv_scales import Calibrated
    from hmt.text import Tokenizer

app = typer.Typer(no_args_is_help=True, help="Find beforehand what codecs need to know.")


@app.callback()
def _group() -> None:
    """Find beforehand what codecs need to know."""


@app.command("kv")
@expand
def kv(
    engine: EngineOptions,
    model: ModelArgument = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text that is like what will come; may be repeated. A .jsonl file has an object "
            'a line: {"text": ...}, or {"messages": [...]}, which go through the chat template. '
            "A small text comes with HMT; int8-static needs a better one."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="The most to read of each file.")] = 32768,
    length: Annotated[
        int,
        typer.Option(
            min=16,
            help="Tokens of a text; longer ones are cut. As many as the context of runs, if keys "
            "are to lose less in int8 and int4.",
        ),
    ] = 4096,
    out: Annotated[
        Path | None, file_to_write("File to write; beside the weights when left out.")
    ] = None,
) -> None:
    """Ranges of the KV cache's numbers, channel by channel, for keeping it in 8 and 4 bits.

    A run with --kv-quant int4 or int8 uses it where it lies beside the weights; int8-static needs
    it.
    """
    path = choose_model(model)
    arguments = {**engine.arguments(), "context": engine.context or length}
    with notes().status("loading") as status:
        from hmt.engine import Engine
        from hmt.engine.loading.kv_scales import calibrate, identity, scales_beside
        from hmt.quantizing import calibration_sequences

        with Engine(**arguments) as made:
            loaded = made.load_model(path)
            texts = [
                part
                for file in text or ()
                for part in _texts(file, loaded.tokenizer, length, tokens)
            ]
            if text is None:
                pieces = max(1, tokens // length)  # of the text that comes with HMT
                texts = calibration_sequences("builtin", loaded.tokenizer, pieces, length)
            status.update(f"reading {sum(map(len, texts))} tokens")
            found = calibrate(loaded, texts)
            file = out or scales_beside(path)
            try:
                found.scales.write(file, identity(loaded.prepared.source))
            except OSError as error:
                raise ConfigError(
                    f"{file} cannot be written ({os_reason(error)}): name another with --out, and "
                    "use it with --kv-quant exact,int8-static@FILE"
                ) from error
    _print(found, file)


@app.command("activations")
@expand
def activations(
    engine: EngineOptions,
    model: ModelArgument = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that is like what will come, as of `hmt quantize --calibration`; builtin "
            "when left out. May be repeated."
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(min=4, help="Pieces of each to read.")] = 128,
    length: Annotated[int, typer.Option(min=256, help="Tokens of each.")] = 512,
) -> None:
    """Statistics by which a run sees that a request drifts, and then rounds its inputs no more."""
    path = choose_model(model)
    arguments = {**engine.arguments(), "context": engine.context or length}
    with notes().status("loading") as status:
        from hmt.engine import Engine
        from hmt.engine.drift import calibrate_activations, statistics_beside
        from hmt.engine.loading.kv_scales import identity
        from hmt.quantizing import calibration_sequences

        with Engine(**arguments) as made:
            loaded = made.load_model(path)
            pieces = [
                piece
                for name in text or ["builtin"]
                for piece in calibration_sequences(name, loaded.tokenizer, sequences, length)
            ]
            found = calibrate_activations(
                loaded, pieces, lambda done, of: status.update(f"reading {done} of {of} sequences")
            )
            file = statistics_beside(path)
            try:
                found.statistics.write(file, identity(loaded.prepared.source))
            except OSError as error:
                raise ConfigError(f"{file} cannot be written: {os_reason(error)}") from error
    _print_activations(found, file)


def _texts(file: Path, tokenizer: "Tokenizer", length: int, most: int) -> Iterator[list[int]]:
    """Token ids of a file's texts, cut into pieces of `length`, `most` in all."""
    from hmt.text import documents

    for ids in documents(file, tokenizer, "--text"):
        for start in range(0, len(ids), length):
            piece = ids[start : start + min(length, most)]
            most -= len(piece)
            if not piece:
                return
            yield piece


def _print(found: "Calibrated", file: Path) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]{file}[/]: scales from {found.tokens} tokens", soft_wrap=True)
    if not found.rows:
        console.print("too few texts to say what the scales would cut off: give four or more")
        return
    console.print(
        f"of {found.rows} rows of keys and values held out, {found.beyond} "
        f"({found.beyond / found.rows:.2%}) have numbers beyond the others': more text makes it "
        "less, and exact,int8-static+shared-parts keeps 4 bits of what is cut off",
        soft_wrap=True,
    )


def _print_activations(found: "CalibratedActivations", file: Path) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]{file}[/]: statistics from {found.tokens} tokens", soft_wrap=True)
    limits = ", ".join(f"{limit.kl:.2f}" for limit in found.statistics.limits)
    console.print(
        f"divergence from which on a request drifts, in nats for each channel: {limits}, of 64, "
        f"128, 192 and 256 tokens; {found.alarms} of {found.held_out} held-out sequences "
        "would have been beyond the others'",
        soft_wrap=True,
    )
