"""Adapters as peft writes them: adapter_config.json and adapter_model.safetensors.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint; LoRA alone, with its scale by
rank (arXiv 2106.09685) or by the root of it (rsLoRA, arXiv 2312.03732).
"""

import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import regex

from hmt.base.errors import AdapterError, HeaderError, MissingFileError, os_reason
from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.adapters.contents import AdapterFile, AdapterMatrices, checked
from hmt.formats.safetensors import read_header

CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PICKLED: Final = "adapter_model.bin"
_MOST_CONFIG_BYTES: Final = 4 << 20
_MOST_PATTERNS: Final = 4096
_MOST_PATTERN_CHARACTERS: Final = 512
_PATTERN_TIMEOUT_S: Final = 2.0  # for all patterns of a file: some take for ever to match
_KEY: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
# Of a module that has several adapted parameters peft wraps one around the other.
_WRAPPED: Final = ".base_layer"

# What changes results in ways that HMT does not compute, and what it does.
_REFUSED: Final = {
    "use_dora": "DoRA scales whole weights by their norm, which HMT does not compute",
    "modules_to_save": "it replaces whole modules, of which HMT would need another copy",
    "trainable_token_indices": "it replaces rows of the embedding",
    "layer_replication": "it repeats layers of the model",
    "alora_invocation_tokens": "it begins only behind some tokens (aLoRA)",
    "use_qalora": "its inputs are pooled (QALoRA)",
    "lora_bias": "it adds biases",
    "use_bdlora": "its matrices are block-diagonal (BD-LoRA)",
    "arrow_config": "it chooses among other adapters (Arrow)",
    "monteclora_config": "its matrices are drawn at random",
    "kasa_config": "it has singular values between its matrices (KaSA)",
    "velora_config": "its activations are projected (VeLoRA)",
}


def open_peft(path: Path) -> AdapterFile:
    """The adapter in folder `path`; see `open_adapter`."""
    config = _read_config(path / CONFIG)
    _check(config, path)
    file = path / _WEIGHTS
    if not file.is_file():
        pickled = (path / _PICKLED).is_file()
        told = f"{_PICKLED} may run any code: save the adapter as safetensors" if pickled else (
            "download it"
        )  # fmt: skip
        raise MissingFileError(f"{path} has no {_WEIGHTS}; {told}")
    pairs: dict[str, dict[str, TensorRecord]] = {}
    for record in read_header(file).values():
        match = _KEY.fullmatch(record.name)
        if match is None:
            raise AdapterError(
                f"{file}: tensor {record.name!r} is none of LoRA's matrices, which end in "
                ".lora_A.weight and .lora_B.weight; HMT adapts linear layers alone"
            )
        pairs.setdefault(match[1], {})[match[2]] = record
    if not pairs:
        raise AdapterError(f"{file} holds no tensor: the adapter changes nothing")
    patterns, stacks = _Patterns(config, path), _stacks(config, path)
    matrices = []
    for module, pair in pairs.items():
        if len(pair) != 2:
            raise HeaderError(f"{file}: {module} has lora_{min(pair)} alone: download it again")
        while module.endswith(_WRAPPED):
            module = module.removesuffix(_WRAPPED)
        rank = pair["A"].shape[0] if pair["A"].shape else 0
        wanted, scale = patterns.rank_and_scale(module)
        experts = 0
        if module.rpartition(".")[2] in stacks and rank % wanted == 0:
            experts = rank // wanted
        elif rank != wanted:
            raise AdapterError(
                f"{file}: {pair['A'].name!r} has rank {rank}, and {CONFIG} says {wanted}: the "
                "files belong to different adapters"
            )
        own = AdapterMatrices(module, pair["A"], pair["B"], scale, experts=experts)
        matrices.append(checked(own, file))
    base = config.get("base_model_name_or_path")
    return AdapterFile(path, tuple(matrices), base if isinstance(base, str) else "")


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MOST_CONFIG_BYTES + 1)
    except OSError as error:
        raise AdapterError(f"{file} cannot be read ({os_reason(error)})") from error
    if len(raw) > _MOST_CONFIG_BYTES:
        raise HeaderError(f"{file} is longer than {_MOST_CONFIG_BYTES} bytes; it is no {CONFIG}")
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        raise HeaderError(f"{file} is not valid JSON: download it again") from None
    if not isinstance(config, dict):
        raise HeaderError(f"{file} is not a JSON object: download it again")
    return config


