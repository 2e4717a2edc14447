"""GGUF headers: what is read of them, and that no damaged one is believed."""

import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from default_part import rounds

from hmt.base.errors import CheckpointError, HeaderError, MissingFileError, UnknownArchitectureError
from hmt.formats import open_checkpoint
from hmt.formats.gguf import read_gguf


def write(path: Path, change: Callable[[gguf.GGUFWriter], None] = lambda w: None) -> Path:
    """A small file with metadata of all kinds, and tensors of some types."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bool("some.flag", True)
    writer.add_int8("some.int8", -3)
    writer.add_float64("some.float64", 0.1)
    writer.add_uint64("some.uint64", 1 << 40)
    writer.add_array("some.numbers", [1.5, 2.5])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "\u00e9", "ab"])
    writer.add_token_types([1, 1, 3])
    change(writer)
    rng = np.random.default_rng(0)
    for name, shape, kind in (
        ("token_embd.weight", (3, 32), "Q8_0"),
        ("blk.0.attn_q.weight", (32, 32), "Q4_0"),
        ("blk.0.ffn_gate_exps.weight", (2, 8, 32), "F16"),
        ("output_norm.weight", (32,), "F32"),
    ):
        number = gguf.GGMLQuantizationType[kind]
        numbers = gguf.quantize(rng.normal(size=shape).astype(np.float32), number)
        writer.add_tensor(name, numbers, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_everything_in_a_header_is_what_the_package_reads(tmp_path: Path, alignment: int) -> None:
    path = write(tmp_path / "m.gguf", lambda w: w.add_custom_alignment(alignment))
    header, oracle = read_gguf(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in oracle.fields.items() if not k.startswith("GGUF.")}
    assert dict(header.metadata) == fields
    assert [
        (t.name, t.tensor_type.name, tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes)
        for t in oracle.tensors
    ] == [(r.name, r.dtype, r.shape, r.offset, r.nbytes) for r in header.records.values()]
    raw = bytearray(path.read_bytes())
    raw[4] = 2  # version 2 differs in nothing that is little-endian
    path.write_bytes(raw)
    assert read_gguf(path).records.keys() == header.records.keys()


def numbers(*parts: tuple[int, int]) -> bytes:
    """(number, bytes) one after the other, little-endian."""
    return b"".join(number.to_bytes(size, "little") for number, size in parts)


def text(value: str) -> bytes:
    return numbers((len(value), 8)) + value.encode()


HEAD = b"GGUF" + numbers((3, 4))
MANY = 1 << 60
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "hardly anything": (b"GG", "begins with"),
    "another kind": (b"PK\x03\x04" + bytes(60), "begins with"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "version 1": (b"GGUF" + numbers((1, 4)) + bytes(40), "version 1"),
    "big-endian": (b"GGUF" + bytes((0, 0, 0, 3)) + bytes(40), "big-endian"),
    "too many entries": (HEAD + numbers((0, 8), (MANY, 8)) + bytes(99), "more than"),
    "entries that are not there": (HEAD + numbers((0, 8), (9999, 8)) + bytes(99), "are left"),
    "a long string": (
        HEAD + numbers((0, 8), (1, 8)) + text("k") + numbers((8, 4), (MANY, 8)), "are left",
    ),
    "a long array": (
        HEAD + numbers((0, 8), (1, 8)) + text("k") + numbers((9, 4), (0, 4), (MANY, 8)),
        "more than",
    ),
    "an array of arrays": (
        HEAD + numbers((0, 8), (1, 8)) + text("k") + numbers((9, 4), (9, 4), (1, 8)) + bytes(9),
        "items of type 9",
    ),
    "an unknown type": (
        HEAD + numbers((0, 8), (1, 8)) + text("k") + numbers((77, 4), (0, 8)), "type 77",
    ),
    "a key twice": (
        HEAD + numbers((0, 8), (2, 8)) + 2 * (text("k") + numbers((0, 4), (1, 1))) + bytes(9),
        "occurs twice",
    ),
    "an odd alignment": (
        HEAD + numbers((0, 8), (1, 8)) + text("general.alignment") + numbers((4, 4), (24, 4)),
        "no power of two",
    ),
    "five dimensions": (HEAD + numbers((1, 8), (0, 8)) + text("t") + numbers((5, 4)) + bytes(99),
                        "5 dimensions"),
    "a huge tensor": (
        HEAD + numbers((1, 8), (0, 8)) + text("t")
        + numbers((2, 4), (MANY, 8), (MANY, 8), (0, 4), (0, 8)),
        "no memory can hold",
    ),
    "half a block": (
        HEAD + numbers((1, 8), (0, 8)) + text("t") + numbers((1, 4), (48, 8), (2, 4), (0, 8)),
        "blocks of 32",
    ),
    "an unknown ggml type": (
        HEAD + numbers((1, 8), (0, 8)) + text("t") + numbers((1, 4), (32, 8), (999, 4), (0, 8)),
        "type 999",
    ),
    "a crooked offset": (
        HEAD + numbers((1, 8), (0, 8)) + text("t") + numbers((1, 4), (32, 8), (0, 4), (7, 8)),
        "no multiple of 32",
    ),
    "numbers that are not there": (
        HEAD + numbers((1, 8), (0, 8)) + text("t") + numbers((1, 4), (32, 8), (0, 4), (0, 8)),
        "is truncated",
    ),
    "one tensor on another": (
        HEAD + numbers((2, 8), (0, 8))
        + b"".join(text(n) + numbers((1, 4), (32, 8), (0, 4), (0, 8)) for n in "tu")
        + bytes(999),
        "overlap",
    ),
    "a tensor twice": (
        HEAD + numbers((2, 8), (0, 8))
        + 2 * (text("t") + numbers((1, 4), (32, 8), (0, 4), (0, 8))) + bytes(999),
        "described twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_header_is_refused_with_its_reason(tmp_path: Path, name: str) -> None:
    content, says = BAD[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(HeaderError, match=says):
        read_gguf(path)


def without(key: str) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.kv_data[0].pop(f"llama.{key}")


def replaced(key: str, value: Any, kind: gguf.GGUFValueType) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.kv_data[0].update({key: gguf.gguf_writer.GGUFValue(value, kind)})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (without("block_count"), HeaderError, "has no llama.block_count"),
        (
            replaced("llama.block_count", 0, gguf.GGUFValueType.UINT32),
            HeaderError,
            "wanted is a count",
        ),
        (
            replaced("llama.embedding_length", "many", gguf.GGUFValueType.STRING),
            HeaderError,
            "is no number",
        ),
        (
            replaced("general.architecture", "rwkv7", gguf.GGUFValueType.STRING),
            UnknownArchitectureError,
            "of GGUF files HMT runs",
        ),
    ],
)
def test_metadata_that_describe_no_model_are_refused(
    tmp_path: Path, change: Callable[[gguf.GGUFWriter], None], error: type[Exception], says: str
) -> None:
    path = write(tmp_path / "m.gguf", change)
    with pytest.raises(error, match=says):
        open_checkpoint(path)


def test_files_that_cannot_be_told_apart_or_are_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        read_gguf(tmp_path / "none.gguf")
    write(tmp_path / "a.gguf")
    assert open_checkpoint(tmp_path).path == tmp_path / "a.gguf"
    other = shutil.copy(tmp_path / "a.gguf", tmp_path / "sha256-4824460d29f2")  # as Ollama keeps it
    assert open_checkpoint(other).path == tmp_path / "sha256-4824460d29f2"
    write(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match="holds 2 GGUF files"):
        open_checkpoint(tmp_path)
    with pytest.raises(MissingFileError, match="lacks 1 of the 2 files"):
        open_checkpoint(write(tmp_path / "c-00002-of-00002.gguf"))


@pytest.mark.parametrize("words", [1, 5, 6, 40])
def test_a_file_without_tensors_is_no_model(tmp_path: Path, words: int) -> None:
    """Vocabularies alone, and the first of split files without the others; of any length."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("x" * words)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    path.write_bytes(path.read_bytes().rstrip(b"\0"))  # without what fills up to the alignment
    assert read_gguf(path).metadata["general.name"] == "x" * words
    with pytest.raises(CheckpointError, match="2 entries of metadata and no tensor"):
        open_checkpoint(path)


