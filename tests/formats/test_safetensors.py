"""Headers: equal to the safetensors package on what is valid, HeaderError on all else."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from default_part import rounds
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hmt.base.errors import HeaderError, HMTError, MissingFileError
from hmt.formats import read_header

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float64: "F64",
}
TWO: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def write(file: Path, header: Any, data: bytes = bytes(32), length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = (len(raw) if length is None else length).to_bytes(8, "little")
    file.write_bytes(prefix + raw + data)
    return file


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**TWO, name: {**TWO[name], **fields}}


def complaint(file: Path) -> str:
    with pytest.raises(HeaderError) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    assert "download" in str(caught.value)
    return str(caught.value)


def assert_equal_to_package(file: Path) -> None:
    """Every recorded range holds the very tensor that the safetensors package reads."""
    records = read_header(file)
    with safe_open(file, framework="pt") as package:
        assert set(package.keys()) == set(records)
        for name, record in records.items():
            tensor = package.get_tensor(name)
            with file.open("rb") as raw:
                raw.seek(record.offset)
                data = raw.read(record.nbytes)
            assert (record.name, record.file, record.shape) == (name, file, tuple(tensor.shape))
            assert record.dtype == DTYPES[tensor.dtype]
            assert data == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.dictionaries(
        st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_what_the_package_writes_is_found_where_the_package_reads_it(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[torch.dtype, list[int]]]
) -> None:
    file = tmp_path_factory.mktemp("shard") / "model.safetensors"
    save_file(
        {name: torch.randint(0, 100, shape).to(dtype) for name, (dtype, shape) in tensors.items()},
        file,
        metadata={"format": "pt"},
    )
    assert_equal_to_package(file)


def test_records_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    records = read_header(write(tmp_path / "x.safetensors", {"z": TWO["a"], "a": TWO["b"]}))
    assert list(records) == ["z", "a"]
    assert records["a"].offset == records["z"].offset + records["z"].nbytes


def test_a_header_without_tensors_is_valid(tmp_path: Path) -> None:
    assert read_header(write(tmp_path / "x.safetensors", {}, b"")) == {}


def test_a_scalar_and_sub_byte_elements(tmp_path: Path) -> None:
    header = {
        "scalar": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]},
        "nibbles": {"dtype": "F4", "shape": [3, 2], "data_offsets": [8, 11]},
    }
    records = read_header(write(tmp_path / "x.safetensors", header, bytes(11)))
    assert {name: record.nbytes for name, record in records.items()} == {"scalar": 8, "nibbles": 3}
    header["nibbles"]["shape"] = [5]
    assert "2.5 bytes" in complaint(write(tmp_path / "x.safetensors", header, bytes(11)))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"x\.safetensors does not exist"):
        read_header(tmp_path / "x.safetensors")


def test_something_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(HMTError, match="cannot be read"):
        read_header(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "git lfs pull" in complaint(file)


def test_a_truncated_shard_says_how_much_is_missing(tmp_path: Path) -> None:
    message = complaint(write(tmp_path / "x.safetensors", TWO, bytes(10)))
    assert "22 bytes" in message
    assert "2 of 2 tensors" in message
    assert "'a'" in message
    message = complaint(write(tmp_path / "x.safetensors", TWO, bytes(31)))
    assert "1 bytes" in message
    assert "1 of 2 tensors" in message
    assert "'b'" in message


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (changed("b", dtype="F12"), "'F12'"),
        (changed("b", dtype=None), "dtype None"),
        (changed("b", dtype=["BF16"]), "dtype"),
        (changed("b", shape=[-4]), "-4"),
        (changed("b", shape=[4.0]), "4.0"),
        (changed("b", shape=[True, 4]), "True"),
        (changed("b", shape="4"), "'4'"),
        (changed("b", shape=None), "shape None"),
        (changed("b", shape=[1] * 65), "at most 64"),
        (changed("b", shape=[1 << 63]), "integers from 0"),
        (changed("b", shape=[0, 1 << 40, 1 << 40]), "no memory can hold"),
        (changed("b", shape=[1 << 62] * 64), "no memory can hold"),
        (changed("b", shape=[5]), "needs 10 bytes"),
        (changed("b", data_offsets=[24]), "begin <= end"),
        (changed("b", data_offsets=[24, 28, 32]), "begin <= end"),
        (changed("b", data_offsets=[32, 24]), "begin <= end"),
        (changed("b", data_offsets=[-8, 0]), "-8"),
        (changed("b", data_offsets=[24.0, 32.0]), "24.0"),
        (changed("b", data_offsets={"begin": 24}), "begin <= end"),
        (changed("b", data_offsets=[16, 24]), "overlap"),
        (changed("b", data_offsets=[0, 8]), "overlap"),
        (changed("b", shape=[0], data_offsets=[8, 8]), "overlap"),
        (changed("b", shape=[2], data_offsets=[28, 32]), "4 bytes before tensor 'b'"),
        (changed("b", shape=[2], data_offsets=[24, 28]), "4 bytes at its end"),
        ({**TWO, "b": [1]}, "not by an object"),
        ({**TWO, "\ud800": TWO["b"]}, "cannot be printed"),
        ({**TWO, "__metadata__": {"n": 1}}, "__metadata__"),
        ([TWO], "not a JSON object"),
        (b" " + json.dumps(TWO).encode(), "not a JSON object"),
        (json.dumps(TWO).replace('"b"', '"a"').encode(), "'a' occurs 2 times"),
        (json.dumps(TWO).replace('"shape"', '"dtype"').encode(), "'dtype' occurs 2 times"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a": ', "not valid JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": {"dtype": ' + b"[" * 900 + b"]" * 900 + b"}}", "dtype"),
        (b'{"a": {"shape": [' + b"9" * 5000 + b"]}}", "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, header: Any, says: str) -> None:
    message = complaint(write(tmp_path / "x.safetensors", header))
    assert says in message
    assert len(message) < 1000 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("length", "says"), [(1 << 40, "100000000"), (10**8 + 1, "100000000"), (10**8, "bytes before")]
)
def test_the_length_prefix_is_checked_before_anything_is_read(
    tmp_path: Path, length: int, says: str
) -> None:
    file = write(tmp_path / "x.safetensors", TWO, length=length)
    tracemalloc.start()
    try:
        assert says in complaint(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", range(8))
def test_a_file_shorter_than_the_prefix(tmp_path: Path, size: int) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(bytes(size))
    assert f"{8 - size} too few" in complaint(file)


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """One or more random edits: of bytes, of digits and signs, of the length, of the file's end."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(data))
        kind = rng.randrange(6)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at:]
            data += bytes(rng.choice((0, 0, 1, 64)))
        elif kind == 2:
            data[at:at] = rng.choice((b"0", b"9" * 30, b"-", b'"', b"[" * 500, b"{", b"1e9", b","))
        elif kind == 3:
            del data[at : at + rng.randrange(1, 20)]
        elif kind == 4:
            data[:8] = (int.from_bytes(data[:8], "little") + rng.randint(-9, 9)).to_bytes(
                9, "little", signed=True
            )[:8]
        else:
            digits = [i for i, byte in enumerate(data[8:], 8) if chr(byte).isdigit()] or [at]
            data[rng.choice(digits)] = rng.choice(b"0123456789-.")
        if len(data) < 9:
            break
    return bytes(data)


