"""Connections of clients that keep a server waiting: each wait has an end.  Real sockets."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import CHAT, NAME, asking, at_rest

from hmt.engine import LoadedModel
from hmt.server import KeyRing, ServerConfig
from hmt.server.app import create_app
from hmt.server.run import _Server, bind

BODY = "application/json"


class Running:
    """A server on a thread of this process."""

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        config = ServerConfig(port=0, **options)
        self.bound = bind(config)
        self.port = self.bound.getsockname()[1]
        self.app = create_app(model, config)
        self.server = _Server(config, self.app)
        up = threading.Event()
        self.server.when_started = up.set
        self.thread = threading.Thread(target=self.server.run, args=([self.bound],))
        self.thread.start()
        assert up.wait(30)

    def connect(self, sent: bytes = b"", buffer: int | None = None) -> socket.socket:
        made = socket.socket()
        if buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        made.settimeout(30)
        made.connect(("127.0.0.1", self.port))
        made.sendall(sent)
        return made

    @property
    def open(self) -> int:
        return len(self.server.server_state.connections)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(model: LoadedModel, **options: Any) -> Iterator[Running]:
    server = Running(model, **options)
    try:
        yield server
    finally:
        server.stop()


def post(body: Any, path: str = CHAT, *lines: str) -> bytes:
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {BODY}", *lines,
            f"Content-Length: {len(content)}"]  # fmt: skip
    return "\r\n".join([*head, "", ""]).encode() + content


def until(fact: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.01)


def ended(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection, which it must."""
    came = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            came += part
    return came


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
     b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"],
    ids=["nothing", "half a header", "half a second header"],
)  # fmt: skip
def test_a_header_that_does_not_come_is_not_waited_for(model: LoadedModel, sent: bytes) -> None:
    with running(model, header_timeout_s=0.2, idle_timeout_s=0.4) as server:
        with server.connect(sent) as connection:
            came = ended(connection)
        assert came.startswith(b"HTTP/1.1 200") == (b"\r\n\r\n" in sent)


def test_bytes_now_and_then_give_no_more_time(model: LoadedModel) -> None:
    with running(model, header_timeout_s=0.5) as server, server.connect(b"GET /") as connection:
        begin = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < begin + 20:
                connection.sendall(b"a")
                time.sleep(0.05)


