"""Models that steps are measured with: one that is trained, and others of random weights.

Small ones of dense layers, of a few experts, and of latent attention, and a wider one whose steps
read more than most caches hold.
"""

import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch

FEW, MANY = 2, 8  # layers
_EXPERTS, CHOSEN = 32, 4
WIDTH, _EXPERT_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM = 256, 64, 4, 2, 64
_WIDE, _WIDE_NETWORK, _WIDE_HEADS, _WIDE_HEAD_DIM = 1024, 4096, 8, 128  # 30 MiB a layer
NARROW = 1536  # numbers of a network, of layers of 15 MiB
# Of latent attention, numbers kept, and with positions: long prompts make keys and values of them.
_LATENT, _ROTATED = 128, 32
LATENT_NUMBERS = _HEADS * (2 * _HEAD_DIM + _ROTATED)  # of all heads' queries and values
EXPERT_BYTES = 3 * WIDTH * _EXPERT_WIDTH * 2
_DEVIATION = 0.02
_WEIGHTS = "model.safetensors"
_SOURCE = "mini-dense"


class _Shelf:
    """Models that stay for others who want the same: large ones take seconds to write."""

    def __init__(self) -> None:
        self._stack: ExitStack | None = None
        self._models: dict[tuple[object, ...], Path] = {}
        self._lock = threading.Lock()  # some are wanted side by side

    @contextmanager
    def open(self) -> Iterator[None]:
        """Until the end of this nothing is written twice."""
        with ExitStack() as self._stack:
            try:
                yield
            finally:
                self._stack = None
                self._models.clear()

    def keeps(
        self, write: Callable[..., AbstractContextManager[Path]]
    ) -> Callable[..., AbstractContextManager[Path]]:
        """`write`, or what it has written."""

        @contextmanager
        @wraps(write)
        def model(*asked: int) -> Iterator[Path]:
            with self._lock:
                if self._stack is not None and (write, *asked) not in self._models:
                    self._models[write, *asked] = self._stack.enter_context(write(*asked))
                known = self._models.get((write, *asked))
            with nullcontext(known) if known is not None else write(*asked) as folder:
                yield folder

        return model


shelf = _Shelf()


@contextmanager
def small_model(layers: int) -> Iterator[Path]:
    """The embedded model with so many of its layers, in a folder that goes away."""
    from safetensors.torch import load_file, save_file

    with (
        as_file(files("hmt") / "embedded" / _SOURCE) as source,
        _folder_beside(source, {"num_hidden_layers": layers}) as folder,
    ):
        config = json.loads((source / "config.json").read_text())
        beyond = tuple(f"model.layers.{n}." for n in range(layers, config["num_hidden_layers"]))
        held = load_file(source / _WEIGHTS)
        save_file({k: v for k, v in held.items() if not k.startswith(beyond)}, folder / _WEIGHTS)
        yield folder


@shelf.keeps
@contextmanager
def wide_model(layers: int, network: int = _WIDE_NETWORK) -> Iterator[Path]:
    """Dense layers of random weights, of Llama's family, 30 MiB each; and a head of 8."""
    kv = _WIDE_HEADS // 2 * _WIDE_HEAD_DIM
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _WIDE,
        "intermediate_size": network,
        "num_attention_heads": _WIDE_HEADS,
        "num_key_value_heads": _WIDE_HEADS // 2,
        "head_dim": _WIDE_HEAD_DIM,
    }
    shapes = {
        "self_attn.q_proj": (_WIDE_HEADS * _WIDE_HEAD_DIM, _WIDE),
        "self_attn.k_proj": (kv, _WIDE),
        "self_attn.v_proj": (kv, _WIDE),
        "self_attn.o_proj": (_WIDE, _WIDE_HEADS * _WIDE_HEAD_DIM),
        **_gated("mlp.", _WIDE, network),
    }
    with random_model(layers, config, shapes, _WIDE) as folder:
        yield folder


@contextmanager
def small_experts(layers: int) -> Iterator[Path]:
    """A mixture of experts with random weights, of Qwen3's family, with a head of its own.

    So its embedding may stay on the drive.
    """
    with _experts(layers, _EXPERTS, WIDTH, _EXPERT_WIDTH, tied=False) as folder:
        yield folder


