"""`hmt run` and `hmt-inference`: which model, which prompt, what is printed where."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from harmony_model import harmony_folder
from scripted import saying

from hmt.cli import run
from hmt.cli.options import embedded_model
from hmt.text import Tokenizer

SMALL = ("--host-memory", "6MiB", "--threads", "1")
QUESTION = "Which is the largest of 3, 55, 21?"


def test_an_answer_goes_to_stdout_and_its_price_to_stderr(hmt):
    done = hmt("run", *SMALL, QUESTION)
    assert done.code == 0
    assert done.out == "55\n" or done.out.strip().isdigit()
    for word in ("prompt", "answer", "weights", "per token", "waiting for disk", "It did not fit"):
        assert word in done.err


def test_the_answer_is_the_same_however_it_is_asked_for(hmt, hmt_inference):
    answers = [
        hmt("run", *SMALL, "--no-summary", QUESTION),
        hmt("run", "--threads", "1", "--no-summary", embedded_model(), QUESTION),
        hmt("run", *SMALL, "--no-summary", "--executor", "plain", QUESTION),
        hmt_inference("--model", embedded_model(), "--max-context", "512", QUESTION),
    ]
    assert {answer.out for answer in answers} == {answers[0].out}
    assert [answer.err for answer in answers[:3]] == ["", "", ""]
    assert "tokens/s" in answers[3].err


def test_json_holds_answer_and_summary(hmt):
    done = hmt("run", *SMALL, "--json", QUESTION)
    content = json.loads(done.out)
    assert done.code == 0 and done.err == ""
    assert content["finish_reason"] == "stop"
    assert len(content["token_ids"]) >= 1
    summary = content["summary"]
    assert summary["budget_bytes"] == 6 << 20
    assert summary["prompt"]["tokens"] == content["prompt_tokens"]
    assert summary["streamed_bytes"] > 0 and summary["generation"]["disk_bytes"] > 0
    assert summary["bottleneck"]["link"] in ("disk", "memory", "computation")


def test_limits_and_stop_strings_reach_the_engine(hmt):
    shorter = json.loads(
        hmt("run", *SMALL, "--json", "--raw", "--max-new-tokens", "3", "Once upon a time").out
    )
    assert (len(shorter["token_ids"]), shorter["finish_reason"]) == (3, "length")
    letter = shorter["text"].strip()[1]
    stopped = json.loads(
        hmt("run", *SMALL, "--json", "--raw", "--stop", letter, "Once upon a time").out
    )
    assert letter not in stopped["text"] and stopped["finish_reason"] == "stop"


def test_a_seed_repeats_chance(hmt):
    arguments = ("run", *SMALL, "--raw", "--no-summary", "--max-new-tokens", "12")
    chance = ("--temperature", "1.5", "--top-k", "50", "--seed", "7", "Once upon a time")
    assert hmt(*arguments, *chance).out == hmt(*arguments, *chance).out


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None), (embedded_model(), None)),
        ((".", None), (Path("."), None)),
        ((".", "hello"), (Path("."), "hello")),
        (("nowhere", "hello"), (Path("nowhere"), "hello")),
        (("hello", None), (embedded_model(), "hello")),
        (("what is 3/4 of 8?", None), (embedded_model(), "what is 3/4 of 8?")),
        (("", None), (embedded_model(), "")),
        (("/is/this a path?", None), (embedded_model(), "/is/this a path?")),
        (("./nowhere", None), (Path("./nowhere"), None)),
        (("long " * 5000, None), (embedded_model(), "long " * 5000)),
    ],
)
def test_one_argument_is_a_model_where_it_can_be_one(given, expected):
    assert run.choose(*given) == expected


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((" ",), 1, "prompt is empty"),
        (("./no-such-folder",), 1, "is not there"),
        (("no-such-folder", "hello"), 1, "is not there"),
        (("--host-memory", "100KiB", "hello"), 1, "smallest --host-memory that works"),
        (("--host-memory", "much", "hello"), 2, "cannot read 'much' as a size"),
        (("--executor", "fast", "hello"), 2, "overlapped, plain"),
        (("--quant", "w1a1", "hello"), 2, "w1a1"),
        (("--numa", "a,b", "hello"), 2, "--numa a,b"),
        (("--numa", "99", "hello"), 1, "NUMA node 99"),
        (("--context", "999999999", "hello"), 2, "999999999"),
        (("--json",), 2, "give a prompt"),
        (("--chat-template", "/nowhere.jinja", "hello"), 2, "/nowhere.jinja cannot be read"),
    ],
)
def test_a_mistake_is_one_line(hmt, arguments, code, message):
    done = hmt("run", *arguments)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert message in done.err


def test_a_chat_template_of_ones_own(hmt, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}")
    common = (*SMALL, "--json", "--max-new-tokens", "3")
    mine = json.loads(hmt("run", *common, "--chat-template", file, "Once upon a time").out)
    raw = json.loads(hmt("run", *common, "--raw", "Once upon a time").out)
    assert mine["token_ids"] == raw["token_ids"] and mine["prompt_tokens"] == raw["prompt_tokens"]


def test_a_prompt_that_is_too_long_is_told_so(hmt):
    done = hmt("run", *SMALL, "--context", "64", "word " * 200)
    assert done.code == 1 and "64" in done.err


def test_an_unknown_option_is_a_usage_error(hmt):
    done = hmt("run", "--host-memroy", "8MiB")
    assert done.code == 2 and "host-memroy" in done.err


def test_hmt_inference_takes_a_gpu_or_says_that_there_is_none(hmt_inference):
    if not torch.cuda.is_available():
        done = hmt_inference("--gpu-id", "0", "hello")
        assert done.code == 1 and "hmt doctor" in done.err
    done = hmt_inference("--gpu-id", "fake", "--max-context", "512", QUESTION)
    assert done.code == 0 and "a fake device" in done.err + done.out
    assert hmt_inference("--gpu-id", "-1", "--max-context", "512", QUESTION).code == 0


class Lines(io.StringIO):
    def isatty(self):
        return False


def test_a_chat_remembers_until_it_is_reset(hmt, monkeypatch):
    sizes = []
    original = run._answer

    def answer(conversation, line, write):
        done = original(conversation, line, write)
        sizes.append(done.prompt_tokens)
        return done

    monkeypatch.setattr(run, "_answer", answer)
    monkeypatch.setattr(sys, "stdin", Lines("Repeat: key\n\nRepeat: key\n/reset\nRepeat: key\n"))
    done = hmt("run", *SMALL, "--max-new-tokens", "5")
    assert done.code == 0
    assert len(done.out.splitlines()) == 3
    assert sizes[1] > sizes[0] == sizes[2]
    assert "tokens/s" in done.err


def test_a_chat_goes_on_after_a_request_that_fails(hmt, monkeypatch):
    lines = Lines(f"{'word ' * 300}\n{QUESTION}\n/exit\nnever asked\n")
    monkeypatch.setattr(sys, "stdin", lines)
    done = hmt("run", *SMALL, "--context", "64")
    assert done.code == 0 and "shorten" in done.err
    assert len(done.out.splitlines()) == 1


def test_reasoning_goes_where_the_price_goes(hmt, monkeypatch, tmp_path):
    """Of a model whose answers have channels; the next prompt has the answer alone."""
    folder = harmony_folder(tmp_path / "model")
    tokenizer = Tokenizer.open(folder)
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is late.<|return|>"
    )
    options = ("--context", "512", "--no-summary")
    with saying(tokenizer.encode(text)):
        found = json.loads(hmt("run", folder, "What time is it?", *options, "--json").out)
        monkeypatch.setattr(sys, "stdin", io.StringIO("Time?\nAnd now?\n"))
        chat = hmt("run", folder, *options)
    assert (found["text"], found["reasoning"]) == ("It is late.", "Hm.")
    assert chat.out.count("It is late.") == 2 and "Hm." not in chat.out
    assert chat.err.count("Hm.") == 2
