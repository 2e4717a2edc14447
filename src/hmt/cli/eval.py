"""`hmt eval`: how much a model still knows, in the encoding and the memory it is given."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hmt.base.errors import ConfigError, os_reason
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, write_json
from hmt.cli.options import EngineOptions, ModelArgument, choose_model, expand

if TYPE_CHECKING:
    from hmt.bench.quality import Quality, Score
    from hmt.engine import LoadedModel

_DEFAULT_SEQUENCES = 4
_SEQUENCES = {2048: 8, 8192: 4, 32768: 2}  # as many as the published scores counted


@expand
def evaluate(
    engine: EngineOptions,
    model: ModelArgument = None,
    tasks: Annotated[int, typer.Option(help="Short tasks; 0 leaves them out.")] = 200,
    retrieval: Annotated[
        str, typer.Option(help="Lengths of retrieval sequences; an empty text leaves them out.")
    ] = "2048,8192",
    windows: Annotated[
        int | None,
        typer.Option(help="Windows of 2048 tokens for the perplexity; all of the text's."),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(
            help="Questions about images that come with a model; all when left out, 0: none."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Held-out text; when left out, the one in HMT's repository."),
    ] = None,
    json: Annotated[Path | None, file_to_write("File to write the scores to.")] = None,
) -> None:
    """Measure a model with tasks that have one right answer, beside its published scores."""
    path, lengths = choose_model(model), _lengths(retrieval)
    held_out = held_out_text(text)
    arguments = engine.arguments()
    arguments.setdefault("context", max([2048, *lengths]))
    with notes().status("loading") as status:
        from hmt.bench.image_questions import FILE, ImageQuestions, answers_of
        from hmt.bench.quality import Extent, Quality, evaluate
        from hmt.engine import Engine

        asked = None
        if images != 0 and (path / FILE).is_file():
            asked = ImageQuestions.read(path / FILE).first(images)

        def progress(part: str, so_far: "Score") -> None:
            status.update(f"{part}: {so_far}")

        with Engine(**arguments) as made:
            loaded = engine.with_adapter(made.load_model(path))
            status.update("measuring")
            seen = asked.grade(answers_of(loaded), progress) if asked else {}
            measured = evaluate(
                loaded, loaded.tokenizer.encode, held_out, Extent(tasks, lengths, windows), progress
            )
            measured = replace(measured, images=seen)
            content = _as_json(measured, loaded, arguments)
    file, depth = path / "quality.json", arguments.get("depth", 1)
    published = Quality.read(file, depth) if file.is_file() else None
    _print(measured, published)
    write_json(content, json)


def _lengths(text: str) -> dict[int, int]:
    """Sequences to measure by length."""
    try:
        lengths = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(
            f"--retrieval {text}: give lengths in tokens, such as 2048,8192"
        ) from None
    return {length: _SEQUENCES.get(length, _DEFAULT_SEQUENCES) for length in lengths}


def held_out_text(text: Path | None) -> str:
    """The text in `text`, or the one in HMT's repository.  Raises ConfigError."""
    file = text or Path(__file__).parents[3] / "assets" / "text" / "valid.txt"
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = os_reason(error) if isinstance(error, OSError) else error
        raise ConfigError(
            f"the held-out text {file} cannot be read ({why}): give one with --text"
        ) from error


def _as_json(
    measured: "Quality", model: "LoadedModel", arguments: dict[str, Any]
) -> dict[str, Any]:
    from hmt.bench.environment import describe

    options = {name: str(value) for name, value in arguments.items()}
    machine = describe(model.prepared.machine)
    return measured.as_json() | {"options": options, "measured_on": machine}


def _print(measured: "Quality", published: "Quality | None") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    table.add_column("")
    table.add_column("measured", justify="right")
    if published is not None:
        table.add_column("published", justify="right")
    ours, theirs = _cells(measured), _cells(published) if published is not None else {}
    for name, value in ours.items():
        table.add_row(name, value, theirs.get(name, "-"))
    Console(highlight=False).print(table)


def _cells(quality: "Quality") -> dict[str, str]:
    cells = {}
    if quality.tasks is not None:
        cells["tasks"] = str(quality.tasks)
    cells |= {f"retrieval {n}": str(score) for n, score in quality.retrieval.items()}
    if quality.perplexity is not None:
        cells["perplexity"] = f"{quality.perplexity:.2f}"
    cells |= {f"images: {kind}": str(score) for kind, score in quality.images.items()}
    return cells
