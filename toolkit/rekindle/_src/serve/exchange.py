"""The state that all endpoints share, and one HTTP request with its response.

A request is read and checked, its endpoint runs until the client leaves, and it is answered.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from rekindle._src.core.error_frames import forget_frames
from rekindle._src.core.version import VERSION
from rekindle._src.dispatch.intake import Turns
from rekindle._src.serve.bodies import (
    IN_A_THREAD,
    VALUES_IN_A_THREAD,
    ClientDisconnect,
    Receive,
    Scope,
    check_size,
    header,
    paced,
    parse,
    pieces,
    read_body,
)
from rekindle._src.serve.bodies import dumps as dumps
from rekindle._src.serve.errors import ApiError, refusal, unavailable, wrong
from rekindle._src.serve.fields import Endpoint, UnknownFields
from rekindle._src.serve.ledger import REQUEST_MEMORY, Account, ByteLedger, bytes_of, parsing_bytes
from rekindle._src.serve.life import CHARACTERS_PER_TOKEN, Active, Hosts, Life, address_of
from rekindle._src.serve.logprobs import TokenNames
from rekindle._src.serve.metrics import Metrics, Names, Tracing
from rekindle._src.serve.models import InLine, LentModel, Models, ServedSession
from rekindle.errors import Busy, QueueFull, RequestAborted

if TYPE_CHECKING:
    from rekindle._src.serve.fetching import Fetcher

FINGERPRINT = f"rekindle-{VERSION}"

PROGRESS_SECONDS = 1.0  # between two comments of a stream that waits for its model
TOKENS_IN_A_TURN = IN_A_THREAD // CHARACTERS_PER_TOKEN  # of a small body: a text may be in many prompts
MOST_ITEMS = 10_000
MOST_CHARACTERS = 16 << 20


class Service:
    """The models, the limits and the state of a server, owned by its loop."""

    def __init__(
        self,
        models: Models,
        life: Life,
        *,
        strict: bool = False,
        body_limit: int = 32 << 20,
        request_memory: int = REQUEST_MEMORY,
        trust_templates: bool = False,
        metrics_names: Names = "rekindle",
        hosts: Hosts | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.hosts: Hosts = hosts or Hosts()
        self.models, self.life, self.strict = models, life, strict
        self.body_limit, self.trust_templates = body_limit, trust_templates
        self.ledger: ByteLedger = ByteLedger(request_memory)
        self.metrics: Metrics = Metrics(models, life, metrics_names, self.ledger)
        self.body_seconds = 60.0  # for a request's body to arrive
        self.heartbeat = 15.0  # seconds of silence after which a stream gets a comment
        self.tracing: Tracing = Tracing()
        self.item_store: KeptItems = KeptItems()
        self.fetcher: Fetcher | None = fetcher  # None: no URL is fetched
        self.turns: Turns = Turns(2)  # at parsing large bodies and building requests from them
        self.unknown: UnknownFields = UnknownFields()
        self._names: dict[str, tuple[ServedSession, TokenNames]] = {}

    def token_names(self, name: str, session: ServedSession) -> TokenNames:
        """Return the texts of a model's tokens, kept from request to request."""
        entry = self._names.get(name)
        if entry is None or entry[0] is not session:
            entry = self._names[name] = session, TokenNames(session.tokenizer)
        return entry[1]


