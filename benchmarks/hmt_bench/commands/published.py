"""The command `published`: files as people download them, beside llama.cpp and its kin."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes, parse_bytes
from hmt.cli.bench import result_table, show_table
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, write_json
from hmt.formats.gguf import FILE_TYPES
from hmt.profiling.random_model import Shape
from hmt_bench.random_hybrid import DeltaShape

SHAPES: Mapping[str, Shape | DeltaShape] = {
    "135m": Shape(30, 576, 1536, 9, 3, vocab_size=49152, tied=False),
    "1b": Shape(22, 2048, 5632, 32, 4, vocab_size=32000),
    "8b": Shape(32, 4096, 14336, 32, 8, vocab_size=128256),
    "30b-a3b": Shape(48, 2048, 768, 32, 4, 128, 151936, experts=128, experts_per_token=8),
    # Qwen3.6-35B-A3B, whole and cut to what two cores have memory for, and Qwen3.8-27B.
    "35b-a3b": DeltaShape(40, 2048, 512, 16, 2, 16, 32, experts=256, experts_per_token=8),
    "35b-a3b-cut": DeltaShape(8, 2048, 512, 16, 2, 16, 32, experts=256, experts_per_token=8),
    "27b": DeltaShape(64, 5120, 17408, 24, 4, 16, 48),
}


def published(
    models: Annotated[
        list[str],
        typer.Argument(
            help=f"GGUF files, or random ones as SHAPE:TYPE, such as 1b:Q4_K_M; shapes: "
            f"{', '.join(SHAPES)}."
        ),
    ],
    llama_bench: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH of another engine's llama-bench; may be given again."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of all engines.")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help='Of the GPU, such as 8GiB, or "all"; none when left out.')
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are decoded.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 3,
    exact: Annotated[bool, typer.Option(help="Also with --activations exact.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where random files are kept.")] = None,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """HMT beside llama.cpp (and ik_llama.cpp) on published GGUF files, interleaved."""
    from hmt_bench.published import Setting, run
    from hmt_bench.random_gguf import write_random_gguf

    programs: dict[str, Path] = {}
    for text in llama_bench or ():
        name, equals, path = text.partition("=")
        if not equals:
            raise ConfigError(f"--llama-bench {text}: give NAME=PATH")
        programs[name] = Path(path)
    gpu = 0 if gpu_memory is None else None if gpu_memory == "all" else parse_bytes(gpu_memory)
    setting = Setting(threads or torch.get_num_threads(), gpu, prompt, tokens)
    results: list[dict[str, Any]] = []
    with notes().status("starting") as status, tempfile.TemporaryDirectory() as scratch:
        for model in models:
            file = Path(model)
            shape, colon, kind = model.partition(":")
            if colon and shape in SHAPES:
                if kind not in FILE_TYPES:
                    raise ConfigError(f"{model}: choose {', '.join(FILE_TYPES)}")
                file = (folder or Path(scratch)) / f"random-{shape}-{kind}.gguf"
                if not file.exists():
                    status.update(f"writing {file.name}")
                    write_random_gguf(file, SHAPES[shape], kind)
            results.append(run(file, setting, programs, rounds=rounds, progress=status.update))
            if exact:
                options = {"activations": "exact"}
                told = run(
                    file, setting, {}, rounds=rounds, options=options, progress=status.update
                )
                results[-1]["engines"]["HMT, exact activations"] = told["engines"]["HMT"]
            if file.parent == Path(scratch):
                file.unlink()
    _print(results, setting.threads)
    write_json({"benchmark": "published", "results": results}, json)


def _print(results: list[dict[str, Any]], threads: int) -> None:
    table = result_table(
        f"{results[0]['machine']['name']}, {threads} threads", "file", "size", "engine",
        "decode tokens/s", "HMT is", "prompt tokens/s", "HMT is",
    )  # fmt: skip
    for result in results:
        for name, told in result["engines"].items():
            ratios = result["ratios"].get(name, {})
            table.add_row(
                result["file"], format_bytes(result["bytes"]), name,
                _number(told["decode_tokens_per_s"]), _number(ratios.get("decode"), "{:.2f} x"),
                _number(told["prompt_tokens_per_s"]), _number(ratios.get("prompt"), "{:.2f} x"),
            )  # fmt: skip
    show_table(table)


def _number(value: float | None, form: str = "{:.1f}") -> str:
    return "-" if value is None else form.format(value)
