"""Drafters of several kinds through the engine: they draft what is defined, change no answer."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dflash_reference as dflash
import gemma4_assistant_reference as gemma4
import pytest
import torch
from eagle3_reference import Drafter, agreeing_drafter, random_drafter, write
from reference import MINI_DENSE, MINI_MOE, transformers_model
from safetensors.torch import save_file

import hmt
from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.blocks import BlockKind
from hmt.engine import LoadedModel
from hmt.engine.loading.prepared import DraftInputs
from hmt.engine.speculation.assistant import AssistantProposer
from hmt.engine.speculation.block_proposer import BlockProposer
from hmt.engine.speculation.draft import Draft, Worth
from hmt.engine.speculation.draft_model import Prediction
from hmt.engine.speculation.model_proposers import FirstOf, NextTokenProposer
from hmt.kernels import ops
from hmt.kernels.cpu import extension
from hmt_bench.open_gate import OpenGate, UpTo

OPTIONS: dict[str, Any] = {"host_memory": "320MiB", "max_prefill_tokens": 64, "context": 1024}
WAYS: dict[str, dict[str, Any]] = {
    "memory": {},
    "plain": {"executor": "plain"},
    "disk": {"host_memory": "36MiB", "context": 512, "max_batch": 2},
    "levels": {"kv_gpu_memory": "4608KiB", "max_prefill_tokens": 32, "prefix_cache": True},
}
CASES = [
    ("original", "plain"), ("original", "levels"), ("speculators", "memory"),
    ("agreeing", "memory"), ("agreeing", "disk"),
    ("dflash", "plain"), ("dflash", "levels"), ("dflash agreeing", "memory"),
    ("dflash agreeing", "disk"),
]  # fmt: skip
WIDTH, VOCAB, LAYERS = 256, 4096, (2, 4, 5)
needs_kernels = pytest.mark.skipif(
    extension.load() is None, reason="torch's results depend on the number of rows"
)


class Recorded:
    """A Proposer that keeps what another one drafts, and for what."""

    def __init__(self, own: Any) -> None:
        self.own, self.drafts = own, list[tuple[list[int], tuple[int, ...]]]()
        self.needs_hidden, self.is_slow, self.layers = True, True, own.layers
        self.observe, self.ended = own.observe, own.ended

    def propose(
        self, number: int, scope: str, tokens: Sequence[int], most: int, worth: Worth
    ) -> Draft:
        """At most three tokens."""
        draft = self.own.propose(number, scope, tokens, min(3, most), worth)
        self.drafts.append((list(tokens), draft.tokens))
        return draft


def always_asked(model: LoadedModel) -> Recorded:
    """Let a model verify all that its drafter drafts, and nothing else."""
    speculator = model._core.speculator
    first = speculator._proposer
    assert isinstance(first, FirstOf)
    kinds = NextTokenProposer | BlockProposer | AssistantProposer
    [own] = (one for one in first._proposers if isinstance(one, kinds))
    recorded = Recorded(own)
    speculator._proposer, speculator._gate = recorded, OpenGate()
    return recorded


def requests() -> list[hmt.Request]:
    """Greedy and drawn, shorter and longer than a chunk; one that says the same all the time."""
    drawn = hmt.Sampling(temperature=1.0, top_k=8, seed=4)
    return [
        hmt.Request([20 + (7 * n) % 300 for n in range(30)], 12, ignore_eos=True),
        hmt.Request([16 + (5 * n) % 200 for n in range(70)], 12, sampling=drawn, ignore_eos=True),
        hmt.Request([33] * 40, 20, ignore_eos=True),
    ]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """By name, and where they lie."""
    folder = tmp_path_factory.mktemp("drafters")
    norm = transformers_model("mini-dense").model.norm.weight
    made: dict[str, Any] = {
        "original": random_drafter(width=WIDTH, vocab=VOCAB, hidden=96, draft_vocab=300, seed=1),
        "speculators": random_drafter(
            width=WIDTH, vocab=VOCAB, original=False, family="qwen3", draft_vocab=200,
            own_table=False, said={"norm_before_residual": True}, seed=2,
        ),
        "agreeing": agreeing_drafter(norm, VOCAB),
        "dflash": dflash.random_drafter(
            width=WIDTH, vocab=VOCAB, draft_vocab=300, seed=5, states=LAYERS,
            types=["sliding_attention", "full_attention"],
        ),
        "dflash agreeing": dflash.agreeing_drafter(norm, VOCAB, mask=33),
    }  # fmt: skip
    architecture = "LlamaForCausalLM"
    return {name: (one, write(one, folder / name, architecture)) for name, one in made.items()}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[hmt.Completion]]:
    """Without drafts, by dtype."""
    found = {}
    for dtype in ("auto", "float32"):
        with hmt.Engine(**OPTIONS, dtype=dtype, speculate="off") as engine:
            model = engine.load_model(MINI_DENSE)
            found[dtype] = [model.infer(one) for one in requests()]
    return found


@pytest.fixture(scope="module")
def states() -> Iterator[Any]:
    """Hidden states of tokens in transformers, behind `LAYERS` layers: [tokens, 3 * width]."""
    model = transformers_model("mini-dense")

    def of(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([found[layer][0] for layer in LAYERS], dim=-1)

    yield of


@needs_kernels
@pytest.mark.parametrize(("name", "way"), CASES)
def test_drafters_change_no_answer(
    name: str,
    way: str,
    drafters: dict[str, tuple[Any, Path]],
    answers: dict[str, list[hmt.Completion]],
    states: Any,
) -> None:
    """All at once; and draft tokens are those that the definition gives for transformers' states.

    Only in f32 are these near enough to the engine's.
    """
    made, folder = drafters[name]
    dtype = "float32" if way == "plain" or name == "speculators" else "auto"
    options = OPTIONS | WAYS[way] | {"dtype": dtype, "speculate": f"draft={folder}"}
    with hmt.Engine(**options) as engine:
        model = engine.load_model(MINI_DENSE)
        recorded = always_asked(model)
        streams = [model.stream(one) for one in requests()]
        assert [stream.completion() for stream in streams] == answers[dtype]
        account = model.summary().speculation
    assert account.proposed > 40
    if name.endswith("agreeing"):
        assert account.accepted > 4 and len(account.by_depth) == 3
    elif name == "dflash" and dtype == "float32":
        _check_blocks(made, recorded, states)
    elif name != "dflash" and dtype == "float32":
        _check_drafts(made, recorded, states)


def _check_drafts(made: Drafter, recorded: Recorded, states: Any) -> None:
    table = torch.arange(len(made.tensors["d2t"])) + made.tensors["d2t"]
    model = transformers_model("mini-dense")
    made = replace(made, theirs={"verifier.embed_tokens.weight": model.model.embed_tokens.weight})
    for tokens, draft in recorded.drafts[::7]:
        with torch.no_grad():
            before, ids = made.fused(states(tokens[:-1]), 3), tokens[1:]
            for token in draft:
                logits, hidden = made.forward(ids, before)
                assert token == int(table[logits[-1].argmax()])
                before, ids = torch.cat((before, hidden[-1:])), [*ids, token]


def _check_blocks(made: dflash.Drafter, recorded: Recorded, states: Any) -> None:
    table = torch.arange(len(made.tensors["d2t"])) + made.tensors["d2t"]
    model = transformers_model("mini-dense")
    made = replace(made, theirs={"verifier.embed_tokens.weight": model.model.embed_tokens.weight})
    for tokens, draft in recorded.drafts[::7]:
        with torch.no_grad():
            logits = made.forward(tokens[-1], states(tokens[:-1]))
        assert list(draft) == table[logits[1:].argmax(1)].tolist()[: len(draft)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"speculators_model_type": "xpress"},
            "a drafter of kind 'xpress'; HMT runs eagle3 and dflash",
        ),
        ({"d2t": 5000}, "names tokens from .* the model that verifies has 4096"),
        ({"d2t": None}, "drafts 200 of 4096 tokens and has no tensor d2t"),
        ({"fc.weight": torch.zeros(256, 512)}, r"fc.weight"),
        ({"architecture": "Qwen3ForCausalLM"}, "drafts for 'publisher/model', a model of type Qw"),
    ],
)
def test_what_does_not_suit_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    made = random_drafter(
        width=WIDTH, vocab=VOCAB, original=False, draft_vocab=200, own_table=False
    )
    for name, value in changed.items():
        if name == "d2t" and value is not None:
            made.tensors[name][-1] = value
        elif name == "d2t":
            del made.tensors[name]
        elif isinstance(value, torch.Tensor):
            made.tensors[name] = value
        elif name in made.config:
            made.config[name] = value
    write(made, tmp_path, changed.get("architecture", "LlamaForCausalLM"))
    with pytest.raises((ConfigError, CheckpointError), match=said):
        hmt.Engine(**OPTIONS, speculate=f"draft={tmp_path}").load_model(MINI_DENSE)


def test_drafters_of_other_sizes_are_refused(tmp_path: Path) -> None:
    write(random_drafter(width=128, vocab=VOCAB), tmp_path)
    with pytest.raises(ConfigError, match=r"hidden_size 128, and this one.*has 256"):
        hmt.Engine(**OPTIONS, speculate=f"draft={tmp_path}").load_model(MINI_DENSE)


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "w4a8"])
def test_prediction_layers_share_the_embedding_and_the_output_layer(
    quantization: str | None,
) -> None:
    """In the bytes that the model has them in: the layers' own are all that is loaded for them."""
    request = hmt.Request([20 + (7 * n) % 300 for n in range(30)], 24, ignore_eos=True)
    options = OPTIONS | {"quantization": quantization}
    with hmt.Engine(**options, speculate="off") as engine:
        wanted = engine.load_model(MINI_MOE).infer(request)
    with hmt.Engine(**options, speculate="mtp") as engine:
        model = engine.load_model(MINI_MOE)
        draft = model._core.memory.draft
        assert draft is not None
        kinds = {block.kind for block in draft.prepared.layouts}
        [head] = (b for b in draft.prepared.layouts if b.kind is BlockKind.HEAD)
        assert BlockKind.EMBEDDING not in kinds and draft.prepared.layouts[head].slot_bytes <= 8192
        always_asked(model)
        assert model.infer(request) == wanted
        assert model.summary().speculation.accepted > 3


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A Gemma 4 and its assistant, as transformers has them, and where both lie."""
    folder = tmp_path_factory.mktemp("gemma4")
    model, made = gemma4.random_gemma4(VOCAB, 1), gemma4.random_assistant(VOCAB, 2, clusters=64)
    gemma4.write(made, folder / "assistant")
    shutil.copy(MINI_DENSE / "tokenizer.json", gemma4.write(model, folder / "model"))
    return model, made, folder


@needs_kernels
@pytest.mark.parametrize("way", ["plain", "disk"])
def test_an_assistant_attends_to_the_cache_of_its_model(
    way: str, gemma: tuple[Any, Any, Path]
) -> None:
    """Several requests at once, windows that are long full; drafts are those of transformers."""
    theirs, made, folder = gemma
    ways = {"plain": {"executor": "plain"}, "disk": {"host_memory": "16MiB", "context": 512}}
    options = OPTIONS | {"dtype": "float32"} | ways[way]
    with hmt.Engine(**options, speculate="off") as engine:
        model = engine.load_model(folder / "model")
        wanted = [model.infer(one) for one in requests()]
    with hmt.Engine(**options, speculate=f"draft={folder / 'assistant'}") as engine:
        model = engine.load_model(folder / "model")
        recorded = always_asked(model)
        streams = [model.stream(one) for one in requests()]
        assert [stream.completion() for stream in streams] == wanted
        account = model.summary().speculation
    assert account.proposed > 40 and len(account.by_depth) == 3
    for tokens, draft in recorded.drafts[::5]:
        assert list(draft) == gemma4.draft(made, theirs, tokens, len(draft))[1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": MINI_DENSE}, "an assistant of Gemma 4, and this model a LlamaForCausalLM"),
        ({"gpus": "fake", "gpu_memory": "64MiB"}, "in host memory only"),
        ({"kv_gpu_memory": "1MiB"}, "pages are at several levels"),
        ({"order": torch.zeros(VOCAB, dtype=torch.int64)}, "does not name each of the 4096 tokens"),
        ({"order": torch.zeros(9, dtype=torch.int64)}, r"is I64 \[9\]; it must be whole numbers"),
    ],
)
def test_where_an_assistant_cannot_draft(
    changed: dict[str, Any], said: str, gemma: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    model, assistant = changed.pop("model", gemma[2] / "model"), gemma[2] / "assistant"
    if (order := changed.pop("order", None)) is not None:
        shutil.copy(assistant / "config.json", tmp_path)
        tensors = gemma4.tensors(gemma[1]) | {"masked_embedding.token_ordering": order}
        save_file(tensors, tmp_path / "model.safetensors")
        assistant = tmp_path
    options = OPTIONS | {"speculate": f"draft={assistant}"} | changed
    with (
        hmt.Engine(**options) as engine,
        pytest.raises((ConfigError, CheckpointError), match=said),
    ):
        engine.load_model(model)


class _Chooses:
    """A draft model that always finds the same logits."""

    def __init__(self, *logits: float) -> None:
        self._logits = torch.tensor(logits)
        self.asked = 0

    def tokens(self, number: int) -> list[int]:
        return []

    def keep(self, number: int, tokens: int) -> None:
        """It has none."""

    def feed(self, *_: object) -> Prediction:
        self.asked += 1
        return Prediction(self._logits, ops.logit_stats(self._logits), torch.empty(0))


def test_alternatives_are_tokens_of_the_model_that_verifies_too() -> None:
    inputs = DraftInputs("eagle3", tokens=torch.tensor([40, 41, 42]))
    proposer = NextTokenProposer(_Chooses(0.0, 3.0, 2.0), 100, inputs)  # type: ignore[arg-type]
    proposer.observe(1, [5], 0, torch.zeros(1, 4))
    draft = proposer.propose(1, "", [5, 6], 1, UpTo())
    assert draft.tokens == (41,)
    assert [other.tokens for other in draft.alternatives] == [(42,)]


@pytest.mark.parametrize("most", [1, 3])
def test_no_step_computes_a_draft_token_that_would_not_be_verified(most: int) -> None:
    model = _Chooses(0.0, 3.0, 2.0)
    proposer = NextTokenProposer(model, 100, DraftInputs("mtp"))  # type: ignore[arg-type]
    proposer.observe(1, [5], 0, torch.zeros(1, 4))
    assert len(proposer.propose(1, "", [5, 6], 8, UpTo(most)).tokens) == model.asked == most
