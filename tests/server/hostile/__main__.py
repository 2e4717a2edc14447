"""Attack a running server: python -m tests.server.hostile URL [--pid N] [--key KEY --key KEY].

Only servers of this machine, unless --elsewhere says that the other one is yours.
"""

import argparse
import ipaddress
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

import on_bodies
import on_connections
import on_forms
import on_keys
from beside import MIB, Guardian
from pending import PENDING
from target import Failure, Target

ROOMS = (on_connections, on_bodies, on_forms, on_keys)


def _is_here(url: str) -> bool:
    parts = urlsplit(url)
    found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(address[4][0]).is_loopback for address in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="such as http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, help="of the server, whose memory is watched then")
    parser.add_argument("--key", action="append", help="API key; give two of different clients")
    parser.add_argument("--most-mib", type=int, help="memory; 300 MiB more than now if left out")
    parser.add_argument("--only", action="append", help="name of an attack; may be repeated")
    parser.add_argument("--elsewhere", action="store_true", help="a server of another machine")
    given = parser.parse_args()
    if not given.elsewhere and not _is_here(given.url):
        parser.error("this server is not of this machine; --elsewhere, if it is yours")
    keys = None if not given.key else (given.key[0], given.key[-1])
    target = Target(given.url, given.pid, keys)
    guardian = Guardian(target, given.most_mib and given.most_mib * MIB)
    failed = 0
    try:
        for attack in (
            *(one for room in ROOMS for one in room.ATTACKS),
            *on_forms.TEMPLATE_ATTACKS,
        ):
            if given.only and attack.__name__ not in given.only:
                continue
            begin = time.monotonic()
            try:
                with guardian.watching():
                    attack(target)
                outcome = "borne"
            except Failure as error:
                failed += 1
                outcome = f"FAILED: {error}" + (" (known)" if attack.__name__ in PENDING else "")
            print(f"{attack.__name__:28} {time.monotonic() - begin:5.1f} s  {outcome}", flush=True)
    finally:
        guardian.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
