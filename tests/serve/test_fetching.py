"""Pictures by URL: what is fetched, from where, and what a stranger's URL or server can't do."""

from __future__ import annotations

import dataclasses
import ipaddress
import random
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest
from anyio.streams.tls import TLSListener

from helpers.thorough import anyio_backend  # noqa: F401  the fixture

pytest.importorskip("h11", reason="the server is the extra `serve`")

from rekindle._src.serve.errors import ApiError
from rekindle._src.serve.fetching import Fetcher, FetchRules
from rekindle._src.serve.web_urls import NETWORKS, FetchProblem, is_public, parse_url

pytestmark = pytest.mark.anyio
CONTEXT = ssl.create_default_context()  # to make one takes a while
LOOPBACK = ipaddress.ip_address("127.0.0.1")
OK = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 7\r\n\r\npicture"

Answer = bytes | Callable[[anyio.abc.ByteStream], Awaitable[None]]


class Website:
    """A server on the loopback that sends what it is told to, by path, and keeps what it was sent."""

    def __init__(self, answers: Mapping[str, Answer], port: int) -> None:
        self.answers, self.port = answers, port
        self.requests: list[bytes] = []
        self.connections = self.left = 0

    def url(self, path: str = "/", host: str = "pictures.test", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def serve(self, stream: anyio.abc.ByteStream) -> None:
        self.connections += 1
        async with stream:
            head = b""
            try:
                while b"\r\n\r\n" not in head:
                    head += await stream.receive()
                    if head.startswith(b"\x16"):  # TLS
                        return
                self.requests.append(head)
                answer = self.answers[head.split()[1].decode()]
                if callable(answer):
                    await answer(stream)
                else:
                    await stream.send(answer)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                self.left += 1


@asynccontextmanager
async def website(answers: Mapping[str, Answer] | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[Any]:
    listener: Any = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    site = Website(answers or {"/": OK}, port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon((TLSListener(listener, tls, standard_compatible=False) if tls else listener).serve, site.serve)
        yield site
        group.cancel_scope.cancel()


def rules(*sites: Website, names: Mapping[str, Sequence[str]] | None = None, **options: Any) -> FetchRules:
    """Rules that allow the loopback, and its ports of these servers."""
    known = {"pictures.test": ["127.0.0.1"], **(names or {})}
    options = {
        "allows": lambda address: address == LOOPBACK,
        "own": True,
        "seconds": 20.0,
        "context": CONTEXT,
        **options,
    }
    ports = frozenset({80, 443, *(site.port for site in sites)})
    return FetchRules(resolve=lambda name: known.get(name, []), ports=ports, **options)


async def problem_of(fetcher: Fetcher, url: str, most: int = 1 << 20) -> FetchProblem:
    with pytest.raises(FetchProblem) as caught:
        await fetcher.fetch([fetcher.parse(url)], most=most)
    return caught.value


# What is sent, and where.


async def test_a_picture_is_fetched_by_one_plain_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with website() as site, website() as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        site.answers = {"/a%20b?c=[1]&d": OK}
        fetcher = Fetcher(rules(site))
        urls = [fetcher.parse(f"HTTP://Pictures.TEST:{site.port}/a%20b?c=[1]&d#part")] * 2
        assert await fetcher.fetch(urls, most=14) == [b"picture", b"picture"]
        assert (site.connections, proxy.connections) == (2, 0)
        head = site.requests[0].decode().split("\r\n")
        assert head[0] == "GET /a%20b?c=[1]&d HTTP/1.1" and f"Host: pictures.test:{site.port}" in head
        fields = {line.partition(":")[0].lower() for line in head[1:] if line}
        assert fields == {"host", "user-agent", "accept", "accept-encoding", "connection"}


async def test_a_name_is_resolved_once_and_its_address_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, looked_up = [], list[Any]()
    getaddrinfo = socket.getaddrinfo

    def resolve(name: str) -> list[str]:
        asked.append(name)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]  # the name was bound to another host meanwhile

    def look(host: Any, *options: Any, **more: Any) -> Any:
        looked_up.append(host)
        return getaddrinfo(host, *options, **more)

    async with website() as site:
        fetcher = Fetcher(
            FetchRules(resolve, allows=lambda one: one == LOOPBACK, own=True, ports=frozenset({site.port}))
        )
        monkeypatch.setattr(socket, "getaddrinfo", look)
        assert await fetcher.fetch([fetcher.parse(site.url())], most=100) == [b"picture"]
        assert asked == ["pictures.test"] and site.connections == 1
        assert all(ipaddress.ip_address(host) for host in looked_up)
        # The next request resolves it again, and checks what it leads to now.
        assert (await problem_of(fetcher, site.url())).problem == "is at no public host"
        assert site.connections == 1


async def test_addresses_of_this_machine_are_refused_even_if_they_are_public() -> None:
    async with website() as site:
        fetcher = Fetcher(rules(site, own=False))
        assert (await problem_of(fetcher, site.url())).problem == "is at no public host"
        assert site.requests == []


async def test_addresses_are_tried_in_their_order() -> None:
    async with website() as site:
        everything = rules(
            site, names={"two.test": ["127.0.0.9", "127.0.0.1"]}, allows=lambda address: address.is_loopback
        )
        fetcher = Fetcher(everything)
        assert await fetcher.fetch([fetcher.parse(site.url(host="two.test"))], most=100) == [b"picture"]


# URLs and addresses.

NAMES = {
    "loop.test": ["127.0.0.1"], "private.test": ["10.1.2.3"], "mixed.test": ["93.184.215.14", "127.0.0.1"],
    "six.test": ["::1"], "mapped.test": ["::ffff:127.0.0.1"], "nat64.test": ["64:ff9b::7f00:1"],
    "sixtofour.test": ["2002:7f00:1::1"], "teredo.test": ["2001:0:7f00:1::1"], "local.test": ["fe80::1%lo"],
    "unique.test": ["fd00:ec2::254"], "cgnat.test": ["100.100.100.200"], "metadata.test": ["169.254.169.254"],
    "oracle.test": ["192.0.0.192"], "azure.test": ["168.63.129.16"], "zero.test": ["0.0.0.0"],
    "many.test": ["224.0.0.1"], "reserved.test": ["240.0.0.1"], "broad.test": ["255.255.255.255"],
    "odd.test": ["not an address"], "none.test": [],
    "compatible.test": ["::127.0.0.1"], "nat64local.test": ["64:ff9b:1::7f00:1"], "multi.test": ["ff02::1"],
    "any.test": ["::"], "site.test": ["fec0::1"], "documents.test": ["2001:db8::1"], "bench.test": ["198.18.0.1"],
}  # fmt: skip
HOSTS = (
    *NAMES, "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "017700000001", "0177.0.0.1",
    "127.0.0.01", "127.0.0.1.", "localhost", "localhost.", "LOCALHOST", "loop.test.", "[::1]", "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::127.0.0.1]", "[2002:7f00:1::]", "[fe80::1%25lo]", "[::1%lo]",
    "[::]", "[::127.0.0.1]", "[::1", "::1", "[::1]x", "[]", "[127.0.0.1]", "[v1.x]", "0.0.0.0", "0", "10.0.0.1",
    "169.254.169.254", "192.168.0.1", "172.16.0.1", "100.64.0.1", "198.51.100.7", "1.2.3", "1.2.3.4.5", "256.1.1.1",
    "loop.test@127.0.0.1", "user:key@loop.test", "@loop.test", "loop.test%00.example.org", "loop.test%2e",
    "%6coop.test", "loop.test\\@example.org", "example.org\\.loop.test", "loop。test", "ⓛⓞⓞⓟ.test", "löop.test",
    "loop.test\t", " loop.test", "loop .test", "loop.test\r\nHost: x", "loop.test\x00", "-loop.test", "loop-.test",
    "loop..test", ".loop.test", "lo_op.test", "xn--.", "a" * 64 + ".test", "a." * 130 + "test", "", "*",
    "loop.test,x.org", "①②⑦.⓪.⓪.①", "127。0。0。1", "１２７.0.0.1", "127.0.0.1%0d",
    "metadata.google.internal", "[::ffff:169.254.169.254]",
)  # fmt: skip


async def test_of_a_hundred_hostile_urls_none_reaches_a_server() -> None:
    async with website() as site:
        fetcher = Fetcher(rules(site, names=NAMES, allows=is_public))
        urls = [f"http://{host}:{site.port}/" for host in HOSTS]
        urls += [
            f"{scheme}://127.0.0.1:{site.port}/" for scheme in ("file", "ftp", "gopher", "dict", "ws", "jar:http", "")
        ]
        urls += [
            f"http:/127.0.0.1:{site.port}/", f"http:127.0.0.1:{site.port}", f"//127.0.0.1:{site.port}/", "http://", "https://",
            f"http:\\\\127.0.0.1:{site.port}/", f"http:///127.0.0.1:{site.port}/", f"http://example.org:{site.port}:80@127.0.0.1/",
            f"http://127.0.0.1:{site.port}\\@example.org/", f"http://127.0.0.1:{site.port}#@example.org/",
            f"http://127.0.0.1:{site.port}?@example.org/", "http://example.org:22/", "http://example.org:+80/",
            "http://example.org:080/", "http://example.org:/", "http://example.org:８０/", "http://example.org:80 /",
            "http://example.org/%", "http://example.org/%0", "http://example.org/%zz", "http://example.org/a b",
            "http://example.org/\n", "http://example.org/é", "http://example.org/" + "a" * 10_000, "a" * 10_000,
            "file.png", "/etc/passwd", f" http://127.0.0.1:{site.port}/", f"http ://127.0.0.1:{site.port}/", "http://example.org/<>",
        ]  # fmt: skip
        assert len(set(urls)) >= 130
        problems = [await problem_of(fetcher, url) for url in urls]
        assert site.connections == 0
        assert all(one.problem and one.fix and "127" not in one.problem for one in problems)


async def test_nothing_is_told_about_hosts_inside() -> None:
    """Of names that exist inside, that don't exist, and of redirects to both, a client learns the same."""
    async with website() as inside, website() as site:
        hosts = (*NAMES, "missing.test", "127.0.0.1", "[::1]", "10.0.0.1", "[fd00::1]")
        site.answers = {
            f"/{index}": f"HTTP/1.1 302 Found\r\nLocation: http://{host}:{inside.port}/\r\n\r\n".encode()
            for index, host in enumerate(hosts)
        }

        def allows(address: Any) -> bool:
            allowed, counts["checks"] = counts["checks"] == 0, counts["checks"] + 1
            return allowed or is_public(address)

        counts = {"checks": 0}
        told = set()
        fetcher = Fetcher(rules(site, inside, names=NAMES, allows=allows))
        for index, host in enumerate(hosts):
            counts["checks"] = 0  # the first host is allowed
            told.add(str(await problem_of(fetcher, site.url(f"/{index}"))))
            counts["checks"] = 1
            told.add(str(await problem_of(fetcher, f"http://{host}:{inside.port}/")))
        assert told == {"is at no public host"}
        assert (inside.connections, site.connections) == (0, len(hosts))


def test_public_addresses_are_public_to_python_too() -> None:
    draw = random.Random(3)
    edges = [edge for network in NETWORKS for edge in (int(network[0]), int(network[-1]))]
    addresses: list[Any] = [ipaddress.IPv4Address(draw.getrandbits(32)) for _ in range(2_000)]
    addresses += [ipaddress.IPv6Address(draw.getrandbits(125) | 1 << 125) for _ in range(2_000)]
    for edge in edges:
        kind: Any = ipaddress.IPv4Address if edge < 1 << 32 else ipaddress.IPv6Address
        addresses += [
            kind(edge + step) for step in (-1, 0, 1) if 0 <= edge + step < 1 << (32 if edge < 1 << 32 else 128)
        ]
    assert [one for one in addresses if is_public(one) and not (one.is_global and not one.is_multicast)] == []
    for text in ("8.8.8.8", "93.184.215.14", "2606:4700::1111", "2a00:1450:4001::200e", "2001:4860:4860::8888"):
        assert is_public(ipaddress.ip_address(text))
    for text in (
        "168.63.129.16",
        "192.88.99.1",
        "224.0.0.251",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
        "2002:808:808::1",
    ):
        assert not is_public(ipaddress.ip_address(text))


def test_a_url_is_taken_apart_once() -> None:
    url = parse_url("https://Example.ORG?a=/b#c")
    assert url == ("https", "example.org", 443, "/?a=/b") and url.authority == "example.org"
    assert parse_url("http://[2606:4700:0:0::1]:443/x").authority == "[2606:4700::1]:443"
    assert parse_url("http://8.8.8.8").target == "/" and parse_url("https://example.org:80/").port == 80


@pytest.mark.parametrize("character", [*'\\ \t\n\r\0\x7f"<>^`{|}é。①', "%", "%0", "%g0", "\ud800"])
def test_characters_that_have_to_be_escaped_are_refused(character: str) -> None:
    for url in (
        f"http://example.org/{character}",
        f"http://example.org?{character}",
        f"http://example.org{character}/",
    ):
        with pytest.raises(FetchProblem):
            parse_url(url)


# Redirects.


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Moved\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


async def test_three_redirects_are_followed_and_each_is_checked() -> None:
    async with website() as site:
        site.answers = {
            "/1": redirect("/2", 301), "/2": redirect(f"//pictures.test:{site.port}/3", 307),
            "/3": redirect(site.url("/4"), 308), "/4": OK, "/0": redirect("/1"), "/loop": redirect("/loop"),
        }  # fmt: skip
        fetcher = Fetcher(rules(site))
        assert await fetcher.fetch([fetcher.parse(site.url("/1"))], most=100) == [b"picture"]
        assert site.connections == 4
        for path in ("/0", "/loop"):
            assert (await problem_of(fetcher, site.url(path))).problem == "is redirected more than 3 times"
        assert site.connections == 12


async def test_redirects_to_anything_else_are_refused() -> None:
    async with website() as inside, website() as site:
        there = inside.port
        locations = (
            f"http://127.0.0.2:{there}/", f"http://pictures.test@inside.test:{there}/", f"http://inside.test:{there}/",
            f"http://pictures.test:{there}\\@example.org/", f"/\\inside.test:{there}/", "\\\\inside.test/", "file:///etc/passwd",
            "data:image/png;base64,AAAA", "picture.png", "?a", "", "http://[::1]/", "https://inside.test/", "gopher://x.test/",
        )  # fmt: skip
        site.answers = {f"/{index}": redirect(location) for index, location in enumerate(locations)}
        site.answers = {
            **site.answers,
            "/none": b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n",
            "/two": b"HTTP/1.1 302 Found\r\nLocation: /a\r\nLocation: /b\r\nContent-Length: 0\r\n\r\n",
        }
        fetcher = Fetcher(rules(site, inside, names={"inside.test": ["127.0.0.2"]}))
        for path in site.answers:
            refused = await problem_of(fetcher, site.url(path))
            assert "inside" not in refused.problem and "passwd" not in refused.problem and "127" not in refused.problem
        assert (inside.connections, site.connections) == (0, len(site.answers))


# Bodies.


async def drip(stream: anyio.abc.ByteStream) -> None:
    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        await stream.send(b"x")
        await anyio.sleep(0.02)


async def slow_head(stream: anyio.abc.ByteStream) -> None:
    while True:
        await stream.send(b"H")
        await anyio.sleep(0.02)


async def silence(stream: anyio.abc.ByteStream) -> None:
    await stream.receive()


def endless(head: bytes, part: bytes) -> Answer:
    async def answer(stream: anyio.abc.ByteStream) -> None:
        await stream.send(head)
        while True:
            await stream.send(part)

    return answer


HEAD = b"HTTP/1.1 200 OK\r\n"
BODIES: dict[str, tuple[Answer, str]] = {
    "declared": (endless(HEAD + b"Content-Length: 1048577\r\n\r\n", b"x"), "has more than the 1,048,576 bytes"),
    "enormous": (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", "has more than the 1,048,576 bytes"),
    "chunked": (endless(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"400\r\n" + bytes(1024) + b"\r\n"), "has more"),
    "endless": (endless(HEAD + b"\r\n", bytes(1 << 15)), "has more than the 1,048,576 bytes"),
    "short": (HEAD + b"Content-Length: 100\r\n\r\nx", "was not answered as HTTP has it"),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx", "was not answered as HTTP has it"),
    "negative": (HEAD + b"Content-Length: -1\r\n\r\nx", "was not answered as HTTP has it"),
    "no number": (HEAD + b"Content-Length: many\r\n\r\nx", "was not answered as HTTP has it"),
    "bad chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nx", "was not answered as HTTP has it"),
    "cut chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n10\r\nx", "was not answered as HTTP has it"),
    "crumbs": (endless(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 64), "comes in too many pieces"),
    "gzip": (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b", "comes compressed"),
    "missing": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "is answered with the status 404"),
    "partial": (b"HTTP/1.1 206 Partial\r\nContent-Length: 1\r\n\r\nx", "is answered with the status 206"),
    "nothing": (b"", "was not answered as HTTP has it"),
    "no http": (b"SSH-2.0-OpenSSH_9.9\r\n", "was not answered as HTTP has it"),
    "head": (endless(HEAD, b"X: " + b"y" * 500 + b"\r\n"), "was not answered as HTTP has it"),
    "interim": (endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"), "was not answered as HTTP has it"),
    "upgrade": (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "was not answered as HTTP has it"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
async def test_answers_that_are_refused(name: str) -> None:
    answer, problem = BODIES[name]
    async with website({"/": answer}) as site:
        refused = await problem_of(Fetcher(rules(site)), site.url())
        assert problem in refused.problem
        assert refused.large == problem.startswith("has more")


async def test_bodies_in_chunks_and_bodies_until_the_end_are_read() -> None:
    answers: dict[str, Answer] = {
        "/chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n4;x=y\r\npict\r\n3\r\nure\r\n0\r\nTrailer: 1\r\n\r\n",
        "/end": b"HTTP/1.0 200 OK\r\n\r\npicture",
        "/hints": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
    }
    async with website(answers) as site:
        fetcher = Fetcher(rules(site))
        assert await fetcher.fetch([fetcher.parse(site.url(path)) for path in answers], most=21) == [b"picture"] * 3
        with pytest.raises(FetchProblem, match="more than the 6 bytes") as caught:  # of the third: 20 in all
            await fetcher.fetch([fetcher.parse(site.url(path)) for path in answers], most=20)
        assert (caught.value.index, caught.value.large) == (2, True)


@pytest.mark.parametrize("answer", [drip, slow_head, silence], ids=["body", "head", "silence"])
async def test_one_deadline_is_for_all_of_it(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set once for both URLs, and passes here when the second one's server has its request."""
    scopes, fail_after = list[anyio.CancelScope](), anyio.fail_after

    @contextmanager
    def recorded(seconds: float) -> Iterator[anyio.CancelScope]:
        with fail_after(seconds) as scope:
            if seconds == 600:
                scopes.append(scope)
            yield scope

    monkeypatch.setattr(anyio, "fail_after", recorded)
    async with website({"/": answer, "/fast": OK}) as site:
        fetcher = Fetcher(rules(site, seconds=600))

        async def passes() -> None:
            while len(site.requests) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.005)
            (scope,) = scopes
            scope.deadline = anyio.current_time()

        async with anyio.create_task_group() as group:
            group.start_soon(passes)
            with pytest.raises(FetchProblem, match="did not come within 600 s") as caught:
                await fetcher.fetch([fetcher.parse(site.url(path)) for path in ("/fast", "/")], most=1 << 20)
        assert caught.value.index == 1


async def test_a_request_that_is_left_closes_its_connection() -> None:
    async with website({"/": silence}) as site:
        fetcher = Fetcher(rules(site))
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: fetcher.fetch([fetcher.parse(site.url())], most=100))
            while not site.requests:  # noqa: ASYNC110
                await anyio.sleep(0.005)
            group.cancel_scope.cancel()
        with anyio.fail_after(60):
            while not site.left:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        assert fetcher._present == {}


# Places.


async def test_a_caller_has_a_bounded_number_of_requests_and_others_go_on() -> None:
    async with website({"/": silence, "/ok": OK}) as site:
        fetcher = Fetcher(rules(site, places=2, present=3))
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(lambda: fetcher.fetch([fetcher.parse(site.url())], most=100, caller="many"))
            while len(site.requests) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.005)
            with pytest.raises(ApiError) as caught:
                await fetcher.fetch([fetcher.parse(site.url())], most=100, caller="many")
            assert caught.value.status == 503 and caught.value.retry_after
            assert site.connections == 2
            group.cancel_scope.cancel()
        assert await fetcher.fetch([fetcher.parse(site.url("/ok"))], most=100, caller="other") == [b"picture"]


async def test_one_caller_s_lookups_that_hang_leave_places_for_others() -> None:
    """A name whose resolver answers after a minute is looked up for as long, however soon its request has left."""
    release, began = threading.Event(), list[str]()

    def resolve(name: str) -> list[str]:
        if name == "slow.test":
            began.append(name)
            release.wait(60)
        return []

    fetcher = Fetcher(FetchRules(resolve, lookups=3, lookups_of_one=2, seconds=0.05))
    try:
        while len(began) < 2:  # a thread that begins too late looks nothing up
            with pytest.raises(FetchProblem) as late:
                await fetcher.fetch([fetcher.parse("http://slow.test/")], most=100, caller="one")
            assert "did not come" in late.value.problem
        fetcher.rules = dataclasses.replace(fetcher.rules, seconds=60)
        with pytest.raises(ApiError) as caught:
            await fetcher.fetch([fetcher.parse("http://slow.test/")], most=100, caller="one")
        assert caught.value.status == 503
        for _ in range(4):  # each gives its place back
            with pytest.raises(FetchProblem) as unknown:
                await fetcher.fetch([fetcher.parse("http://fast.test/")], most=100, caller="other")
            assert "no public host" in unknown.value.problem
    finally:
        release.set()


async def test_names_that_are_resolved_for_long_are_bounded() -> None:
    release, began = threading.Event(), list[str]()

    def resolve(name: str) -> list[str]:
        began.append(name)
        release.wait(20)
        return []

    fetcher = Fetcher(FetchRules(resolve, lookups=2, seconds=0.05))
    try:
        while len(began) < 2:  # a thread that begins too late looks nothing up
            assert "did not come" in (await problem_of(fetcher, "http://slow.test/")).problem
        fetcher.rules = dataclasses.replace(fetcher.rules, seconds=60)
        with pytest.raises(ApiError) as caught:
            await fetcher.fetch([fetcher.parse("http://slow.test/")], most=100)
        assert caught.value.status == 503 and len(began) == 2
    finally:
        release.set()


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of pictures.test that signs itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    paths = folder / "certificate.pem", folder / "key.pem"
    command = [
        openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=pictures.test", "-addext", "subjectAltName=DNS:pictures.test",
        "-out", str(paths[0]), "-keyout", str(paths[1]),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return paths


async def test_certificates_are_verified_for_the_name_in_the_url(certificate: tuple[Path, Path]) -> None:
    named: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.sni_callback = lambda _, name, __: named.append(name)
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    async with website(tls=context) as site, website() as plain:
        site.answers = {"/": OK, "/down": redirect(plain.url())}
        options: dict[str, Any] = {"names": {"other.test": ["127.0.0.1"]}, "context": trusting}
        fetcher = Fetcher(rules(site, plain, **options))
        assert await fetcher.fetch([fetcher.parse(site.url(scheme="https"))], most=100) == [b"picture"]
        assert named == ["pictures.test"]
        assert (await problem_of(fetcher, site.url("/down", scheme="https"))).problem.endswith("from https to http")
        certified = "has a host whose certificate can't be verified"
        assert (await problem_of(fetcher, site.url(host="other.test", scheme="https"))).problem == certified
        assert (await problem_of(Fetcher(rules(site)), site.url(scheme="https"))).problem == certified
        assert (await problem_of(fetcher, plain.url(scheme="https"))).problem == "has a host that does not speak TLS"
        assert len(site.requests) == 2 and plain.requests == []
