"""What a model still knows when its keys and values are kept elsewhere, and in fewer bits.

The protocol is that of `hmt.bench.quality`; only the memory of keys and values differs.  Prompts
are read in pieces, and what left the near memory is read back in the form in which it is kept, by
every piece that follows: prompts see it as answers do.  Short tasks, and what is within the near
memory in general, cannot tell.

A setting is "full", "near:fp8", which is all of it near in that form, or where the rest lies:
"warm:int8" in host memory, "cold:int4" on the disk, "warm:int8,cold:int4" in both, half each.
Only some encodings can be warm, but what a codec costs in quality does not depend on where its
pages lie: measured cold, it is what it would be in host memory.

"select:bound@0.1" attends to that share of the pages, those with the best bounds on scores.
Selection is for tokens that are decoded: everything before the first answer is read as a prompt,
which sees all pages, and the rest, later questions included, token by token.  For the perplexity
all tokens are decoded.  (Published results also have "select:lru@0.1" and others, pages that an
eviction policy values most, and residuals that are gone: both lost.)

Static scales are calibrated by this module: "int8-static@prompts" on prompts of the kinds that are
asked, with other seeds, and on prose; "int8-static@prose" on prose alone, which is less than what
comes.  After @ there may be a file instead.

"cold:exact~sparse24@0.3" keeps pages in one of two ways: those whose A2CR score was below 0.3 when
they went to the disk in the second.  How many those were is counted while it is measured.
"""

import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from hmt.base.errors import ConfigError
from hmt.bench.environment import describe
from hmt.bench.quality import (
    FACTS,
    QUESTIONS,
    RETRIEVAL_SEED,
    Extent,
    TeacherForced,
    evaluate,
    short_tasks,
)
from hmt.bench.tasks import Corpus
from hmt.contracts.kv import GROUP_PAGES, KVAccount, PinnedPages, min_device_pages, ring_pages
from hmt.contracts.model import PAGE_TOKENS
from hmt.engine import Engine
from hmt.engine.config import KV_ENCODINGS, KV_NEAR
from hmt.engine.loading.kv_scales import see_text
from hmt.kvcache import group_bytes_as
from hmt.kvcache.codecs import STATIC, Calibration, CodecName, DiskCodecName

if TYPE_CHECKING:
    import torch

    from hmt.engine import LoadedModel
    from hmt.engine.loading.prepared import Prepared

DEVICE_SHARE = 0.12
SELECTIONS = tuple(f"select:bound@{share}" for share in (0.25, 0.1, 0.05))
SETTINGS = (
    "full",
    "near:fp8",
    "warm:exact",
    "warm:int8",
    "warm:fp8",
    "cold:int8-channel/int8",
    "cold:int8+parts",
    f"cold:{STATIC}@prompts",
    f"cold:{STATIC}+parts@prompts",
    f"cold:{STATIC}@prose",
    f"cold:{STATIC}+parts@prose",
    f"cold:{STATIC}+shared-parts@prose",
    "cold:int4",
    "cold:int4+parts",
    "cold:int4+shared-parts",
    "warm:int8,cold:int4",
    "cold:int8/sparse24-int8",
    "cold:sparse24-int8",
    "cold:sparse24",
    "cold:exact~sparse24@0.3",
    "cold:exact~sparse24@0.6",
    "cold:exact~sparse24@0.9",
    "cold:int8~sparse24-int8@0.3",
    "cold:int8~int8/sparse24-int8@0.6",
    *SELECTIONS,
)
_CHUNKS = (32, 64, 128, 256, 512)
_HOST_MEMORY = "2GiB"
_CALIBRATIONS = {"prompts", "prose"}
_PROSE_TOKENS = 4096  # of the end of the text
_TASKS, _RETRIEVALS = 64, 4  # that are not asked
_RETRIEVAL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Setting:
    """How keys and values are kept; None: nothing is there.

    near     of those that stay
    select   the share of pages that tokens attend to; None: all
    """

    name: str
    warm: str | None = None
    cold: str | None = None
    select: float | None = None
    near: str = "exact"

    @property
    def all_near(self) -> bool:
        """Whether there is no other place."""
        return self.warm is None and self.cold is None

    @staticmethod
    def parse(name: str) -> "Setting":
        """Raises ConfigError for what is none; see the module's description."""
        if name == "full":
            return Setting(name)
        if name in [f"near:{kept}" for kept in KV_NEAR]:
            return Setting(name, near=name.removeprefix("near:"))
        parts = dict(part.partition(":")[::2] for part in name.split(","))
        if not parts or not {*parts} <= {"warm", "cold", "select"} or "" in parts.values():
            raise ConfigError(
                f"setting {name!r}: write full, near:fp8, warm:NAME, cold:NAME, "
                "warm:NAME,cold:NAME or select:bound@SHARE"
            )
        chosen = _selection(parts["select"]) if "select" in parts else None
        warm = parts.get("warm", None if "cold" in parts else "exact")
        return Setting(name, warm, parts.get("cold"), chosen)


