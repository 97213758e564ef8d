"""Heads without end, connections without requests and without readers, and names of other origins, at a real socket.

A neighbour's stream is read to its end while they last.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.asgi import get
from helpers.sessions import eventually, listener_of
from helpers.thorough import by_default
from rekindle import Server, Session
from rekindle.errors import ConfigError
from serve.conftest import chatting_session, checked

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
from rekindle._src.serve import listening
from rekindle._src.serve.life import Hosts
from rekindle.serve import app

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
MINE = b"Authorization: Bearer secret\r\nContent-Type: application/json\r\n"
MIB = 1 << 20


@pytest.fixture(scope="module")
def slow() -> Iterator[Session]:
    yield from checked(chatting_session(step_seconds=0.005))


@pytest.fixture(scope="module", params=["httptools", "h11"])
def server(slow: Session, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with 16 places, 12 of them for one address."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "h11":
            patch.setattr(listening, "HttpToolsProtocol", None)
        elif listening.HttpToolsProtocol is None:
            pytest.skip("needs httptools")
        patch.setattr(listening, "SWEEP_SECONDS", 0.05)
        made = slow.serve(max_connections=16, api_key="secret").result_sync()
        yield made
        made.close()


@contextlib.contextmanager
def neighbour(server: Server, tokens: int = 60) -> Iterator[None]:
    """Run a stream that begins before the block, and check that it ends as it should after it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"content-type": "application/json", "authorization": "Bearer secret"}
    body = {"prompt": "Hello", "max_tokens": tokens, "temperature": 0, "stream": True}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        begun = response.readline()
        yield
        text = (begun + response.read()).decode()
        assert text.endswith("data: [DONE]\n\n") and text.count("data: ") == tokens + 1 and '"error"' not in text


def opened(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 20)


def ports(server: Server) -> set[int]:
    """The ports of the clients that are connected."""
    several = tuple(listener_of(server).connections._by_address.values())
    return {one.client[1] for connections in several for one in tuple(connections) if one.client is not None}


def sent_until_closed(server: Server, first: bytes, again: bytes, most: int) -> tuple[int, bytes]:
    """How many bytes the server took before it closed the connection, and what it said."""
    count = 0
    with opened(server) as client:
        said = b""
        with contextlib.suppress(OSError):
            client.sendall(first)
            while count < most:
                client.sendall(again)
                count += len(again)
        with contextlib.suppress(OSError):
            said = client.recv(65_536)
    return count, said


ENDLESS = {
    "one header": (HEAD + b"X-Long: ", b"a" * 16_384),
    "many headers": (HEAD, b"".join(b"X-%d: a\r\n" % index for index in range(2_000))),
    "the path": (b"GET /", b"a" * 16_384),
    "empty lines": (b"", b"\r\n" * 8_192),
    "a trailer": (
        HEAD + MINE + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Trailer: ",
        b"a" * 16_384,
    ),
    "a chunk's extension": (
        HEAD
        + b"Authorization: Bearer secret\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2;",
        b"a" * 16_384,
    ),
    "a trailer after an answer": (
        b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Trailer: ",
        b"a" * 16_384,
    ),
}


@pytest.mark.parametrize("what", by_default(ENDLESS, lambda what: what in ("one header", "empty lines", "a trailer")))
def test_what_has_no_end_is_cut_before_it_costs_anything(server: Server, what: str) -> None:
    first, again = ENDLESS[what]
    with neighbour(server):
        count, said = sent_until_closed(server, first, again, 64 * MIB)
    assert count < 16 * MIB  # the socket's buffers hold some of it
    if not what.startswith(("a trailer", "a chunk")):  # there, a request was being answered
        assert not said or said.split()[1] in (b"431", b"400")


def test_a_whole_head_that_is_too_large_is_431_and_names_the_bounds(server: Server) -> None:
    for extra in (b"X-Long: " + b"a" * 70_000 + b"\r\n", b"".join(b"X-%d: a\r\n" % index for index in range(500))):
        with opened(server) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + extra + b"\r\n")
            said = client.recv(65_536)
            assert b" 431 " in said or b" 400 " in said  # h11 has the first bound itself


def test_half_a_head_and_silence_are_timed_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with neighbour(server, tokens=200), contextlib.ExitStack() as stack:
        second = stack.enter_context(opened(server))
        second.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in second.recv(65_536)
        monkeypatch.setattr(listening, "HEAD_SECONDS", 0.3)
        silent, half = (stack.enter_context(opened(server)) for _ in range(2))
        half.sendall(HEAD + b"X-Ha")
        second.sendall(b"GET /health HTTP/1.1\r\n")  # of a connection that was kept
        for client in (silent, half, second):
            assert b" 408 " in client.recv(65_536)
            assert client.recv(100) == b""
    eventually(lambda: listener_of(server).connections.count == 0)