def test_layers_that_a_file_only_speaks_of_take_no_time(tmp_path: Path) -> None:
    """What is to be done follows from its tensors."""
    many = replaced("llama.block_count", (1 << 31) - 1, gguf.GGUFValueType.UINT32)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", many))
    assert checkpoint.config["num_hidden_layers"] == (1 << 31) - 1
    assert len(checkpoint.records) == 4


def test_mutations_are_read_or_refused(tmp_path: Path) -> None:
    """Bytes flipped, cut off, repeated and inserted: each is a model or a CheckpointError."""
    path = write(tmp_path / "m.gguf")
    original = path.read_bytes()
    header = len(original) - sum(r.nbytes for r in read_gguf(path).records.values())
    rng = random.Random(0)
    refused, count = 0, rounds(20_000)
    with path.open("r+b", buffering=0) as file:  # opening it anew takes longer than reading it
        for number in range(count):
            if number == count * 19 // 20:
                tracemalloc.start()  # it takes several times as long
            content = mutated(original, header, rng)
            file.seek(0)
            file.write(content)
            file.truncate(len(content))
            try:
                open_checkpoint(path)
            except CheckpointError:
                refused += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count / 2 < refused < count
    assert peak < 8 << 20, "more was allocated than a small file can need"


def mutated(original: bytes, header: int, rng: random.Random) -> bytes:
    at = rng.randrange(header)
    match rng.randrange(5):
        case 0:
            return original[: rng.randrange(len(original))]
        case 1:
            return original[:at] + bytes((rng.randrange(256),)) + original[at + 1 :]
        case 2:
            wild = rng.choice((0, 1, 255, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1))
            return original[:at] + wild.to_bytes(8, "little") + original[at + 8 :]
        case 3:
            return original[:at] + original[at + rng.randrange(1, 32) :]
        case _:
            piece = original[at : at + rng.randrange(1, 64)]
            return original[:at] + piece + original[at:]
