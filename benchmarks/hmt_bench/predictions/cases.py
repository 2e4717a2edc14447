"""What predictions are compared with: runs of models written for it, and of given files."""

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from hmt.profiling.random_model import Shape, write_random_model

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

    model          a name of WRITTEN or GPU_SHAPES, "mini-dense", or a path
    scheme         how weights are encoded; None: as published
    kept           the share of the weights that host memory may keep
    users          who decode at once, each behind a prompt of `prompt` tokens
    tokens         that each decodes
    gpu_memory     None: the CPU computes
    """

    model: str
    scheme: str | None = None
    kept: float = 1.0
    prompt: int = 1024
    users: int = 1
    tokens: int = 64
    gpu_memory: str | None = None

    @property
    def name(self) -> str:
        """For tables."""
        where = "" if self.gpu_memory is None else f" GPU {self.gpu_memory}"
        kept = "" if self.kept == 1 else f" {self.kept:.0%} kept"
        encoding = self.scheme or "as published"
        return f"{Path(self.model).name} {encoding}{kept}{where}, {self.prompt} x {self.users}"


def cpu_cases(models: tuple[str, ...] = ()) -> list[Case]:
    """Runs for a machine without a GPU: ten of models that are written, two of each of `models`."""
    cases = [
        Case("mini-dense", tokens=512),
        Case("dense"),
        Case("dense", users=8, tokens=32),
        Case("dense", "w8a8", tokens=96),
        Case("dense", "w4a8", prompt=8192, tokens=96),
        Case("dense", kept=0.5, tokens=24),
        Case("dense", "w4a8", kept=0.1, tokens=24),
        Case("moe", tokens=192),
        Case("moe", "w4a8", users=8, tokens=96),
        Case("moe", "w8a8", tokens=192),
    ]
    for model in models:
        cases += [Case(model), Case(model, prompt=512, users=4, tokens=48)]
    return cases


def gpu_cases() -> list[Case]:
    """Runs for a machine with one."""
    resident = Case("8b", "w4a16:32", prompt=512, tokens=256, gpu_memory="40GiB")
    return [
        resident,
        replace(resident, prompt=8192),
        replace(resident, users=8, tokens=128),
        replace(resident, scheme="w8a8", prompt=2048),
        replace(resident, gpu_memory="2GiB", prompt=2048, tokens=48),
        replace(resident, model="30b-moe", prompt=2048),
        replace(resident, model="30b-moe", users=8, tokens=128),
        replace(resident, model="30b-moe", gpu_memory="3GiB", prompt=2048, tokens=96),
    ]


def folder_of(case: Case, folder: Path) -> Path:
    """Where the case's model lies; random weights are written into `folder` unless they are there.

    Models of GPU_SHAPES are packs: as large as it says in memory, and small on the disk.
    """
    if case.model in WRITTEN:
        written = folder / case.model
        if not (written / "model.safetensors.index.json").exists():
            write_random_model(written, WRITTEN[case.model])
        return written
    if case.model in GPU_SHAPES:
        from hmt_bench.aliased_pack import write_tiled_pack

        scheme = case.scheme or "w4a16:32"
        written = folder / f"{case.model}-{scheme.replace(':', '-')}"
        if not (written / "pack").exists():
            write_tiled_pack(written, GPU_SHAPES[case.model], scheme, written_layers=1)
        return written / "pack"
    if case.model == "mini-dense":
        return Path(str(files("hmt") / "embedded" / "mini-dense"))
    return Path(case.model)
