"""Every rope type of transformers in every family: its logits, or a refusal that names the option.

Prompts of two lengths, one beyond the limit at which LongRoPE and dynamic NTK change: whole, in
chunks, token by token at that limit and beside each other.
"""

import copy
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_memory import bench_of, published, put_tokenizer, random_reference
from random_configs import families, first_fields
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hmt
from hmt.base.errors import CheckpointError
from hmt.contracts.step import SegmentRequest, Step
from hmt.models import open_model

# With more, threads would only wait for one another.
pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
BORDER, SHORT, LONG = 20, 15, 41
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.5},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 12},
    "longrope": {"original_max_position_embeddings": BORDER},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
}
# Without a file here: attention by name with a rotary module beside the layers; a scale that
# changes with the factors; latent attention.
OTHERS: dict[str, dict[str, Any]] = {
    "granite": {"attention_multiplier": 0.2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minicpm3": {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16, "v_head_dim": 12, "head_dim": 16,
    },
}  # fmt: skip
SIZES = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def config_of(family: str, kind: str, **more: Any) -> Any:
    """A small configuration with rotary positions of a kind; `more` are options of it."""
    fields: dict[str, Any] = dict(
        SIZES | OTHERS[family] if family in OTHERS else first_fields(family)
    )
    for name in ("original_max_position_embeddings", "sliding_window_pattern"):
        fields.pop(name, None)
    fields["num_hidden_layers"] = 2
    if family == "granitemoehybrid":
        fields["position_embedding_type"] = "rope"
    if "layer_types" in fields:
        others = [kind for kind in fields["layer_types"] if kind != "full_attention"]
        fields["layer_types"] = [*others[:1], "full_attention"]
    if family == "deepseek_v4":
        fields["layer_types"] = others[:2]  # of many positions to an entry, and of few
    if "ple_layer_ids" in fields:
        fields["ple_layer_ids"] = [1]  # from 1 on, and of linear attention
    if "mlp_layer_types" in fields:
        fields["mlp_layer_types"] = fields["mlp_layer_types"][:2]
    fields["max_position_embeddings"] = BORDER if kind == "dynamic" else 96
    if family == "gemma4_text":
        fields["num_kv_shared_layers"] = 0
    config = CONFIG_MAPPING[family](**fields)
    config.allow_global_per_layer_attribute_access = True
    dim = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
    dim = dim or config.hidden_size // config.num_attention_heads
    if family != "deepseek_v4":
        fields["head_dim"] = dim  # transformers' Mixtral needs it with some types
    dim = fields.get("global_head_dim", dim)
    rope = {"rope_type": kind, "rope_theta": 5000.0, **copy.deepcopy(OPTIONS[kind]), **more}
    if kind == "longrope":
        usual = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
        turned = int(dim * more.get("partial_rotary_factor", usual)) // 2
        rng = random.Random(dim)
        rope |= {
            "long_factor": [1 + 8 * rng.random() for _ in range(turned)],
            "short_factor": [1 + rng.random() for _ in range(turned)],
        }
        if family == "phi3":
            fields["original_max_position_embeddings"] = BORDER
        if family == "phimoe":
            rope |= {"short_mscale": 1.1, "long_mscale": 1.3}
    if family in ("gemma3_text", "gemma4_text"):
        local = {"rope_type": "default", "rope_theta": 700.0}
        fields["layer_types"] = ["sliding_attention", "full_attention"]
        rope = {"full_attention": rope, "sliding_attention": local}
    if family == "deepseek_v4":
        share = {"partial_rotary_factor": 0.25}
        rope = {"main": {"rope_type": "default", "rope_theta": 1e4, **share}, "compress": rope}
        rope["compress"] |= share
    return CONFIG_MAPPING[family](**fields, rope_parameters=rope)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(250) for _ in range(count)] for count in (SHORT, LONG)]


