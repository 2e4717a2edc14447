"""GGUF files of the hub, hashes of what was downloaded, and what `hmt pull`, `list` and `rm` do."""

import hashlib
from pathlib import Path

import pytest
from huggingface_hub import constants
from test_hub import Hub, hub

from hmt.base.errors import CheckpointError, MissingFileError
from hmt.cli import models
from hmt.formats import located
from hmt.formats.hub import gguf_files
from hmt.formats.hub_cache import downloaded, remove_downloaded, verify_downloaded
from hmt.planner import catalogue
from hmt.planner.catalogue import KnownModel, resolved

__all__ = ["hub"]
FILES = {
    "README.md": b"words",
    "Model-Q8_0.gguf": b"8" * 9000,
    "Model-UD-Q4_K_M.gguf": b"u" * 9000,
    "Q4_K_M/Model-Q4_K_M-00001-of-00002.gguf": b"1" * 30_000,
    "Q4_K_M/Model-Q4_K_M-00002-of-00002.gguf": b"2" * 30_000,
    "mmproj-F32.gguf": b"e" * 100,
    "mmproj-BF16.gguf": b"e" * 50,
}
SPLIT = [name for name in FILES if name.startswith("Q4_K_M/")]


@pytest.fixture
def gguf(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub.files = dict(FILES)
    row = KnownModel("small", "Small", "some/model", {"Q8_0": 2, "Q4_K_M": 1})
    monkeypatch.setattr(catalogue, "known_models", lambda: (row,))
    return hub


def test_a_type_names_one_model() -> None:
    assert gguf_files(FILES, "q4_k_m") == [*SPLIT, "mmproj-BF16.gguf"]
    assert gguf_files(FILES, "UD-Q4_K_M") == ["Model-UD-Q4_K_M.gguf", "mmproj-BF16.gguf"]
    assert gguf_files(FILES, "Q8_0")[0] == "Model-Q8_0.gguf"
    assert gguf_files(FILES, "K_M") == gguf_files(FILES, "F32") == gguf_files([], "Q8_0") == []
    assert resolved("llama-3.1-8b") == "unsloth/Llama-3.1-8B-Instruct-GGUF:Q4_K_M"
    assert resolved("llama-3.1-8b:q8_0").endswith(":Q8_0")
    assert resolved("gpt-oss-20b") == "openai/gpt-oss-20b"
    assert resolved("some/other:Q2_K") == "some/other:Q2_K"
    with pytest.raises(MissingFileError, match=r"Q9_K.*choose Q8_0"):
        resolved("llama-3.1-8b:Q9_K")


def test_a_model_is_pulled_listed_and_removed(
    gguf: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf.cut = 12_000, SPLIT[0]
    models.pull("small")
    said = capsys.readouterr().out
    assert "some/model:Q4_K_M: 58.6 KiB, as the hub has it" in said and "hmt run small" in said
    ranges = [range_ for name, range_ in gguf.got if name == SPLIT[0]]
    assert ranges == [None, "bytes=12000-"]  # it went on where the connection broke
    assert {name for name, _ in gguf.got} == {*SPLIT, "mmproj-BF16.gguf"}
    path = located("some/model:Q4_K_M")
    assert path.name.endswith("00001-of-00002.gguf") and path.read_bytes() == FILES[SPLIT[0]]
    models.pull("some/model:Q8_0")
    models.list_models()
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        "small:Q4_K_M", "small:Q8_0",
    ]  # fmt: skip
    gguf.broken = True  # a file in the cache needs no hub
    assert located("some/model:Q4_K_M") == path
    with pytest.raises(MissingFileError, match="no complete copy"):
        located("some/model:Q2_K")
    second = path.with_name(path.name.replace("00001-", "00002-"))
    second.rename(path.parent / "away")
    with pytest.raises(MissingFileError, match="no complete copy"):
        located("some/model:Q4_K_M")
    (path.parent / "away").rename(second)
    models.remove("small:Q8_0")
    assert [one.source for one in downloaded()] == ["some/model:Q4_K_M"]
    models.remove("small")
    assert downloaded() == [] and models.installed_sources() == set()
    assert not path.exists()
    with pytest.raises(MissingFileError, match="hmt list"):
        remove_downloaded("some/model")
    models.list_models()
    assert "no models yet" in capsys.readouterr().out
    gguf.broken = False
    with pytest.raises(CheckpointError, match=r"no GGUF file of type Q5_0.*Model-Q8_0\.gguf"):
        located("some/model:Q5_0")


def test_what_differs_from_its_hash_is_deleted_and_comes_again(gguf: Hub) -> None:
    right = FILES["Model-Q8_0.gguf"]
    gguf.hashes["Model-Q8_0.gguf"] = hashlib.sha256(right).hexdigest()
    gguf.files["Model-Q8_0.gguf"] = right[:-1] + b"9"
    with pytest.raises(CheckpointError, match=r"Model-Q8_0\.gguf is not what the hub has"):
        models.pull("small:Q8_0")
    blobs = Path(constants.HF_HUB_CACHE) / "models--some--model" / "blobs"
    assert gguf.hashes["Model-Q8_0.gguf"] not in {file.name for file in blobs.iterdir()}
    gguf.files["Model-Q8_0.gguf"] = right
    seen: list[tuple[int, int]] = []
    models.pull("small:Q8_0")
    path = located("some/model:Q8_0")
    assert path.read_bytes() == right
    assert verify_downloaded(path, lambda *done: seen.append(done)) == len(right)
    assert seen[-1] == (len(right), len(right))
