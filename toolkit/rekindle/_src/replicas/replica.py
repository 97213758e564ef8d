"""A replica: a session in its own process, the mail to the fleets that send it requests, and the pages of others.

News of a sequence are merged while they wait for the mail. A replica gives its pages, and takes its requests' pages
from other replicas.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from rekindle._src.capabilities import ENTRIES, capabilities_of
from rekindle._src.core.own_failure import close_each, one_line, own_failure
from rekindle._src.core.records import FinishReason, Request, TokenEvent
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capabilities import NO_RESOURCES, Capabilities, Resources
from rekindle._src.dispatch.threads import Mailbox, Wakeup, until, wake
from rekindle._src.kvcache.sharing import PageAddress, Puller, SharedPages, page_address, parts
from rekindle._src.kvcache.tiers.host import HostHold
from rekindle._src.replicas.routing import Role
from rekindle._src.replicas.wire import Mail, News, ReplicaInfo, RequestMessage, SessionChange, decode
from rekindle._src.session.client import Client
from rekindle._src.session.session import Session, client_of
from rekindle.errors import (
    ConfigError,
    ProcessLost,
    QueueFull,
    RekindleError,
    RequestFailed,
    SessionClosed,
)

log = logging.getLogger("rekindle.fleet")
BEAT = 1.0  # seconds between two checks of the session
FORGOTTEN = 30.0  # seconds without a call for mail after which a fleet counts as gone

Opening = Callable[[], Session]  # blocks until the session is open


class Replica:
    """Serves any number of fleets. All methods run on one event loop, and `run` must run there meanwhile."""

    def __init__(self, opening: Opening, *, role: Role = "both", listen: str | None = "127.0.0.1") -> None:
        """Make a replica. Others take its pages at the host address `listen`; None shares no pages."""
        self._opening, self._role, self._listen = opening, role, listen
        self.pulls: Pulls | None = None
        self._capabilities = capabilities_of()
        self._opened: Session | None = None
        self._info: ReplicaInfo | None = None
        self._lock = anyio.Lock()
        self._boxes: dict[str, Box] = {}
        self._figures: Mapping[str, Any] = {}
        self._beat = time.monotonic()

    async def open(self) -> ReplicaInfo:
        """Open the session, unless it is open already."""
        async with self._lock:
            if self._info is None:
                self._opened = await anyio.to_thread.run_sync(self._opening)
                self.pulls = await self._sharing(self._opened)
                await self._look()
                pages = None if self.pulls is None else self.pulls.address
                self._info = _info_of(self._client)._replace(pages=pages)
            return self._info

    async def _sharing(self, session: Session) -> Pulls | None:
        """Begin to share the session's pages. Return None if it keeps none off its device."""
        if self._listen is None:
            return None
        try:
            shared = await session.cache.share(host=self._listen, secret=secrets.token_hex(32))
        except ConfigError as error:
            log.debug("a replica shares no pages: %s", error)
            return None
        if self._role == "decode":  # its streams must not wait for the computation of prompts
            parts(self._client.writer)[1].costs.mode = "always"
        return Pulls(self._client, shared)

    async def run(self, lease: float | None = None) -> None:
        """Check the session, and drop fleets that are gone. Return after `lease` seconds without a fleet."""
        used = time.monotonic()
        while lease is None or time.monotonic() - used < lease:
            await anyio.sleep(BEAT)
            if self._opened is not None and not self._opened.closed:
                await self._look()
            now = time.monotonic()
            used = now if self._boxes or self._info is None else used
            for sender in [name for name, box in self._boxes.items() if now - box.called > FORGOTTEN]:
                for mailbox in tuple(self._boxes.pop(sender).running.values()):
                    self._client.host.abort(mailbox)

    async def _look(self) -> None:
        """Take the session's figures on its loop, to show that the loop is alive."""
        stats = await anyio.to_thread.run_sync(self._session.stats)
        plain = {name: value for name, value in stats.as_dict().items() if isinstance(value, int | float | str)}
        figures: dict[str, Any] = {**plain, "step_sizes": dict(stats.step_sizes)}
        self._figures = figures | ({} if self.pulls is None else self.pulls.figures())
        self._beat = time.monotonic()

    @property
    def _session(self) -> Session:
        assert self._opened is not None, "a request came before the session was open"
        return self._opened

    @property
    def _client(self) -> Client:
        return client_of(self._session)

    async def warm(self, addresses: tuple[PageAddress, ...]) -> int:
        """Take pages that neighbours likely need again. Return their number."""
        pulls = self.pulls
        return 0 if pulls is None else await anyio.to_thread.run_sync(pulls.warm, addresses)

    async def send(self, sender: str, requests: tuple[RequestMessage, ...], ended: tuple[str, ...]) -> None:
        """Run requests, and abort the ones with ids in `ended`. A request that can't be run ends with its error."""
        self._client.host.check()
        box = self._boxes.setdefault(sender, Box())
        for request_id in ended:
            mailbox = box.running.pop(request_id, None)
            if mailbox is not None:
                self._client.host.abort(mailbox)
            elif (beginning := box.beginning.pop(request_id, None)) is not None:
                beginning.abandoned = True
        box.beginning.update((sent.id, Mailbox(1)) for sent in requests)
        async with anyio.create_task_group() as group:  # no request waits for the grammar of an earlier one
            for sent in requests:
                group.start_soon(self._begin, box, sent)

    async def _begin(self, box: Box, sent: RequestMessage) -> None:
        beginning = box.beginning.get(sent.id)
        if beginning is None:  # it was aborted before its turn
            return
        try:
            await self._run(box, sent, beginning)
        except BaseException as error:
            failure = own_failure(error, f"request {sent.id} could not be run by its replica")
            mailbox = box.running.get(sent.id)
            if mailbox is None:
                box.put(News(failed(sent.id, failure)))
            else:  # the request has a place
                mailbox.complete_all(failure)
        finally:
            if box.beginning.get(sent.id) is beginning:  # and not another request's with the same id
                del box.beginning[sent.id]

    async def _run(self, box: Box, sent: RequestMessage, beginning: Mailbox) -> None:
        client, pages = self._client, sent.pages
        host = client.host
        request = await self._taken_in(decode(sent, client.front.vocab_size), beginning)
        if box.beginning.get(sent.id) is not beginning:  # the request was aborted meanwhile
            return
        if not host.limiter.try_enter(1, request.caller):
            raise QueueFull(f"all {host.limiter.places} places of the replica are taken")
        mailbox = box.running[request.id] = Mailbox(1)
        arrived, ended, timed = time.perf_counter(), False, False
        used: list[Callable[[], object]] = []  # releases of pulled pages

        def take(event: TokenEvent, began: float) -> None:
            nonlocal ended, timed
            while used:
                used.pop()()
            waited = None if timed or not began else began - arrived
            timed, ended = timed or waited is not None, event.finish_reason is not None
            box.put(News(sendable(event), waited))

        def over() -> None:
            releases = tuple(used)
            used.clear()
            close_each(f"request {request.id}", partial(host.limiter.leave, caller=request.caller), tell, *releases)

        def tell() -> None:
            box.running.pop(request.id, None)
            if not ended and mailbox.error is not None:  # the session was closed, or has crashed
                box.put(News(failed(request.id, mailbox.error)))

        def relay(give_up: Callable[[], object]) -> None:
            used.append(give_up)
            host.relay(request, mailbox, take)

        mailbox.on_sequence_end = over
        if pages is None or self.pulls is None:
            host.relay(request, mailbox, take)
        else:
            self.pulls.pull_first(request, pages, relay)

    async def _taken_in(self, request: Request, mailbox: Mailbox) -> Request:
        """Return the request with its extensions on this replica."""
        capabilities, front = self._capabilities, self._client.front
        submission = Submission(
            id=request.id,
            text=None,
            token_ids=request.token_ids,
            add_special_tokens=False,
            sampling=request.sampling,
            mailbox=mailbox,
            arrival=request.arrival,
            extensions=request.extensions,
            caller=request.caller,
        )
        waits = capabilities.waits(submission, front)
        resources = await capabilities.resources(submission, front) if waits else NO_RESOURCES
        admitted = partial(_admitted, capabilities, front, request, submission, resources)
        return await anyio.to_thread.run_sync(admitted) if capabilities.slow(submission) else admitted()

    async def change(self, change: SessionChange) -> None:
        """Change the session. Running requests go on."""
        await change.apply(self._session)

    async def mail(self, sender: str, patience: float) -> Mail:
        """Return news for `sender` as soon as there is some, or without any after `patience` seconds."""
        self._client.host.check()
        box = self._boxes.setdefault(sender, Box())
        news = await box.collect(patience)
        return Mail(news, self._figures, time.monotonic() - self._beat)

    async def close(self, drain: float = 0.0) -> None:
        """Close the session. Running requests may go on for `drain` seconds."""
        if self._opened is not None:
            await self._opened.aclose(drain=drain)


