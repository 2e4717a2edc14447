"""What a server is told, checked once."""

import ipaddress
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hmt.base.errors import ConfigError
from hmt.base.units import MIB
from hmt.server.keys import KeyRing

MOST_SHUTDOWN_S = 86400  # a day
_IMAGE_HOST: Final = re.compile(r"[\w.-]+(:\d{1,5})?", re.ASCII)


# What some fields are called on the command line.
_FLAGS: Final = {
    "max_waiting": "--max-waiting", "default_new_tokens": "--max-tokens",
    "max_body_bytes": "--max-body",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a model is served.  `check` says what makes no sense.

    name         what clients call the model; None: the name of its folder
    host, port   where to listen; port 0: any that is free
    keys         who may use it; without any, everybody who reaches it
    public       listen on an address that others can reach although there are no keys
    max_waiting  answers that may wait for their turn; more are refused at once
    max_choices  answers that one request may ask for
    default_new_tokens the longest answer of requests that do not say; less where the context ends.
                       None: what the context holds, and 1024 in the APIs of OpenAI's chats
    timeout_s          time that an answer may take, its wait included
    max_body_bytes     of a request
    body_timeout_s     in which a request's body must have come
    header_timeout_s   in which a request's header must have come
    idle_timeout_s     that a connection may wait for its next request
    write_timeout_s    after which a client that reads nothing of its answer is cut off
    shutdown_s         that answers under way have to end once the server is told to stop
    origins            of web pages that may use it (CORS); none when empty
    image_hosts        "HOST" or "HOST:PORT" from which images are fetched; none when empty
    log_requests       write a line of JSON to stderr for each response, without what was said
    chat_template      Jinja by which the model's chats are written; None: as its files say
    max_connections    at once; more are refused
    adapter_dir        folder of which clients may load adapters, and unload any; None: none may
    replica            of several servers behind a router this one's number, with which the ids of
                       stored responses begin; None: it is alone
    """

    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    keys: KeyRing = field(default_factory=KeyRing)
    public: bool = False
    max_waiting: int = 64
    max_choices: int = 16
    default_new_tokens: int | None = None
    timeout_s: float = 600.0
    max_body_bytes: int = 4 * MIB
    body_timeout_s: float = 30.0
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    shutdown_s: float = 30.0
    origins: tuple[str, ...] = ()
    image_hosts: tuple[str, ...] = ()
    log_requests: bool = False
    chat_template: str | None = None
    max_connections: int = 1024
    adapter_dir: Path | None = None
    replica: int | None = None

    def check(self) -> None:
        """Raise ConfigError for what makes no sense, or is not safe."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is not in 0..65535")
        least = {"max_waiting": 0, "max_choices": 1, "default_new_tokens": 1, "max_body_bytes": 1}
        least["max_connections"] = 1
        for name, minimum in least.items():
            if getattr(self, name) is not None and getattr(self, name) < minimum:
                flag = _FLAGS.get(name)
                raise ConfigError(
                    f"{name}{f' ({flag})' if flag else ''} is {getattr(self, name)}; it must be at "
                    f"least {minimum}"
                )
        for name in ("timeout_s", "body_timeout_s", "header_timeout_s", "idle_timeout_s",
                     "write_timeout_s"):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; a timeout must be more than 0 seconds, "
                    "and finite"
                )
        if not 0 <= self.shutdown_s <= MOST_SHUTDOWN_S:
            raise ConfigError(
                f"shutdown_s is {self.shutdown_s}; give 0 to {MOST_SHUTDOWN_S} seconds"
            )
        if self.adapter_dir is not None and not self.adapter_dir.is_dir():
            raise ConfigError(
                f"adapter_dir {self.adapter_dir} is no folder: name one that is there"
            )
        for host in self.image_hosts:
            if not _IMAGE_HOST.fullmatch(host):
                raise ConfigError(
                    f"images cannot be allowed from {host!r}: give a host, or HOST:PORT, without "
                    "https:// and without a path"
                )
        if not self.is_local and not self.keys and not self.public:
            raise ConfigError(
                f"{self.host} can be reached from other machines, and there is no API key: give "
                "one with --api-key-file, listen on 127.0.0.1, or say --public to let everybody in"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
