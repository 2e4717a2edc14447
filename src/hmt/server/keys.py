"""API keys: kept as hashes, compared in constant time."""

import hashlib
import hmac
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hmt.base.errors import ConfigError
from hmt.base.log import logger

_HASHED = "sha256:"
_FOR_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP
_LEAST = 8  # characters; shorter ones can be guessed


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys that a server accepts.  False when there are none.

    A key should be random (`openssl rand -hex 24`): then its plain SHA-256 tells nothing, and a
    slow hash would only cost time in every request.
    """

    hashes: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[str] = (), file: Path | None = None) -> "KeyRing":
        """Keys as given, and those of a file: one per line, as it is or as "sha256:" and its hash.

        Empty lines and lines that begin with # are left out.  Raises ConfigError for keys that are
        too short, and for a file that cannot be read or has none.
        """
        given = list(keys)
        if file is not None:
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"the file of API keys {file} cannot be read: {error}") from error
            _warn_of_readers(file)
            found = [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]
            if not found:
                raise ConfigError(f"the file of API keys {file} has none: write one on each line")
            given += found
        return cls(tuple(dict.fromkeys(map(_hash, given))))

    def __bool__(self) -> bool:
        return bool(self.hashes)

    def owner(self, key: str) -> str | None:
        """Who has `key`: the first half of its hash; None for a wrong one.

        Less would not do: a client with another key whose hash begins alike would be taken for it.

        Takes the same time whichever key it is, or is like.
        """
        hashed = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known in self.hashes:
            if hmac.compare_digest(known, hashed):
                found = known.hex()[:32]
        return found


def _warn_of_readers(file: Path) -> None:
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & _FOR_OTHERS:
        logger.warning(
            "the file of API keys %s has mode %04o, so that other users of this machine can %s it: "
            "chmod 600 %s",
            file,
            mode,
            "read" if mode & stat.S_IROTH else "change",
            file,
        )


def _hash(key: str) -> bytes:
    if key.startswith(_HASHED):
        try:
            hashed = bytes.fromhex(key.removeprefix(_HASHED))
        except ValueError:
            hashed = b""
        if len(hashed) != hashlib.sha256().digest_size:
            raise ConfigError(
                f'"{_HASHED}" must be followed by the 64 hexadecimal digits of a hash'
            )
        return hashed
    if len(key) < _LEAST or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"an API key has {len(key)} characters; give at least {_LEAST}, printable ASCII "
            "without spaces (openssl rand -hex 24 makes a good one)"
        )
    return hashlib.sha256(key.encode()).digest()