@torch.inference_mode()
def logits_of(reference: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def part(sequence: int, start: int, tokens: list[int], whole: int) -> SegmentRequest:
    """Tokens of a prompt of `whole` tokens, of which the logits of each are wanted."""
    return SegmentRequest(sequence, start, tokens, len(tokens), whole=whole)


# Whose attention knows no positions, or that have none.
UNTURNED = ("mamba", "mamba2", "falcon_mamba", "jamba", "nemotron_h", "glm5_next_text")
TURNED = [family for family in families() if family not in UNTURNED]
MATRIX = [
    (family, kind)
    for family in (*TURNED, *OTHERS)
    for kind in OPTIONS
    # transformers itself knows no others in these.
    if not (family == "phi3" and kind not in ("default", "longrope"))
    # Pools of keys and entries have one set of frequencies; others are refused.
    and not (family in ("qwen4_exp_text", "deepseek_v4") and kind in ("dynamic", "longrope"))
    and (family, kind) != ("deepseek_v4", "proportional")  # turns whole heads, of two widths
    and not (family == "phimoe" and kind not in ("default", "longrope"))
    and (family, kind) != ("gemma4_text", "longrope")  # it asks for one width of all heads
]


def turned_once() -> list[Any]:
    """MATRIX: of each family one kind in turn, and the others with `--whole`."""
    chosen = set()
    for number, family in enumerate((*TURNED, *OTHERS)):
        kinds = [kind for other, kind in MATRIX if other == family]
        chosen.add((family, kinds[number % len(kinds)]))
    assert {kind for _, kind in chosen} == OPTIONS.keys()
    return [
        pytest.param(*pair, marks=[] if pair in chosen else [pytest.mark.whole]) for pair in MATRIX
    ]


def test_all_types_of_transformers_are_here() -> None:
    assert {"default", *ROPE_INIT_FUNCTIONS} == OPTIONS.keys()


@pytest.mark.parametrize(("family", "kind"), turned_once())
def test_logits_are_transformers(family: str, kind: str, tmp_path: Path) -> None:
    reference, (short, long) = random_reference(config_of(family, kind), 3), prompts()
    # The shorter first: transformers' modules keep the frequencies of the longest call.
    wanted = [logits_of(reference, prompt) for prompt in (short, long)]
    bench = bench_of(reference, tmp_path)
    # Whole, in chunks, and token by token where the type changes; test_parity has all others so.
    ones = [0, *range(BORDER - 3, BORDER + 3), LONG]
    cuts = [(short, [0, SHORT]), (short, [0, 7, SHORT - 1, SHORT]), (long, [0, LONG])]
    cuts += [(long, [*range(0, LONG, 7), LONG]), (long, ones)]
    for number, (prompt, borders) in enumerate(cuts):
        found = [
            bench.compute(part(number, begin, prompt[begin:end], len(prompt)))
            for begin, end in pairwise(borders)
        ]
        rows = wanted[prompt is long]
        torch.testing.assert_close(torch.cat(found), rows, atol=TOLERANCE, rtol=0)
    beside = bench.compute(part(101, 0, long, LONG), part(100, 0, short, SHORT))
    torch.testing.assert_close(beside, torch.cat(wanted[::-1]), atol=TOLERANCE, rtol=0)


# Whose modules turn a part of each head.
PARTIAL = (
    "bamba", "glm4_moe", "minimax_m2", "phi3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "qwen4_exp_text", "deepseek_v4",
)  # fmt: skip
NATIVE = [family for family in TURNED if family not in PARTIAL]


@pytest.mark.parametrize("family", NATIVE)
def test_a_share_of_the_head_is_refused_where_no_module_reads_it(
    family: str, tmp_path: Path
) -> None:
    config = config_of(family, "linear", partial_rotary_factor=0.5).to_dict()
    config["architectures"] = [type_of(family)]
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor is 0\.5"):
        open_model(config, tmp_path, torch.float32)


def type_of(family: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"factor": 2.0}, "factor 2.0"),
        ({"rope_type": "default", "factor": 2.0}, "factor 2.0"),
        ({"type": "linear", "factor": 2.0, "attention_factor": 0.5}, "attention_factor 0.5"),
        ({"rope_type": "linear", "factor": 2.0, "alpha": 1000}, "alpha 1000"),
        ({"rope_type": "default", "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta 0.1"),
        ({"rope_type": "axial"}, "rope_type 'axial' is not supported"),
        ({"rope_type": "longrope", "factor": 2.0}, "short_factor"),
        ({"rope_type": "yarn"}, "factor"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_options_that_nothing_reads_are_refused(
    rope: dict[str, Any], named: str, spelling: str, tmp_path: Path
) -> None:
    config = config_of("llama", "default").to_dict()
    del config["rope_parameters"]
    config |= {"architectures": ["LlamaForCausalLM"], "rope_theta": 5000.0, spelling: rope}
    with pytest.raises(CheckpointError, match=named):
        open_model(config, tmp_path, torch.float32)


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "linear", "factor": 2.0},
        {"type": "linear", "rope_type": "linear", "factor": 2.0, "attention_factor": None},
    ],
)
def test_old_spellings_are_the_same_model(rope: dict[str, Any], tmp_path: Path) -> None:
    new = config_of("llama", "linear", factor=2.0).to_dict() | {
        "architectures": ["LlamaForCausalLM"]
    }
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    old |= {"rope_theta": 5000.0, "rope_scaling": rope}
    step = Step.build([(1, 30, [0, 0], 0)])
    tables = []
    for config in (new, old):
        model: Any = open_model(config, tmp_path, torch.float32)
        tables.append(model.attention.rotary.cos_sin(step)[0])
    assert torch.equal(*tables)