def _admitted(
    capabilities: Capabilities, front: Front, request: Request, submission: Submission, resources: Resources
) -> Request:
    """Return the admitted request. Its extensions have taken over its tokens."""
    extensions = capabilities.admit(submission, request.token_ids, front, resources)
    if request.resumed is not None:
        extensions.resume(request.resumed.token_ids)
    return dataclasses.replace(request, extensions=extensions)


def _info_of(client: Client) -> ReplicaInfo:
    front = client.front
    return ReplicaInfo(
        config=front.config,
        tokenizer=front.tokenizer,
        chat=front.chat,
        vocab_size=front.vocab_size,
        embedder=front.embedder,
        longest=front.longest,
        sampling=front.sampling,
        chat_sampling=front.chat_sampling,
        processors=front.processors,
        facts={type(entry).__name__: entry.facts(front) for entry in ENTRIES},
        places=client.host.limiter.places,
        pid=os.getpid(),
        host=socket.gethostname(),
    )


TOGETHER = 0.01  # seconds between two mails at least: tokens of this time travel together


class Box:
    """The news for one fleet, and its running requests. `put` may be called in any thread."""

    def __init__(self) -> None:
        self.running: dict[str, Mailbox] = {}
        self.beginning: dict[str, Mailbox] = {}  # of requests being taken in that were not aborted
        self.called = time.monotonic()  # time of the fleet's last call
        self._pending: dict[str, News] = {}
        self._lock = threading.Lock()
        self._wakeups: list[Wakeup] = []
        self._urgent = False  # a first token or an end is sent at once
        self._sent_at = 0.0

    def put(self, news: News) -> None:
        request_id = news.event.request_id
        with self._lock:
            first, earlier = not self._pending, self._pending.get(request_id)
            if earlier is not None:
                waited = news.waited if earlier.waited is None else earlier.waited
                news = News(earlier.event.merged_with(news.event), waited)
            self._pending[request_id] = news
            self._urgent = self._urgent or news.waited is not None or news.event.finish_reason is not None
            rouse = first or self._urgent
        if rouse:  # merged news changes nothing for the reader, and waking it costs the session time
            wake(self._wakeups)

    async def collect(self, patience: float) -> tuple[News, ...]:
        """Wait for news and return it, or an empty tuple after `patience` seconds."""
        self.called = time.monotonic()
        with anyio.move_on_after(patience):
            await until(lambda: bool(self._pending), self._wakeups)
            with anyio.move_on_after(max(0.0, self._sent_at + TOGETHER - time.monotonic())):
                await until(lambda: self._urgent, self._wakeups)
        with self._lock:
            news, self._pending, self._urgent = tuple(self._pending.values()), {}, False
        self.called = self._sent_at = time.monotonic()
        return news