def test_mutations_end_in_an_error_of_ours_or_in_the_right_tensors(tmp_path: Path) -> None:
    """What we accept, the package accepts and reads the same; what we refuse costs no memory.

    Memory is watched for the first tenth: that makes everything twice as slow.
    """
    rng = random.Random(17)
    file = tmp_path / "x.safetensors"
    tensors = {"wide": torch.rand(7, 11), "half": torch.rand(12, 10).half(), "none": torch.rand(0)}
    save_file(tensors, file, metadata={"format": "pt"})
    valid = file.read_bytes()
    changed = [valid[:size] for size in range(len(valid))]  # every place to end at
    accepted = 0
    tracemalloc.start()
    with file.open("r+b", buffering=0) as out:  # opening it anew takes as long as reading it
        for number in range(count := rounds(20_000)):
            data = changed[number] if number < len(changed) else mutate(rng, valid)
            out.seek(0)
            out.write(data)
            out.truncate()
            try:
                read_header(file)
            except HMTError:
                pass
            else:
                accepted += 1
                assert_equal_to_package(file)
            if number == 2000:
                assert tracemalloc.get_traced_memory()[1] < 4 << 20
                tracemalloc.stop()
    assert count / 20 < accepted < count / 2


def test_what_the_package_accepts_of_changed_numbers_we_accept_too(tmp_path: Path) -> None:
    """We are not stricter than the package where a header and its bytes agree."""
    rng = random.Random(5)
    file = tmp_path / "x.safetensors"
    agreed = 0
    for _ in range(1500):
        rows = rng.randrange(3)
        columns = 8 - 3 * rows + rng.choice((0, 0, 0, 1))
        cut, end = 12 * rows + rng.choice((0, 0, 0, 1)), 32 - rng.choice((0, 0, 0, 1))
        header = {
            "a": {"dtype": "F32", "shape": [rows, 3], "data_offsets": [0, cut]},
            "b": {"dtype": "U8", "shape": [columns, 4], "data_offsets": [cut, end]},
        }
        write(file, header)
        try:
            with safe_open(file, framework="pt") as package:
                names = set(package.keys())
        except SafetensorError:
            with pytest.raises(HeaderError):
                read_header(file)
        else:
            agreed += 1
            assert set(read_header(file)) == names
    assert agreed > 50
