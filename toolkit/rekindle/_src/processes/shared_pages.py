"""The leader's view of the host memory of several processes: keeps, drops and joins their parts of pages.

Each process keeps the part of a page that its devices have, under the page's digest. The leader alone decides which are
kept: each gather names the digests of its parts, and other messages name the digests to be dropped. Messages of one
connection keep their order, so every process has the same digests after the same messages. A page that is dropped while
it is still on its way from the devices is not kept by any of them.
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
        """Send all followers the same message. Return their answers. One caller at a time."""
        ...


class SharedPages:
    """Implements `OtherHosts` of `kvcache.tiers.divided_host` and `OtherDisks` of `kvcache.tiers.divided_disk`."""

    def __init__(self, followers: Connections, codec: CallCodec, heads: Mapping[int, np.ndarray]) -> None:
        """Set up; `heads` are the kv heads of a page that each follower's devices have."""
        self._followers, self._codec, self._heads = followers, codec, heads
        self._lock = threading.Lock()  # expected digests change together with the message that names them
        self._asking = threading.Lock()
        self._expected: set[bytes] = set()  # on their way from the devices
        self._on_disk: dict[int, set[bytes]] = {}  # digests that each follower has read from its disk, and not kept yet

    def gather(self, digests: Sequence[bytes], send: Callable[[], None]) -> None:
        """Send the message of a gather with `send`, and expect its pages from the devices."""
        with self._lock:
            self._expected.update(digests)
            send()

    def note_arrival(self, digest: bytes) -> bool:
        """Note that this process's part has left the devices. True if it is still to be kept."""
        with self._lock:
            expected = digest in self._expected
            self._expected.discard(digest)
            return expected

    def own_part(self, whole: paged.Payload) -> paged.Payload:
        """Return this process's part of a whole page."""
        return self._codec.parts.cut(whole)

    def keep(self, digest: bytes, whole: paged.Payload) -> None:
        """Give each follower its part of a page, unless it has read it. Raises ProcessLost if one is gone."""
        for process, heads in self._heads.items():
            stored = digest in self._on_disk.get(process, ())
            if stored:
                self._on_disk[process].discard(digest)
            content = self._codec.part(digest, None if stored else self._codec.parts.cut(whole, heads))
            self._followers.send_to(process, Kind.KEEP, content)

    def forget_read(self) -> None:
        """Forget read parts: followers are about to read other pages, and drop those that they need not keep."""
        self._on_disk = {}

    def read(self, digests: Sequence[bytes]) -> None:
        """Have the followers read their parts from disk; one caller at a time. Raises ProcessLost if one is gone."""
        answers = self._followers.ask_each(Kind.READ, self._codec.encode_digests(digests), Kind.HAVE)
        self._on_disk = {process: set(self._codec.read_digests(content)) for process, content in answers.items()}

    def store(self, pages: Sequence[Page]) -> None:
        """Have all followers write the parts of pages that they still have."""
        with contextlib.suppress(RekindleError):
            for at in range(0, len(pages), MOST_STORED):
                content = self._codec.encode_records(pages[at : at + MOST_STORED])
                for process in self._heads:
                    self._followers.send_to(process, Kind.STORE, content)

    def forget(self) -> None:
        """Have all followers remove their parts on disk."""
        with contextlib.suppress(RekindleError):
            for process in self._heads:
                self._followers.send_to(process, Kind.FORGET, b"")

    def drop(self, digests: Sequence[bytes]) -> None:
        """Have all followers drop pages. A lost follower is ignored: the session ends because of it elsewhere."""
        with self._lock:
            self._expected.difference_update(digests)
            with contextlib.suppress(RekindleError):
                for at in range(0, len(digests), MOST_NAMES):
                    content = self._codec.encode_digests(digests[at : at + MOST_NAMES])
                    for process in self._heads:
                        self._followers.send_to(process, Kind.DROP, content)

    def whole(self, digest: bytes, own_part: paged.Payload) -> paged.Payload | None:
        """Join this process's part of a page with those of all followers; None if one of them has none."""
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
        return self._codec.parts.join(own_part, parts)