def sendable(event: TokenEvent) -> TokenEvent:
    """Return the event with an error that another process can unpickle."""
    return event if event.error is None else event._replace(error=_plain(event.error))


def failed(request_id: str, error: BaseException) -> TokenEvent:
    return TokenEvent(request_id, finish_reason=FinishReason.FAILED, error=_plain(error))


def _plain(error: BaseException) -> BaseException:
    """Return an error that another process can unpickle. Of its cause, only the message is sent.

    If a step failed because a process that shares the model is gone, the whole session has ended.
    """
    if _lost_process(error):
        return SessionClosed(f"a process of the replica is gone: {one_line(error)}")
    try:
        return _readable(error)
    except Exception:  # users' exception classes may raise anything
        return RequestFailed(one_line(error))


def _readable(error: BaseException) -> BaseException:
    cause = error.__cause__
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RequestFailed(str(error))
    if cause is not None:
        plain = type(error).__init__ is Exception.__init__
        error = type(error)(f"{error} The cause: {one_line(cause)}"[:2000]) if plain else error
    return error


def _lost_process(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ProcessLost):
        error = error.__cause__
    return error is not None


PULLS = 4  # at once
LOOK_SECONDS = 0.1
ROOM_SECONDS = 10.0  # a pull's limit of waiting for room; after it, the prompt is computed instead

