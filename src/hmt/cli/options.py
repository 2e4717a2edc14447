"""Options that several commands share, declared once.

A command takes a parameter of type EngineOptions or SamplingOptions; `expand` turns each into the
command line options that its fields declare.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial, wraps
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from hmt.base.errors import ConfigError
from hmt.cli.presets import preset_settings
from hmt.cli.torchrun import launch

if TYPE_CHECKING:
    from hmt.contracts.request import Sampling
    from hmt.engine import LoadedModel

# Options by the panel of the help in which they are.
_memory = partial(typer.Option, rich_help_panel="Memory")
_compute = partial(typer.Option, rich_help_panel="Computation")
_kv = partial(typer.Option, rich_help_panel="Keys and values")
_choice = partial(typer.Option, rich_help_panel="Choosing tokens")

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="Folder of a checkpoint or pack, a GGUF file, owner/name or owner/name:TYPE on the "
        "Hugging Face hub, or a name of the list that `hmt` shows; "
        "the embedded model when left out."
    ),
]


RememberOption = Annotated[
    bool,
    _memory(
        "--remember",
        help="Keep these options for this model in ~/.config/hmt/models.toml: later runs take "
        "them from there.",
    ),
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is stored and computed; see hmt.engine.EngineConfig."""

    preset: Annotated[
        str | None,
        _memory(
            help="Settings for a purpose: coding, long-context, many-users or laptop; options "
            "that are given count before it."
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        _memory(
            help="Memory for weights, KV and buffers, such as 8MiB or 64GiB; "
            "80% of what is available when left out."
        ),
    ] = None
    gpu_memory: Annotated[
        str | None,
        _memory(
            help="Memory of the GPU to use, such as 16GiB; without, the CPU computes alone. Of "
            "several GPUs: of each, or 16GiB,24GiB."
        ),
    ] = None
    gpus: Annotated[
        str | None,
        _memory(
            "--gpus",
            "--gpu-id",
            help="Which GPU, by number; layers are spread over several: 0,1. 90% of their free "
            "memory without --gpu-memory.",
        ),
    ] = None
    tp: Annotated[
        int | None,
        _compute(
            help="Processes that divide each layer's heads, widths and experts; each has its part "
            "of --host-memory, and one of --gpus."
        ),
    ] = None
    ep: Annotated[
        int | None, _compute(help="Processes that divide each layer's experts alone.")
    ] = None
    pp: Annotated[
        int | None,
        _compute(
            help="Stages of a pipeline, each with some of the layers: as many processes, times "
            "those of --tp or --ep."
        ),
    ] = None
    quant: Annotated[
        str | None,
        _compute(
            help="Weights in memory: none, w8a8, w8a16, w4a8, w4a16, nvfp4a8, nvfp4a16, mxfp4a8, "
            "mxfp4a16; w4 (groups of 32) and w8 (one scale per row) with another group size if "
            "wanted, as in w4a8:64."
        ),
    ] = None
    activations: Annotated[
        str | None,
        _compute(
            help="What published weights of 8 bits and fewer are multiplied with: auto (rounded to "
            "int8), or exact."
        ),
    ] = None
    context: Annotated[
        int | None,
        _memory("--context", "--max-context", help="Positions of KV cache to keep."),
    ] = None
    adapter: Annotated[
        list[str] | None,
        _compute(
            help="NAME=PATH of a low-rank adapter (LoRA), a folder of peft or a GGUF file; may be "
            "repeated. serve answers with it as MODEL:NAME, other commands compute with the first."
        ),
    ] = None
    adapter_memory: Annotated[
        str | None,
        _memory(
            help="Memory that adapters in use may take together; what those of --adapter take "
            "when left out."
        ),
    ] = None
    mmproj: Annotated[
        Path | None,
        _compute(
            help="File with a GGUF model's encoder of images; mmproj*.gguf beside the model when "
            "left out."
        ),
    ] = None
    kv_gpu_memory: Annotated[
        str | None,
        _kv(
            help="Keys and values that stay where layers compute, such as 2GiB; the others go to "
            "host memory, or to the disk.  All of them stay when left out."
        ),
    ] = None
    kv_host_memory: Annotated[
        str | None,
        _kv(help="Host memory for those that do not stay; what is needed when left out."),
    ] = None
    kv_offload_dir: Annotated[Path | None, _kv(help="Folder on a fast disk for the rest.")] = None
    kv_offload_disk_memory: Annotated[
        str | None, _kv(help="The most to take of that disk; what is needed when left out.")
    ] = None
    kv_quant: Annotated[
        str | None,
        _kv(
            help="How those are kept that do not stay: exact, int8 or int4; or two of these and "
            "fp8, for host memory and for the disk: int8,int4. fp8 alone is for all, wherever "
            "they lie; three are for near, too: fp8,exact,int4. The disk has codecs, too, such as "
            "exact,int8+shared-parts, and another way for pages of little attention, such as "
            "exact,int8~int8/sparse24-int8: see docs/quality.md."
        ),
    ] = None
    kv_eviction: Annotated[
        str | None, _kv(help="Which go first: those that a2cr, lru or lfu value least.")
    ] = None
    kv_policy: Annotated[
        str | None,
        _kv(
            help="exact attends to all of the context; select to the share --kv-share of its "
            "pages, chosen anew for each token."
        ),
    ] = None
    kv_share: Annotated[float | None, _kv(help="What select attends to; 0.1 when left out.")] = None
    prefix_cache: Annotated[
        bool | None,
        _kv(
            "--prefix-cache/--no-prefix-cache",
            help="Keep the KV cache of ended sequences for prompts that begin alike.",
        ),
    ] = None
    prefix_cache_dir: Annotated[
        Path | None, _kv(help="Folder to keep them in for later runs, too.")
    ] = None
    prefix_cache_disk_memory: Annotated[
        str | None, _kv(help="The most to take there; 4GiB when left out.")
    ] = None
    prefix_shared: Annotated[
        bool | None,
        _kv(
            "--prefix-shared/--no-prefix-shared",
            help="Let all API keys share the prefix cache; else each key has its own.",
        ),
    ] = None
    dtype: Annotated[
        str | None, _compute(help="Of activations: auto, bfloat16, float32, float16.")
    ] = None
    fallback_model: Annotated[
        Path | None,
        _compute(
            help="Checkpoint of the same model in higher precision: requests that leave the text "
            "of hmt calibrate activations are computed with it."
        ),
    ] = None
    executor: Annotated[
        str | None,
        _compute(help="overlapped reads ahead while it computes, plain reads when it needs."),
    ] = None
    speculate: Annotated[
        str | None,
        _compute(
            help="auto drafts next tokens by what was said before and verifies several in one "
            "step, where that is faster and changes no answer, as lookup does; mtp also by the "
            "checkpoint's multi-token prediction layers, draft=PATH by a smaller model or an "
            "EAGLE-3 or DFlash drafter or Gemma 4's assistant; off does not."
        ),
    ] = None
    depth: Annotated[
        float | None,
        _compute(
            help="Of a mixture of recursions: the share of layers that a token passes through on "
            "average; 1 when left out."
        ),
    ] = None
    prefetch_distance: Annotated[int | None, _memory(help="Layers to read ahead.")] = None
    max_prefill_tokens: Annotated[int | None, _compute(help="Prompt tokens per step.")] = None
    goal: Annotated[
        str | None,
        _memory(help="Search for the plan that is best for latency, throughput or balanced."),
    ] = None
    profile: Annotated[
        str | None,
        _memory(
            help="Choices from a YAML file, or latency, throughput or balanced; hmt plan shows "
            "what they cost beside the goal's own plan."
        ),
    ] = None
    idle_unload: Annotated[
        float | None,
        _memory(
            help="Seconds without images after which a model's encoder of images leaves memory; "
            "when others need the room when left out."
        ),
    ] = None
    spill_dir: Annotated[
        Path | None,
        _memory(help="Folder on a fast disk for quantised weights that do not fit in memory."),
    ] = None
    disk_reader: Annotated[
        str | None,
        _memory(
            help="io_uring or direct (past the page cache), buffered or mmap (the same); the "
            "faster one of the first two when left out."
        ),
    ] = None
    verify_reads: Annotated[
        str | None,
        _memory(
            help="Compare the checksums of a pack's blocks: first (when first read), always, "
            "or never."
        ),
    ] = None
    threads: Annotated[
        int | None, _compute(help="Threads that compute; one per physical core when left out.")
    ] = None
    numa: Annotated[
        str | None,
        _memory(
            "--numa-node",
            "--numa",
            help="NUMA node to bind to; or two, of the CPU and of memory, such as 0,1; or auto: "
            "the GPU's where the model fits there, else memory is spread over all.",
        ),
    ] = None

    expert_cache_policy: Annotated[
        str | None, _memory(help="Which experts stay in memory: those that heat or lru value most.")
    ] = None
    expert_prefetch: Annotated[
        bool | None,
        _memory(
            "--expert-prefetch/--no-expert-prefetch",
            help="Read experts that are likely to be needed, while that gains time; on by default.",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        _compute(
            help="File for a timeline of reads, computing and waits, for ui.perfetto.dev; .gz "
            "compresses it."
        ),
    ] = None
    expert_trace: Annotated[
        Path | None,
        _memory(
            help="File for what the routers choose, for hmt plan --routing; .gz compresses it."
        ),
    ] = None

    def with_adapter(self, model: "LoadedModel") -> "LoadedModel":
        """The model, which computes all with the first of the adapters that were named."""
        if self.adapter:
            model.use_adapter(self.adapter[0].partition("=")[0])
        return model

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of hmt.Engine, and of EngineConfig.resolve.  Raises ConfigError."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        preset = named.pop("preset")
        if preset is not None:
            given = {name: value for name, value in named.items() if value is not None}
            named |= preset_settings(preset) | given
        named["quantization"] = named.pop("quant")
        named["adapters"] = named.pop("adapter") or None
        named["max_batch"] = 1  # a command answers one request after the other
        if self.numa is not None:
            named["numa"] = _nodes(self.numa)
        _with_launched(named)
        return {name: value for name, value in named.items() if value is not None}


def _with_launched(named: dict[str, Any]) -> None:
    """Let the processes that torchrun started divide the layers, where nothing else is asked."""
    found = launch()
    if found is None:
        return
    tp, ep, pp = named["tp"], named["ep"], named["pp"]
    if tp is ep is pp is None:
        named["tp"] = tp = found.ranks
    found.check(max(tp or 1, ep or 1) * (pp or 1))


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen and when an answer ends."""

    max_new_tokens: Annotated[
        int | None,
        _choice(help="The longest answer; 512, or what the context holds, when left out."),
    ] = None
    temperature: Annotated[float, _choice(help="0 takes the likeliest token.")] = 0.0
    top_k: Annotated[int, _choice(help="Only the K likeliest tokens; 0: all.")] = 0
    top_p: Annotated[
        float, _choice(help="Only the likeliest tokens that sum to this probability.")
    ] = 1.0
    min_p: Annotated[
        float, _choice(help="Only tokens with this share of the likeliest one's probability.")
    ] = 0.0
    repetition_penalty: Annotated[float, _choice(help="Above 1 discourages what was said.")] = 1.0
    seed: Annotated[int | None, _choice(help="Makes chance repeatable.")] = None
    stop: Annotated[
        list[str] | None, _choice(help="Text that ends the answer; may be repeated.")
    ] = None

    def sampling(self) -> "Sampling":
        """The same for the engine."""
        from hmt.contracts.request import Sampling

        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with its option groups replaced by a keyword parameter for each of their fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            parameters += _parameters(kind)
        else:
            parameters.append(parameter.replace(annotation=kind))

    @wraps(command)
    def expanded(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    expanded.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    expanded.__annotations__ = {p.name: p.annotation for p in parameters}
    return expanded


def embedded_model() -> Path:
    """The folder of the model that comes with HMT."""
    return Path(str(files("hmt") / "embedded" / "mini-dense"))


def choose_model(model: str | None) -> Path:
    """The folder or file that was named, perhaps on the hub or in the list, or the embedded one."""
    from hmt.formats import located
    from hmt.planner.catalogue import resolved

    if model is None:
        return embedded_model()
    return located(model if Path(model).expanduser().exists() else resolved(model))


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def _nodes(text: str) -> tuple[int, int] | str:
    if text == "auto":
        return text
    try:
        nodes = [int(part) for part in text.split(",")]
    except ValueError:
        nodes = []
    if len(nodes) not in (1, 2):
        raise ConfigError(f"--numa {text}: give one node, such as 0, two, such as 0,1, or auto")
    return nodes[0], nodes[-1]
