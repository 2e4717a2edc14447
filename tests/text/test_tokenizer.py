"""Ids and chat prompts equal transformers'; broken checkpoints and requests get clear errors."""

import ctypes
import gc
import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hmt.base.errors import CheckpointError, MissingFileError, RequestError
from hmt.text import Tokenizer

MINI_DENSE = Path(str(files("hmt") / "embedded" / "mini-dense"))
THEIRS = AutoTokenizer.from_pretrained(MINI_DENSE)
OURS = Tokenizer.open(MINI_DENSE)
USER = {"role": "user", "content": "hello"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the mini checkpoint without its weights, to be changed."""
    for file in MINI_DENSE.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    return tmp_path


def configure(folder: Path, file: str = "tokenizer_config.json", **entries: Any) -> None:
    """Change entries of a JSON file; None removes one."""
    path = folder / file
    old = json.loads(path.read_text()) if path.exists() else {}
    new = {key: value for key, value in (old | entries).items() if value is not None}
    path.write_text(json.dumps(new))


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_ids_and_text_equal_transformers(text: str) -> None:
    ids = OURS.encode(text)
    assert ids == THEIRS.encode(text)
    assert OURS.decode(ids) == THEIRS.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_in_a_text_are_special() -> None:
    assert OURS.encode("<|begin|>a") == [0, *OURS.encode("a")]
    assert OURS.decode([0, *OURS.encode("a"), 1]) == "a"


def test_the_vocabulary_covers_all_ids() -> None:
    assert OURS.vocab_size == len(THEIRS) == 4096


@pytest.mark.parametrize("adds", [None, True, False])
def test_bos_comes_as_the_configuration_wants(folder: Path, adds: bool | None) -> None:
    """As in transformers 4; version 5 looks at tokenizer.json only and loses DeepSeek's BOS."""
    configure(folder, add_bos_token=adds, add_eos_token=True)
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.encode("hello") == [0] * bool(adds) + OURS.encode("hello")
    assert tokenizer.encode("<|begin|>hello") == [0, *OURS.encode("hello")]
    assert tokenizer.chat_prompt([USER]) == OURS.chat_prompt([USER])


@pytest.mark.parametrize("adds", [True, False])
def test_a_bos_that_a_text_has_twice_stays(folder: Path, adds: bool) -> None:
    configure(folder, add_bos_token=adds)
    assert Tokenizer.open(folder).encode("<|begin|><|begin|>a")[:3] == [0, 0, *OURS.encode("a")]


def test_an_end_that_the_template_writes_counts_beside_the_stated_ones(folder: Path) -> None:
    """As of a base model's configuration beside the template of the tuned one (Qwen, OLMo)."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|im_end|>", "<|eot_id|>"])
    backend.add_tokens(["<end_of_turn>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|><end_of_turn>")
    ended = backend.token_to_id("<|im_end|>")
    assert Tokenizer.open(folder).eos_ids == {1, ended}, "special, of the list, in the template"


def test_channels_of_others_end_no_answer(folder: Path) -> None:
    """<|end|> ends a part of an answer where calls and returns have separate marks."""
    configure(folder, eos_token="<|begin|>")
    configure(folder, "config.json", eos_token_id=0)
    configure(folder, "generation_config.json", eos_token_id=0)
    assert Tokenizer.open(folder).eos_ids == {0, 1}, "mini-dense's template writes <|end|>"
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|calls|>", "<|flush|>"])
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.open(folder).eos_ids == {0}


def test_bos_comes_as_tokenizer_json_wants(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single=["<|begin|>", "$A"], special_tokens=[("<|begin|>", 0)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.encode("hello, a longer text") == [0, *OURS.encode("hello, a longer text")]
    assert tokenizer.encode("") == [0]
    assert tokenizer.chat_prompt([USER]) == OURS.chat_prompt([USER])


def test_bos_is_not_added_where_there_is_none(folder: Path) -> None:
    configure(folder, add_bos_token=True, bos_token=None)
    assert Tokenizer.open(folder).encode("hello") == OURS.encode("hello")


def test_tokens_that_only_the_configuration_adds(folder: Path) -> None:
    def token(content: str, special: bool) -> dict[str, Any]:
        off = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        return {"content": content, "special": special, "__type": "AddedToken", **off}

    texts = ("<think>", "<two words>", "<ende é>", "<hidden>", "<b>")
    added = {str(4096 + i): token(text, text == "<hidden>") for i, text in enumerate(texts)}
    configure(folder, added_tokens_decoder=dict(reversed(added.items())), pad_token="<b>")
    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.encode("a<think>b<two words><ende é>c<hidden><b>d")
    assert [number for number in ids if number >= 4096] == list(range(4096, 4101))
    assert tokenizer.vocab_size == 4101
    assert tokenizer.decode(ids) == "a<think>b<two words><ende é>cd"
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def test_named_tokens_of_older_checkpoints_count(folder: Path) -> None:
    """special_tokens_map.json was once the place; ordinary words may be named there."""
    word = OURS.encode("a")[0]
    configure(folder, eos_token=None)
    end = {"content": "a", "lstrip": False, "rstrip": False}
    configure(folder, "special_tokens_map.json", eos_token=end, bos_token="ignored")
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.eos_ids == {1, word}
    assert tokenizer.decode([word, 0]) == ""


def test_end_tokens_are_those_of_all_configurations(folder: Path) -> None:
    assert OURS.eos_ids == {1}
    configure(folder, "config.json", eos_token_id=5, text_config={"eos_token_id": [6, 7]})
    configure(folder, "generation_config.json", eos_token_id=[8, 5])
    assert Tokenizer.open(folder).eos_ids == {1, 5, 6, 7, 8}
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (folder / file).unlink()
    assert Tokenizer.open(folder).eos_ids == set()


def test_chat_prompts_equal_transformers() -> None:
    messages = [{"role": "system", "content": "Be brief: é👍"}, USER]
    theirs = THEIRS.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert OURS.chat_prompt(messages) == theirs


def test_where_a_template_may_be_kept(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert not Tokenizer.open(folder).has_chat_template
    with pytest.raises(RequestError, match=r"no chat template .*send plain text"):
        Tokenizer.open(folder).chat_prompt([USER])
    expected = []
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "list"}]
    for text in ("list", "string", "older", "own"):
        if text == "list":
            configure(folder, chat_template=several)
        elif text == "string":
            configure(folder, chat_template="string")
        elif text == "older":
            configure(folder, "chat_template.json", chat_template="older")
        else:
            (folder / "chat_template.jinja").write_text("own")
        tokenizer = Tokenizer.open(folder)
        assert tokenizer.has_chat_template
        expected.append(tokenizer.decode(tokenizer.chat_prompt([USER])))
    assert expected == ["list", "string", "older", "own"]


@pytest.mark.parametrize("several", [[], ["x"], [{"name": "tool_use", "template": "T"}]])
def test_a_list_of_templates_without_the_default_one(folder: Path, several: list[Any]) -> None:
    (folder / "chat_template.jinja").unlink()
    configure(folder, chat_template=several)
    assert not Tokenizer.open(folder).has_chat_template


def test_a_template_that_is_no_text(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    configure(folder, chat_template={"default": "x"})
    with pytest.raises(CheckpointError, match="is a dict and not text"):
        Tokenizer.open(folder)


def test_text_that_is_not_unicode() -> None:
    with pytest.raises(RequestError, match=r"character 2 of 3 is the lone surrogate U\+D83D"):
        OURS.encode("ab\ud83d")
    with pytest.raises(RequestError, match="lone surrogate"):
        OURS.chat_prompt([{"role": "user", "content": "\udc00"}])


def test_a_missing_or_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read by tokenizers"):
        Tokenizer.open(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(MissingFileError, match="save_pretrained"):
        Tokenizer.open(folder)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "x"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"9": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"9": {"content": 1}}}'),
        ("config.json", '{"text_config": [1]}'),
        ("config.json", '{"eos_token_id": "1"}'),
        ("generation_config.json", '{"eos_token_id": [1, -2]}'),
        ("generation_config.json", '{"eos_token_id": [true]}'),
        ("special_tokens_map.json", "\x80"),
        ("chat_template.jinja", "\x80"),
    ],
)
def test_damaged_configurations(folder: Path, file: str, text: str) -> None:
    (folder / file).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=rf"{file}.*download"):
        Tokenizer.open(folder)


def test_a_gemma_like_checkpoint_equals_transformers(tmp_path: Path) -> None:
    """SentencePiece pieces, byte fallback, BOS by the configuration, template with bos_token."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "<start>", "<end>"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    backend.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>", "<start>", "<end>"])
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", add_bos_token=True
    )
    theirs.chat_template = (
        "{{ bos_token }}{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] | trim }}"
        "<end>\n{% endfor %}{% if add_generation_prompt %}<start>model\n{% endif %}"
    )
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.open(tmp_path)
    text = "hello wörld  👍\n"
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ids[:2].count(2) == 1
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text
    messages = [USER, {"role": "model", "content": " x "}, USER]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat_prompt(messages) == expected
    assert expected.count(2) == 1


class _Heap(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [(f"_{n}", ctypes.c_size_t) for n in range(7)] + [
        ("used", ctypes.c_size_t),
        ("free", ctypes.c_size_t),
        ("last", ctypes.c_size_t),
    ]


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc tells what its heap holds"
)
def test_what_a_tokenizer_keeps_goes_with_it():
    told = ctypes.CDLL(None).mallinfo2
    told.restype = _Heap
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=9)) for _ in range(16000)]
    texts = [" ".join(words[part::8]) for part in range(8)]
    used = []
    with ThreadPoolExecutor(4) as pool:
        for _ in range(6):
            list(pool.map(Tokenizer.open(MINI_DENSE).encode, texts))
            gc.collect()
            used.append(told().used)
    assert used[-1] - used[1] < 4 << 20, used  # 10 MiB with what threads kept