Then = Callable[[Callable[[], object]], object]  # continues a request; its argument releases the pages after their use


class Pulls:
    """The pulls of one open session that can share its pages."""

    def __init__(self, client: Client, shared: SharedPages) -> None:
        self._host, self._puller = client.host, Puller(client.host, client.writer)
        self.address: PageAddress = page_address(shared)
        self.pages = self.bytes = self.failed = 0  # pages and bytes that were taken, and failed pulls
        self._waiting: deque[Callable[[], object]] = deque()
        self._workers = 0
        self._room = threading.Condition()
        self._held = 0  # bytes of pulled pages in host memory that no request has used yet

    def figures(self) -> dict[str, int]:
        return {"pulled_pages": self.pages, "pulled_bytes": self.bytes, "failed_pulls": self.failed}

    def pull_first(self, request: Request, address: PageAddress, then: Then) -> None:
        """Take the pages of a request's prompt in another thread, and call `then` there, after a failure too."""
        with self._room:
            self._waiting.append(lambda: self._pull(request, address, then))
            if self._workers == PULLS:
                return
            self._workers += 1
        threading.Thread(target=self._work, name="rekindle pulls", daemon=True).start()

    def warm(self, addresses: Sequence[PageAddress]) -> int:
        """Take the pages that neighbours most likely need again, up to half of host memory. Return their number."""
        total, budget = 0, self._puller.budget // 2
        for number, address in enumerate(addresses, start=1):
            try:
                pulled = self._puller.likeliest(address, budget * number // len(addresses))
            except RekindleError as error:
                log.debug("a replica gives no pages to a new one: %s", error)
                continue
            total += pulled.pages
            self.pages += pulled.pages
            self.bytes += pulled.bytes
        return total

    def _work(self) -> None:
        while True:
            with self._room:
                if not self._waiting:
                    self._workers -= 1
                    return
                job = self._waiting.popleft()
            job()

    def _pull(self, request: Request, address: PageAddress, then: Then) -> None:
        page_size = self._puller.identity.page_size
        prefix = request.prefix(page_size)
        size = len(prefix.tokens) // page_size * self._puller.page_bytes
        if not self._enter(size):
            self.failed += 1
            then(nothing)
            return
        claim = _Claim(lambda: self._leave(size))
        try:
            pulled = self._puller.prefix(address, prefix)
            claim.held = pulled.held
            self.pages += pulled.pages
            self.bytes += pulled.bytes
        except RekindleError as error:
            self.failed += 1
            log.debug("pages of %s are computed, since they could not be pulled: %s", request.id, error)
        except Exception:
            self.failed += 1
            log.exception("pages of %s are computed, since they could not be pulled", request.id)
        then(claim.give_up)

    def _enter(self, size: int) -> bool:
        """Reserve room for `size` bytes. Return False if none is free within `ROOM_SECONDS`."""
        looks_left = int(ROOM_SECONDS / LOOK_SECONDS)
        with self._room:
            while self._held and self._held + size > self._puller.budget:
                looks_left -= 1
                if looks_left < 0 or self._host.closing:
                    return False
                self._room.wait(LOOK_SECONDS)
            self._held += size
            return True

    def _leave(self, size: int) -> None:
        with self._room:
            self._held -= size
            self._room.notify_all()


class _Claim:
    """Room in host memory with pulled pages, until a request has used them."""

    def __init__(self, leave: Callable[[], object]) -> None:
        self._leave: Callable[[], object] | None = leave
        self.held: HostHold | None = None

    def give_up(self) -> None:
        """Release room and pages. Further calls do nothing."""
        leave, self._leave = self._leave, None
        if self.held is not None:
            self.held.release()
        if leave is not None:
            leave()


def nothing() -> None:
    """Do nothing: no pages were taken, so there is nothing to release."""
