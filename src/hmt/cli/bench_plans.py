"""`hmt bench plans`: searched plans beside random ones and rules of thumb, predicted."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write


def plans(
    models: Annotated[
        list[str] | None, typer.Argument(help="Shapes, as in `hmt plan`; all that come with HMT.")
    ] = None,
    machines: Annotated[
        list[str] | None, typer.Option("--machine", help="Machines, as in `hmt plan`; all.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Random plans for each.")] = 200,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Compare plans for a goal with random ones that fit, and with what people do by hand."""
    from hmt.bench.plans import cases, compare, content_of, table
    from hmt.cli.formatting import write_json
    from hmt.engine.loading.model_shapes import shape_names
    from hmt.hardware.machine_file import machine_names

    wanted = cases(models or shape_names(), machines or machine_names())
    results: list[dict[str, Any]] = []
    with notes().status("planning") as status:
        for case in wanted:
            status.update(f"{case.model} on {case.machine}, {case.goal}")
            results.append(compare(case, count))
    content = content_of(results, count)
    Console().print(table(content), soft_wrap=True, markup=False, highlight=False)
    write_json(content, json)
