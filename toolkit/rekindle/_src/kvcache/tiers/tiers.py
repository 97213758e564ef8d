"""The tiers below the device as one: host memory, and the disk if there is one.

`Tiers` satisfies `TierLike`; `CostModel` decides what to copy and what to compute.

tree        looks up payloads in host memory and on disk, holds the payloads that a plan relies on
runner      puts payloads that left the device, gets returning ones
scheduler   has pages fetched from disk before it admits the request that needs them
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from rekindle._src.core import words
from rekindle._src.core.drawable import Record
from rekindle._src.core.records import StepResult
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.kvcache.tiers.host import HostHold, HostTier, Payload
from rekindle.errors import StoreError

log = logging.getLogger("rekindle.cache")
READERS = 2  # threads; half of the time of a page that the system has in memory goes into its checksum
# Pages that several requests wait for are read together, and the requests admitted together. Of 16 requests that came
# at once, 6 used to be admitted 8 ms before the others, which then had to wait for their step.
TOGETHER_SECONDS = 0.03
AHEAD_BYTES, AHEAD_PAGES = 256 << 20, 8  # read ahead in all, and between two checks for waiting requests
PAUSE_SECONDS = 0.02
HANG_SECONDS = 10.0  # without a page from a disk that is being read, after which requests compute their pages


class DiskFetch(HostHold):
    """Pages on their way from disk to host memory, where they stay until `release`."""

    finished = False

    def __init__(self, host: HostTier, digests: Sequence[bytes], hangs: Callable[[], bool]) -> None:
        super().__init__(host, digests)
        self._hangs = hangs

    @property
    def over(self) -> bool:
        """True if waiting for it should end: it is finished, or the disk hangs."""
        return self.finished or self._hangs()


class Tiers:
    """Host memory and the disk. Only the scheduler's thread calls it, but for `put`, `get` and the reading thread."""

    def __init__(
        self, host: HostTier, costs: CostModel, disk: DiskTier | None = None, *, identity: Identity | None = None
    ) -> None:
        self.host, self.costs, self.disk = host, costs, disk
        self.hold, self.release = host.hold, host.release
        self.worth, self.observe, self.record_copy = costs.worth, costs.observe, costs.record_copy
        self._identity = identity
        self.busy: Callable[[], bool] = lambda: False  # requests run: nothing is read ahead
        self.finds_stored = False  # pages of earlier sessions are found by prompts, without a restore
        self.fillable: Callable[[], bool] = lambda: True  # programs that bring pages to the device need no compiling
        self._fetched = self._expected = 0  # pages that requests took from disk: on demand, and read ahead
        self._ahead: deque[bytes] = deque()
        self._unusable: set[bytes] = set()  # payloads on disk that did not fit the session's pages
        self._speculative: set[bytes] = set()  # read ahead, and no request came for it yet
        self._queue: queue.SimpleQueue[DiskFetch | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._progress: float | None = None  # when a page was read last; None while nothing is being read

    @property
    def identity(self) -> Identity | None:
        """The identity of the pages; changes with the weights."""
        return self._identity if self.disk is None else self.disk.identity

    @identity.setter
    def identity(self, identity: Identity) -> None:
        self._identity = identity
        if self.disk is not None:
            self.disk.identity = identity

    # -- for the tree

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.host

    def has(self, digest: bytes) -> bool:
        """True if a page can be restored now or after a fetch."""
        if digest in self.host:
            return True
        return self.disk is not None and digest not in self._unusable and digest in self.disk

    def should_offload(self, digest: bytes) -> bool:
        """True if a page that is about to leave the device should be read out. It counts as used now."""
        return not self.host.touch(digest) and self.host.budget > 0

    def touch(self, digest: bytes) -> None:
        self.host.touch(digest)

    def discard(self, digest: bytes) -> None:
        """Drop a payload that can't be used from host memory, and do not read it from disk again."""
        self._unusable.add(digest)
        self.host.discard(digest)

    def trim(self) -> None:
        self.host.trim()

    def clear(self) -> None:
        self._ahead.clear()
        self.host.clear()

    # -- for the runner

    def put(self, digest: bytes, payload: Payload) -> None:
        self.host.put_part(digest, payload)

    def get(self, digest: bytes) -> Payload:
        if digest in self._speculative:
            self._speculative.discard(digest)
            self._expected += 1
        return self.host.get(digest)

    # -- from disk

    @property
    def disk_hits(self) -> int:
        """Pages that were read from disk and taken by a request, or put on the device in advance of one."""
        return self._fetched + self._expected

    def read_ahead(self, digests: Iterable[bytes]) -> None:
        """Read pages that requests will likely need into host memory, in this order, while there is no other work."""
        self._ahead.extend(digests)
        if self._ahead and self.host.budget:
            self._start()

    @property
    def has_disk_pages(self) -> bool:
        """True if there may be pages that only the disk has."""
        return self.disk is not None and len(self.disk) > 0

    def fetch(self, digests: Sequence[bytes], beyond: int) -> DiskFetch | None:
        """Start reading; None if it is quicker to compute these pages and the `beyond` pages that they make usable."""
        if not digests or self.hangs() or not self.fillable():
            return None
        if not self.costs.worth(len(digests) + beyond, from_disk=len(digests)):
            return None
        self._start()
        fetch = DiskFetch(self.host, digests, self.hangs)
        self._queue.put(fetch)
        return fetch

    def hangs(self) -> bool:
        """True if the disk is being read and no page has come for `HANG_SECONDS`. Its pages are computed meanwhile."""
        progress = self._progress
        if progress is None or time.monotonic() - progress < HANG_SECONDS:
            return False
        if self.disk is not None:
            self.disk.log_once(
                "hang", f"{self.disk.folder} has not answered for {HANG_SECONDS:.0f} s; pages are computed"
            )
        return True

    def read(self, digest: bytes) -> Payload | None:
        """Return the payload from host memory or disk; None if it is in neither or can't be read."""
        payload = self.host.peek(digest)
        if payload is None and self.disk is not None:
            try:
                payload = self.disk.load(digest)
            except (KeyError, StoreError):
                return None
        return payload

    def close(self) -> None:
        self._queue.put(None)
        if self._reader is not None:
            self._reader.join(1.0)
        self.host.clear()
        if self.disk is not None:
            self.disk.close()

    def _start(self) -> None:
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_all, name="rekindle pages", daemon=True)
            self._reader.start()

    def _read_all(self) -> None:
        with ThreadPoolExecutor(READERS, thread_name_prefix="rekindle pages") as readers:
            while True:
                try:
                    fetch = self._queue.get(timeout=self._patience())
                except queue.Empty:
                    self._read_some(readers)
                    continue
                if fetch is None:
                    return
                self._serve(fetch, readers)

    def _serve(self, fetch: DiskFetch, readers: ThreadPoolExecutor) -> None:
        """Read the pages of a fetch, and of other fetches that arrive within `TOGETHER_SECONDS`."""
        start, fetches = time.perf_counter(), [fetch]
        pages = len(self._bring(fetch.digests, readers))
        while time.perf_counter() - start < TOGETHER_SECONDS and (following := self._waiting_fetch()) is not None:
            pages += len(self._bring(following.digests, readers))
            fetches.append(following)
        if pages:
            self.costs.record_load(pages, time.perf_counter() - start)
            self._fetched += pages
        for served in reversed(fetches):  # so that all are finished when the first one is
            served.finished = True

    def _waiting_fetch(self) -> DiskFetch | None:
        """Return the next fetch that is already in the queue, or None."""
        with contextlib.suppress(queue.Empty):
            fetch = self._queue.get_nowait()
            if fetch is None:
                self._queue.put(None)  # the end, which is the loop's
            return fetch
        return None

    def _patience(self) -> float | None:
        """Return the seconds to wait for a fetch before reading ahead; None if there is nothing to read ahead."""
        if not self._ahead:
            return None
        return PAUSE_SECONDS if self.busy() else 0.0

    def _read_some(self, readers: ThreadPoolExecutor) -> None:
        """Read a few pages ahead, if there is room for them."""
        assert self.disk is not None
        if self.busy():
            return
        digests: list[bytes] = []
        with contextlib.suppress(IndexError):  # cleared meanwhile
            while self._ahead and len(digests) < AHEAD_PAGES:
                digests.append(self._ahead.popleft())
        room = min(AHEAD_BYTES, self.host.budget) - self.host.nbytes
        count = max(0, room) // max(1, self.disk.page_bytes)
        if count < len(digests):
            self._ahead.clear()
        self._bring(digests[:count], readers, speculative=True)

    def _bring(
        self, digests: Iterable[bytes], readers: ThreadPoolExecutor, *, speculative: bool = False
    ) -> list[bytes]:
        """Read pages into host memory and return the digests that succeeded. The others are computed; the disk tier has
        reported the reason.
        """
        assert self.disk is not None
        disk, host = self.disk, self.host
        brought: list[bytes] = []
        self._progress = time.monotonic()
        try:
            runs = disk.runs(digest for digest in digests if digest not in host)
            loaded = readers.map(lambda run: disk.load_run(run, host.memory), runs)
            host.announce([digest for run in runs for digest in run.digests])
            for pairs in loaded:
                self._progress = time.monotonic()
                for digest, payload in pairs:
                    if speculative:
                        self._speculative.add(digest)  # before a request can take it
                    host.put(digest, payload, owned=True, cold=speculative)
                    brought.append(digest)
        except Exception:
            log.exception("pages could not be read from disk; they are computed")
        finally:
            self._progress = None
        return brought


