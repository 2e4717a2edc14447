"""An application on a socket, for clients that are programs of their own."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Its address, while it is served."""
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, args=([made],))
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.02)
        yield f"http://127.0.0.1:{made.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        made.close()
