"""Attacks on connections: those that send little, read nothing, or say what is no HTTP."""

import contextlib
import json
import socket
import time

from target import CHAT, TEXT, Target, eventually, require


def half_open_connections(target: Target) -> None:
    """More connections than the server takes, which send nothing: others are let in."""
    with contextlib.ExitStack() as stack:
        for number in range(1100):
            try:
                stack.enter_context(target.raw(b"" if number % 2 else b"GET /health HTT"))
            except OSError:
                break  # no descriptors, or the server does not accept so many at once
        for _ in range(3):
            require(target.get("/health").status == 200, "half-open connections keep others out")


def bodies_that_stop(target: Target) -> None:
    """Connections whose bodies never end, each with as much as may be."""
    with contextlib.ExitStack() as stack:
        head = target.head(CHAT, "Content-Length: 4000000") + b"\r\n"
        for _ in range(48):
            with contextlib.suppress(OSError):
                connection = stack.enter_context(target.raw(head))
                connection.setblocking(False)
                for _ in range(60):
                    connection.send(b" " * 65536)
                    time.sleep(0.0005)
        require(target.get("/health").status == 200, "bodies that stop keep others out")


def clients_that_never_read(target: Target) -> None:
    """Five streams of 16 answers whose clients read nothing: their places become free."""
    body = target.chat("hi", n=16, max_tokens=60, ignore_eos=True, stream=True)
    body |= {"logprobs": True, "top_logprobs": 20}
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(target.raw(target.request(CHAT, body), receive_buffer=2048))
        eventually(
            lambda: target.post(CHAT, target.chat(max_tokens=1)).status == 200, 60,
            "clients that read nothing keep all places",
        )  # fmt: skip


def clients_that_go(target: Target) -> None:
    """Many that ask and go at once, in the middle of the request and of the answer."""
    whole = target.request(TEXT, {"model": target.model, "prompt": "a", "stream": True,
                                  "max_tokens": 400, "ignore_eos": True})  # fmt: skip
    for number in range(60):
        with target.raw(whole[: len(whole) - number % 3 * 20]) as connection:
            linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)  # resets it
    eventually(
        lambda: target.post(CHAT, target.chat(max_tokens=1)).status == 200, 60,
        "clients that went keep their places",
    )  # fmt: skip


def two_lengths(target: Target) -> None:
    """Transfer-Encoding beside Content-Length, and the like: a proxy may believe the other one."""
    chunked, content = b"0\r\n\r\n", json.dumps(target.chat(max_tokens=1)).encode()
    size = f"Content-Length: {len(content)}"
    for lines in (
        (size, "Transfer-Encoding: chunked"), ("Transfer-Encoding: chunked", size),
        ("Content-Length: 5", "Content-Length: 6"), ("Transfer-Encoding: chunked, chunked",),
        ("Transfer-Encoding: identity",), ("Transfer-Encoding: xchunked",),
        ("Content-Length: +5",), ("Content-Length: -1",), ("Content-Length: 0x5",),
        ("Content-Length: " + "9" * 5000,),
    ):  # fmt: skip
        for path in (CHAT, "/health"):
            status = target.status_of(target.head(path, *lines) + b"\r\n" + chunked + content)
            require(status in (400, 413, 501), f"{lines} at {path} gave {status}")


def no_http(target: Target) -> None:
    """What is no HTTP is refused, and costs nothing."""
    head = target.head("/health", method="GET")
    for sent in (
        b"\x16\x03\x01\x02\x00\x01" * 50, b"\x00" * 1000, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n", head + b"X: " + b"a" * 200_000, head + b"A:b\r\n" * 30_000,
        head + b"X : 1\r\n\r\n", head + b"X: a\x00b\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"GET " + b"/a" * 60_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):  # fmt: skip
        for _ in range(3):
            with contextlib.suppress(OSError):  # it may be reset while it is sent
                status = target.status_of(sent)
                require(
                    status in (0, 400, 401, 403, 404, 431, 501, 505), f"{sent[:40]!r}: {status}"
                )


def many_at_once(target: Target) -> None:
    """Requests on one connection before the first is answered."""
    one = target.head("/health", method="GET") + b"\r\n"
    with target.raw(one * 400) as connection:
        text, end = b"", time.monotonic() + 20
        while text.count(b'"ok"') < 400 and time.monotonic() < end:
            text += connection.recv(1 << 16)
    require(text.count(b'"ok"') == 400, "requests behind each other were not all answered")


ATTACKS = (
    half_open_connections, bodies_that_stop, clients_that_never_read, clients_that_go, two_lengths,
    no_http, many_at_once,
)  # fmt: skip
