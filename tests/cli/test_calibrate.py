"""`hmt calibrate kv` as a user meets it."""

import json
import shutil

import pytest

from hmt.cli.options import embedded_model

QUESTION = {"messages": [{"role": "user", "content": "What is 12 + 34?"}]}


@pytest.fixture
def model(tmp_path):
    shutil.copytree(embedded_model(), tmp_path / "model")
    return tmp_path / "model"


def test_scales_are_written_beside_the_weights_and_used(hmt, model, tmp_path):
    prose, chats = tmp_path / "prose.txt", tmp_path / "chats.jsonl"
    prose.write_text("It was the best of times, it was the worst of times. " * 40)
    chats.write_text("\n".join(map(json.dumps, [QUESTION, {"text": "What is 3 + 4?"}])))
    done = hmt("calibrate", "kv", model, "--text", prose, "--text", chats, "--length", "256")
    assert done.code == 0, done.err
    assert "held out" in done.out and str(model / "kv-scales.hmt") in done.out
    levels = ["--kv-gpu-memory", "4MiB", "--kv-offload-dir", tmp_path, "--context", "1024"]
    options = [*levels, "--kv-quant", "exact,int8-static", "--no-summary"]
    done = hmt("run", model, "What is 12 + 34?", *options)
    assert done.out.strip() == "46"
    few = hmt("calibrate", "kv", model, "--text", chats, "--out", tmp_path / "scales")
    assert "give four or more" in few.out and (tmp_path / "scales").is_file()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2 is not"),
        ("[]", "line 2 is not"),
        ('{"words": "a"}', "line 2 is not"),
        (None, "cannot be read"),
    ],
)
def test_texts_that_are_none_are_told(hmt, model, tmp_path, line, told):
    file = tmp_path / "some.jsonl"
    if line is not None:
        file.write_text(f"{json.dumps(QUESTION)}\n{line}\n")
    done = hmt("calibrate", "kv", model, "--text", file)
    assert done.code == 2 and told in " ".join(done.err.split())
    assert not (model / "kv-scales.hmt").exists()


def test_without_scales_a_run_says_how_to_make_them(hmt, model, tmp_path):
    options = ["--kv-gpu-memory", "4MiB", "--kv-offload-dir", tmp_path, "--context", "1024"]
    done = hmt("run", model, "Hello", *options, "--kv-quant", "exact,int8-static")
    assert done.code == 2 and "hmt calibrate kv" in done.err
