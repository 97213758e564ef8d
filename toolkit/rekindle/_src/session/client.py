"""The state that a session and its helpers share: the host, the front, the engine and the cache writer."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from rekindle._src.calls.content import RequestOptions, keyed
from rekindle._src.calls.prompts import PromptLike, parse_one
from rekindle._src.capabilities import capabilities_of
from rekindle._src.core import words
from rekindle._src.core.activity import Activity, State
from rekindle._src.core.own_failure import interrupted
from rekindle._src.core.prefix import Prefix
from rekindle._src.core.records import PageMove, Request, WaitingRequest
from rekindle._src.dispatch.backend import Exclusive, Front, Pause, Resume
from rekindle._src.dispatch.engine import Engine, Observer
from rekindle._src.dispatch.host import Host
from rekindle._src.dispatch.threads import OneShot
from rekindle._src.kvcache import writer
from rekindle._src.kvcache.persist.segment import Page
from rekindle._src.kvcache.writer import CacheWriter, SaveReport
from rekindle.errors import RekindleError, StoreError

if TYPE_CHECKING:
    from rekindle._src.kvcache.sharing import SharedPages

T = TypeVar("T")
log = logging.getLogger("rekindle.cache")
_sessions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # in the order of their opening
_numbers = itertools.count()


def enlist(session: Any) -> None:
    """Count a session among the open ones in this process, for as long as something refers to it."""
    _sessions[next(_numbers)] = session


def open_sessions() -> list[Any]:
    """Return the sessions that are open in this process, the oldest first."""
    return [session for _, session in sorted(_sessions.items()) if not session.closed]


class Client:
    """Access to one open session. Every method may be called from any thread, and raises if the session can't be used.

    The session, its cache view and its live views hold the client; the host and its threads don't. So the session can
    close itself once nothing refers to the client any more.
    """

    def __init__(self, host: Host, front: Front) -> None:
        assert isinstance(front.backend, Engine), "a session has an engine of its own"
        self.host: Host = host
        self.front: Front = front
        self.engine: Engine = front.backend
        self.writer: CacheWriter = CacheWriter(host, self.engine)
        self._capabilities = capabilities_of()
        self.pauses: int = 0  # paused() blocks that have been entered and not left
        self.asleep: bool = False
        self.sleeper: object = None  # the task that put it to sleep
        self._trainings: tuple[OneShot[Any], ...] = ()  # the ends of trainings
        self._trainings_lock = threading.Lock()
        self.shared: list[SharedPages] = []  # addresses at which the cache's pages are shared

    @property
    def trainings(self) -> int:
        """The number of trainings that run."""
        return sum(not ended.filled for ended in self._trainings)

    def add_training(self, ended: OneShot[T]) -> None:
        """Count a training as a use of the session until `ended` is filled."""
        with self._trainings_lock:
            self._trainings = (*(one for one in self._trainings if not one.filled), ended)

    def ask(self, function: Callable[[], T]) -> T:
        """Run `function` on the host's loop, where nothing else changes meanwhile, and return its result. Blocks."""
        self.host.check()
        return self.host.ask(function)

    def observe(self, observer: Observer) -> None:
        """Call `observer` after every committed step from now on, on the host's loop; it has to be quick."""
        self.host.ask(lambda: self.engine.observers.append(observer))

    def unobserve(self, observer: Observer) -> None:
        """Undo `observe`; raises ValueError if it isn't called."""
        self.host.ask(lambda: self.engine.observers.remove(observer))

    async def exclusive(self, job: Callable[[], T], after: Callable[[T], object]) -> T:
        """Run `job` on the device thread while no step is in flight, then `after` with its result on the loop."""
        self.host.check()
        reply: OneShot[T] = OneShot()
        return await self.host.send(Exclusive(job, after, reply), reply).get()

    def waits(self, limit: int) -> list[WaitingRequest]:
        """Return the requests that wait and why, the oldest first, at most `limit`."""
        return self.ask(lambda: self.engine.scheduler.waits(limit))

    def keyed_request(self, prompt: PromptLike, **options: Unpack[RequestOptions]) -> Request:
        """Return a request with this prompt and these options, to ask the scheduler what its pages are.

        Its content is decoded, which may take seconds.
        """
        prompted = keyed(self.front, parse_one(prompt), options)
        return self._capabilities.keyed_request(prompted, self.front)

    def prefix(self, prompt: PromptLike, **options: Unpack[RequestOptions]) -> Prefix:
        """Return the prefix that a request with this prompt and these options would have."""
        page_size = self.front.config.page_size
        return self.keyed_request(prompt, **options).prefix(page_size)

    def text(self, token_ids: list[int]) -> str:
        """Return the text of tokens; empty if the tokenizer knows only ids."""
        tokenizer = self.front.tokenizer
        return tokenizer.decode(token_ids) if tokenizer.has_text else ""

    def pin(self, prompt: PromptLike, **options: Unpack[RequestOptions]) -> int:
        """Keep the cached pages of a prompt on the device until `unpin`. Return how many tokens they cover."""
        self.host.check()
        prefix = self.prefix(prompt, **options)
        return self.ask(lambda: self.engine.scheduler.pin(prefix))

    def unpin(self, prompt: PromptLike, **options: Unpack[RequestOptions]) -> int:
        """Undo one `pin`. Return how many tokens are no longer kept."""
        self.host.check()
        prefix = self.prefix(prompt, **options)
        return self.ask(lambda: self.engine.scheduler.unpin(prefix))

    async def in_writer(self, job: Callable[[], T]) -> T:
        """Run `job` in the cache writer's thread. Return its result, or raise its error."""
        self.host.check()
        return await _reply(self.writer.submit(job)).get()

    async def save(self, name: str) -> SaveReport:
        """Write the pages that are not on disk yet, then the list of all pages under `name`; at last the programs that
        a restart needs for them."""
        self.writer.check_save(name)
        listed: list[Page] = []
        report: SaveReport | None = None

        def look() -> State:
            if report is not None:
                return State(f"saved {name!r}; compiling the programs that a restart needs")
            return State(f"saving {name!r}: {words.count(len(listed), 'page')}")

        try:
            with Activity(look, quiet=self.front.config.quiet):
                report = await self.in_writer(partial(self.writer.save, name, listed))
                if report.pages:
                    await self.in_writer(self.writer.prepare_restart)
        except BaseException as error:
            interrupted(error, f"{name!r} is still being saved" if report is None else f"{name!r} is saved")
            raise
        return report

    async def finish_saving(self) -> None:
        """Save as many of the pages that wait for it as there is time for, before the session is closed."""
        job = self.writer.finish()
        if job is None:
            return
        reply, hung = _reply(job), StoreError("the disk did not answer")
        timer = threading.Timer(writer.CLOSE_SECONDS, reply.fail, [hung])
        timer.daemon = True
        timer.start()
        try:
            await reply.get()
        except Exception as error:  # whatever it is, the session closes
            level = logging.DEBUG if isinstance(error, RekindleError) else logging.WARNING
            log.log(level, "not everything was saved at the end of a session: %s", error)
        finally:
            timer.cancel()

    async def pause(self) -> None:
        """Wait for the steps in flight; no further one begins until `resume`."""
        self.host.check()
        quiet: OneShot[None] = OneShot()
        self.host.send(Pause(quiet), quiet)
        try:
            await quiet.get()
        except BaseException:
            self.resume()
            raise

    def resume(self) -> None:
        """Undo one call of `pause`; after the last, steps begin again."""
        self.host.send(Resume(), OneShot())

    async def flush_cache(self) -> None:
        """Forget every cached page. Requests that run keep theirs."""
        await self.between_steps(self.engine.scheduler.flush_cache)

    async def between_steps(self, function: Callable[[], object]) -> None:
        """Call `function` on the host's loop while no step is in flight."""
        await self.exclusive(_nothing, lambda _: function())

    async def swap_weights(
        self, swap: Callable[[], bytes], set_aside: Callable[[Sequence[PageMove]], None] | None = None
    ) -> int:
        """Call `swap`, which returns the new root key of the cache, and compute the running requests' pages again.

        With `set_aside`, which reads pages out, the cache is kept below the device under its old root. Returns how
        often weights were swapped.
        """
        scheduler, versions, moves = self.engine.scheduler, list[int](), list[PageMove]()

        def swapped(key: bytes) -> None:
            scheduler.flush_cache(key, recompute=True, keep=set_aside is not None)
            versions.append(scheduler.weights_version)

        if set_aside is None:
            await self.exclusive(swap, swapped)
            return versions[0]
        await self.pause()
        try:
            await self.between_steps(lambda: moves.extend(scheduler.vacate()))
            await self.exclusive(partial(set_aside, moves), lambda _: scheduler.vacated())
            await self.exclusive(swap, swapped)
        finally:
            self.resume()
        return versions[0]


def _nothing() -> None: ...


def _reply(job: Future[T]) -> OneShot[T]:
    """Return the result of a job of another thread, for a caller with or without an event loop."""
    reply: OneShot[T] = OneShot()
    job.add_done_callback(lambda ended: reply.run(ended.result))
    return reply