def _check(config: Mapping[str, Any], path: Path) -> None:
    """Raise AdapterError for what HMT does not compute."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{path} is an adapter of type {str(kind)[:40]!r}; HMT computes LORA")
    for field, why in _REFUSED.items():
        if config.get(field):
            raise AdapterError(f"{path} cannot be used: {field} is set, and {why}")
    bias = config.get("bias", "none")
    if bias != "none":
        raise AdapterError(
            f"{path} cannot be used: bias is {str(bias)[:40]!r}, which replaces biases of the model"
        )


def _stacks(config: Mapping[str, Any], path: Path) -> set[str]:
    """Last parts of the names of modules of which parameters are adapted: experts in one tensor."""
    given = config.get("target_parameters") or []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise AdapterError(f"{path}: target_parameters is no list of names")
    return {name.rpartition(".")[0].rpartition(".")[2] for name in given}


class _Patterns:
    """Ranks and scales by module: those of all, and those that patterns give to some."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._path = path
        self._rank = self._number(config.get("r", 8), "r")
        self._alpha = self._number(config.get("lora_alpha", 8), "lora_alpha")
        self._by_root = config.get("use_rslora") is True
        self._ranks = self._patterns(config, "rank_pattern")
        self._alphas = self._patterns(config, "alpha_pattern")
        self._left_s = _PATTERN_TIMEOUT_S

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Of one module.  Raises AdapterError."""
        rank = self._matching(self._ranks, module, self._rank)
        alpha = self._matching(self._alphas, module, self._alpha)
        if rank < 1 or rank != int(rank):
            raise AdapterError(f"{self._path}: {module} has rank {rank}; wanted is an integer")
        return int(rank), alpha / (math.sqrt(rank) if self._by_root else rank)

    def _number(self, value: object, name: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= 1e9:  # type: ignore[arg-type]
            raise AdapterError(f"{self._path}: {name} is {str(value)[:40]!r}; wanted is a number")
        return float(value)  # type: ignore[arg-type]

    def _patterns(self, config: Mapping[str, Any], name: str) -> list[tuple[Any, float]]:
        given = config.get(name) or {}
        if not isinstance(given, dict) or len(given) > _MOST_PATTERNS:
            raise AdapterError(
                f"{self._path}: {name} is no map of at most {_MOST_PATTERNS} patterns to numbers"
            )
        compiled = []
        for text, value in given.items():
            try:
                if len(text) > _MOST_PATTERN_CHARACTERS:
                    raise ValueError("it is too long")
                # As peft matches: the whole module, or what is behind one of its dots.
                found = regex.compile(rf"(.*\.)?({text})$")
            except (ValueError, RecursionError, regex.error) as error:
                raise AdapterError(
                    f"{self._path}: the pattern {text[:40]!r} of {name} is not one: {error}"
                ) from None
            compiled.append((found, self._number(value, name)))
        return compiled

    def _matching(self, patterns: list[tuple[Any, float]], module: str, default: float) -> float:
        for pattern, value in patterns:
            begin = time.monotonic()
            try:
                # A timeout of 0 would be none.
                if pattern.match(module, timeout=max(self._left_s, 1e-3)):
                    return value
                self._left_s -= time.monotonic() - begin
                if self._left_s < 0:
                    raise TimeoutError
            except TimeoutError:
                raise AdapterError(
                    f"{self._path}: patterns, the last {pattern.pattern[:60]!r}, take more than "
                    f"{_PATTERN_TIMEOUT_S:g} s to match: write the modules' names instead"
                ) from None
        return default
