"""The host memory of several processes as its leader sees it: who keeps what, and how a page becomes whole again.

Each process keeps the part of a page that its devices have, under the page's digest. The leader alone decides what is
kept: it says with each gather what the parts are kept as, and which are to be dropped. Messages of one connection keep
their order, so every process has the same digests after the same messages. A page that is dropped while it is still on
its way from the devices is not kept by any of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from rekindle._src.kvcache.digest import DIGEST_SIZE
from rekindle._src.kvcache.persist.segment import Page
from rekindle._src.processes.call_codec import CallCodec
from rekindle._src.processes.kinds import LIMITS, Kind
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.page_parts import layout_of
from rekindle.errors import ProcessLost, RekindleError

MOST_NAMES = LIMITS[Kind.DROP] // DIGEST_SIZE
MOST_STORED = 1024  # pages of a message that has them written


class Connections(Protocol):
    """The followers of a session, by process."""

    def send_to(self, process: int, kind: Kind, content: bytes) -> None: ...
    def ask_each(self, kind: Kind, content: bytes, answer: Kind) -> Mapping[int, bytes]:
        """Send the same to all; returns their answers. One caller at a time."""
        ...


class SharedPages:
    """Implements `Others` of `kvcache.tiers.divided_host` and `OtherDisks` of `kvcache.tiers.divided_disk`."""

    def __init__(self, followers: Connections, codec: CallCodec, heads: Mapping[int, np.ndarray]) -> None:
        """`heads` are those of a page that each follower's devices have."""
        self._followers, self._codec, self._heads = followers, codec, heads
        self._lock = threading.Lock()  # what is expected changes with the message that says so
        self._asking = threading.Lock()
        self._expected: set[bytes] = set()  # on their way from the devices
        self._there: dict[int, set[bytes]] = {}  # what each follower has read from its disk, and not kept yet

    def gathered(self, digests: Sequence[bytes], send: Callable[[], None]) -> None:
        """Pages are about to leave the devices, which `send` says."""
        with self._lock:
            self._expected.update(digests)
            send()

    def arrived(self, digest: bytes) -> bool:
        """This process's part has left the devices; whether it is still to be kept."""
        with self._lock:
            found = digest in self._expected
            self._expected.discard(digest)
            return found

    def own(self, whole: paged.Payload) -> paged.Payload:
        """This process's part of a whole page."""
        return self._codec.parts.cut(whole)

    def keep(self, digest: bytes, whole: paged.Payload) -> None:
        """Give each follower its part of a page, unless it has read it. Raises ProcessLost if one is gone."""
        for process, heads in self._heads.items():
            there = digest in self._there.get(process, ())
            if there:
                self._there[process].discard(digest)
            content = self._codec.part(digest, None if there else self._codec.parts.cut(whole, heads))
            self._followers.send_to(process, Kind.KEEP, content)

    def forget_read(self) -> None:
        """Followers are about to read other pages, and forget those that they were not told to keep."""
        self._there = {}

    def read(self, digests: Sequence[bytes]) -> None:
        """Have the followers read their parts from disk; one caller at a time. Raises ProcessLost if one is gone."""
        answers = self._followers.ask_each(Kind.READ, self._codec.named_pages(digests), Kind.HAVE)
        self._there = {process: set(self._codec.read_named_pages(told)) for process, told in answers.items()}

    def store(self, pages: Sequence[Page]) -> None:
        """Have all followers write their parts of pages, as far as they have them still."""
        with contextlib.suppress(RekindleError):
            for at in range(0, len(pages), MOST_STORED):
                content = self._codec.stored(pages[at : at + MOST_STORED])
                for process in self._heads:
                    self._followers.send_to(process, Kind.STORE, content)

    def forget(self) -> None:
        """Have all followers remove what they have on disk."""
        with contextlib.suppress(RekindleError):
            for process in self._heads:
                self._followers.send_to(process, Kind.FORGET, b"")

    def drop(self, digests: Sequence[bytes]) -> None:
        """Have all followers drop pages. One that is gone has dropped them, and ends the session elsewhere."""
        with self._lock:
            self._expected.difference_update(digests)
            with contextlib.suppress(RekindleError):
                for at in range(0, len(digests), MOST_NAMES):
                    content = self._codec.named_pages(digests[at : at + MOST_NAMES])
                    for process in self._heads:
                        self._followers.send_to(process, Kind.DROP, content)

    def whole(self, digest: bytes, own: paged.Payload) -> paged.Payload | None:
        """A page of this process's part and those of all followers; None if one of them has none."""
        parts = []
        try:
            with self._asking:
                answers = self._followers.ask_each(Kind.FETCH, digest, Kind.PART)
        except RekindleError:
            return None
        for process, content in answers.items():
            heads = self._heads[process]
            name, part = self._codec.read_part(content, layout_of(self._codec.parts.whole, len(heads)))
            if name != digest:
                raise ProcessLost(f"process {process} sent page {name.hex()} where {digest.hex()} was asked for")
            if part is None:
                return None
            parts.append((heads, part))
        return self._codec.parts.join(own, parts)