class KeptItems:
    """The latest items, in memory only. Beyond the bounds, the caller that has the most of them loses its oldest."""

    def __init__(self, most_items: int = MOST_ITEMS, most_characters: int = MOST_CHARACTERS) -> None:
        self._most_items, self._most_characters = most_items, most_characters
        self._items: dict[str, OrderedDict[str, tuple[Mapping[str, Any], int]]] = {}  # by caller
        self._characters = Counter[str]()  # by caller
        self._count = 0
        self.characters = 0  # of all items

    def keep(self, caller: str, items: Sequence[Mapping[str, Any]]) -> None:
        """Keep the text of items for the caller with this key, or at this address."""
        if not items:
            return
        own = self._items.setdefault(caller, OrderedDict())
        for item in items:
            content = [{"type": part["type"], "text": part["text"]} for part in item.get("content", ())]
            entry = {**item, "content": content} if "content" in item else dict(item)
            size = characters_of(entry)
            _, before = own.get(item["id"], (None, 0))
            self._count += item["id"] not in own
            own[item["id"]] = entry, size
            self._add(caller, size - before)
        while self._count > self._most_items or self.characters > self._most_characters:
            largest = max(self._items, key=self._share)
            _, (_, size) = self._items[largest].popitem(last=False)
            self._count -= 1
            self._add(largest, -size)
            if not self._items[largest]:
                del self._items[largest], self._characters[largest]

    def _add(self, caller: str, characters: int) -> None:
        self._characters[caller] += characters
        self.characters += characters

    def _share(self, caller: str) -> float:
        """Return how much of the room for items and for characters a caller takes, together."""
        return len(self._items[caller]) / self._most_items + self._characters[caller] / self._most_characters

    def get(self, caller: str, name: str, path: str) -> Mapping[str, Any]:
        """Return an item by its id. Raise `ApiError` (404) if it is not kept, or belongs to another caller."""
        own = self._items.get(caller)
        entry = None if own is None else own.get(name)
        if entry is None:
            raise ApiError(
                404,
                f"{path}: item {name[:200]!r} is not found. The last items of answers are kept in memory, until the "
                "server ends. Send the item itself; clients do so with store: false",
                param=path,
                code="item_not_found",
            )
        return entry[0]


def characters_of(item: Mapping[str, Any]) -> int:
    """Return the number of characters that a kept item stands for."""
    texts = sum(len(part["text"]) for part in item.get("content", ()))
    return texts + len(item.get("arguments", "")) + len(item["id"])


log = logging.getLogger("rekindle.server")

T = TypeVar("T")
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LARGE = 64 << 10  # characters of an answer sent at once


class Dialect(Protocol):
    """The form of an API's errors."""

    def body(self, refused: ApiError) -> dict[str, Any]: ...
    def event(self, refused: ApiError) -> bytes:
        """Return the end of a stream that fails."""
        ...


class OpenAI:
    """Error objects of OpenAI's API; a stream that fails ends with one, and with [DONE]."""

    def body(self, refused: ApiError) -> dict[str, Any]:
        return refused.body()

    def event(self, refused: ApiError) -> bytes:
        return f"data: {dumps(refused.body())}\n\ndata: [DONE]\n\n".encode()