def test_a_connection_is_kept_for_longer_than_clients_keep_one(server: Server) -> None:
    """A client that polls at the very time when its connection is closed sees a failure."""
    assert listener_of(server).config.timeout_keep_alive > 60


@pytest.mark.slow
def test_polls_every_five_seconds_over_one_connection(server: Server) -> None:
    with opened(server) as client:
        for _ in range(4):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in client.recv(65_536)
            time.sleep(5.0)


@pytest.mark.thorough
def test_a_client_that_reads_nothing_loses_its_connection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "STALLED_SECONDS", 0.3)
    body = json.dumps({"prompt": "x" * 400, "max_tokens": 1, "n": 24, "echo": True, "logprobs": 20}).encode()
    head = HEAD + MINE + b"Connection: close\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
    with contextlib.closing(client), neighbour(server, tokens=100):
        client.connect(("127.0.0.1", server.port))
        client.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        port = client.getsockname()[1]
        eventually(lambda: port in ports(server))
        eventually(lambda: port not in ports(server), seconds=60)


def test_one_address_leaves_room_for_others_and_waits_on_its_own(server: Server) -> None:
    """Of 40 connections with half a head 12 stay; a request from the same address still finds its place."""
    with neighbour(server), contextlib.ExitStack() as stack:
        held = [stack.enter_context(opened(server)) for _ in range(40)]
        for one in held:
            with contextlib.suppress(OSError):
                one.sendall(HEAD)
        eventually(lambda: listener_of(server).connections.count == 12)
        with neighbour(server, tokens=5):
            pass
        with socket.socket() as other:
            other.bind(("127.0.0.2", 0))
            other.connect(("127.0.0.1", server.port))
            other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in other.recv(65_536)


@pytest.mark.thorough
def test_answers_are_never_cut_for_a_new_connection(slow: Session) -> None:
    with contextlib.closing(slow.serve(max_connections=4).result_sync()) as small, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(neighbour(small, tokens=200))
        refused = stack.enter_context(opened(small))
        assert b" 503 " in refused.recv(65_536)


def test_a_client_that_sends_ahead_and_leaves_stops_what_it_began(slow: Session, server: Server) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 400}).encode()
    one = HEAD + MINE + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    aborted = slow.stats().aborted
    with opened(server) as client:
        client.sendall(one + one)
        eventually(lambda: slow.stats().running > 0)
    eventually(lambda: slow.stats().aborted > aborted and not slow.stats().live)


# Clients that close their half.


def request(version: bytes = b"HTTP/1.1", **fields: Any) -> bytes:
    """A completion's request, which asks for the connection to be kept."""
    body = json.dumps({"prompt": "Hello", "temperature": 0, **fields}).encode()
    return HEAD.replace(b"HTTP/1.1", version) + MINE + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def answers_to(client: socket.socket) -> list[http.client.HTTPResponse]:
    """All answers up to the end of the connection, read whole; interim ones are left out."""
    data = b""
    while part := client.recv(65_536):
        data += part
    answers = []
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with ours.makefile("rb") as file:
            while file.peek(1):
                answer = http.client.HTTPResponse(_Buffered(file))  # type: ignore[arg-type]
                answer.begin()
                answer.body = answer.read()  # type: ignore[attr-defined]
                answers.append(answer)
    return answers


class _Buffered:
    """A file as `HTTPResponse` takes it: as a socket that makes one."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def makefile(self, _: str) -> Any:
        return self

    def close(self) -> None:
        pass  # another answer may follow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize(("stream", "ahead"), by_default([(False, 1), (True, 2), (False, 2), (True, 1)], 2))
def test_a_client_that_closes_its_half_gets_its_answer(
    server: Server, stream: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RFC 9112 allows it, and `nc -N` and some proxies do it; interim answers show that the client still reads."""
    monkeypatch.setattr(listening, "PROBE_SECONDS", (0.0, 0.0))
    with neighbour(server), opened(server) as client:
        client.sendall(request(max_tokens=40, stream=stream) * ahead)
        client.shutdown(socket.SHUT_WR)
        answers = answers_to(client)
    assert [answer.status for answer in answers] == [200] * ahead
    for answer in answers:
        body = answer.body.decode()  # type: ignore[attr-defined]
        assert body.endswith("data: [DONE]\n\n") if stream else json.loads(body)["usage"]["completion_tokens"] == 40
    eventually(lambda: listener_of(server).connections.count == 0)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_that_leaves_without_a_reset_stops_what_it_began(slow: Session, server: Server, stream: bool) -> None:
    """It has read everything so far, so its close sends the same FIN as a client that still reads."""
    aborted = slow.stats().aborted
    with opened(server) as client:
        client.sendall(request(max_tokens=400, stream=stream))
        eventually(lambda: slow.stats().running > 0)
        while stream and b"data:" not in client.recv(65_536):
            pass
    eventually(lambda: slow.stats().aborted > aborted and not slow.stats().live)
    eventually(lambda: listener_of(server).connections.count == 0)