_MEMORY = 9  # measurements
_RETRY = 16  # a refused copy is tried every so often, or a bad measurement would never be corrected
_MOST_DECODE = 0.25  # a step with a larger share of decode rows says little about the cost of prefill


class _Rate:
    """Seconds per unit: the median of the latest measurements. A single one can be a thousand times too long when it
    shared its time with a compilation or with another process."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_MEMORY)

    def record(self, units: float, seconds: float) -> None:
        self._latest.append(seconds / units)

    @property
    def value(self) -> float | None:
        ordered = sorted(self._latest)
        middle = len(ordered) // 2
        return (ordered[middle] + ordered[~middle]) / 2 if ordered else None


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Rates(Record):
    """Seconds, None where nothing was measured yet."""

    compute_token: float | None
    copy_page: float | None  # host to device
    load_page: float | None  # disk to host, checksum included

    _seconds = ("compute_token", "copy_page", "load_page")

    def __str__(self) -> str:
        lines = (
            f"{label} {'not measured yet' if value is None else words.seconds(value)}"
            for label, value in (
                ("computing a token:", self.compute_token),
                ("copying a page from host memory:", self.copy_page),
                ("reading a page from disk:", self.load_page),
            )
        )
        return "\n".join(lines)


class CostModel:
    """Decides whether to copy a prefix or to compute it again. A copy that was not measured yet counts as free.

    `mode` overrides the decision: "always" or "never" copy.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.mode: Literal["measured", "always", "never"] = "measured"
        self.refused = 0  # copies that would have cost more than computing
        self._compute, self._copy, self._load = _Rate(), _Rate(), _Rate()

    def observe(self, result: StepResult) -> None:
        """Measure the cost of a committed step's tokens. Steps that copied pages, decoded much or had few tokens say
        little about that and are left out."""
        plan = result.plan
        if (
            not plan.restore
            and plan.prefill_tokens >= self.page_size
            and len(plan.decode) <= _MOST_DECODE * plan.tokens
        ):
            self._compute.record(plan.tokens, result.device_seconds)

    def record_copy(self, pages: int, seconds: float) -> None:
        self._copy.record(pages, seconds)

    def record_load(self, pages: int, seconds: float) -> None:
        self._load.record(pages, seconds)

    def fetch_seconds(self, pages: int, *, from_disk: int = 0) -> float:
        """Return the seconds to bring `pages` to the device, when `from_disk` of them are not in host memory yet."""
        return pages * (self._copy.value or 0.0) + from_disk * (self._load.value or 0.0)

    def compute_seconds(self, pages: int) -> float | None:
        rate = self._compute.value
        return None if rate is None else pages * self.page_size * rate

    def quicker(self, pages: int, *, from_disk: int = 0) -> bool:
        """True if bringing `pages` back is expected to be quicker than computing them. Nothing is counted."""
        if self.mode != "measured":
            return self.mode == "always"
        compute = self.compute_seconds(pages)
        return not pages or compute is None or self.fetch_seconds(pages, from_disk=from_disk) <= compute

    def worth(self, pages: int, *, from_disk: int = 0) -> bool:
        """True if bringing `pages` back is expected to be quicker than computing them, or is tried again."""
        if self.mode == "never":
            return False
        if self.quicker(pages, from_disk=from_disk):
            return True
        self.refused += 1
        return self.refused % _RETRY == 0

    @property
    def rates(self) -> Rates:
        return Rates(self._compute.value, self._copy.value, self._load.value)
