"""Images of other hosts: of those that are named, from public addresses, within limits."""

import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from elsewhere import Elsewhere
from serving import run

from hmt.base.errors import ConfigError
from hmt.server import ServerConfig, image_fetching
from hmt.server.client import CLIENT, Client
from hmt.server.errors import ApiError
from hmt.server.image_fetching import ImageFetcher, is_public
from hmt.server.images import RemoteImage

FILE = bytes(range(256)) * 20


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    with Elsewhere(FILE) as server:
        yield server


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255",
        "192.168.1.1", "169.254.169.254", "100.100.100.200", "100.64.0.1", "168.63.129.16",
        "192.0.0.192", "192.0.2.1", "198.18.0.1", "203.0.113.9", "224.0.0.1", "239.1.2.3",
        "240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1",
        "::ffff:8.8.8.8", "::ffff:169.254.169.254", "64:ff9b::a00:1", "64:ff9b:1::1", "fe80::1",
        "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fd20:ce::254", "fec0::1", "ff02::1",
        "2001:db8::1", "2001::1", "2002:7f00:1::", "2002:808:808::", "2130706433", "0x7f.1",
        "0177.0.0.1", "localhost", "", "1.2.3",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_addresses_that_are() -> None:
    for address in ("8.8.8.8", "151.101.1.69", "2606:4700::1111", "2a00:1450:4001:81b::200e"):
        assert is_public(address)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were resolved: those of .test to this machine, but the first one of "two.test"."""
    names: list[str] = []
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if not str(host).endswith(".test"):
            return resolve(host, port, *rest, **more)
        names.append(host)
        addresses = ["93.184.216.34", "127.0.0.1"] if host == "two.test" else ["127.0.0.1"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


def here(address: str) -> bool:
    return address == "127.0.0.1"


def fetch(
    *urls: str,
    hosts: Any,
    reachable: Callable[[str], bool] = here,
    tls: Any = None,
    hold: Any = lambda more: None,
) -> tuple[bytes, ...]:
    async def work() -> tuple[bytes, ...]:
        CLIENT.set(Client(hold=hold))
        fetcher = ImageFetcher(hosts, reachable=reachable, tls=tls)
        return await fetcher.files([RemoteImage(url) for url in urls])

    return run(work())


def refused(*urls: str, **options: Any) -> str:
    with pytest.raises(ApiError) as raised:
        fetch(*urls, **options)
    assert raised.value.status == 400 and raised.value.code == "invalid_image_url"
    return str(raised.value)


def test_a_named_host_is_asked_at_the_address_that_was_looked_at(
    elsewhere: Elsewhere, resolved: list[str]
) -> None:
    url = f"http://{elsewhere.name}/a.png"
    # Each name once, whatever it would be the next time; each image once, however often it is sent.
    assert fetch(url, url, hosts=[elsewhere.name.upper()]) == (FILE, FILE)
    assert resolved == ["images.test"]
    assert elsewhere.asked == [("/a.png", elsewhere.name)]


def test_other_hosts_and_ports_are_not_asked(elsewhere: Elsewhere, resolved: list[str]) -> None:
    port = elsewhere.server_port
    for url in (
        f"http://other.test:{port}/", f"http://images.test.other.test:{port}/", "http://images.test/",
        f"http://127.0.0.1:{port}/", f"http://2130706433:{port}/", f"http://0x7f.1:{port}/",
        f"http://[::ffff:127.0.0.1]:{port}/", f"http://images.test:{port + 1}/", "http:///",
        f"http://images.test:{port}@other.test:{port}/", f"http://other.test\\@images.test:{port}/",
        f"http://images.test%2eother.test:{port}/", f"http://0177.0.0.1:{port}/",
    ):  # fmt: skip
        said = refused(url, hosts=[elsewhere.name])
        assert "not fetched from" in said or "cannot be read" in said or "password" in said, url
    assert "data:image/png" in refused(f"http://{elsewhere.name}/", hosts=[])
    assert elsewhere.asked == [] and resolved == []


@pytest.mark.parametrize("host", ["images.test", "two.test", "localhost", "2130706433", "0x7f.1"])
def test_names_of_private_addresses_are_refused(
    host: str, elsewhere: Elsewhere, resolved: list[str]
) -> None:
    """Even where the server's user has named them, and where only one of their addresses is."""
    name = f"{host}:{elsewhere.server_port}"
    said = refused(f"http://{name}/", hosts=[name], reachable=is_public)
    assert "not public" in said or "no address" in said
    assert elsewhere.asked == []


@pytest.mark.parametrize(
    ("path", "said"), [("moved", "redirects"), ("none", "404"), ("packed", "compressed")]
)
def test_what_is_no_image_is_refused(
    path: str, said: str, elsewhere: Elsewhere, resolved: list[str]
) -> None:
    assert said in refused(f"http://{elsewhere.name}/{path}", hosts=[elsewhere.name])
    assert len(elsewhere.asked) == 1


def test_bytes_are_counted_as_they_come(elsewhere: Elsewhere, resolved: list[str]) -> None:
    counted: list[int] = []

    def hold(more: int) -> None:
        counted.append(more)
        if sum(counted) > 1 << 20:
            raise ApiError(413, "too large")

    with pytest.raises(ApiError, match="too large"):
        fetch(f"http://{elsewhere.name}/endless", hosts=[elsewhere.name], hold=hold)
    assert sum(counted) < 2 << 20


@pytest.mark.parametrize("path", ["slow", "slow-header"])
def test_time_is_limited(
    path: str, elsewhere: Elsewhere, resolved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_fetching, "_TIME_S", 0.2)
    said = refused(f"http://{elsewhere.name}/{path}", hosts=[elsewhere.name])
    assert "within 0.2 s" in said


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, for a certificate")
def test_certificates_are_of_the_name(
    elsewhere: Elsewhere, resolved: list[str], tmp_path: Path
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=images.test",
         "-addext", "subjectAltName=DNS:images.test"],
        check=True, capture_output=True,
    )  # fmt: skip
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(certificate, key)
    elsewhere.socket = secured.wrap_socket(elsewhere.socket, server_side=True)
    trusting = ssl.create_default_context(cafile=str(certificate))
    port = elsewhere.server_port
    asked = partial(fetch, hosts=[f"images.test:{port}", f"other.test:{port}"], tls=trusting)
    assert asked(f"https://images.test:{port}/a") == (FILE,)
    with pytest.raises(ApiError, match="ConnectError"):
        asked(f"https://other.test:{port}/a")
    assert elsewhere.asked == [("/a", f"images.test:{port}")]


def test_hosts_are_hosts() -> None:
    ServerConfig(image_hosts=("example.org", "example.org:8443", "10.0.0.1")).check()
    for host in ("https://example.org", "example.org/x", "*", "", "a b", "a:b", "user@host"):
        with pytest.raises(ConfigError, match="cannot be allowed"):
            ServerConfig(image_hosts=(host,)).check()