def test_half_a_request_and_the_end_are_no_request(slow: Session, server: Server) -> None:
    """Nor is an unanswered request of HTTP/1.0, which has no interim answers to show whether its client reads."""
    whole, old = request(max_tokens=3), request(b"HTTP/1.0", max_tokens=400)
    cases = ((whole[:40], 0), (whole[:-3], 0), (whole + whole[:40], 1), (whole + whole[:-3], 1), (old, 0))
    for data, most in cases:  # what was sent ahead of a part may be answered
        with opened(server) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            assert len(answers_to(client)) <= most, data
        eventually(lambda: listener_of(server).connections.count == 0 and not slow.stats().live)


def test_a_stream_of_http_1_0_whose_client_closes_its_half_goes_on(server: Server) -> None:
    with opened(server) as client:
        client.sendall(request(b"HTTP/1.0", max_tokens=30, stream=True))
        begun = client.recv(65_536)
        client.shutdown(socket.SHUT_WR)
        while part := client.recv(65_536):
            begun += part
    assert begun.startswith(b"HTTP/1.") and b"[DONE]" in begun and b"100 Continue" not in begun


OFFERS = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\nUpgrade: "
BODY = b'{"prompt": "Hello", "max_tokens": 5}'
FRAMED = {
    "a length": (b"Content-Length: %d\r\n\r\n" % len(BODY), BODY),
    "chunks": (b"Transfer-Encoding: chunked\r\n\r\n", b"9;a=b\r\n%b\r\n%x\r\n%b\r\n0\r\nX-Trailer: a\r\n\r\n" % (
        BODY[:9], len(BODY) - 9, BODY[9:],
    )),
}  # fmt: skip


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("framed", FRAMED)
@pytest.mark.parametrize("offered", [b"h2c", b"websocket"])
def test_a_client_that_offers_another_protocol_is_answered_in_this_one(
    server: Server, offered: bytes, framed: str, apart: bool
) -> None:
    """Java's client offers HTTP/2 with its first request; what follows its head is its body, and no request."""
    framing, body = FRAMED[framed]
    with opened(server) as client, client.makefile("rb") as answers:
        for _ in range(3):
            client.sendall(HEAD + MINE + OFFERS + offered + b"\r\n" + framing + (b"" if apart else body))
            if apart:
                time.sleep(0.05)  # so that it comes by itself
                client.sendall(body)
            assert b" 200 " in answers.readline()
            head = b"".join(iter(answers.readline, b"\r\n")).lower()
            answer = answers.read(int(head.partition(b"content-length: ")[2].split()[0]))
            assert json.loads(answer)["usage"]["completion_tokens"] == 5


def test_a_body_after_an_offer_is_not_read_as_a_request(server: Server) -> None:
    inner = b"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n\r\n"
    with opened(server) as client:
        client.sendall(HEAD + MINE + OFFERS + b"h2c\r\nContent-Length: %d\r\n\r\n" % len(inner))
        time.sleep(0.05)
        client.sendall(inner)
        client.shutdown(socket.SHUT_WR)
        said = b""
        with contextlib.suppress(OSError):
            while data := client.recv(65_536):
                said += data
    assert b'"version"' not in said and b" 200 " not in said


def test_many_offers_in_one_packet_are_answered_in_order(server: Server) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with neighbour(server), opened(server) as client:
        client.sendall(one * 10)
        said = b""
        while said.count(b'{"status":"ok"}') < 10 and (data := client.recv(65_536)):
            said += data
        with contextlib.suppress(OSError):
            client.sendall(one * 3_000)  # more than may be sent ahead
            while client.recv(65_536):
                pass
    assert said.count(b" 200 ") == 10


def test_requests_sent_ahead_are_bounded(server: Server) -> None:
    with neighbour(server), opened(server) as client:
        body = b'{"prompt": "Hello", "max_tokens": 5}'
        one = HEAD + MINE + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        with contextlib.suppress(OSError):
            client.sendall(one * 60)
        answers = b""
        with contextlib.suppress(OSError):
            while data := client.recv(65_536):
                answers += data
                if answers.count(b"200 OK") > listening.AHEAD + 2:
                    break
                if listener_of(server).connections.count == 1:
                    break
    # httptools reads all of them at once and gives up; h11 reads them one after the other.
    assert len(answers) < MIB