def test_a_body_that_nobody_wants_is_not_waited_for(model: LoadedModel) -> None:
    """Refused before it came: the answer can be read, and the connection ends."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: evil.example\r\nContent-Type: {BODY}\r\n"
    sent = f"{head}Content-Length: 1000000\r\n\r\n".encode()
    with running(model) as server, server.connect(sent) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 403")
        begin = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < begin + 20:
                connection.sendall(b" ")
                time.sleep(0.1)


def test_a_body_that_comes_after_its_answer_leaves_the_connection_usable(
    model: LoadedModel,
) -> None:
    whole = post(asking()).replace(b"localhost", b"evil.example", 1)
    with running(model) as server, server.connect(whole[:-5]) as connection:
        came = b""
        while b"host_not_allowed" not in came:
            came += connection.recv(1 << 16)
        connection.sendall(whole[-5:])
        time.sleep(2.5)  # longer than a body is waited for
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_nothing_is_left(model: LoadedModel, stream: bool) -> None:
    """An answer larger than the buffers of the system: whole, and as a stream."""
    body = {"model": NAME, "prompt": "Once", "max_tokens": 250, "n": 4, "ignore_eos": True}
    body |= {"logprobs": 20, "stream": stream, "best_of": 4}
    with running(model, write_timeout_s=0.4) as server:
        server.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with server.connect(post(body, "/v1/completions"), buffer=2048):
            until(lambda: server.open == 1)
            until(lambda: server.open == 0, 60)
        until(lambda: at_rest(model))
        assert server.app.state.service.limit.inside == 0


def test_a_client_that_reads_slowly_is_not_left(model: LoadedModel) -> None:
    body = {"model": NAME, "prompt": "Once", "max_tokens": 100, "n": 4, "ignore_eos": True}
    whole = post(body | {"logprobs": 20}, "/v1/completions")
    with running(model, write_timeout_s=1.5) as server:  # much for a reader that gets no turn
        # Much smaller ones make the system itself stop for half a minute.
        server.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
        with server.connect(whole, buffer=1 << 15) as connection:
            came, end = b"", 0.0
            while b'"usage"' not in came:
                part = connection.recv(1 << 13)
                assert part
                came += part
                end = end or time.monotonic() + 3.5  # more than two of its times
                time.sleep(0.1 if time.monotonic() < end else 0)
        head, _, content = came.partition(b"\r\n\r\n")
        assert f"content-length: {len(content)}".encode() in head.lower()
        assert json.loads(content)["usage"]["completion_tokens"] == 400
        assert len(content) > 3 << 16  # more than fits into the buffers on the way


def test_time_frees_the_place_of_a_client_that_reads_nothing(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--timeout holds although what was written waits to be read."""
    from hmt.server import generation

    monkeypatch.setattr(generation, "_LATE_S", 0.2)
    monkeypatch.setattr(generation, "_TO_READ_S", 0.2)
    body = {"model": NAME, "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "logprobs": 20}
    with running(model, timeout_s=1.0, write_timeout_s=1000.0) as server:
        server.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        whole = post(body | {"stream": True, "n": 4}, "/v1/completions")
        with server.connect(whole, buffer=2048) as connection:
            assert connection.recv(16).startswith(b"HTTP/1.1 200")
            until(lambda: server.app.state.service.limit.inside == 0)
            until(lambda: at_rest(model))


def test_idle_connections_give_way_to_new_ones(model: LoadedModel) -> None:
    with running(model, max_connections=8) as server:
        held = [server.connect(b"" if n % 2 else b"GET /hea") for n in range(20)]
        try:
            assert server.open <= 8
            for _ in range(3):
                with server.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as new:
                    assert new.recv(1 << 16).startswith(b"HTTP/1.1 200")
        finally:
            for connection in held:
                connection.close()


def test_where_all_connections_work_new_ones_are_refused(model: LoadedModel) -> None:
    body = {"model": NAME, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with running(model, max_connections=2) as server:
        held = [server.connect(post(body, "/v1/completions")) for _ in range(2)]
        try:
            for connection in held:
                assert connection.recv(64).startswith(b"HTTP/1.1 200")
            with server.connect() as new:
                came = ended(new)
            assert came.startswith(b"HTTP/1.1 503") and b"Retry-After: 1" in came
            assert json.loads(came.partition(b"\r\n\r\n")[2])["error"]["code"]
        finally:
            for connection in held:
                connection.close()
        until(lambda: at_rest(model))


def test_without_descriptors_the_loop_rests(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """accept() that fails for want of descriptors: tried twice a second, and told once."""
    import errno

    with running(model) as server:
        listener, tried = server.server.servers[0], []

        class Without:
            def __getattr__(self, name: str) -> Any:
                return getattr(server.bound, name)

            def accept(self) -> Any:
                tried.append(time.monotonic())
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(listener, "_socket", Without())
        begin = time.monotonic()
        waiting = [server.connect() for _ in range(5)]
        until(lambda: len(tried) >= 6)
        monkeypatch.setattr(listener, "_socket", server.bound)
        rounds = 1 + (tried[5] - begin) / 0.5
        assert rounds > 2.9  # each time once, and once more for the one who is refused
        with server.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        for one in waiting:
            one.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ulimit -n" in caplog.text


@pytest.mark.parametrize("lines", [("Transfer-Encoding: chunked",), ("transfer-encoding: gzip",)])
def test_a_body_with_two_lengths_is_refused(model: LoadedModel, lines: tuple[str, ...]) -> None:
    with running(model) as server, server.connect(post(asking(), CHAT, *lines)) as connection:
        came = ended(connection)
        assert came.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501")), came
        assert came.count(b"HTTP/1.1 4") == 1  # what came behind it was not taken for a request


def test_nonsense_is_answered_in_json_and_not_logged(
    model: LoadedModel, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with running(model) as server:
        for sent in (b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"):
            with server.connect(sent) as connection:
                came = ended(connection)
            assert came.startswith(b"HTTP/1.1 400")
            assert json.loads(came.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    assert capsys.readouterr().err == "" and not caplog.records


def test_answers_have_their_time_to_end_and_no_more(model: LoadedModel) -> None:
    body = {"model": NAME, "prompt": "Once", "ignore_eos": True, "stream": True}
    server = Running(model, shutdown_s=3.0)
    with (
        server.connect(post(body | {"max_tokens": 12}, "/v1/completions")) as short,
        server.connect(post(body | {"max_tokens": 1900, "n": 16}, "/v1/completions")) as long,
        server.connect(b"GET /hea"),
    ):
        for connection in (
            short,
            long,
        ):  # both have tokens: how long prompts wait is not the matter
            came = part = connection.recv(64)
            while part and b"data: " not in came:
                part = connection.recv(64)
                came += part
            assert came.startswith(b"HTTP/1.1 200")
        server.server.should_exit = True
        reading = threading.Thread(target=ended, args=(long,))
        reading.start()
        assert b"[DONE]" in ended(short)
        server.thread.join(30)
        reading.join(30)
        assert not server.thread.is_alive()
    until(lambda: at_rest(model))


def test_keys_that_others_can_read_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-correct-horse\n", encoding="utf-8")
    for mode, warned in ((0o644, "read"), (0o620, "change"), (0o600, ""), (0o440, "")):
        file.chmod(mode)
        caplog.clear()
        KeyRing.of(file=file)
        assert stat.S_IMODE(file.stat().st_mode) == mode
        assert (f"can {warned} it: chmod 600" in caplog.text) == bool(warned)
        assert "horse" not in caplog.text


def test_who_is_furthest_behind_is_cut_off() -> None:
    from hmt.base.errors import HMTError
    from hmt.server.concurrency_limit import Unread

    class Reader:
        told: HMTError | None = None

        def cut_off(self, error: HMTError) -> None:
            self.told = error
            unread.drop(self)

    unread = Unread(of_one_bytes=100, of_all_bytes=250)
    slow, slower, quick = Reader(), Reader(), Reader()
    for size in (40, 50):
        unread.add(slow, size)
        unread.add(slower, size + 5)
    for _ in range(20):
        unread.add(quick, 60)
        unread.read(quick, 60)
    assert (slow.told, slower.told, quick.told) == (None, None, None)
    unread.add(quick, 80)
    assert slower.told is not None and "100" in str(slower.told) and quick.told is None
    assert unread.total_bytes == 170
    unread.add(slow, 11)
    assert slow.told is not None and unread.total_bytes == 80


def test_work_for_large_bodies_is_done_one_at_a_time() -> None:
    from hmt.server.client import CLIENT, Client, off_loop

    now, most, together = 0, 0, threading.Barrier(2)

    def work() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        time.sleep(0.05)
        now -= 1

    async def ask(size: int) -> None:
        CLIENT.set(Client(size))
        await off_loop(work if size > 1000 else lambda: together.wait(30))

    async def all_of(size: int) -> None:
        await asyncio.gather(*(asyncio.create_task(ask(size)) for _ in range(4)))

    asyncio.run(all_of(1 << 20))
    assert most == 1
    asyncio.run(all_of(1000))  # two by two, or the barrier breaks
