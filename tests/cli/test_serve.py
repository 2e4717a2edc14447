"""`hmt serve`: what it refuses before anything is loaded; tests/server has what it answers."""

import socket
import sys

import pytest


def test_an_address_that_is_taken_is_told_before_anything_is_loaded(hmt):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = hmt("serve", "nowhere", "--port", port)
    assert done.code == 2 and f"port {port} cannot be listened on" in done.err


def test_a_public_address_without_a_key_is_refused(hmt):
    done = hmt("serve", "--host", "0.0.0.0")
    assert done.code == 2 and "there is no API key" in done.err and "--public" in done.err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--api-key", "short"), "at least 8"),
        (("--api-key-file", "/nowhere"), "cannot be read"),
        (("--max-body", "many"), "many"),
        (("--port", "99999"), "99999"),
        (("--timeout", "0"), "timeout"),
        (("--max-batch", "0"), "max_batch"),
        (("--chat-template", "/nowhere.jinja"), "cannot be read"),
        (("--dp", "2", "--extra-model", "/tmp"), "--extra-model is of one server"),
        (("--allow-image-host", "https://example.org"), "without https://"),
    ],
    ids=str,
)
def test_nonsense_is_refused(hmt, arguments, word):
    done = hmt("serve", *arguments)
    assert done.code == 2 and word in done.err


def test_without_its_dependencies_it_says_what_to_install(hmt, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("hmt.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = hmt("serve")
    assert done.code == 1 and "hmt[serve]" in done.err