def test_names_that_a_proxy_gives_clients_are_bounded() -> None:
    """Items that are kept by them were counted without their 60 kB."""
    assert listening.address_of(("unknown", 0)) == "unknown"
    assert len(listening.address_of(("a" * 60_000, 0))) == 64


def test_ipv6_networks_and_mapped_addresses_are_one_address() -> None:
    of = listening.address_of
    assert of(("2001:db8::1", 5)) == of(("2001:db8::ffff:2", 6)) != of(("2001:db8:0:1::1", 5))
    assert of(("::ffff:10.0.0.1", 5)) == of(("10.0.0.1", 9)) != of(("::ffff:10.0.0.2", 5))
    assert of(("fe80::1%eth0", 5)) == of(("fe80::2", 5)) and of(None) == "" and of(("unix", 0)) == "unix"


@pytest.mark.parametrize("most", [0, -1, True, "3"])
def test_no_number_of_connections(slow: Session, most: Any) -> None:
    with pytest.raises(ConfigError, match="max_connections"):
        slow.serve(max_connections=most).result_sync()


# Names.


def asked(server: Server, *hosts: str, key: str | None = None) -> tuple[int, str]:
    """The status and the body of GET /v1/models with these Host headers."""
    lines = [f"Host: {host}" for host in hosts] + ([f"Authorization: Bearer {key}"] if key else [])
    with opened(server) as client:
        client.sendall("\r\n".join(["GET /v1/models HTTP/1.1", *lines, "Connection: close", "", ""]).encode())
        said = b""
        while data := client.recv(65_536):
            said += data
    head, _, body = said.decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


def test_a_page_whose_name_points_here_is_refused(slow: Session) -> None:
    with contextlib.closing(slow.serve().result_sync()) as server:
        port = server.port
        for host in ("localhost", "LOCALHOST.", f"127.0.0.1:{port}", f"[::1]:{port}", "app.localhost", "192.168.1.7"):
            assert asked(server, host)[0] == 200, host
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "localhost@evil.example",
            "127.1",
        ):
            status, body = asked(server, host)
            assert status == 403 and "--allowed-host" in body, host
        assert asked(server, "localhost", "evil.example")[0] == 400


def test_names_that_the_operator_allows(slow: Session) -> None:
    with contextlib.closing(slow.serve(allowed_hosts=["llm.example.org", "*.Intern.example"]).result_sync()) as server:
        for host in ("LLM.example.org:80", "a.b.intern.example", "localhost"):
            assert asked(server, host)[0] == 200, host
        for host in ("example.org", "intern.example", "evilintern.example"):
            assert asked(server, host)[0] == 403, host
    with contextlib.closing(slow.serve(api_key="k").result_sync()) as server:  # such a page has no key
        assert asked(server, "anything.example", key="k")[0] == 200 and asked(server, "anything.example")[0] == 401
    with contextlib.closing(slow.serve(allowed_hosts="*").result_sync()) as server:
        assert asked(server, "anything.example")[0] == 200
    for wrong in ("http://a", "a:80", "*a", "", 3):
        with pytest.raises(ConfigError, match="allowed_hosts"):
            Hosts([wrong])  # type: ignore[list-item]


def test_requests_of_other_machines_have_any_name() -> None:
    def check(hosts: Hosts, server: Any, host: bytes) -> None:
        hosts.check({"headers": [(b"host", host)], "server": server}, keyed=False)

    check(Hosts(), ("192.168.1.7", 80), b"llm")
    check(Hosts(), None, b"llm")
    named = Hosts()
    named.add("Box.local")
    check(named, ("127.0.0.1", 80), b"box.local:80")
    for server in (("::1", 80), ("::ffff:127.0.0.1", 80), ("127.3.2.1", 80)):
        with pytest.raises(Exception, match="llm"):
            check(Hosts(), server, b"llm")


@pytest.mark.anyio
async def test_an_app_that_is_mounted_elsewhere_checks_both(slow: Session) -> None:
    served = app(slow)
    assert (await get(served, "/v1/models", headers={"host": "evil.example"})).status == 403
    assert (await get(served, "/v1/models", headers={"x": "a" * 70_000})).status == 431
    many = await get(served, "/v1/models", headers={f"x{index}": "a" for index in range(200)})
    assert many.status == 431 and many.headers["connection"] == "close" and "201" in many.error["message"]