def publish(reference: Any, folder: Path) -> None:
    published(reference, folder)
    put_tokenizer(folder)


def greedy(reference: PreTrainedModel, prompt: list[int], count: int, *, cached: bool) -> list[int]:
    # By a copy that has seen nothing yet: modules keep frequencies from call to call.
    out = copy.deepcopy(reference).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        use_cache=cached,
    )
    return [int(token) for token in out[0, len(prompt) :]]


# transformers' Phi-3 begins again at the border by itself; others mix keys of both kinds, which
# HMT does not: their answers are those without a cache.  With dynamic NTK it keeps keys, too.
ACROSS = {
    ("phi3", "longrope"): True,
    ("granite", "longrope"): False,
    ("llama", "dynamic"): True,
    ("granite", "dynamic"): True,
}


@pytest.mark.parametrize(("family", "kind"), ACROSS)
def test_answers_cross_the_border_as_transformers_do(
    family: str, kind: str, tmp_path: Path
) -> None:
    """Whatever the chunk, the answer's limit, what runs beside, and what prompts share."""
    reference, (prompt, long) = random_reference(config_of(family, kind), 3), prompts()
    wanted = greedy(reference, prompt, 14, cached=ACROSS[family, kind])
    beside = greedy(reference, long, 4, cached=True)
    publish(reference, tmp_path)
    turn = prompt + wanted[:9] + [5] * 3
    second = greedy(reference, turn, 3, cached=True)
    options = {"host_memory": "128MiB", "dtype": "float32", "context": 48, "max_batch": 3}
    for chunk, prefixes in ((None, False), (4, True)):
        with hmt.Engine(
            **options, max_prefill_tokens=chunk, prefix_cache=prefixes, threads=1
        ) as engine:
            model = engine.load_model(tmp_path)

            def answers(*asked: tuple[list[int], int], model: Any = model) -> list[list[int]]:
                requests = [hmt.Request(t, n, ignore_eos=True) for t, n in asked]
                return [list(answer.token_ids) for answer in model.infer_batch(requests)]

            assert answers((prompt, 2)) == [wanted[:2]]
            assert answers((prompt, 14), (long, 4), (prompt, 9)) == [wanted, beside, wanted[:9]]
            assert answers((turn, 3), (prompt, 14)) == [second, wanted]


@pytest.mark.parametrize(("family", "kind"), [("phi3", "longrope"), ("llama", "dynamic")])
def test_beams_cross_the_border_as_transformers_do(family: str, kind: str, tmp_path: Path) -> None:
    wide = {"factor": 6.0} if kind == "dynamic" else {}
    reference, (prompt, _) = random_reference(config_of(family, kind, **wide), 3), prompts()
    publish(reference, tmp_path)
    out = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, SHORT, dtype=torch.long),
        max_new_tokens=12, min_new_tokens=12, num_beams=3, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    with hmt.Engine(host_memory="128MiB", dtype="float32", context=96, max_batch=3) as engine:
        model = engine.load_model(tmp_path)
        [best, *_] = model.beam_search(hmt.Request(prompt, 12), 3)
    assert list(best.token_ids) == out[0, SHORT:].tolist()
