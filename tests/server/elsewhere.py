"""Another host, from which a server may fetch."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Host(BaseHTTPRequestHandler):
    """Another host.  Its paths say how it answers."""

    protocol_version = "HTTP/1.1"
    server: "Elsewhere"

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Host"]))
        self.close_connection = True
        if self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            self.write_often(b"x" * 65536, 0)
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            self.write_often(b"x", 0.02)
        elif self.path == "/slow-header":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            self.write_often(b"X-A: b\r\n", 0.02)
        else:
            status = {"/moved": 302, "/none": 404}.get(self.path, 200)
            self.send_response(status)
            self.send_header("Location", "http://169.254.169.254/")
            self.send_header("Content-Type", "text/html")
            if self.path == "/packed":
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(self.server.file)))
            self.end_headers()
            self.wfile.write(self.server.file)

    def write_often(self, data: bytes, pause_s: float) -> None:
        """Until the client goes."""
        try:
            while True:
                self.wfile.write(data)
                self.wfile.flush()
                time.sleep(pause_s)
        except OSError:
            return

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


class Elsewhere(ThreadingHTTPServer):
    """The other host, which has one file, and what it was asked: paths, and by which name."""

    def __init__(self, file: bytes) -> None:
        self.file = file
        self.asked: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", 0), Host)
        self.name = f"images.test:{self.server_port}"

    def __enter__(self) -> "Elsewhere":
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client has gone, or has not liked the certificate."""
