"""Images of other hosts, where the server's user allows some by name.

A request says what is fetched, and the server reaches more than its client does: the machine's own
services, its network, and what clouds tell a machine of itself.  So a host has to be named, and all
its addresses have to be public ones; the connection goes to one of those that were looked at, as a
name may have another one the next time (DNS rebinding).  Redirects are not followed.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpx2

from hmt.server.client import CLIENT
from hmt.server.errors import ApiError
from hmt.server.images import RemoteImage

_AT_ONCE: Final = 4  # requests whose images are fetched
_TIME_S: Final = 20.0  # for all images of one, its turn included
_SILENCE_S: Final = 5.0
_INTERNET: Final = ipaddress.IPv6Network("2000::/3")
# What Oracle's and Azure's machines are told of themselves, and Python 3.11 takes for public.
_METADATA: Final = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "168.63.129.16/32")))
_PORTS: Final = {"https": 443, "http": 80}


def is_public(address: str) -> bool:
    """Whether an address belongs to the internet, and not to this machine or its surroundings.

    Of IPv6 only global unicast counts, and nothing that has an address of IPv4 in it: neither
    mapped ones nor those of translators and tunnels (RFC 6052, RFC 3056, RFC 4380).
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        carries = found.sixtofour is not None or found.teredo is not None
        return found in _INTERNET and found.is_global and not found.is_multicast and not carries
    near = found.is_multicast or any(found in network for network in _METADATA)
    return found.is_global and not near


class ImageFetcher:
    """Fetches images of hosts that are named.  For one event loop."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        reachable: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`hosts`: each "HOST", for the usual ports, or "HOST:PORT".

        reachable   whether an address may be connected to
        tls         by which certificates are checked; None: as the system does
        """
        self._hosts = frozenset(host.lower() for host in hosts)
        self._reachable = reachable
        self._tls = tls
        self._turns = asyncio.Semaphore(_AT_ONCE)
        # Not those of the event loop: a name server may take its time.
        self._resolvers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="hmt-resolver")

    def url_of(self, image: RemoteImage) -> httpx2.URL:
        """Where an image is.  Raises ApiError where it is not fetched from there."""
        if not self._hosts:
            raise _refusal(
                "images are not fetched from other hosts, since a request could then reach what "
                "only this server can: send the image itself, as data:image/png;base64,..."
            )
        try:
            url = httpx2.URL(image.url)
        except (httpx2.InvalidURL, UnicodeError):
            raise _refusal("an image's URL cannot be read") from None
        host, port = _host(url), url.port or _PORTS[url.scheme]
        usual = port == _PORTS[url.scheme] and host in self._hosts
        if not (usual or f"{host}:{port}" in self._hosts):
            raise _refusal(
                f"images are not fetched from {host[:100]!r}, port {port}: the server's "
                "--allow-image-host names others.  Send the image itself, as a data URL"
            )
        if url.userinfo:
            raise _refusal("an image's URL has a name or a password in it, which are not sent")
        return url

    async def files(self, images: Sequence[bytes | RemoteImage]) -> tuple[bytes, ...]:
        """The files of `images`, in order.  Raises ApiError.

        What is fetched counts as if it had been in the request's body.
        """
        urls = {one: self.url_of(one) for one in images if isinstance(one, RemoteImage)}
        fetched: dict[RemoteImage, bytes] = {}
        try:
            async with asyncio.timeout(_TIME_S), self._turns:
                for image, url in urls.items():
                    fetched[image] = await self._fetch(url)
        except TimeoutError:
            raise _refusal(f"images did not come within {_TIME_S:g} s") from None
        return tuple(one if isinstance(one, bytes) else fetched[one] for one in images)

    async def _fetch(self, url: httpx2.URL) -> bytes:
        host = _host(url)
        address = await self._address(host, url.port or _PORTS[url.scheme])
        # The name is what certificates are checked for, and what the host is told.
        headers = {
            "Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity",
        }  # fmt: skip
        if self._tls is None:
            self._tls = await asyncio.to_thread(httpx2.create_ssl_context, trust_env=False)
        # One for each: a connection that is kept would serve other names of its address, too.
        transport = httpx2.AsyncHTTPTransport(verify=self._tls, trust_env=False)
        try:
            async with (
                httpx2.AsyncClient(
                    transport=transport, trust_env=False, timeout=_SILENCE_S, follow_redirects=False
                ) as client,
                client.stream(
                    "GET", url.copy_with(host=address), headers=headers,
                    extensions={"sni_hostname": host},
                ) as response,
            ):  # fmt: skip
                return await _body(response)
        except httpx2.HTTPError as error:
            kind = type(error).__name__
            raise _refusal(f"an image cannot be fetched from {host!r}: {kind}") from error

    async def _address(self, host: str, port: int) -> str:
        """One address of a host.  Raises ApiError unless all of them may be connected to."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._resolvers, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError):
            raise _refusal(f"an image's host {host!r} has no address") from None
        addresses = [str(entry[4][0]) for entry in found]
        if not addresses or not all(map(self._reachable, addresses)):
            raise _refusal(f"an image's host {host!r} has an address that is not public")
        return addresses[0]


async def _body(response: httpx2.Response) -> bytes:
    """All of it, as it was sent, and counted as it comes."""
    if response.status_code != 200:
        moved = ", and redirects are not followed" if response.has_redirect_location else ""
        raise _refusal(f"an image's host answered with status {response.status_code}{moved}")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise _refusal("an image's host sent it compressed, which was not asked for")
    client, parts = CLIENT.get(), list[bytes]()
    async for part in response.aiter_raw():
        client.hold(len(part))
        parts.append(part)
    return b"".join(parts)


def _host(url: httpx2.URL) -> str:
    """As names are compared: in lower case, in ASCII, without the dot of the root."""
    return url.raw_host.decode("ascii").lower().rstrip(".")


def _refusal(why: str) -> ApiError:
    return ApiError(400, why, param="messages", code="invalid_image_url")
