"""Calibration sequences that a model writes itself, and recipes of bits."""

import re
from pathlib import Path

import pytest
from small_models import DENSE, checkpoint

from hmt.base.errors import ConfigError
from hmt.quantizing import QuantizeOptions, bits_by_recipe
from hmt.quantizing.calibration_text import BUILTIN, calibration_sequences
from hmt.quantizing.own_text import _kept, own_sequences
from hmt.text import Tokenizer

MINI = Path(__file__).parents[2] / "src" / "hmt" / "embedded" / "mini-dense"
MEMORY = QuantizeOptions(host_memory_bytes=256 << 20)


def test_chats_come_first_and_text_adds_about_as_many_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HMT_CACHE", str(tmp_path / "first"))
    made = own_sequences(MINI, 16, 256, MEMORY)
    monkeypatch.setenv("HMT_CACHE", str(tmp_path / "second"))
    assert made == own_sequences(MINI, 16, 256, MEMORY), "the same is written again"
    monkeypatch.setattr("hmt.quantizing.own_text.Engine", None)
    assert made == own_sequences(MINI, 16, 256, MEMORY), "nothing is written"
    tokenizer = Tokenizer.open(MINI)
    begin, answer = tokenizer.encode("<|begin|><|user|>"), tokenizer.encode("<|assistant|>")
    chats = [ids for ids in made if answer[0] in ids]
    assert chats == made[: len(chats)] and 4 <= len(chats) <= 16
    assert all(ids[: len(begin)] == begin and len(ids) <= 256 for ids in chats)
    text = made[len(chats) :]
    assert text == calibration_sequences(BUILTIN, tokenizer, len(text), 256)
    assert sum(map(len, text)) <= max(256, sum(map(len, chats)))


def test_what_was_written_is_kept_by_its_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HMT_CACHE", str(tmp_path))
    sequences = iter([[[1, 2]], [[3]], [[4]], [[5]]])
    assert _kept(["a", 1], lambda: next(sequences)) == [[1, 2]]
    assert _kept(["a", 1], lambda: next(sequences)) == [[1, 2]]
    [file] = tmp_path.rglob("*.json")
    assert _kept(["a", 2], lambda: next(sequences)) == [[3]]
    for damage, again in (("[[1, 2", [[4]]), ('[["a"]]', [[5]])):
        file.write_text(damage)
        assert _kept(["a", 1], lambda: next(sequences)) == again, "what is damaged is written again"


def test_turns_that_do_not_end_follow_where_few_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hmt.quantizing.own_text._TURN", 128)  # 2 tokens
    made = own_sequences(MINI, 16, 256, MEMORY)
    assert [len(ids) for ids in made[:4]] == [4] * 4  # with <|begin|> and <|user|>
    assert len(made) == 5


def test_a_model_without_a_template_is_refused(tmp_path: Path):
    model = checkpoint(tmp_path / "model", DENSE)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        own_sequences(model, 2, 64, MEMORY)


def test_the_mixed_recipe_gives_bits_to_what_suffers_and_no_more():
    options = QuantizeOptions(bits_of=bits_by_recipe("mixed"))

    def bits(module: str) -> int:
        target = options.target_of(module, 128)
        assert target is not None
        return target.bits

    eight = (
        "self_attn.v_proj self_attn.o_proj self_attn.kv_a_proj_with_mqa self_attn.kv_b_proj "
        "self_attn.qkv_proj linear_attn.out_proj mlp.shared_experts.up_proj "
        "mlp.shared_expert.down_proj"
    )
    four = "self_attn.q_proj self_attn.k_proj mlp.down_proj mlp.gate_proj mlp.experts.3.up_proj"
    assert {bits(f"model.layers.0.{name}") for name in eight.split()} == {8}
    assert {bits(f"model.layers.0.{name}") for name in four.split()} == {4}
    with pytest.raises(ConfigError, match=re.escape("'best' is unknown; choose uniform or mixed")):
        bits_by_recipe("best")
