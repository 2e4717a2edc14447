"""Who may pass: keys, hosts, pages of other origins, and what a server may not be told to do."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import openai as package
import pytest
from serving import CHAT, app_on, asking, http, openai, run

from hmt.base.errors import ConfigError
from hmt.engine import LoadedModel
from hmt.server import KeyRing, ServerConfig

KEY, OTHER = "sk-correct-horse", "sk-battery-staple"


@pytest.fixture
def locked(model: LoadedModel, tmp_path: Path) -> Any:
    file = tmp_path / "keys"
    hashed = hashlib.sha256(OTHER.encode()).hexdigest()
    file.write_text(f"# people\n{KEY}\n\nsha256:{hashed}\n", encoding="utf-8")
    return app_on(model, keys=KeyRing.of(file=file))


def test_openais_client_sends_its_key(locked: Any) -> None:
    async def work() -> None:
        for key in (KEY, OTHER):
            async with openai(locked, key) as client:
                done = await client.chat.completions.create(**asking())
                assert done.choices[0].finish_reason == "stop"
        async with openai(locked, "sk-wrong-and-long") as client:
            with pytest.raises(package.AuthenticationError) as error:
                await client.models.list()
            assert error.value.code == "invalid_api_key"

    run(work())


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"authorization": ""}, "missing_api_key"),
        ({"authorization": "Bearer "}, "missing_api_key"),
        ({"authorization": f"Basic {KEY}"}, "missing_api_key"),
        ({"authorization": KEY}, "missing_api_key"),
        ({"authorization": f"Bearer {KEY}x"}, "invalid_api_key"),
        ({"authorization": f"Bearer {KEY[:-1]}"}, "invalid_api_key"),
        ({"authorization": "Bearer " + "x" * 9000}, "invalid_api_key"),
        ({"authorization": b"Bearer \xff\xfe"}, "invalid_api_key"),
        ({"x-api-key": "nonsense"}, "invalid_api_key"),
    ],
    ids=str,
)
def test_without_a_key_nothing_is_told(locked: Any, headers: Any, code: str) -> None:
    async def work() -> None:
        async with http(locked) as client:
            for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"),
                                 ("GET", "/openapi.json"), ("GET", "/nothing")):  # fmt: skip
                done = await client.request(method, path, headers=headers)
                assert (done.status_code, done.json()["error"]["code"]) == (401, code)
                assert done.headers["www-authenticate"] == "Bearer"
            for path in ("/health", "/ready"):
                assert (await client.get(path, headers=headers)).status_code == 200

    run(work())


def test_keys_are_owners(locked: Any, model: LoadedModel) -> None:
    ring = locked.state.service.config.keys
    owners = {ring.owner(KEY), ring.owner(OTHER)}
    assert len(owners) == 2 and None not in owners
    assert not any(KEY in part or OTHER in part for part in map(repr, (ring, owners)))
    seen = []
    begin = model.begin

    def watched(request: Any, listeners: Any) -> Any:
        seen.append(request.owner)
        return begin(request, listeners)

    async def work() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "begin", watched)
            for headers in ({"authorization": f"bearer {KEY}"}, {"x-api-key": OTHER}):
                async with http(locked, **headers) as client:
                    assert (await client.post(CHAT, json=asking())).status_code == 200

    run(work())
    assert set(seen) == owners


@pytest.mark.parametrize(
    "key", ["short", "has a space in it", "nöt-ascii-at-all", "sha256:12", "sha256:" + "g" * 64]
)
def test_keys_that_are_none_are_refused(key: str) -> None:
    with pytest.raises(ConfigError):
        KeyRing.of([key])


def test_files_without_keys_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n\n", encoding="utf-8")
    for file in (tmp_path / "empty", tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match="API keys"):
            KeyRing.of(file=file)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])
def test_public_addresses_need_a_key_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match="--public"):
        ServerConfig(host=host).check()
    ServerConfig(host=host, public=True).check()
    ServerConfig(host=host, keys=KeyRing.of([KEY])).check()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_local_addresses_need_none(host: str) -> None:
    ServerConfig(host=host).check()


@pytest.mark.parametrize(
    "options",
    [{"port": -1}, {"port": 70000}, {"max_waiting": -1}, {"timeout_s": 0.0}, {"max_choices": 0}],
    ids=str,
)
def test_nonsense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**options).check()


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("localhost:8000", 200), ("127.0.0.1:1", 200), ("[::1]:80", 200),
     ("evil.example", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403),
     ("", 403)],
)  # fmt: skip
def test_names_that_lead_here_from_elsewhere_are_refused(
    model: LoadedModel, host: str, status: int
) -> None:
    async def work() -> None:
        async with http(app_on(model)) as client:
            done = await client.get("/v1/models", headers={"host": host})
            assert done.status_code == status
        async with http(app_on(model, keys=KeyRing.of([KEY])), authorization=f"Bearer {KEY}") as c:
            assert (await c.get("/v1/models", headers={"host": host})).status_code == 200

    run(work())


def test_pages_of_other_origins_get_no_leave_unless_told(model: LoadedModel) -> None:
    origin = "https://example.org"
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }

    async def work() -> None:
        async with http(app_on(model)) as client:
            found = await client.options(CHAT, headers=asked)
            assert "access-control-allow-origin" not in found.headers and found.status_code == 405
            plain = await client.get("/v1/models", headers={"origin": origin})
            assert "access-control-allow-origin" not in plain.headers
        allowed = app_on(model, origins=(origin,), keys=KeyRing.of([KEY]))
        async with http(allowed) as client:
            found = await client.options(CHAT, headers=asked)
            assert found.status_code == 200
            assert found.headers["access-control-allow-origin"] == origin
            plain = await client.get("/v1/models", headers={"origin": origin})
            assert plain.status_code == 401  # and the page may read why
            assert plain.headers["access-control-allow-origin"] == origin
            found = await client.options(CHAT, headers=asked | {"origin": "https://evil.example"})
            assert "access-control-allow-origin" not in found.headers

    run(work())


def test_request_ids_are_repeated_or_made(model: LoadedModel) -> None:
    async def work() -> None:
        async with http(app_on(model)) as client:
            for given, kept in (
                ("abc-1.2_3", True),
                ("a b", False),
                ("x" * 65, False),
                ("", False),
            ):
                done = await client.get("/health", headers={"x-request-id": given})
                assert (done.headers["x-request-id"] == given) == kept
                assert len(done.headers["x-request-id"]) > 3

    run(work())


def test_a_body_that_does_not_come_is_not_waited_for(model: LoadedModel) -> None:
    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(30)

    async def work() -> None:
        async with http(app_on(model, body_timeout_s=0.05)) as client:
            done = await client.post(
                CHAT, content=slow(), headers={"content-type": "application/json"}
            )
            assert (done.status_code, done.json()["error"]["code"]) == (408, "body_timeout")

    run(work())


def test_the_journal_has_no_words(model: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    app = app_on(model, log_requests=True, keys=KeyRing.of([KEY]))

    async def work() -> None:
        async with http(app, authorization=f"Bearer {KEY}") as client:
            done = await client.post(CHAT, json=asking("A secret."), headers={"x-request-id": "r1"})
            assert done.status_code == 200
            await client.get("/secret-path")
        async with http(app) as client:
            await client.get("/v1/models")

    run(work())
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["path"], line["status"]) for line in lines] == [
        (CHAT, 200), (None, 404), ("/v1/models", 401),
    ]  # fmt: skip
    assert lines[0]["request_id"] == "r1" and lines[0]["seconds"] > 0
    assert lines[0]["owner"] == app.state.service.config.keys.owner(KEY)
    assert "secret" not in text and KEY not in text


def test_what_is_not_asked_for_is_not_logged(app: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        async with http(app) as client:
            await client.post(CHAT, json=asking())

    run(work())
    assert capsys.readouterr().err == ""
