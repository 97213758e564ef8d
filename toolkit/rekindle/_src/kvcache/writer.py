"""Saves cached pages to disk: one thread per session, in the background and on demand.

It never touches the tree itself. It asks the session's loop for a slice of nodes at a time, takes payloads from host
memory, and has the device read pages between two steps, a few at a time.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from rekindle._src.core import words
from rekindle._src.core.contracts import RunnerLike, SchedulerLike
from rekindle._src.core.drawable import Record
from rekindle._src.core.own_failure import one_line
from rekindle._src.core.prefix import Prefix
from rekindle._src.kvcache import AnyCache, Node, Tiers, distinct
from rekindle._src.kvcache.persist import prefix_file, snapshot
from rekindle._src.kvcache.persist.segment import Page, Payload
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.kvcache.tiers.host import size
from rekindle._src.kvcache.tiers.side_tiers import SideStore, side_stores
from rekindle.errors import ConfigError, RekindleError, SessionClosed, StoreError

T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger("rekindle.cache")

TICK_SECONDS = 1.0
RETRY_SECONDS, LONGEST_RETRY = 2.0, 300.0  # from a failure of saving to the next attempt: at first, and at most
COLD_SECONDS = 1.0  # pages used more recently are saved later: they are likely to be used again soon
BUSY_BYTES, IDLE_BYTES = 8 << 20, 64 << 20  # the most to save in one tick: while requests run, and while none does
PAUSE_BYTES = 4 << 20  # read from the device between two steps: about 2 ms at the speed of memory
ROUNDS = 3  # the number of waits for a page that is being copied from the device to host memory
SAVES = 3  # the most attempts to save what another process removes
SEGMENT_BYTES = 64 << 20
SLICE = 1024  # nodes looked at in one turn of the loop: about 1 ms
BUSY_SLICES = 4  # in one tick while requests run, so that the cost does not grow with the tree
CLOSE_SECONDS = 1.0  # the most that saving delays the end of a session
LAST_BYTES = 8 << 20  # of pages in one write at the end of a session, begun in the first three quarters of that time
EXIT_SECONDS = 5.0  # the most that the interpreter's exit waits for what all sessions are saving


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class SaveReport(Record):
    """The result of `await session.save(name)`."""

    name: str
    pages: int  # listed in the snapshot
    tokens: int
    written: int  # pages that were not on disk before
    skipped: int  # left out because they did not fit into disk_memory
    bytes: int  # written
    seconds: float
    states: int = 0  # entries of side caches that are listed in the snapshot

    def __str__(self) -> str:
        states = f" and {words.count(self.states, 'state')}" if self.states else ""
        skipped = f", {self.skipped} did not fit into disk_memory" if self.skipped else ""
        return (
            f"snapshot {self.name!r}: {self.pages} pages ({self.tokens} tokens){states}, {self.written} of them new "
            f"({self.bytes / 2**20:.1f} MiB in {self.seconds:.2f} s){skipped}"
        )


class SessionLoop(Protocol):
    """The loop of the session that has the cache. Its methods may be called from any other thread."""

    @property
    def closing(self) -> bool:
        """True if the session is closed, or about to be."""
        ...

    @property
    def is_over(self) -> bool:
        """True once the session has ended."""
        ...

    def refusal(self) -> RekindleError:
        """Return the error of a closed session."""
        ...

    def ask(self, function: Callable[[], T]) -> T:
        """Run `function` on the loop, where nothing else changes meanwhile, and return its result. Blocks."""
        ...

    def between_steps(self, job: Callable[[], T], after: Callable[[T], object]) -> T:
        """Run `job` on the device's thread while no step is in flight, then `after` on the loop. Blocks."""
        ...


class RestartLike(Protocol):
    """The device of an engine, as its cache is saved."""

    def prepare_restart(self, *, demanded: bool) -> bool:
        """Make and store one program that a restart needs. Return False if none is left."""
        ...


class CachedEngine(Protocol):
    """The engine with the cached pages: its scheduler has the tree, and its runner reads pages of the device."""

    @property
    def scheduler(self) -> SchedulerLike: ...
    @property
    def runner(self) -> RunnerLike: ...
    @property
    def device(self) -> RestartLike: ...


class PageRecord(NamedTuple):
    """A page and the place to read its payload from."""

    node: Node
    page: Page
    on_device: int  # its device page, or 0; of an entry of a side cache its slot


