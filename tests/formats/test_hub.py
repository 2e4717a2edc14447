"""Names of the hub: what is needed is downloaded, goes on where it stopped, and is kept."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

from hmt.base.errors import CheckpointError, MachineError, MissingFileError
from hmt.formats import located, open_checkpoint, shown_name

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": json.dumps({"model_type": "llama"}).encode(),
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "model.safetensors": save({"a": torch.arange(60_000, dtype=torch.float32)}),
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"and again",
    "onnx/model.safetensors": b"and again",
    "README.md": b"words",
}


class Hub(http.server.ThreadingHTTPServer):
    """A hub with one model; notes what is asked for, and can fail in the middle of a file."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(FILES)
        # Bytes of a file after which the connection breaks, once; and which file.
        self.cut: tuple[int, str] | None = None
        self.hashes: dict[str, str] = {}  # what is said of a file, where it is not its own
        self.lost = ""  # a file that cannot be had
        self.broken = False
        self.refusal: tuple[int, str] | None = None
        self.got: list[tuple[str, str | None]] = []  # files, and which range of them

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        if hub.broken:
            self._answer(503, b"")
        elif hub.refusal is not None:
            self._answer(hub.refusal[0], b"{}", {"X-Error-Code": hub.refusal[1]})
        elif path.startswith("/api/models/some/model/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                for name, data in hub.files.items()
            ]
            self._answer(200, json.dumps(listed).encode())
        elif path.startswith("/api/models/some/model"):
            self._answer(200, json.dumps({"id": "some/model", "sha": SHA, "siblings": []}).encode())
        else:
            self._file(path.removeprefix(f"/some/model/resolve/{SHA}/"))

    def _file(self, name: str) -> None:
        hub = self.server
        data = hub.files[name]
        etag = hub.hashes.get(name) or _oid(data)
        marks = {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            self._answer(200, data, marks)
            return
        if name == hub.lost:
            self._answer(503, b"")
            return
        wanted = self.headers.get("Range")
        hub.got.append((name, wanted))
        first = 0 if wanted is None else int(wanted.removeprefix("bytes=").partition("-")[0])
        if first:
            marks["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        cut = None
        if hub.cut is not None and name == hub.cut[1]:
            cut, hub.cut = hub.cut[0], None
        self._answer(206 if first else 200, data[first:], marks, cut)

    def _answer(
        self, status: int, data: bytes, marks: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for mark, value in (marks or {}).items():
            self.send_header(mark, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.connection.shutdown(2)
            self.close_connection = True


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and an empty cache.  huggingface_hub reads its environment when it is imported."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4000)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_is_needed_is_downloaded_once_and_used_without_the_hub(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    folder = located("some/model")
    wanted = {"config.json", "tokenizer.json", "merges.txt", "model.safetensors"}
    assert {file.name for file in folder.iterdir()} == wanted
    assert {name for name, _ in hub.got} == wanted
    assert shown_name(folder) == "some/model"
    record = open_checkpoint(folder).records["a"]
    with record.file.open("rb") as file:
        file.seek(record.offset)
        assert file.read(record.nbytes) == torch.arange(60_000.0).numpy().tobytes()
    assert located(f"some/model@{SHA}") == folder
    assert len(hub.got) == len(wanted)
    hub.broken = True
    assert located("some/model") == folder
    assert "as it is in the cache" in caplog.text


def test_a_download_goes_on_where_the_connection_broke(hub: Hub) -> None:
    hub.cut = 100_000, "model.safetensors"
    folder = located("some/model")
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    asked = [range_ for name, range_ in hub.got if name == "model.safetensors"]
    assert asked[0] is None
    assert asked[1:] == ["bytes=100000-"]


def test_a_download_that_failed_goes_on_with_the_files_that_are_missing(hub: Hub) -> None:
    hub.lost = "model.safetensors"
    with pytest.raises(MissingFileError, match="try again, which goes on where it stopped"):
        located("some/model")
    kept = {name for name, _ in hub.got}
    hub.lost = ""
    hub.got.clear()
    assert (located("some/model") / "model.safetensors").is_file()
    again = [name for name, _ in hub.got]
    assert "model.safetensors" in again
    assert not kept & set(again)


@pytest.mark.parametrize(
    ("status", "code", "error", "says"),
    [
        (404, "RepoNotFound", MissingFileError, "no model that the hub shows"),
        (401, "RepoNotFound", MissingFileError, "log in"),
        (403, "GatedRepo", CheckpointError, "agreement"),
        (404, "RevisionNotFound", MissingFileError, "no revision 'v9'"),
        (500, "", MissingFileError, "no complete copy"),
    ],
)
def test_refusals_say_what_to_do(
    hub: Hub, status: int, code: str, error: type[Exception], says: str
) -> None:
    hub.refusal = status, code
    with pytest.raises(error, match=says):
        located("some/model@v9")


def test_nothing_is_downloaded_that_cannot_run_or_has_no_room(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: free)
    with pytest.raises(MachineError, match=r"some/model needs 2.*1000 B free.*HF_HOME"):
        located("some/model")
    del hub.files["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors"):
        located("some/model")
    assert not hub.got


def test_what_is_here_is_never_asked_for(hub: Hub, tmp_path: Path) -> None:
    assert located(tmp_path) == tmp_path
    assert located(str(tmp_path / "none" / "here")) == tmp_path / "none" / "here"
    assert located("just words") == Path("just words")
    assert shown_name(tmp_path) == tmp_path.name
    hub.broken = True
    with pytest.raises(MissingFileError, match=r"some/model is no folder here.*cannot be reached"):
        located("some/model")


def test_the_environment_names_hub_and_cache(hub: Hub, tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads its environment once."""
    program = "from hmt.formats import located; print(located('some/model'))"
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    environment = {
        k: v
        for k, v in environment.items()
        if k not in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN")
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path / "home" / "hub")
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "Fetching 4 files" in done.stderr  # progress