def _selection(text: str) -> float:
    """The share in bound@SHARE.  Raises ConfigError."""
    ranking, _, share = text.partition("@")
    try:
        found = float(share)
    except ValueError:
        found = 0.0
    if ranking != "bound" or not 0 < found <= 1:
        raise ConfigError(f"select:{text}: give a share of pages, as in select:bound@0.1")
    return found


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and with how much memory.

    lengths   context -> retrieval sequences; tasks and windows are measured at the shortest
    near      share of a context's pages that stay near, where a piece of the prompt permits it
    """

    lengths: Mapping[int, int] = field(default_factory=lambda: {2048: 8})
    tasks: int = 200
    windows: int = 8
    near: float = DEVICE_SHARE


def run(
    model: Path,
    text: str,
    settings: Sequence[str] = SETTINGS,
    sizes: Sizes | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Scores of `model` for each setting and length, on held-out `text`, and what they take.

    options   for all engines: a GPU, for example

    Raises ConfigError for settings that are none, and what loading and measuring raise.
    """
    sizes = sizes or Sizes()
    chosen = [Setting.parse(name) for name in settings]
    for setting in chosen:
        usual = DiskCodecName.parse(setting.cold or "exact").usual
        if usual not in KV_ENCODINGS and CodecName.parse(usual).lacks_file:
            raise ConfigError(f"setting {setting.name!r} needs a file with scales, after @")
    given = {"host_memory": _HOST_MEMORY, "max_batch": 1, **(options or {})}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hmt-kv-quality-") as name:
        folder = Path(name)
        with Engine(**given, context=_PROSE_TOKENS) as engine:
            loaded = engine.load_model(model)
            prepared = loaded.prepared
            wanted = {
                DiskCodecName.parse(setting.cold or "").usual.partition("@")[2]
                for setting in chosen
            }
            scales = {seen: folder / f"{seen}.safetensors" for seen in _CALIBRATIONS & wanted}
            for seen, file in scales.items():
                progress(f"calibrating on {seen}")
                calibrate(loaded, text, prompts=seen == "prompts").write(file)
        for length, count in sizes.lengths.items():
            first = length == min(sizes.lengths)
            extent = Extent(
                sizes.tasks if first else 0, {length: count}, sizes.windows if first else 0
            )
            for setting in chosen:
                gc.collect()  # the last engine's memory
                memory = KVMemory.of(setting, length, sizes.near, prepared, scales)
                at = f"{length} {setting.name}"
                progress(at)
                with Engine(**given, **memory.options(folder)) as engine:
                    loaded = engine.load_model(model)
                    quality = evaluate(
                        loaded if setting.select is None else Decoding(loaded),
                        loaded.tokenizer.encode,
                        text,
                        extent,
                        lambda part, so_far, at=at: progress(f"{at}: {part} {so_far}"),  # type: ignore[misc]
                    )
                    account = loaded.summary().kv
                memory = memory.after(account)
                results.append({"length": length, **memory.as_json(), **quality.as_json()})
    return {
        "model": model.resolve().name,
        "near": sizes.near,
        "tasks": sizes.tasks,
        "windows": sizes.windows,
        "machine": describe(prepared.machine),
        "results": results,
    }


@dataclass(frozen=True, slots=True)
class Decoding(TeacherForced):
    """A model that reads what comes before the first wanted row at once, the rest as it decodes."""

    model: "LoadedModel"

    @override
    def logits(self, tokens: Sequence[int], rows: Sequence[int]) -> "torch.Tensor":
        return self.model.logits(tokens, rows, prefill=min(rows))


def calibrate(model: "LoadedModel", text: str, *, prompts: bool) -> Calibration:
    """Magnitudes of keys and values over the end of `text`, and of `prompts` that are not asked."""
    encode, found = model.tokenizer.encode, Calibration()
    ids = encode(text)
    see_text(model, ids[-_PROSE_TOKENS:], found.see)
    if prompts:
        tasks = [*short_tasks(encode, Extent().tasks + _TASKS)][-_TASKS:]
        for quiz in tasks:
            see_text(model, quiz.tokens, found.see)
        corpus = Corpus(encode, np.array(ids, np.int32), RETRIEVAL_SEED + 1)
        for _ in range(_RETRIEVALS):
            drawn = corpus.retrieval(_RETRIEVAL_TOKENS, FACTS, QUESTIONS)
            see_text(model, drawn.ids.tolist(), found.see)
    return found


