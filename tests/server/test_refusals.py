"""What clients, and the server's operator, are told of a refusal: the right reason."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from serving import CHAT, NAME, app_on, asking, http, run

import hmt
from hmt.base.errors import ContextLengthError, MachineError, os_reason
from hmt.cli.options import embedded_model
from hmt.engine import LoadedModel
from hmt.server import KeyRing
from hmt.server.json_shape import MOST_NUMBERS, MOST_PARTS

KEY = "sk-correct-horse"


def told(app: Any, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    async def work() -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **headers}
        async with http(app) as client:
            return await client.post(path, content=content, headers=sent)

    done = run(work())
    return done.status_code, done.json()


@pytest.mark.parametrize("token", ["1" * 100_000, "1" * 4301, "1" * 19, "٣", "1_0", "+1", ""])
def test_tokens_of_any_length_are_refused_and_not_a_fault(model: LoadedModel, token: str) -> None:
    status, body = told(app_on(model), CHAT, asking(logit_bias={token: 1}))
    assert (status, body["error"]["param"]) == (400, "logit_bias")
    assert len(body["error"]["message"]) < 200


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompt": [5] * 2000, "max_tokens": 100}, "need 2100 positions; the context of 2048 is "
         "what it was loaded with"),
        ({"prompt": "word " * 40_000, "max_tokens": 1}, "the context has room for 2048"),
        ({"prompt": "1 2 3 4 5 " * 500, "max_tokens": 1}, "the context of 2048"),
    ],
)  # fmt: skip
def test_the_limit_that_rules_is_named(
    model: LoadedModel, asked: dict[str, Any], words: str
) -> None:
    """Of a model that was made for 131072 and loaded with 2048, the latter."""
    status, body = told(app_on(model), "/v1/completions", {"model": NAME, **asked})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert words in body["error"]["message"] and body["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (hmt.Request([5] * 9, 2048), "2048 is what it was loaded with"),
        (hmt.Request([5] * 9, 200_000), "2048 is what it was loaded with"),
        (hmt.Request([5] * 9, 8, context_size=16), "16 is the request's context_size"),
        (hmt.Request([5] * 9, 4096, context_size=4096), "2048 is what it was loaded with"),
    ],
)
def test_of_several_limits_the_smallest_is_named(
    model: LoadedModel, request_: hmt.Request, words: str
) -> None:
    with pytest.raises(ContextLengthError, match=words):
        model.infer(request_)


def test_bodies_of_millions_of_parts_are_refused_before_they_are_read(model: LoadedModel) -> None:
    app = app_on(model)
    for part, count in (("{}", MOST_PARTS), ('""', MOST_PARTS), ("1", MOST_NUMBERS)):
        body = f'{{"model":"{NAME}","messages":[{",".join([part] * (count + 2))}]}}'.encode()
        status, answer = told(app, CHAT, body)
        assert (status, answer["error"]["code"]) == (400, "invalid_json")
        assert f" {count} are" in answer["error"]["message"]
    # Strings may have as many of these characters as they like.
    text = '{"a": [1, 2, "x\\""]}, ' * 20_000
    status, answer = told(app, "/tokenize", {"prompt": text})
    assert status == 200 and answer["count"] == len(answer["tokens"])
    assert answer["tokens"] == model.tokenizer.encode(text)


def test_lists_are_read_until_their_first_fault(model: LoadedModel) -> None:
    status, answer = told(app_on(model), CHAT, {"model": NAME, "messages": [1] * 20_000})
    assert (status, answer["error"]["param"]) == (400, "messages[0]")


def test_large_bodies_together_are_bounded_and_small_ones_go_on(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hmt.server import guard

    monkeypatch.setattr(guard, "_BODIES_BYTES", 0)
    app = app_on(model, max_body_bytes=100_000)
    large = asking("x", metadata={"a": "b" * 60_000}, max_tokens=1)
    assert told(app, CHAT, large)[0] == 200
    held = next(m for m in iter_middleware(app) if isinstance(m, guard.Guard))
    assert held._bodies_bytes == 0
    held._bodies_bytes = 150_000
    status, answer = told(app, CHAT, large)
    assert (status, answer["error"]["code"]) == (503, "overloaded")
    assert "200000" in answer["error"]["message"]
    assert told(app, CHAT, asking(max_tokens=1))[0] == 200
    assert held._bodies_bytes == 150_000


def iter_middleware(app: Any) -> Any:
    layer = app.middleware_stack
    while layer is not None:
        yield layer
        layer = getattr(layer, "_app", None) or getattr(layer, "app", None)


def test_the_journal_has_path_and_reason(
    model: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    app = app_on(model, log_requests=True, keys=KeyRing.of([KEY]))
    key = {"authorization": f"Bearer {KEY}"}

    told(app, CHAT, asking())
    told(app, CHAT, asking(), **key | {"content-type": "text/plain"})
    told(app, CHAT, asking(temperature=9), **key)
    told(app, "/secret", {}, **key)
    told(app, "/v1/models/secret", {}, **key)
    told(app, CHAT, asking(max_tokens=1), **key)
    text = capsys.readouterr().err
    assert [
        (one["path"], one["status"], one["code"]) for one in map(json.loads, text.splitlines())
    ] == [
        (CHAT, 401, "missing_api_key"),
        (CHAT, 415, "unsupported_media_type"),
        (CHAT, 400, "invalid_value"),
        (None, 404, "unknown_url"),
        ("/v1/models/{name:path}", 405, "method_not_allowed"),
        (CHAT, 200, None),
    ]
    assert "secret" not in text


def test_reasons_of_the_system_are_never_none(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with pytest.raises(OSError) as caught:
        shutil.rmtree(tmp_path / "link")
    assert caught.value.strerror is None
    assert "symbolic link" in os_reason(caught.value)
    assert os_reason(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"
    assert os_reason(OSError()) == "OSError"
    source = Path(hmt.__file__).parent
    named = [path for path in source.rglob("*.py") if "{error.strerror" in path.read_text("utf-8")]
    assert named == []


def test_too_little_room_on_a_drive_is_told_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil._ntuple_diskusage(1 << 30, 1 << 30, 2 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    options = {"quantization": "w4a8", "context": 512, "max_prefill_tokens": 16, "max_batch": 1}
    told = r"has 2\.00 MiB free, and \d.* are wanted, of which \d.* would be used"
    with (
        hmt.Engine(host_memory="3.6MiB", spill_dir=tmp_path, **options) as engine,
        pytest.raises(MachineError, match=told),
    ):
        engine.load_model(embedded_model())
