"""Sharing of pages: a replica gives its pages, and takes those of its requests from other replicas."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from rekindle._src.core.records import Request
from rekindle._src.kvcache.tiers.host import Held
from rekindle._src.session.client import Client
from rekindle._src.session.page_sharing import PageAddress, Puller, SharedPages, page_address
from rekindle.errors import RekindleError

log = logging.getLogger("rekindle.fleet")
PULLS = 4  # at once
LOOK_SECONDS = 0.1
ROOM_SECONDS = 10.0  # a pull's limit of waiting for room; after it, the prompt is computed instead

Then = Callable[[Callable[[], object]], object]  # continues a request; its argument releases the pages after their use


class Pulls:
    """The pulls of one open session whose pages can be shared."""

    def __init__(self, client: Client, shared: SharedPages) -> None:
        self._host, self._puller = client.host, Puller(client.host, client.writer)
        self.address: PageAddress = page_address(shared)
        self.pages = self.bytes = self.failed = 0  # pages and bytes that were taken, and failed pulls
        self._waiting: deque[Callable[[], object]] = deque()
        self._workers = 0
        self._room = threading.Condition()
        self._held = 0  # bytes of pulled pages in host memory that no request has used yet

    def figures(self) -> dict[str, int]:
        """Return the figures for the fleet's statistics."""
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
        tokens = request.token_ids
        if request.resumed is not None:
            tokens = np.concatenate([tokens, request.resumed.token_ids])
        size = len(tokens) // self._puller.identity.page_size * self._puller.page_bytes
        if not self._enter(size):
            self.failed += 1
            then(nothing)
            return
        claim = _Claim(lambda: self._leave(size))
        try:
            pulled = self._puller.prefix(address, tokens, request.root)
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
        self.held: Held | None = None

    def give_up(self) -> None:
        """Release room and pages. Further calls do nothing."""
        leave, self._leave = self._leave, None
        if self.held is not None:
            self.held.release()
        if leave is not None:
            leave()


def nothing() -> None:
    """Do nothing: no pages were taken, so there is nothing to release."""