@dataclass(frozen=True, slots=True)
class KVMemory:
    """How many pages of a context lie where, and what they take.

    chunk         tokens of a prompt's pieces
    device_bytes  of all near pages, and of rings
    pages         by level: "near", "warm", "cold"
    page_bytes    of one of them on average, without what only padding takes "low" those of the disk
                  that are of little attention
    quant         how warm and cold pages are kept, for the engine
    low_share     of the pages that went to the disk, those of little attention
    """

    setting: Setting
    context: int
    chunk: int
    device_bytes: int
    pages: Mapping[str, int]
    page_bytes: Mapping[str, float]
    quant: tuple[str, str]
    low_share: float = 0.0

    @staticmethod
    def of(
        setting: Setting,
        context: int,
        share: float,
        prepared: "Prepared",
        scales: Mapping[str, Path],
    ) -> "KVMemory":
        """`share` of the pages near, or as few as can be; `scales`: files of calibrations."""
        model, sizes = prepared.model, prepared.demand.kv_sizes
        assert sizes is not None
        chunk = prompt_slice(context, share)
        pages = -(-context // PAGE_TOKENS)
        hot = max(min_device_pages(chunk, 1, PinnedPages()), int(pages * share))
        hot = pages if setting.all_near else min(hot, pages)
        rings = sum(n * ring_pages(w, chunk) for w, n in sizes.ring_pages.items())
        warm = 0 if setting.warm is None else (pages - hot) // (1 if setting.cold is None else 2)
        cold = DiskCodecName.parse(setting.cold or "exact")
        codec, at, seen = cold.usual.partition("@")
        cold = replace(cold, usual=f"{codec}{at}{scales.get(seen, seen)}")
        ways = setting.warm or "exact", cold.usual, cold.low or cold.usual
        layers = model.spec.kv_layers
        far = [group_bytes_as(name, layers, model.dtype) / GROUP_PAGES for name in ways]
        near = sizes.device_page
        if setting.near != "exact":
            near = group_bytes_as(setting.near, layers, model.dtype) // GROUP_PAGES
        return KVMemory(
            setting, context, chunk, hot * sizes.device_page + rings,
            {"near": hot, "warm": warm, "cold": pages - hot - warm},
            {"near": near, "warm": far[0], "cold": far[1], "low": far[2]},
            (ways[0], str(cold)),
        )  # fmt: skip

    def after(self, account: KVAccount | None) -> "KVMemory":
        """The same when it is known which pages of the disk were of little attention."""
        written = 0
        if account is not None:
            written = sum(n for way, n in account.moved.items() if way.endswith("to disk"))
        if account is None or not account.low_pages:
            return self
        low = account.low_pages / written
        mixed = (1 - low) * self.page_bytes["cold"] + low * self.page_bytes["low"]
        return replace(self, page_bytes={**self.page_bytes, "cold": mixed}, low_share=low)

    def options(self, folder: Path) -> dict[str, Any]:
        """Of an engine whose cold pages lie in `folder`."""
        options: dict[str, Any] = {"context": self.context, "max_prefill_tokens": self.chunk}
        if self.setting.all_near:
            return options | {"kv_quant": f"{self.setting.near},exact,exact"}
        if self.setting.select is not None:
            options |= {"kv_policy": "select", "kv_share": self.setting.select}
        return options | {
            "kv_gpu_memory": self.device_bytes,
            "kv_host_memory": int(self.pages["warm"] * self.page_bytes["warm"]),
            "kv_offload_dir": folder,
            "kv_quant": ",".join(self.quant),
        }

    def as_json(self) -> dict[str, Any]:
        """What of it tells results apart."""
        total = sum(self.pages[level] * self.page_bytes[level] for level in self.pages)
        used = [level for level in self.pages if self.pages[level]]
        low = {"low_share": self.low_share} if self.low_share else {}
        return {
            "setting": self.setting.name,
            **low,
            "prompt_slice": self.chunk,
            "near_share": self.pages["near"] / sum(self.pages.values()),
            "bytes_per_token": {level: self.page_bytes[level] / PAGE_TOKENS for level in used},
            "mean_bytes_per_token": total / PAGE_TOKENS / sum(self.pages.values()),
        }


def prompt_slice(context: int, share: float) -> int:
    """Tokens of a prompt's pieces: as many as let `share` of the pages be near, 32 at least."""
    pages = context / PAGE_TOKENS * share
    fitting = [chunk for chunk in _CHUNKS if min_device_pages(chunk, 1, PinnedPages()) <= pages]
    return max(fitting, default=_CHUNKS[0])
