"""Messages between HMT and its limited child processes, over a stream socket.

A frame is two big-endian uint32, the lengths of a JSON object and of raw bytes, and then both.
JSON and not pickle: a stranger's template may have taken over the child that sends a frame, and HMT
must not run what the frame says.
"""

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

_LENGTHS: Final = struct.Struct(">II")
MAX_BYTES: Final = 1 << 30  # of either part: a length above it is not one of ours


def send(
    link: socket.socket, message: dict[str, Any], blob: bytes = b"", files: Sequence[int] = ()
) -> None:
    """Send one frame, with open `files` that the receiver gets too.

    Raises OSError where the receiver has closed its end, ValueError or RecursionError where
    `message` cannot be JSON.
    """
    text = json.dumps(message).encode()
    if max(len(text), len(blob)) > MAX_BYTES:
        raise ValueError(f"{max(len(text), len(blob))} bytes are more than {MAX_BYTES}")
    lengths = _LENGTHS.pack(len(text), len(blob))
    if files:
        socket.send_fds(link, [lengths], list(files))
        lengths = b""
    link.sendall(lengths + text + blob)


def receive(link: socket.socket, files: list[int] | None = None) -> tuple[dict[str, Any], bytes]:
    """The next frame; open files that come with it are added to `files`.

    Raises EOFError where there is none, or only the beginning of one.
    """
    head = b""
    if files is not None:
        head, given, _, _ = socket.recv_fds(link, _LENGTHS.size, 4)
        files += given
        if not head:
            raise EOFError
    head += _exactly(link, _LENGTHS.size - len(head))
    text_bytes, blob_bytes = _LENGTHS.unpack(head)
    if max(text_bytes, blob_bytes) > MAX_BYTES:
        raise EOFError
    return json.loads(_exactly(link, text_bytes)), _exactly(link, blob_bytes)


def _exactly(link: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        data = link.recv(min(count - len(parts), 1 << 20))
        if not data:
            raise EOFError
        parts += data
    return bytes(parts)
