"""The command line: `hmt run`, `serve`, `plan`, `convert`, `quantize`, `calibrate`, `bench`, ...

Commands import what computes when they run, so that `hmt --help` answers at once.
"""

import logging
import sys
from typing import Annotated, NoReturn

import typer

from hmt import __version__
from hmt.base.errors import ConfigError, HMTError
from hmt.cli import (
    bench,
    calibrate,
    convert,
    doctor,
    eval,
    models,
    plan,
    probe,
    quantize,
    run,
    serve,
    simulate,
    streams,
)
from hmt.cli.retired_flags import by_new_names

app = typer.Typer(
    name="hmt",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("serve")(serve.serve)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
models.add_commands(app)
app.command("convert")(convert.convert)
app.command("quantize")(quantize.quantize)
app.add_typer(calibrate.app, name="calibrate")
app.command("probe")(probe.probe)
app.command("doctor")(doctor.doctor)
app.command("eval")(eval.evaluate)
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hmt {__version__}")
        raise typer.Exit


@app.callback()
def hmt(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Runs language models that are larger than memory, on one machine.

    Without a command: shows what this machine can run, and lets one be chosen.
    """
    if context.invoked_subcommand is None:
        from hmt.cli.first_run import first_run

        first_run()


def main() -> NoReturn:
    """Run the command line.

    Exit codes: 0, 1 failure, 2 wrong options, 130 after Ctrl-C, 141 where nobody reads the output.
    """
    guard(app)


def guard(application: typer.Typer) -> NoReturn:
    """Run `application`; an error that a user can cause becomes one line on stderr."""
    streams.open_all()
    logging.basicConfig(format="hmt: %(message)s", level=logging.WARNING)
    code = 0
    with streams.Output() as output:
        try:
            code = _code_of(application)
            output.flush()
        except streams.UnwrittenError as error:
            output.drop()
            code = streams.code_of(error, code)
    sys.exit(code)


def _code_of(application: typer.Typer) -> int:
    """Run `application`; its exit code."""
    try:
        application(args=by_new_names(sys.argv[1:]))
    except SystemExit as ended:  # as Typer ends all that no error ends
        return int(ended.code or 0)
    except HMTError as error:
        from hmt.cli.console import complain

        complain(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    return 0