class Exchange:
    """A request as its endpoint sees it. The endpoint answers once with `reply`, or any number of times with `emit`."""

    def __init__(self, service: Service, scope: Scope, send: Send) -> None:
        self.service, self.scope = service, scope
        self._send = send
        self._lock = anyio.Lock(fast_acquire=True)  # the heartbeat sends from its own task
        self._ended = False
        self.size = self.values = 0  # bytes and JSON values of the body, about
        self.status = 0  # of the response, once it has begun
        self.streaming = False
        self.sent_at = time.monotonic()  # time of the last send
        self.model = ""  # name of the requested model
        self.names: dict[str, str] = {}  # the client's fields, by our options
        self._named = False  # True if the request's body has the id
        request_id = header(scope, b"x-request-id")
        self.request_id: str = request_id if request_id is not None and _ID.fullmatch(request_id) else uuid.uuid4().hex
        self.key: bytes = scope.get("rekindle.key", b"")
        # Callers with large requests take turns, and have a share of the memory for requests. A caller is the owner of
        # a key; without keys, the client's address.
        self.caller: str = self.key.hex() or address_of(scope.get("client"))
        self.account: Account = service.ledger.account(self.caller)
        self._lent: LentModel | None = None  # the use of a model that is loaded on demand
        self._wait = ExitStack()  # for one: the request is in progress, so that a server that ends waits for it
        self._waited: Active | None = None
        self._progress: Callable[[], str] | None = None  # of that wait
        self._news: anyio.Event | None = None  # set when such a wait begins, for the heartbeat

    def rename(self, request_id: str) -> None:
        """Take the id in the request's body."""
        if _ID.fullmatch(request_id) is None:
            raise wrong("request_id", request_id, "has characters other than printable ASCII", "Use others")
        self.request_id, self._named = request_id, True

    @contextmanager
    def takes_on(self, tokens: int) -> Iterator[Active]:
        """Register the request with about `tokens` tokens in its prompts; see `Life.request`."""
        life, since = self.service.life, self._waited
        with life.request(self.request_id, self.key, tokens, named=self._named, since=since) as active:
            self._end_wait()
            yield active

    def holds(self, lent: LentModel) -> None:
        """Release the use of a model at the end of the request, unless `let_go` does before."""
        self._lent = lent

    def let_go(self) -> None:
        """End the use of a model."""
        self._end_wait()
        if self._lent is not None:
            self._lent.release()

    @contextmanager
    def waits(self, place: InLine, progress: Callable[[], str]) -> Iterator[None]:
        """Count as a request of the server while its model is loaded, and until `takes_on`; a stream says how far it
        is."""
        life, since = self.service.life, self._waited
        wait = life.request(self.request_id, self.key, 0, named=self._named, since=since)
        self._waited = self._wait.enter_context(wait)
        self._waited.handles.append(place)
        self._progress = progress
        if self._news is not None:
            self._news.set()
        try:
            yield
        finally:
            self._progress = self._news = None

    def _end_wait(self) -> None:
        self._waited = None
        self._wait.close()

    @property
    def small(self) -> bool:
        """True if the loop may read the body's values itself."""
        return self.size < IN_A_THREAD and self.values < VALUES_IN_A_THREAD

    def turn(self, tokens: int = 0) -> AbstractAsyncContextManager[None]:
        """Return the caller's turn at work for large requests; a small one with few tokens to encode needs none."""
        few = self.small and tokens < TOKENS_IN_A_TURN
        return nullcontext() if few else self.service.turns.turn(self.caller)

    async def run(self, work: Callable[[], T]) -> T:
        """Return `work()`. A large request runs it in a thread, when it is the caller's turn."""
        return work() if self.small else await self.run_in_turn(work)

    async def run_in_turn(self, work: Callable[[], T]) -> T:
        """Return `work()`, run in a thread. It does not run if the client leaves before its turn."""
        async with self.service.turns.turn(self.caller):
            return await anyio.to_thread.run_sync(work)

    async def reply(self, body: dict[str, Any], *, status: int = 200, headers: Any = ()) -> None:
        """Answer with one JSON object. A large one is sent while it is written, and other requests run meanwhile."""
        held: bytes | None = None  # the last part is sent with the end of the response
        begun = False
        async for data in _joined(paced(pieces(body))):
            if held is not None:
                if not begun:
                    begun = True
                    await self._start(status, [(b"content-type", b"application/json"), *headers])
                await self._send({"type": "http.response.body", "body": held, "more_body": True})
            held = data
        if begun:
            await self._send({"type": "http.response.body", "body": held})
        else:
            await self.reply_bytes(held or b"", b"application/json", status=status, headers=headers)

    async def reply_bytes(self, data: bytes, kind: bytes, *, status: int = 200, headers: Any = ()) -> None:
        """Answer with `data` of the content type `kind`."""
        length = (b"content-length", str(len(data)).encode())
        await self._start(status, [(b"content-type", kind), length, *headers])
        await self._send({"type": "http.response.body", "body": data})

    async def emit(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of an event stream; the first one begins the response, the last one ends it."""
        async with self._lock:
            await self._emit(data, last=last)

    async def emit_paced(self, parts: Iterator[str]) -> None:
        """Send events built piece by piece. Other requests run meanwhile, and no heartbeat comes in between."""
        async with self._lock:
            async for data in _joined(paced(parts)):
                await self._emit(data)

    async def _emit(self, data: bytes, *, last: bool = False) -> None:
        if not self.streaming:
            self.streaming = True
            # Without the last of these headers, nginx buffers the events.
            kind = (b"content-type", b"text/event-stream; charset=utf-8")
            await self._start(200, [kind, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        self.sent_at = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def end(self, data: bytes = b"") -> None:
        self._ended = True
        await self.emit(data, last=True)

    async def beat(self) -> None:
        """Send a comment after each pause: proxies cut connections that seem to be dead. While the request waits for
        its model, say how far that is, after each second."""
        while not self._ended:
            progress = self._progress
            seconds = self.service.heartbeat if progress is None else min(PROGRESS_SECONDS, self.service.heartbeat)
            silent = time.monotonic() - self.sent_at
            if silent >= seconds:
                await self.emit(b": waiting\n\n" if progress is None else f": {progress()}\n\n".encode())
            elif progress is None:
                self._news = self._news or anyio.Event()
                with anyio.move_on_after(seconds - silent):
                    await self._news.wait()
            else:
                await anyio.sleep(seconds - silent)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        headers = [*headers, (b"x-request-id", self.request_id.encode())]
        if self.service.life.draining:
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def fail(self, refused: ApiError, dialect: Dialect) -> None:
        """Answer with an error: a status and its object, or the last events of a stream that has begun."""
        if self.streaming:
            await self.end(dialect.event(refused))
        else:
            await self.reply(dialect.body(refused), status=refused.status, headers=refused.headers)


async def _joined(parts: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """Join the text into parts of a size worth sending."""
    held: list[str] = []
    size = 0
    async for part in parts:
        held.append(part)
        size += len(part)
        if size > _LARGE:
            yield "".join(held).encode()
            held, size = [], 0
    if held:
        yield "".join(held).encode()


Handler = Callable[[Exchange, dict[str, Any]], Awaitable[None]]


class JsonEndpoint:
    """An ASGI app for one path: a JSON object comes in, JSON or an event stream goes out.

    The handler and its requests are cancelled when the client disconnects. An ASGI server reports that only to a
    reader, so a separate task waits for the message.
    """

    def __init__(self, service: Service, endpoint: Endpoint, handler: Handler, dialect: Dialect) -> None:
        self._service, self._endpoint, self._handler, self._dialect = service, endpoint, handler, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, endpoint = self._service, self._endpoint
        exchange = Exchange(service, scope, send)
        exchange.names = endpoint.names

        async def answer() -> None:
            service.life.check()
            fields = await self._read(exchange, receive, group)
            if fields.get("stream"):
                group.start_soon(exchange.beat)
            await self._handler(exchange, fields)
            if exchange.streaming:
                await exchange.end()

        status = 499  # the client disconnected
        try:
            with exchange.account:
                async with anyio.create_task_group() as group:
                    status = await refusing(exchange, self._dialect, answer)
                    group.cancel_scope.cancel()
        finally:
            exchange.let_go()
            service.metrics.http(endpoint.path, status)

    async def _read(self, exchange: Exchange, receive: Receive, group: TaskGroup) -> dict[str, Any]:
        """Return the fields of the body, which is let go. Once it is there, `group` ends when the client leaves."""
        service, account = self._service, exchange.account
        data = await read_body(
            exchange.scope,
            receive,
            limit=service.body_limit,
            seconds=service.body_seconds,
            hold=lambda size: account.hold(body=size),
        )
        exchange.size = len(data)
        group.start_soon(_watch, receive, group.cancel_scope)

        def read() -> dict[str, Any]:
            marks = check_size(data, service.body_limit)
            account.hold(parsed=parsing_bytes(data, marks))
            exchange.values = marks
            fields = self._endpoint.read(parse(data), strict=service.strict, unknown=service.unknown)
            if len(data) >= IN_A_THREAD:  # of a small one, the bound will do
                account.hold(parsed=bytes_of(fields))
            return fields

        fields = await exchange.run(read)
        account.hold(body=0)
        return fields


async def refusing(exchange: Exchange, dialect: Dialect, call: Callable[[], Awaitable[None]]) -> int:
    """Call an endpoint. Return the status of its response, or of the error sent in its place."""
    try:
        await call()
        return exchange.status
    except ClientDisconnect:
        return 499
    except Exception as error:
        refused = refusal(error, exchange.names)
        if isinstance(error, RequestAborted) and exchange.service.life.cut:
            refused = unavailable("the server ended before the answer did. Send the request to the one that follows it")
        if refused is not error and refused.status >= 500 and not isinstance(error, Busy | RequestAborted):
            log.error("%s %s failed: %r", exchange.scope["path"], exchange.request_id, error, exc_info=error)
        if isinstance(error, QueueFull):
            refused.retry_after = exchange.service.life.retry_after
        # They hold the body and all that was made of it, and one of them the error: a cycle.
        forget_frames(error)
        try:
            await exchange.fail(refused, dialect)
        except OSError:  # the connection is gone
            return 499
        return refused.status


async def _watch(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
