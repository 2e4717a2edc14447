"""Going on after an end, memory, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hmt
from hmt.base.errors import BudgetError, ConfigError
from hmt.engine.loading.source import open_source
from hmt.finetuning import FinetuneOptions, finetune, training
from hmt.finetuning.adapters import find_modules
from hmt.finetuning.examples import read_examples
from hmt.finetuning.training import opened_run
from hmt.models import open_model

MODEL = Path(hmt.__file__).parent / "embedded/mini-dense"
TEXT = "Not every word that is said has to be kept in mind."
OPTIONS = FinetuneOptions(
    rank=1, batch=1, length=16, targets=("o_proj",), host_memory_bytes=8 << 20, epochs=2
)


def data(folder: Path, lines: list[object]) -> Path:
    file = folder / "data.jsonl"
    file.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return file


def test_a_run_that_ended_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = data(tmp_path, [{"text": TEXT}, {"text": TEXT[9:]}])
    whole = finetune(MODEL, tmp_path / "whole", file, OPTIONS)
    monkeypatch.setattr(training, "_SAVED_EVERY_S", 0.0)

    def end(step: int, steps: int, loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(MODEL, tmp_path / "ended", file, OPTIONS, progress=end)
    told = list[int]()
    with pytest.raises(ConfigError, match=r"begun with seed 0, not 1"):
        finetune(MODEL, tmp_path / "ended", file, replace(OPTIONS, seed=1))
    again = finetune(
        MODEL, tmp_path / "ended", file, OPTIONS,
        progress=lambda step, steps, loss: told.append(step),
    )  # fmt: skip
    assert told == [3, 4], "the step that had not been saved, and the last"
    assert again.losses == whole.losses
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        one, other = (tmp_path / folder / name for folder in ("whole", "ended"))
        assert one.read_bytes() == other.read_bytes()
    with pytest.raises(ConfigError, match="--force"):
        finetune(MODEL, tmp_path / "whole", file, OPTIONS)


def test_a_step_takes_no_more_than_is_charged(tmp_path: Path) -> None:
    examples = read_examples(
        data(tmp_path, [{"text": 5 * TEXT}] * 3), open_source(MODEL).tokenizer(), 48
    )
    options = FinetuneOptions(rank=4, batch=3, host_memory_bytes=24 << 20)
    source = open_source(MODEL)
    model = open_model(source.config, source.path, torch.float32)
    modules = find_modules(model.spec, frozenset(source.tensors), ())
    with (
        opened_run(source, model, modules, examples, options) as run,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        run.gradients.add(examples.all)
    assert run.plan.tokens == 96, "two examples at a time fit"
    changes = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        now += change.nbytes()
        most = max(most, now)
    # Gradients of adapters, a fourth of their share, are made in the step, too.
    charged = run.plan.inputs + run.plan.activations + run.plan.adapters // 4
    assert charged / 3 < most <= charged


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["no json"], "line 1 is not"),
        ([{"text": TEXT}, {"words": TEXT}], "line 2 is not"),
        ([{"messages": [{"role": "user", "content": "x"}]}], "nothing|no line"),
        ([{"messages": ["x"]}], "line 1 is not"),
        ([], "no line"),
    ],
)
def test_what_is_no_data_is_refused(tmp_path: Path, lines: list[object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        finetune(MODEL, tmp_path / "own", data(tmp_path, lines), OPTIONS)
    assert not list(tmp_path.glob("own*"))


def test_what_cannot_be_met_is_refused(tmp_path: Path) -> None:
    file = data(tmp_path, [{"text": TEXT}])
    with pytest.raises(ConfigError, match=r"x_proj is no linear layer .* q_proj"):
        finetune(MODEL, tmp_path / "own", file, FinetuneOptions(targets=("x_proj",)))
    with pytest.raises(BudgetError, match="--host-memory"):
        finetune(MODEL, tmp_path / "own", file, FinetuneOptions(host_memory_bytes=1 << 20))
    for wrong in ({"rank": 0}, {"learning_rate": 2.0}, {"length": 1}, {"alpha": 0.0}):
        with pytest.raises(ConfigError):
            FinetuneOptions(**wrong)  # type: ignore[arg-type]


def test_a_chat_of_several_turns_is_learned_where_the_model_would_write(tmp_path: Path) -> None:
    tokenizer = open_source(MODEL).tokenizer()
    chat = [
        {"role": role, "content": f"{role} {turn}"}
        for turn in range(2)
        for role in ("user", "assistant")
    ]
    (one,) = read_examples(data(tmp_path, [{"messages": chat}]), tokenizer, 512).all
    assert tokenizer.chat_prompt(chat[:1]) == list(one.tokens[: one.learned.index(True)])
    learned = [t for t, wanted in zip(one.tokens, one.learned, strict=True) if wanted]
    text = tokenizer.decode(learned)
    assert "assistant 0" in text and "assistant 1" in text and "user" not in text
    short = read_examples(data(tmp_path, [{"messages": chat}]), tokenizer, 20).all[0]
    assert short.tokens == one.tokens[:20] and short.learned == one.learned[:20]