@shelf.keeps
@contextmanager
def wide_experts(layers: int) -> Iterator[Path]:
    """The same of larger and fewer experts: 28 MiB a layer."""
    with _experts(layers, CHOSEN * 2, _WIDE, _WIDE // 2) as folder:
        yield folder


@contextmanager
def _experts(
    layers: int, experts: int, width: int, between: int, tied: bool = True
) -> Iterator[Path]:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": width,
        "moe_intermediate_size": between,
        "num_experts": experts,
        "num_experts_per_tok": CHOSEN,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "tie_word_embeddings": tied,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
    }
    shapes = {
        "self_attn.q_norm": (_HEAD_DIM,),
        "self_attn.k_norm": (_HEAD_DIM,),
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, width),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, width),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, width),
        "self_attn.o_proj": (width, _HEADS * _HEAD_DIM),
        "mlp.gate": (experts, width),
    }
    for expert in range(experts):
        shapes |= _gated(f"mlp.experts.{expert}.", width, between)
    with random_model(layers, config, shapes, width) as folder:
        yield folder


@contextmanager
def small_latent(layers: int) -> Iterator[Path]:
    """Latent attention and dense networks with random weights, of DeepSeek-V3's family."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "first_k_dense_replace": layers,
        "num_key_value_heads": _HEADS,
        "q_lora_rank": _LATENT,
        "kv_lora_rank": _LATENT,
        "qk_nope_head_dim": _HEAD_DIM,
        "qk_rope_head_dim": _ROTATED,
        "v_head_dim": _HEAD_DIM,
        "n_routed_experts": _EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": _EXPERT_WIDTH,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }
    shapes = {
        "self_attn.q_a_proj": (_LATENT, WIDTH),
        "self_attn.q_a_layernorm": (_LATENT,),
        "self_attn.q_b_proj": (_HEADS * (_HEAD_DIM + _ROTATED), _LATENT),
        "self_attn.kv_a_proj_with_mqa": (_LATENT + _ROTATED, WIDTH),
        "self_attn.kv_a_layernorm": (_LATENT,),
        "self_attn.kv_b_proj": (_HEADS * 2 * _HEAD_DIM, _LATENT),
        "self_attn.o_proj": (WIDTH, _HEADS * _HEAD_DIM),
        **_gated("mlp."),
    }
    with random_model(layers, config, shapes) as folder:
        yield folder


def _gated(at: str, width: int = WIDTH, between: int = _EXPERT_WIDTH) -> dict[str, tuple[int, ...]]:
    """A gated network, usually a small one."""
    wide, narrow = (between, width), (width, between)
    return {f"{at}gate_proj": wide, f"{at}up_proj": wide, f"{at}down_proj": narrow}


@contextmanager
def random_model(
    layers: int,
    config: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    width: int = WIDTH,
    vocabulary: int = 0,
) -> Iterator[Path]:
    """Alike layers with weights of `shapes` and two norms, in a folder that goes away.

    vocabulary   0: as many tokens as the tokenizer knows
    """
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    norms = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (torch.randn(shape, generator=generator) * _DEVIATION).bfloat16()

    with as_file(files("hmt") / "embedded" / _SOURCE) as source:
        known = json.loads((source / "config.json").read_text())
        vocabulary = vocabulary or known["vocab_size"]
        known = {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": _EXPERT_WIDTH,
            "num_attention_heads": _HEADS,
            "vocab_size": vocabulary,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        }
        all_shapes = {"model.embed_tokens": (vocabulary, width), "model.norm": (width,)}
        if not config.get("tie_word_embeddings", True):
            all_shapes["lm_head"] = vocabulary, width
        weights = {f"{name}.weight": drawn(shape) for name, shape in all_shapes.items()}
        for name, shape in (norms | shapes).items():
            weight = drawn(shape)
            for layer in range(layers):
                weights[f"model.layers.{layer}.{name}.weight"] = weight.clone()
        with _folder_beside(source, known | config, anew=True) as folder:
            save_file(weights, folder / _WEIGHTS)
            yield folder


@contextmanager
def _folder_beside(source: Path, config: dict[str, Any], anew: bool = False) -> Iterator[Path]:
    """A copy of the source but its weights, `config` changed in it, or all of it `anew`."""
    with tempfile.TemporaryDirectory(prefix="hmt-probe-") as name:
        folder = Path(name)
        for file in source.iterdir():
            if file.name != _WEIGHTS:
                (folder / file.name).write_bytes(file.read_bytes())
        known = {} if anew else json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(known | config))
        yield folder
