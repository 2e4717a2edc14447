"""`hmt bench serve`: users on an endpoint, ours or any other that speaks OpenAI's language."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hmt.base.errors import ConfigError, MachineError
from hmt.cli.console import notes
from hmt.cli.eval import held_out_text
from hmt.cli.formatting import file_to_write, write_text
from hmt.cli.options import ModelArgument, choose_model

_WIDTH = 160


def serve(
    model: ModelArgument = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Endpoint to measure, such as http://127.0.0.1:8080/v1; when left out, a server "
            "of HMT is started for MODEL and stopped afterwards."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--model", help="What the endpoint calls the model; its first one."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Its key.  Others on this machine can see it in the list of processes."),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds its key.")] = None,
    options: Annotated[
        str, typer.Option("--serve", help='Options of hmt serve, as in "--quant w4a8".')
    ] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask for chats; completions when left out.")
    ] = False,
    prompts: Annotated[str, typer.Option(help="Lengths of prompts, in tokens.")] = "128",
    outputs: Annotated[str, typer.Option(help="Lengths of answers, in tokens.")] = "64",
    users: Annotated[
        str, typer.Option(help="Closed loop: users that ask again once they have an answer.")
    ] = "1,4,16",
    rates: Annotated[
        str, typer.Option(help="Open loop: requests per second, at random moments.")
    ] = "",
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Counted requests of a cell; 4 per user, or 32 in open loop."),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="Requests before that do not count; one per user."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals and of what is asked.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0,
    text: Annotated[
        Path | None,
        typer.Option(help="What prompts are taken from; when left out, HMT's held-out text."),
    ] = None,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
    html: Annotated[Path | None, file_to_write("File for a report with charts.")] = None,
) -> None:
    """Users on an endpoint: times to the first text, per token and in all, and rates."""
    try:
        from hmt.bench.load import Matrix, report_html, run
    except ImportError as error:
        raise MachineError(
            f"hmt bench serve needs {error.name}, which is not installed: pip install 'hmt[serve]'"
        ) from error
    from hmt.cli.formatting import write_json

    matrix = Matrix(
        prompts=_counts("--prompts", prompts),
        outputs=_counts("--outputs", outputs),
        users=_counts("--users", users),
        rates=_positive("--rates", rates),
        requests=requests,
        warmup=warmup,
        seed=seed,
    )
    if url is not None and (model is not None or options):
        raise ConfigError("--url names a server that runs: MODEL and --serve are for one of HMT's")
    with notes().status("starting") as status:
        content = run(
            matrix, held_out_text(text), model=choose_model(model), url=url, name=name,
            key=_key(api_key, api_key_file), chat=chat, timeout_s=timeout,
            serve_options=shlex.split(options), progress=status.update,
        )  # fmt: skip
    _print(content)
    write_json(content, json)
    if html is not None:
        write_text(html, report_html(content))


def _positive(option: str, listed: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in listed.split(",") if part.strip())
    except ValueError:
        found = (0.0,)
    if not all(0 < number < float("inf") for number in found):
        raise ConfigError(f"{option} {listed}: give numbers above 0, such as 1,4")
    return found


def _counts(option: str, listed: str) -> tuple[int, ...]:
    found = _positive(option, listed)
    if any(number != int(number) for number in found):
        raise ConfigError(f"{option} {listed}: give whole numbers, such as 1,4")
    return tuple(int(number) for number in found)


def _key(given: str | None, file: Path | None) -> str | None:
    if file is not None:
        try:
            given = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from error
    if given is not None and not (given.isascii() and given.isprintable() and given):
        raise ConfigError("the API key is empty or has characters that no header can hold")
    return given


def _print(content: dict[str, Any]) -> None:
    from hmt.bench.load.report import row

    machine = content["machine"]
    table = Table(
        title=f"{content['model']} ({content['target']}) on {machine['name']}; times in ms, "
        "P50 / P90 / P99",
        title_justify="left", box=None, padding=(0, 1),
    )  # fmt: skip
    rows = [row(cell) for cell in content["results"]]
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "load" else "right", no_wrap=True)
    for one in rows:
        table.add_row(*one.values())
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)  # a pipe has no width of its own
    console.print(table)
