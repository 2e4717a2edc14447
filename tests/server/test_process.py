"""`hmt serve` as a process: a real socket, OpenAI's blocking client, an orderly end."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from serving import NAME, asking

pytestmark = pytest.mark.usefixtures("quick_processes")

KEY = "sk-correct-horse"


class Server:
    def __init__(self, folder: Path, *arguments: str) -> None:
        keys = folder / "keys"
        keys.write_text(KEY, encoding="utf-8")
        keys.chmod(0o600)  # or it is warned of
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hmt", "serve", "--port", "0", "--api-key-file", str(keys),
             "--host-memory", "64MiB", "--context", "2048", "--threads", "1", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
        assert found, line + self.process.stderr.read()
        self.port = int(found[1])

    def client(self) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(api_key=KEY, base_url=url, max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
        text = connection.getresponse().read().decode()
        connection.close()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    def stop(self) -> str:
        """Ask it to end, and what it has written."""
        self.process.send_signal(signal.SIGTERM)  # does nothing where it has ended
        self.process.wait(60)
        assert self.process.stderr is not None
        with self.process.stderr:
            return self.process.stderr.read()


def test_a_server_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    """One process for all, since each takes seconds to start."""
    server = Server(tmp_path)
    try:
        answers_openais_blocking_client(server)
        answers_users_at_once_as_it_does_alone(server)
        frees_the_pages_of_a_closed_connection(server)
        ends_once_what_it_answers_has_ended(server)
    finally:
        assert server.stop() == ""


def answers_openais_blocking_client(server: Server) -> None:
    with server.client() as client:
        assert [one.id for one in client.models.list()] == [NAME]
        whole = client.chat.completions.create(**asking())
        text = whole.choices[0].message.content
        with client.chat.completions.create(**asking(), stream=True) as stream:
            parts = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(parts) == text and len(parts) > 2
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**asking(temperature=3))
        assert error.value.param == "temperature"


def answers_users_at_once_as_it_does_alone(server: Server) -> None:
    questions = [f"What is {a} + {b}?" for a in (2, 30, 14) for b in (11, 5, 27)]

    def ask(question: str) -> str:
        with server.client() as client:
            done = client.chat.completions.create(**asking(question, max_tokens=32))
            return str(done.choices[0].message.content)

    alone = [ask(question) for question in questions]
    with ThreadPoolExecutor(len(questions)) as users:
        assert list(users.map(ask, questions)) == alone


def frees_the_pages_of_a_closed_connection(server: Server) -> None:
    free = server.metric('hmt_kv_pages{model_name="mini-dense",state="free"}')
    body = json.dumps(
        {"model": NAME, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert client.recv(200).startswith(b"HTTP/1.1 200")
        end = time.monotonic() + 30  # it is told so before it is admitted
        while server.metric('hmt_kv_pages{model_name="mini-dense",state="free"}') >= free:
            assert time.monotonic() < end
    end = time.monotonic() + 30
    while (
        server.metric('hmt_answers_inside{model_name="mini-dense"}')
        or server.metric('hmt_kv_pages{model_name="mini-dense",state="free"}') < free
    ):
        assert time.monotonic() < end
    assert server.metric('hmt_answers_total{end="cancelled",model_name="mini-dense"}') >= 1


def ends_once_what_it_answers_has_ended(server: Server) -> None:
    """SIGTERM in the middle of an answer."""
    told = threading.Event()
    with server.client() as client:
        with client.completions.create(
            model=NAME, prompt="Once", max_tokens=300, stream=True, temperature=0,
            extra_body={"ignore_eos": True}, stream_options={"include_usage": True},
        ) as stream:  # fmt: skip
            usage = None
            for chunk in stream:
                if not told.is_set():
                    server.process.send_signal(signal.SIGTERM)
                    told.set()
                usage = chunk.usage
        assert usage is not None and usage.completion_tokens == 300
    assert server.process.wait(60) == 0
