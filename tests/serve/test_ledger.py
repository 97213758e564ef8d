"""What requests hold in memory is counted in bytes, with one bound for a server and a share for each caller."""

from __future__ import annotations

import base64
import gc
import json
import random
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from helpers.asgi import Answer, post, until
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.serve import bodies, exchange
from rekindle._src.serve.errors import ApiError
from rekindle._src.serve.ledger import ByteLedger, Results, bytes_of, parsing_bytes
from rekindle.errors import ConfigError
from rekindle.serve import app as make_app
from serve.test_pictures import Pictures, seeing_session

MIB = 1 << 20
CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


class Sender:
    """A client that sends a part of a body, and the rest or its end when the test says so."""

    def __init__(self, app: Any, first: bytes | int, *, host: str = "10.0.0.1", path: str = CHAT) -> None:
        self.app, self.host, self.path = app, host, path
        self.first = first  # or so many spaces, which are made as they are sent
        self.rest: bytes | None = None  # None: it leaves
        self.answer = Answer()
        self.sent, self.goes_on = anyio.Event(), anyio.Event()
        self._parts = 0

    async def run(self) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": self.path, "raw_path": self.path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "client": (self.host, 1), "server": ("10.0.0.9", 80),
        }  # fmt: skip
        await self.app(scope, self._receive, self._send)
        self.sent.set()

    async def _receive(self) -> dict[str, Any]:
        self._parts += 1
        if self._parts == 1:
            first = b" " * self.first if isinstance(self.first, int) else self.first
            return {"type": "http.request", "body": first, "more_body": True}
        self.sent.set()
        await self.goes_on.wait()
        if self._parts == 2 and self.rest is not None:
            return {"type": "http.request", "body": self.rest, "more_body": False}
        if self.rest is not None:
            await anyio.sleep_forever()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self.answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        self.answer.body += message.get("body", b"")


@pytest.mark.anyio
@pytest.mark.usefixtures("short_turns")
async def test_a_hundred_unfinished_bodies_hold_no_more_than_the_share_of_their_client(session: Session) -> None:
    """They held all that they had sent, 3.3 GB, for a minute each."""
    app = make_app(session, request_memory=8 * MIB)
    ledger = app.state.rekindle.ledger
    senders = [Sender(app, MIB) for _ in range(100)]
    async with anyio.create_task_group() as group:
        for sender in senders:
            group.start_soon(sender.run)
        for sender in senders:
            await sender.sent.wait()
        refused = [sender.answer for sender in senders if sender.answer.status]
        assert len(refused) >= 97 and {answer.status for answer in refused} == {503}
        error = refused[0].error
        assert "the requests of this client take 3 MiB of memory, and 4 MiB are the most of one" in error["message"]
        assert "--request-memory" in error["message"] and int(refused[0].headers["retry-after"]) >= 1
        assert 2 * MIB < ledger.held <= 4 * MIB
        other = Sender(app, b"", host="10.0.0.2")
        other.rest = json.dumps({**HI, "metadata": {"x": "y" * MIB}}).encode()
        other.goes_on.set()
        await other.run()
        assert other.answer.status == 200, "another client has its own share"
        for sender in senders:
            sender.goes_on.set()  # the clients leave
    assert ledger.held == 0 == ledger.held_by("10.0.0.1")


@pytest.mark.anyio
async def test_all_clients_together_have_one_bound(session: Session) -> None:
    app = make_app(session, request_memory=8 * MIB)
    senders = [Sender(app, b" " * (3 * MIB), host=f"10.0.1.{number}") for number in range(2)]
    async with anyio.create_task_group() as group:
        for sender in senders:
            group.start_soon(sender.run)
        for sender in senders:
            await sender.sent.wait()
        late = Sender(app, b" " * (3 * MIB), host="10.0.2.1")
        await late.run()
        assert late.answer.status == 503 and "all requests take" in late.answer.error["message"]
        for sender in senders:
            sender.goes_on.set()