class Retries:
    """When something that failed is tried again: after `RETRY_SECONDS`, then after twice as long each time, up to
    `LONGEST_RETRY`. Only the first failure of a session is a warning."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._wait = self._next = 0.0
        self._warned = False

    @property
    def due(self) -> bool:
        """True unless the latest attempt failed and it is too early for the next one."""
        return time.monotonic() >= self._next

    def failed(self, error: BaseException) -> None:
        """Note a failed attempt."""
        self._wait = min(2 * self._wait or RETRY_SECONDS, LONGEST_RETRY)
        self._next = time.monotonic() + self._wait
        text = f"{self._what}: {one_line(error)}. It is tried again, at least every {LONGEST_RETRY / 60:.0f} minutes"
        log.log(logging.DEBUG if self._warned else logging.WARNING, text)
        self._warned = True

    def succeeded(self) -> None:
        """Note an attempt that succeeded."""
        if self._wait:
            log.info("succeeded after failures: %s", self._what)
        self._wait = self._next = 0.0


class CacheWriter:
    """Its methods may be called from any thread; the work is done in the writer's own thread, one job at a time."""

    def __init__(self, loop: SessionLoop, engine: CachedEngine) -> None:
        self._loop, self._engine = loop, engine
        cache = engine.scheduler.cache
        self.cache: AnyCache | None = cache if isinstance(cache, AnyCache) else None
        tiers = self.cache.host_tier if self.cache is not None else None
        self.tiers: Tiers | None = tiers if isinstance(tiers, Tiers) else None
        self.sides: tuple[SideStore, ...] = side_stores(self.cache)
        self.saved_bytes: int = 0  # in the background
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # held while the thread starts or ends, or a job is queued
        self._over = False  # the thread takes no more jobs
        self._at_work = threading.Lock()  # held during a job, and while something is saved in the background
        self._leaving = False  # the interpreter exits: nothing more is saved in the background
        self._stopped = False
        self.complete_at = -1  # the tree's version when everything cold in it was on disk
        self._restart_ready = False  # True once a restart finds its programs in the store
        self._distrusted = self._disk is not None and self._disk.distrusted is not None
        self._saving = Retries("pages are not saved in the background now")
        self._preparing = Retries("programs that a restart needs for saved pages can't be stored now")
        self._position = 0  # index in `_walk` where the next look begins
        self._walk: list[Node] = []  # the nodes of that walk; some have left the tree by the time they come up
        self._whole = False  # the latest look covered all nodes: only then is it known that nothing is missing
        if self._disk is not None:
            self._start()

    @property
    def _disk(self) -> DiskTier | None:
        return self.tiers.disk if self.tiers is not None else None

    @property
    def _finds_stored(self) -> bool:
        """True if prompts find pages of earlier sessions; programs for them may be missing."""
        return self.tiers is not None and self.tiers.finds_stored and self.tiers.has_disk_pages

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` in the writer's thread, after those before it. Returns at once. Fails if the thread has ended."""
        reply: Future[T] = Future()
        with self._starting:
            if self._over:
                reply.set_exception(self._loop.refusal())
                return reply
            self._start()
            self._jobs.put((job, reply))
        return reply

    def check_save(self, name: str) -> None:
        """Raise if no snapshot can be saved under `name`."""
        snapshot.check_name(name)
        if self._disk is None:
            raise ConfigError("disk_memory", 0, "leaves no room for snapshots", "Open the session with disk_memory")

    def finish(self) -> Future[None] | None:
        """Save as many pages as `CLOSE_SECONDS` allow, before the session is closed. None if none waits for it.

        A job that waits for a disk can't be stopped: wait for no longer.
        """
        cache = self.cache
        if self._disk is None or self._distrusted or cache is None or cache.version in (0, self.complete_at):
            return None
        deadline = time.monotonic() + 0.75 * CLOSE_SECONDS
        return self.submit(lambda: self._keep(sys.maxsize, cold=0.0, visited=False, deadline=deadline))

    def stop(self) -> None:
        """Ask the thread to end after its current job. Returns at once."""
        self._stopped = True
        self._jobs.put((lambda: None, Future()))

    def rest(self, seconds: float) -> None:
        """Save nothing more in the background, and wait for the current save; jobs are done as before."""
        self._leaving = True
        if self._at_work.acquire(timeout=seconds):
            self._at_work.release()

    # -- the thread

    def _start(self) -> None:
        if self._thread is None:
            _rest_at_exit(self)
            self._thread = threading.Thread(target=self._work, name="rekindle cache writer", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while not (self._stopped or self._loop.is_over):
            try:
                job, reply = self._jobs.get(timeout=TICK_SECONDS if self._disk is not None else None)
            except queue.Empty:
                with self._at_work:
                    self.tick()
                continue
            with self._at_work:
                self._do(job, reply)
        with self._starting:
            self._over = True  # a job queued later would never be answered
        while not self._jobs.empty():
            self._jobs.get()[1].set_exception(self._loop.refusal())

    def _do(self, job: Callable[[], Any], reply: Future[Any]) -> None:
        try:
            reply.set_result(job())
        except (OSError, MemoryError, ImportError) as error:  # Orbax's library may find no room
            if isinstance(error, RekindleError):
                reply.set_exception(error)
                return
            typed = StoreError(f"the cache folder can't be used now: {error}. Check disk and memory, and try again")
            typed.__cause__ = error
            reply.set_exception(typed)
        except BaseException as error:
            reply.set_exception(error)

    def tick(self) -> None:
        """Save some of the pages that are due. If that fails, it is tried again later; only the first failure is a
        warning."""
        cache = self.cache
        if self._distrusted or self._leaving or cache is None or self._loop.closing:
            return
        if cache.version == self.complete_at:
            if (self.saved_bytes or self._finds_stored) and self._preparing.due:
                self.store_for_restart()
            return
        if not self._saving.due:
            return
        busy = self._engine.scheduler.has_work
        try:
            self._keep(BUSY_BYTES if busy else IDLE_BYTES, cold=COLD_SECONDS, visited=busy)
        except SessionClosed:
            pass
        except Exception as error:
            self._saving.failed(error)
        else:
            self._saving.succeeded()

    def prepare_restart(self) -> None:
        """Store all programs that a restart needs for the pages. Call it in the writer's thread."""
        self.store_for_restart(all_of_them=True)

    def store_for_restart(self, *, all_of_them: bool = False) -> None:
        """Store the programs that a restart needs for the pages, one in a tick: storing one takes a core meanwhile.

        Pages are useful without them: a failure is logged, and the restart compiles unless a later attempt succeeds.
        """
        try:
            while not self._restart_ready:
                self._restart_ready = not self._engine.device.prepare_restart(demanded=all_of_them)
                self._preparing.succeeded()
                if not all_of_them:
                    return
        except (OSError, StoreError) as error:
            self._preparing.failed(error)
        except Exception as error:
            self._restart_ready = True
            log.warning("a restart will have to compile the programs for these pages: %s", error)

    def _keep(self, limit: int, *, cold: float, visited: bool, deadline: float | None = None) -> None:
        assert self.cache is not None
        assert self._disk is not None
        disk, version, missing = self._disk, self.cache.version, False
        disk.scan()

        def is_due(node: Node, digest: bytes, now: float) -> bool:
            nonlocal missing
            if digest in disk:
                return False
            ready = node.visits > 0 or (now - node.last_use >= cold and not visited)
            missing |= not ready
            return ready

        written, count = 0, 64
        if deadline is not None:
            page_bytes = sum(leaf.nbytes for leaf in disk.identity.leaves)
            count = max(1, min(count, LAST_BYTES // max(1, page_bytes)))
        candidates = iter(self._find(is_due, most=BUSY_SLICES if visited else None))
        while (batch := list(islice(candidates, count))) and written < limit:
            if deadline is not None and time.monotonic() > deadline:
                return
            pairs = self.payloads(batch)
            total = sum(size(payload) for _, payload in pairs)
            if disk.room(total) < total:
                disk.log_once("full", f"disk_memory of {disk.budget >> 20} MiB is full; newer pages are not saved")
                self.complete_at = version  # try again when the tree has changed
                break
            disk.write(pairs)
            written += total
        else:
            entries, later = (0, bool(self.sides)) if visited else self._save_sides(cold, deadline)
            written += entries
            self.complete_at = version if self._whole and not (missing or batch or later) else -1
        self.saved_bytes += written

    def save(self, name: str, pages: list[Page]) -> SaveReport:
        """Write the pages that are not on disk yet, then the list of all pages, which goes into `pages`, under `name`.

        Call it in the writer's thread.
        """
        for _ in range(SAVES):
            report = self._save_once(name, pages)
            assert self._disk is not None
            self._disk.scan()
            if all(page.digest in self._disk for page in pages):
                return report
            pages.clear()  # another process removed some before they were listed
        raise StoreError(f"pages of snapshot {name!r} were removed while it was saved. Save again")

    def _save_once(self, name: str, pages: list[Page]) -> SaveReport:
        assert self._disk is not None
        disk, start, written, total_bytes, skipped = self._disk, time.perf_counter(), 0, 0, 0
        identity = disk.identity
        disk.scan()
        batch: list[PageRecord] = []
        batch_bytes = 0
        page_bytes = 0

        def flush() -> None:
            nonlocal written, total_bytes, skipped, batch_bytes, page_bytes
            pairs = self.payloads(batch)
            if pairs:
                page_bytes = size(pairs[0][1])
                fits = disk.room(len(pairs) * page_bytes) // page_bytes
                skipped += len(pairs) - fits
                written += disk.write(pairs[:fits])
                total_bytes += fits * page_bytes
            batch.clear()
            batch_bytes = 0

        for candidate in self._find(lambda node, digest, now: True):
            pages.append(candidate.page)
            if candidate.page.digest not in disk:
                batch.append(candidate)
                batch_bytes += page_bytes or PAUSE_BYTES // 16
                if batch_bytes >= SEGMENT_BYTES:
                    flush()
        flush()
        if identity != disk.identity:
            raise StoreError("the weights were swapped while their pages were saved. Save again")
        pages[:] = snapshot.connected([page for page in pages if page.digest in disk], identity.root)
        states = self._snapshot_sides(name, pages)
        for data in () if self.cache is None else self.cache.data:
            data.save(name, pages, disk, self._loop.ask)
        path = snapshot.save(disk.folder, name, identity, pages)
        disk.collect()
        snapshot.keep_shared(path, disk.segments_of(page.digest for page in pages))
        tokens = len(pages) * identity.page_size
        seconds = time.perf_counter() - start
        return SaveReport(name, len(pages), tokens, written, skipped, total_bytes, seconds, states)

    # -- entries of side caches, which nodes have in addition to their pages

    def _save_sides(self, cold: float = 0.0, deadline: float | None = None) -> tuple[int, bool]:
        """Write the entries that are not on disk yet and were not used for `cold` seconds.

        Return their bytes, and whether some are left for later.
        """
        results = [self._save_side(side, cold, deadline) for side in self.sides]
        return sum(written for written, _ in results), any(later for _, later in results)

    def _save_side(self, side: SideStore, cold: float, deadline: float | None) -> tuple[int, bool]:
        cache, disk, written = self.cache, side.tiers.disk, 0
        if cache is None or disk is None:
            return 0, False
        disk.scan()

        def look() -> tuple[list[PageRecord], float]:
            now = cache.clock()
            return [
                self._side_record(side, node)
                for node in cache
                if side.cache.worth_keeping(node) and cache.digest_of(node) not in disk
            ], now

        found, now = self._loop.ask(look)
        records = [record for record in found if now - record.node.last_use >= cold]
        later = len(records) < len(found)
        while records and (deadline is None or time.monotonic() < deadline):
            pairs: list[tuple[Page, Payload]] = []
            total = 0
            each = max(1, side.cache.plan.entry_bytes)
            while records and total < SEGMENT_BYTES:
                count = max(1, PAUSE_BYTES // each)
                part, records = records[-count:], records[:-count]  # those at ends of texts first
                pairs += self._entries(side, part)
                total = sum(size(payload) for _, payload in pairs)
            if disk.room(total) < total:
                kind = side.cache.plan.words.entries
                disk.log_once("full", f"disk_memory of {disk.budget >> 20} MiB is full; newer {kind} are not saved")
                return written, False
            disk.write(pairs)
            written += total
        return written, later or bool(records)

    def _side_record(self, side: SideStore, node: Node) -> PageRecord:
        return self.page_record(node)._replace(on_device=side.cache.slot(node))

    def _entries(self, side: SideStore, records: Sequence[PageRecord]) -> list[tuple[Page, Payload]]:
        """Return the entries of nodes, from host memory, disk or the device, without entries that are gone by now."""
        pairs: list[tuple[Page, Payload]] = []
        on_device: list[PageRecord] = []
        for record in records:
            payload = side.tiers.host.peek(record.page.digest)
            if payload is None and not record.on_device:
                payload = side.tiers.read(record.page.digest)
            if payload is not None:
                pairs.append((record.page, tuple(np.asarray(leaf) for leaf in payload)))
            elif record.on_device:
                on_device.append(record)

        def check(payloads: Sequence[Payload]) -> None:
            if not payloads:  # the session fell asleep before they could be read
                return
            for record, payload in zip(on_device, payloads, strict=True):
                if side.cache.slot(record.node) == record.on_device:
                    pairs.append((record.page, payload))

        if on_device:
            slots = [record.on_device for record in on_device]
            self._loop.between_steps(partial(self._engine.runner.read_side, side.cache.number, slots), check)
        return pairs

    def entries_of(self, side: SideStore, nodes: Sequence[Node]) -> list[tuple[Page, Payload]]:
        """Return the entries of a side cache that nodes have in any tier.

        Call it in any thread but the session's own.
        """
        count = max(1, PAUSE_BYTES // max(1, side.cache.plan.entry_bytes))
        records: list[PageRecord] = self._loop.ask(lambda: [self._side_record(side, node) for node in nodes])
        parts = (records[start : start + count] for start in range(0, len(records), count))
        return [pair for part in parts for pair in self._entries(side, part)]

    def _snapshot_sides(self, name: str, pages: Sequence[Page]) -> int:
        """Save entries, and list the entries of `pages` under `name`. Return how many are listed."""
        self._save_sides()
        count = 0
        for side in self.sides:
            disk = side.tiers.disk
            listed = [page for page in pages if disk is not None and page.digest in disk]
            if disk is not None and listed:
                path = snapshot.save(disk.folder, name, disk.identity, listed)
                snapshot.keep_shared(path, disk.segments_of(page.digest for page in listed))
            count += len(listed)
        return count

    # -- a prefix as a file

    def export_prefix(self, prefix: Prefix, path: Path) -> int:
        """Write the cached pages of a prompt to a file. Return how many tokens that covers."""
        cache, disk = self._parts()
        matches: list[PageRecord] = self._loop.ask(
            lambda: [self.page_record(node) for node in cache.find(prefix)],
        )
        pairs = self.payloads(matches)
        digests = {page.digest for page, _ in pairs}
        chain = snapshot.connected([entry.page for entry in matches if entry.page.digest in digests], cache.root_key)
        payloads = {page.digest: payload for page, payload in pairs}
        nodes = [entry.node for entry in matches[: len(chain)]]
        sides = [(side.identity, self.entries_of(side, nodes)) for side in self.sides]
        prefix_file.write(path, disk.identity, [(page, payloads[page.digest]) for page in chain], sides=sides)
        return len(chain) * cache.page_size

    def import_prefix(self, path: Path) -> int:
        """Take over the pages of a file. Return how many tokens. Raise SnapshotRefused if they are of another model."""
        cache, disk = self._parts()
        assert self.tiers is not None
        sides = [side.identity for side in self.sides]
        most = max(self.tiers.host.budget, disk.budget) + 2 * prefix_file.MOST_INDEX
        pairs, entries = prefix_file.read(path, disk.identity, sides=sides, most=most)
        for side, own in zip(self.sides, entries, strict=True):
            for page, payload in own:
                side.tiers.host.put(page.digest, payload)
        host = self.tiers.host
        if sum(size(payload) for _, payload in pairs) <= host.budget:
            for page, payload in pairs:
                host.put(page.digest, payload)
        else:
            disk.write(pairs)
        return self._loop.ask(lambda: snapshot.graft_all(cache, [page for page, _ in pairs])) * cache.page_size

    def _parts(self) -> tuple[AnyCache, DiskTier]:
        if self.cache is None or self._disk is None:
            raise ConfigError("disk_memory", 0, "is needed to export and import prefixes", "Open with disk_memory")
        return self.cache, self._disk

    # -- looking at the tree, on the session's loop

    def _find(self, test: Callable[[Node, bytes, float], bool], most: int | None = None) -> Iterable[PageRecord]:
        """Yield nodes, parents first, a slice of the tree at a time; `most` slices from where the last walk ended."""
        cache = self.cache
        assert cache is not None
        # Listed once per walk: that alone took 4 ms of the loop with 100,000 nodes, as much as the slices of a tick.
        resumed = most is not None and 0 < self._position < len(self._walk)
        nodes: list[Node] = self._walk if resumed else self._loop.ask(lambda: list(distinct(cache)))

        def look(part: Sequence[Node]) -> list[PageRecord]:
            now = cache.clock()
            present = (node for node in part if cache.has(node))
            return [self.page_record(node) for node in present if test(node, cache.digest_of(node), now)]

        start = self._position if resumed else 0
        stop = len(nodes) if most is None else min(len(nodes), start + most * SLICE)
        self._whole = stop - start == len(nodes)
        self._position, self._walk = (0, []) if stop == len(nodes) else (stop, nodes)
        yield from in_slices(self._loop, nodes[start:stop], look)

    def page_record(self, node: Node) -> PageRecord:
        """Return the record for reading a page that the tree holds now. Call it on the session's loop."""
        cache = self.cache
        assert cache is not None
        assert node.parent is not None
        last_used = time.time() - (cache.clock() - node.last_use)
        # A copy, because the row is reused when the node is forgotten.
        tokens = cache.tokens_of(node).copy()
        page = Page(cache.digest_of(node), cache.digest_of(node.parent), tokens, node.visits, last_used)
        return PageRecord(node, page, node.page)

    def payloads(self, pages: Sequence[PageRecord], batch: int = 1) -> list[tuple[Page, Payload]]:
        """Return the contents of pages, from host memory, disk or the device. Pages that are gone by now are left out.

        The device reads `batch` of them first, and then as many as it can between two steps. Call it in any thread
        but the session's own.
        """
        assert self.tiers is not None
        pairs: list[tuple[Page, Payload]] = []
        on_device: list[PageRecord] = []
        late: list[PageRecord] = []  # being copied from the device to host memory
        for entry in pages:
            payload = self.tiers.host.peek(entry.page.digest)
            if payload is None and not entry.on_device:
                payload = self.tiers.read(entry.page.digest)
            if payload is not None:
                pairs.append((entry.page, tuple(np.asarray(leaf) for leaf in payload)))
            else:
                (on_device if entry.on_device else late).append(entry)
        count = batch
        while on_device:
            part, on_device = on_device[:count], on_device[count:]
            read = self._read(part)
            pairs += read
            unchanged = {page.digest for page, _ in read}
            late += [entry for entry in part if entry.page.digest not in unchanged]
            if read:
                count = max(batch, PAUSE_BYTES // size(read[0][1]))
        for _ in range(ROUNDS):
            if not late:
                break
            self._read([])  # waits for the steps in flight, and so for their copies to host memory
            arrived = [(entry, self.tiers.host.peek(entry.page.digest)) for entry in late]
            pairs += [
                (entry.page, tuple(np.asarray(array) for array in payload))
                for entry, payload in arrived
                if payload is not None
            ]
            late = [entry for entry, payload in arrived if payload is None]
        order = {entry.page.digest: index for index, entry in enumerate(pages)}
        return sorted(pairs, key=lambda pair: order[pair[0].digest])

    def _read(self, part: Sequence[PageRecord]) -> list[tuple[Page, Payload]]:
        """Read device pages between two steps."""
        cache, runner = self.cache, self._engine.runner
        assert cache is not None
        pairs: list[tuple[Page, Payload]] = []

        def check(payloads: Sequence[Payload]) -> None:
            if not payloads:  # the session fell asleep before they could be read
                return
            # Nothing was planned since they were read: a node that still has its page had it then.
            for entry, payload in zip(part, payloads, strict=True):
                if cache.has(entry.node) and entry.node.page == entry.on_device:
                    pairs.append((entry.page, payload))

        job = partial(runner.read_pages, [entry.on_device for entry in part], [entry.page.digest for entry in part])
        self._loop.between_steps(job, check)
        return pairs


def in_slices(loop: SessionLoop, entries: Sequence[T], look: Callable[[Sequence[T]], list[R]]) -> Iterator[R]:
    """Yield what `look` returns for slices of the entries, one in each turn of the session's loop."""
    for start in range(0, len(entries), SLICE):
        yield from loop.ask(partial(look, entries[start : start + SLICE]))


_writers: weakref.WeakSet[CacheWriter] = weakref.WeakSet()
_registered: list[bool] = []


def _rest_at_exit(writer: CacheWriter) -> None:
    """Make the interpreter's exit wait for the writer to finish saving.

    A thread that is ended inside XLA aborts the process, and Orbax, which stores programs, needs thread pools: they
    take no more work once threading's own exit functions have run, the last registered first.
    """
    _writers.add(writer)
    if not _registered:
        import concurrent.futures.thread  # noqa: F401  registers the end of thread pools, which has to come later

        getattr(threading, "_register_atexit", atexit.register)(_rest)
        _registered.append(True)


def _rest() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for writer in tuple(_writers):
        writer.rest(max(0.0, deadline - time.monotonic()))
