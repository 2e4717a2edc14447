"""What predictions are compared with: runs of models that are written for it.

Small models show what a step costs whatever it reads, larger ones what reading and computing cost.
"""

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from hmt.bench.random_model import Shape, write_random_model

WRITTEN = {
    "dense": Shape(12, 1536, 4096, 12, 4, 128),
    "moe": Shape(8, 1024, 512, 16, 4, 64, experts=32, experts_per_token=4),
}
GPU_SHAPES = {
    # Llama-3-8B and Qwen3-30B-A3B with fewer layers.
    "8b": Shape(8, 4096, 14336, 32, 8, vocab_size=32000),
    "30b-moe": Shape(8, 2048, 768, 32, 4, 128, vocab_size=32000, experts=128, experts_per_token=8),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    model          a name of WRITTEN or GPU_SHAPES, "mini-dense", or a folder
    scheme         how weights are encoded; None: as published
    kept           the share of the weights that host memory may keep
    users          who decode at once, each behind a prompt of `prompt` tokens
    tokens         that each decodes
    chunk          prompt tokens per step; None: the planner's choice
    gpu_memory     None: the CPU computes
    """

    model: str
    scheme: str | None
    kept: float
    prompt: int
    users: int
    tokens: int = 32
    chunk: int | None = None
    gpu_memory: str | None = None

    @property
    def name(self) -> str:
        """For tables."""
        where = "" if self.gpu_memory is None else f" GPU {self.gpu_memory}"
        kept = "" if self.kept == 1 else f" {self.kept:.0%} kept"
        encoding = self.scheme or "as published"
        return f"{Path(self.model).name} {encoding}{kept}{where}, {self.prompt} x {self.users}"


def cpu_cases(moe: str | None = None) -> list[Case]:
    """Runs for a machine without a GPU; `moe` is the folder of a trained mixture of experts."""
    # Steps of a second and more in all, where they can: memory's rate changes from one to the next.
    cases = [
        Case("mini-dense", None, 1, 1024, 1, 512),
        Case("mini-dense", None, 1, 1024, 8, 192),
        Case("mini-dense", None, 1, 8192, 1, 256, 512),
        Case("mini-dense", None, 1, 32000, 1, 128, 512),
        Case("mini-dense", "w8a8", 1, 4096, 4, 192),
        Case("dense", None, 1, 1024, 1, 64),
        Case("dense", None, 1, 1024, 8),
        Case("dense", "w8a8", 1, 1024, 1, 96),
        Case("dense", "w8a8", 1, 2048, 4, 64),
        Case("dense", "w4a8", 1, 1024, 1, 128),
        Case("dense", "w4a8", 1, 1024, 8, 64),
        Case("dense", "w4a8", 1, 8192, 1, 96),
        Case("dense", None, 0.5, 1024, 1, 24),
        Case("dense", None, 0.1, 1024, 1, 16),
        Case("dense", None, 0.1, 1024, 4, 16),
        Case("dense", "w4a8", 0.5, 1024, 1, 32),
        Case("dense", "w8a8", 0.1, 2048, 2, 24),
        Case("moe", None, 1, 1024, 1, 192),
        Case("moe", "w8a8", 1, 1024, 8, 96),
        Case("moe", "w4a8", 1, 1024, 1, 384),
        Case("moe", "w4a8", 1, 4096, 2, 192),
        Case("moe", None, 0.5, 1024, 1, 128),
        Case("moe", None, 0.1, 1024, 1, 48),
        Case("moe", None, 0.5, 1024, 4, 48),
        Case("moe", "w4a8", 0.5, 1024, 1, 192),
    ]
    if moe is not None:
        own = Case(moe, None, 1, 1024, 1, 384)
        cases += [own, replace(own, prompt=16384, tokens=192), replace(own, users=8, tokens=160)]
    return cases


def gpu_cases() -> list[Case]:
    """Runs for a machine with one."""
    # Steps of a millisecond: as many as take a quarter of a second.
    resident, experts = Case("8b", "w4a16:32", 1, 512, 1, 256, None, "40GiB"), "30b-moe"
    return [
        resident,
        replace(resident, prompt=8192),
        replace(resident, users=8, tokens=128),
        replace(resident, users=32, tokens=64),
        replace(resident, scheme="w8a8", prompt=2048),
        replace(resident, scheme="w8a8", prompt=2048, users=8, tokens=128),
        replace(resident, gpu_memory="2GiB", prompt=2048, tokens=48),
        replace(resident, gpu_memory="2GiB", users=8, tokens=32),
        replace(resident, model=experts, prompt=2048),
        replace(resident, model=experts, users=8, tokens=128),
        replace(resident, model=experts, users=32, tokens=64),
        replace(resident, model=experts, gpu_memory="3GiB", prompt=2048, tokens=96),
        replace(resident, model=experts, gpu_memory="3GiB", users=8, tokens=64),
    ]


def folder_of(case: Case, folder: Path) -> Path:
    """Where the case's model lies; random weights are written into `folder` unless they are there.

    Models of GPU_SHAPES are packs: as large as it says in memory, and small on the drive.
    """
    if case.model in WRITTEN:
        found = folder / case.model
        if not (found / "model.safetensors.index.json").exists():
            write_random_model(found, WRITTEN[case.model])
        return found
    if case.model in GPU_SHAPES:
        from hmt.bench.tiled_pack import write_tiled_pack

        scheme = case.scheme or "w4a16:32"
        found = folder / f"{case.model}-{scheme.replace(':', '-')}"
        if not (found / "pack").exists():
            write_tiled_pack(found, GPU_SHAPES[case.model], scheme, written_layers=1)
        return found / "pack"
    if case.model == "mini-dense":
        return Path(str(files("hmt") / "embedded" / "mini-dense"))
    return Path(case.model)