@pytest.mark.anyio
async def test_a_body_that_no_client_may_send_is_413(session: Session) -> None:
    app = make_app(session, request_memory=2 * MIB)
    answer = await post(app, CHAT, {**HI, "metadata": {"x": "y" * (2 * MIB)}})
    assert answer.status == 413 and "1 MiB are the most of one client" in answer.error["message"]
    # Half a mebibyte, of which one character makes all others four bytes wide while it is parsed.
    wide = json.dumps({**HI, "metadata": {"x": "y" * (MIB // 2) + "😀"}}, ensure_ascii=False).encode()
    assert (await post(app, CHAT, raw=wide)).status == 413
    narrow = json.dumps({**HI, "user": "y" * (MIB // 4)}).encode()
    assert (await post(app, CHAT, raw=narrow)).status == 200
    assert app.state.rekindle.ledger.held == 0
    with pytest.raises(ConfigError, match="request_memory"):
        make_app(session, request_memory=0)


def bmp(size: int) -> bytes:
    """A BMP of one pixel, and bytes after it that no reader looks at."""
    head = b"BM" + size.to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
    info = (40).to_bytes(4, "little") + (1).to_bytes(4, "little") * 2 + b"\1\0\x18\0" + bytes(24)
    data = head + info + b"\1\2\3\0"
    return data + bytes(size - len(data))


class Waiting(Pictures):
    """Pictures whose rows are not there before the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.decodes = False
        self.gate = threading.Event()

    def known(self, picture: Any, salt: str | None) -> bool:
        return False

    async def encoded(self, picture: Any, wanted: Any, *, caller: str, salt: str | None) -> Any:
        picture.digest = b"d" * 32
        await until(self.gate.is_set)
        return await super().encoded(picture, wanted, caller=caller, salt=salt)


PICTURE_BODIES = {
    CHAT: lambda data: {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/bmp;base64,{data}"}}]}
        ],
        "max_tokens": 2,
    },
    "/v1/responses": lambda data: {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/bmp;base64,{data}"}]}],
        "max_output_tokens": 2,
    },
    "/v1/messages": lambda data: {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/bmp", "data": data}}],
            }
        ],
        "max_tokens": 2,
    },
}  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize("path", [*PICTURE_BODIES])
async def test_a_large_file_of_one_pixel_is_held_once_while_it_waits(path: str) -> None:
    """One token that waits held 100 MiB: the body, its text, the file in base64, and the file."""
    pytest.importorskip("PIL.Image", reason="pictures are the extra `images`")
    pictures, size = Waiting(), 2 * MIB
    session = seeing_session(pictures)
    try:
        app = make_app(session, request_memory=32 * MIB)
        ledger = app.state.rekindle.ledger
        data = json.dumps(PICTURE_BODIES[path](base64.b64encode(bmp(size)).decode())).encode()
        answers: list[int] = []

        async def ask() -> None:
            answers.append((await post(app, path, raw=data)).status)

        tracemalloc.start()
        async with anyio.create_task_group() as group:
            before, _ = tracemalloc.get_traced_memory()
            group.start_soon(ask)
            await until(lambda: bool(session.stats().live) and ledger.held < 2 * size)
            gc.collect()
            there, _ = tracemalloc.get_traced_memory()
            assert size <= ledger.held < 1.1 * size
            assert there - before < 1.5 * size, "the file, and next to nothing else"
            for number in range(2, 12):
                group.start_soon(ask)
                await until(lambda number=number: session.stats().live + len(answers) == number)
            assert len(answers) >= 5 and set(answers) == {503}, "the client has room for no more"
            assert ledger.held <= ledger.most_of_one
            pictures.gate.set()
        assert answers.count(200) >= 3 and set(answers) == {200, 503}
        assert ledger.held == 0
    finally:
        tracemalloc.stop()
        pictures.gate.set()
        session.close()


class Body(bytearray):
    """A body that can be referred to weakly."""


@contextmanager
def bodies_watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Body]]]:
    """The bodies that are read in the block, in which Python's collector does nothing."""
    watched, read_body = list[weakref.ref[Body]](), bodies.read_body

    async def read(*arguments: Any, **options: Any) -> Body:
        body = Body(await read_body(*arguments, **options))
        watched.append(weakref.ref(body))
        return body

    monkeypatch.setattr(exchange, "read_body", read)
    gc.collect()
    gc.disable()
    try:
        yield watched
    finally:
        gc.enable()


REFUSED = {
    "no JSON": b"[" * 1_000,
    "no object": b"[]",
    "a wrong field": json.dumps({**HI, "max_tokens": "many"}).encode(),
    "an unknown model": json.dumps({**HI, "model": "x"}).encode(),
    "refused by the session": json.dumps({**HI, "response_format": {"type": "json_schema"}}).encode(),
    "too long": json.dumps({**HI, "messages": [{"role": "user", "content": "x " * 50_000}]}).encode(),
    "large": json.dumps({**HI, "max_tokens": "many", "user": "x" * 200_000}).encode(),
    "half a surrogate pair": b'{"messages": "\\ud800"}',
}


@pytest.mark.anyio
@pytest.mark.parametrize("why", [*REFUSED])
async def test_a_refused_body_is_freed_without_pythons_collector(
    app: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error, its traceback and the frame that had caught it were a cycle, with the body in one of its frames."""
    with bodies_watched(monkeypatch) as watched:
        answer = await post(app, CHAT, raw=REFUSED[why])
        assert 400 <= answer.status < 500
        await until(lambda: len(watched) == 1 and watched[0]() is None)
    assert app.state.rekindle.ledger.held == 0


@pytest.mark.anyio
@pytest.mark.parametrize("size", [10, 200_000])
async def test_a_body_is_freed_before_its_request_runs(
    slow: Session, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(slow)
    body = json.dumps({**HI, "max_tokens": 40, "stream": True, "user": "x" * size}).encode()
    with bodies_watched(monkeypatch) as watched:
        alive: list[bool] = []

        def look(answer: Answer) -> bool:
            alive.append(watched[0]() is not None)
            return len(alive) > 5  # the client leaves

        await post(app, CHAT, raw=body, leave=look)
        assert alive and not any(alive[2:])
    assert app.state.rekindle.ledger.held == 0


@pytest.mark.anyio
async def test_a_failure_of_the_server_frees_the_body_too(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise ValueError("a defect")

    monkeypatch.setattr("rekindle._src.serve.generation.sampling_options", broken)
    with bodies_watched(monkeypatch) as watched:
        assert (await post(app, CHAT, HI)).status == 500
        await until(lambda: watched[0]() is None)


def peak_of(data: bytes) -> tuple[int, int]:
    """The most bytes that parsing takes, and those of its value."""
    gc.collect()
    tracemalloc.start()
    try:
        value = bodies.parse(data)
        there, peak = tracemalloc.get_traced_memory()
        del value
        return peak, there
    finally:
        tracemalloc.stop()


DEAREST = {
    "text": b'["' + b"a" * 500_000 + b'"]',
    "text of which one character is wide": b'["' + b"a" * 500_000 + "😀".encode() + b'"]',
    "text of which one escape is wide": b'["' + b"a" * 500_000 + b'\\ud83d\\ude00"]',
    "wide text": ('["' + "😀" * 100_000 + '"]').encode(),
    "text of two bytes": ('["' + "语" * 100_000 + '"]').encode(),
    "lists": b"[" + b"[]," * 100_000 + b"[]]",
    "objects": b"[" + b"{}," * 100_000 + b"{}]",
    "objects with a field": b"[" + b'{"a":1},' * 50_000 + b"{}]",
    "nested": b"[" + (b"[" * 500 + b"]" * 500 + b",") * 100 + b"[]]",
    "numbers": b"[" + b"1.5," * 100_000 + b"1]",
    "whole numbers": b"[" + b"123456789012," * 50_000 + b"1]",
    "short texts": b"[" + b'"ab",' * 100_000 + b'""]',
    "names": b"{" + b",".join(b'"%d":1' % number for number in range(50_000)) + b"}",
}  # fmt: skip


@pytest.mark.parametrize("what", [*DEAREST])
def test_parsing_takes_no_more_than_what_is_counted_for_it(what: str) -> None:
    data = DEAREST[what]
    peak, there = peak_of(data)
    assert peak <= 1.1 * parsing_bytes(data, bodies.check_size(data, 64 * MIB)) + 4_096
    assert there <= 1.5 * bytes_of(bodies.parse(data)) + 4_096


@pytest.mark.anyio
async def test_tokens_and_texts_that_a_client_has_yet_to_read_are_counted(session: Session) -> None:
    """A character may be four tokens, and a client has a minute to read them: 280 MB a request were counted nowhere."""
    app = make_app(session, request_memory=MIB)
    text = "a" * 100_000
    refused = await post(app, "/tokenize", {"prompt": text})
    assert refused.status == 413 and "half of --request-memory" in refused.json()["error"]["message"]
    ids = (await post(app, "/tokenize", {"prompt": text[:50_000], "return_token_strs": True})).json()
    assert ids["count"] == 50_000 and ids["tokens"] == [ids["tokens"][0]] * 50_000 and {*ids["token_strs"]} == {"a"}
    assert (await post(app, "/detokenize", {"tokens": ids["tokens"][:2_000]})).json() == {"prompt": "a" * 2_000}
    assert not app.state.rekindle.ledger.held


def test_a_column_is_built_as_it_is_written() -> None:
    made = list[int]()

    def make(part: range) -> list[int]:
        made.append(len(part))
        return [*part]

    written = bodies.pieces({"count": 3_000, "all": bodies.Column(range(3_000), make), "none": []})
    first = ""
    while not made:
        first += next(written)
    assert made == [1_024]
    assert json.loads(first + "".join(written)) == {"count": 3_000, "all": [*range(3_000)], "none": []}
    assert made == [1_024, 1_024, 952] and "".join(bodies.pieces(bodies.Column([], list))) == "[]"


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_counted_while_they_are_made(session: Session, stream: bool) -> None:
    """A request of 1,024 answers with twenty of them a token made 6.9 GB, which nothing counted."""
    app = make_app(session, request_memory=MIB)
    ledger = app.state.rekindle.ledger
    asked = {"logprobs": True, "top_logprobs": 20, "n": 4, "max_tokens": 100, "ignore_eos": True, "stream": stream}
    small = await post(app, CHAT, {**HI, **asked, "n": 1, "max_tokens": 20})
    assert small.status == 200 and ledger.held == 0
    answer = await post(app, CHAT, {**HI, **asked, "temperature": 1.0})
    told = answer.body.decode()
    assert answer.status == (200 if stream else 413), "a stream has begun, and ends with the error"
    assert "are the most of one client" in told
    assert ledger.held == 0
    await until(lambda: session.stats().running == 0)
    plain = await post(app, CHAT, {**HI, "n": 4, "max_tokens": 100, "ignore_eos": True, "stream": stream})
    assert plain.status == 200 and b"error" not in plain.body, "tokens alone are not counted"


@pytest.mark.anyio
@pytest.mark.parametrize("scores", [{"logprobs": 0}, {"logprobs": 20}, {"prompt_logprobs": 20}])
async def test_log_probabilities_take_no_more_than_what_is_counted_for_them(
    session: Session, scores: dict[str, int]
) -> None:
    class Counted:
        results = 0

        def hold(self, results: int) -> None:
            self.results = results

    async def memory(count: int) -> tuple[int, int]:
        results = Results(Counted())  # type: ignore[arg-type]
        prompt = list(range(count)) if "prompt_logprobs" in scores else "Once"
        options = {"max_tokens": 1 if "prompt_logprobs" in scores else count, "ignore_eos": True, **scores}
        handle = session.submit(prompt, temperature=1.0, **options)  # type: ignore[arg-type]
        async for delta in handle:
            results.add(delta)
        completion = await handle
        gc.collect()
        assert completion.finish_reason == "length"
        return tracemalloc.get_traced_memory()[0], results._bytes

    await memory(200)  # programs, and what is made once
    tracemalloc.start()
    try:
        (few, counted_few), (many, counted_many) = await memory(10), await memory(200)
    finally:
        tracemalloc.stop()
    assert counted_few < counted_many
    assert many - few <= 1.1 * (counted_many - counted_few) + 65_536


def test_a_request_that_ends_while_a_thread_counts_its_bytes_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = ByteLedger(1_000)
    account, change = ledger.account("a caller"), ledger.change
    leaves = threading.Thread(target=account.__exit__)

    def interrupted(*counts: Any) -> None:
        monkeypatch.undo()
        leaves.start()
        leaves.join(0.2)  # it waits for the bytes to be counted
        change(*counts)

    monkeypatch.setattr(ledger, "change", interrupted)
    account.hold(results=300)
    leaves.join(60)
    account.hold(results=200)
    assert ledger.held == account.total == 0


def test_a_ledger_counts_exactly_whatever_is_refused() -> None:
    draw, ledger = random.Random(5), ByteLedger(1_000)
    accounts = [ledger.account(f"caller {number % 3}") for number in range(9)]
    sizes = dict.fromkeys(range(9), 0)
    refused, statuses = 0, set[int]()
    for _ in range(3_000):
        number = draw.randrange(9)
        parts = {draw.choice(["body", "parsed", "pictures", "results"]): draw.choice([0, 0, 20, 50, 200, 499, 600])}
        try:
            accounts[number].hold(**parts)
        except ApiError as error:
            refused += 1
            statuses.add(error.status)
        sizes[number] = accounts[number].total
        assert ledger.held == sum(sizes.values()) <= 1_000
        for caller in range(3):
            held = sum(size for number, size in sizes.items() if number % 3 == caller)
            assert ledger.held_by(f"caller {caller}") == held <= 500
    assert 100 < refused < 2_900 and statuses == {413, 503}
    for account in accounts:
        with account:
            pass
        account.hold(body=100)  # a thread that is late
    assert ledger.held == 0 and not ledger._by_caller


def test_hosts_of_one_network_are_one_caller(session: Session) -> None:
    from rekindle._src.serve.exchange import Exchange

    service = make_app(session).state.rekindle

    def caller(host: str) -> str:
        return Exchange(service, {"headers": [], "path": "/", "client": (host, 1)}, None).caller  # type: ignore[arg-type]

    assert caller("2001:db8::1") == caller("2001:db8::2") != caller("2001:db8:0:1::1")
    assert caller("10.0.0.1") != caller("10.0.0.2")
