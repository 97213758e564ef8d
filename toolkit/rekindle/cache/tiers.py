"""The tiers below the device as one: host memory, and the disk if there is one. Satisfies `TierLike`.

tree        asks what is near (host memory) and what is known at all, holds what a plan counts on
runner      puts payloads that left the device, gets those that return
scheduler   has pages fetched from disk before it admits the request that needs them
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

from rekindle.cache.costs import CostModel
from rekindle.cache.disk import DiskTier
from rekindle.cache.host import HostTier, Payload
from rekindle.errors import StoreError
from rekindle.records import StepResult

log = logging.getLogger("rekindle.cache")


class Fetch:
    """Pages on their way from disk to host memory, where they stay until `release`."""

    def __init__(self, tiers: Tiers, digests: Sequence[bytes]) -> None:
        self.digests = tuple(digests)
        self.done = False
        self._host, self._generation = tiers.host, tiers.host.generation
        for digest in self.digests:
            self._host.hold(digest)

    def release(self) -> None:
        if self._generation == self._host.generation:
            for digest in self.digests:
                self._host.release(digest)
        self.digests = ()


class Tiers:
    """Everything but `put`, `get` and the reading thread belongs to the scheduler's thread."""

    def __init__(self, host: HostTier, costs: CostModel, disk: DiskTier | None = None) -> None:
        self.host, self.costs, self.disk = host, costs, disk
        self.disk_hits = 0  # pages that were read from disk for a request
        self._queue: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    # -- what the tree asks

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.host

    def knows(self, digest: bytes) -> bool:
        """It can be restored now, or after a fetch."""
        return digest in self.host or (self.disk is not None and digest in self.disk)

    def wants(self, digest: bytes) -> bool:
        """Its page is about to leave the device: should it be read out? It counts as used now."""
        return not self.host.touch(digest) and self.host.budget > 0

    def touch(self, digest: bytes) -> None:
        self.host.touch(digest)

    def hold(self, digest: bytes) -> None:
        self.host.hold(digest)

    def release(self, digest: bytes) -> None:
        self.host.release(digest)

    def trim(self) -> None:
        self.host.trim()

    def clear(self) -> None:
        self.host.clear()

    def worth(self, pages: int) -> bool:
        return self.costs.worth(pages)

    def observe(self, result: StepResult) -> None:
        self.costs.observe(result)

    # -- what the runner does

    def put(self, digest: bytes, payload: Payload) -> None:
        self.host.put(digest, payload)

    def get(self, digest: bytes) -> Payload:
        return self.host.get(digest)

    def copied(self, pages: int, seconds: float) -> None:
        self.costs.copied(pages, seconds)

    # -- from disk

    @property
    def far(self) -> bool:
        """There may be pages that only the disk has."""
        return self.disk is not None and len(self.disk) > 0

    def fetch(self, digests: Sequence[bytes], beyond: int) -> Fetch | None:
        """Start reading; None if computing these and the `beyond` pages that they lead to is quicker."""
        if not digests or not self.costs.worth(len(digests) + beyond, from_disk=len(digests)):
            return None
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_all, name="rekindle pages", daemon=True)
            self._reader.start()
        fetch = Fetch(self, digests)
        self._queue.put(fetch)
        return fetch

    def read(self, digest: bytes) -> Payload | None:
        """The payload from wherever it is; None if it is nowhere, or damaged."""
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

    def _read_all(self) -> None:
        while (fetch := self._queue.get()) is not None:
            start, pages = time.perf_counter(), 0
            try:
                for digest in fetch.digests:
                    if digest not in self.host:
                        assert self.disk is not None
                        self.host.put(digest, self.disk.load(digest))
                        pages += 1
            except (KeyError, StoreError):
                pass  # what is missing is computed; the disk tier has reported damage
            except Exception:
                log.exception("pages could not be read from disk; they are computed")
            if pages:
                self.costs.loaded(pages, time.perf_counter() - start)
                self.disk_hits += pages
            fetch.done = True
