"""The command `hybrid`: a DeepSeek-V3 whose experts are shared out between GPU, link and CPU."""

import tempfile
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hmt.base.units import format_bytes, format_rate
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, folder_to_write
from hmt_bench.commands.gpu import numbers


def hybrid(
    layers: Annotated[
        int, typer.Option(min=2, help="Layers, the first of them dense; 61 take 380 GB of RAM.")
    ] = 13,
    memory: Annotated[str, typer.Option(help="Memory of the GPU to use.")] = "9GiB",
    quant: Annotated[
        str, typer.Option(help="Encoding of the weights, or a type of GGUF files such as IQ2_XXS.")
    ] = "w4a8:32",
    host_memory: Annotated[str, typer.Option(help="Host memory to use.")] = "100GiB",
    batches: Annotated[str, typer.Option(help="Sequences that decode together.")] = "1,4,16",
    contexts: Annotated[
        str, typer.Option(help="Positions before them; all but the first with one sequence.")
    ] = "1024,131072",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each.")] = 16,
    prompt: Annotated[int, typer.Option(min=0, help="Tokens of a prompt; 0: none.")] = 4096,
    chunk: Annotated[
        int, typer.Option(min=1, help="Tokens of a prompt that are computed at once.")
    ] = 4096,
    traces: Annotated[
        list[Path] | None,
        typer.Option(help="Recorded traces of experts, for routing with their skew as well."),
    ] = None,
    small: Annotated[bool, typer.Option(help="A tiny model, to try the benchmark with.")] = False,
    gpu_id: Annotated[str, typer.Option(help="Which GPU, by number.")] = "0",
    folder: Annotated[
        Path | None,
        folder_to_write("Where the model is kept for the next time; deleted without."),
    ] = None,
    prepare: Annotated[
        bool, typer.Option(help="Only make the model in --folder, for another time.")
    ] = False,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """A mixture of experts that a GPU holds all of but the experts: time by who spends it."""
    from hmt.cli.formatting import write_json
    from hmt_bench.hybrid import SMALL, Task, pack_of, run
    from hmt_bench.random_deepseek import DeepSeekShape

    dense = 3 if layers > 30 else 1
    shape = replace(SMALL if small else DeepSeekShape(), layers=layers, dense_layers=dense)
    task = Task(
        numbers("--batches", batches), numbers("--contexts", contexts), steps, prompt, chunk
    )
    with ExitStack() as stack:
        status = stack.enter_context(notes().status("starting"))
        models = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if prepare:
            pack_of(models, shape, quant, status.update)
            return
        report = _Report()

        def found(content: dict[str, Any]) -> None:
            report.tell(content)
            write_json(content, json)

        run(
            models,
            shape,
            memory,
            task,
            quantization=quant,
            host_memory=host_memory,
            gpu=gpu_id,
            traces=traces or (),
            progress=status.update,
            found=found,
        )
    report.end()


class _Report:
    """Prints what is new, as it comes."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._steps = 0
        self._content: dict[str, Any] = {}

    def tell(self, content: dict[str, Any]) -> None:
        """What was not there when this was called before."""
        from hmt_bench.hybrid import HybridStep

        if not self._content:
            self._console.print(_setting(content))
        self._content = content
        for step in content["steps"][self._steps :]:
            share = f"{step['share']:.0%} of what link and CPU allow"
            told = HybridStep(**{field.name: step[field.name] for field in fields(HybridStep)})
            self._console.print(f"  {step['routing']:8} {told.as_row()}; {share}")
        self._steps = len(content["steps"])
        if prompt := content["prompt"]:
            self._console.print(
                f"  prompt of {prompt['tokens']}: {prompt['tokens_per_s']:.0f} tokens/s, link busy "
                f"{prompt['link_busy']:.0%}"
            )

    def end(self) -> None:
        """The most GPU memory, and when that was."""
        most: dict[str, int] = self._content["gpu_most_bytes"]
        when = max(most, key=lambda what: most[what])
        self._console.print(f"  {format_bytes(most[when])} of GPU memory used at most, by {when}")


def _setting(content: dict[str, Any]) -> str:
    rates = content["rates"]
    return (
        f"{content['shape']['layers']} layers, {content['gpu_memory']} of "
        f"{content['gpu']}: {content['expert_slots']} experts cached per layer; at once link "
        f"{format_rate(rates['shared_link'])} and CPU {format_rate(rates['shared_cpu'])}"
    )
