"""The host memory of a follower: its parts of pages, kept and dropped as its leader says."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence

from rekindle._src.kvcache.tiers.host import HostTier
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.page_parts import PageParts
from rekindle.errors import ProcessLost

WAIT_SECONDS = 0.5  # between two looks whether the thread that reads pages still runs


class KeptPages:
    """Parts by digest. The thread that makes calls uses it; another one waits for the devices and answers."""

    def __init__(self, parts: PageParts, tell: Callable[[bytes, paged.Payload | None], object]) -> None:
        """`tell` sends a part to the leader."""
        self._parts, self._tell = parts, tell
        self._host = HostTier(sys.maxsize)  # the leader's budget bounds it: it drops what exceeds that
        self._changed = threading.Condition()
        self._expected: dict[bytes, object] = {}  # by digest, the gather that brings it
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="rekindle pages", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._host)

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    def expect(self, digests: Sequence[bytes], payload: paged.Payload) -> None:
        """Keep the leading pages of a gather, once the devices have given them."""
        gather = object()
        with self._changed:
            self._expected.update(dict.fromkeys(digests, gather))

        def store() -> None:
            arrays = self._parts.arrived(payload)
            with self._changed:
                for at, digest in enumerate(digests):
                    if self._expected.get(digest) is gather:  # it was not dropped meanwhile
                        del self._expected[digest]
                        self._host.put(digest, tuple(array[at : at + 1] for array in arrays))
                self._changed.notify_all()

        self._jobs.put(store)

    def keep(self, digest: bytes, part: paged.Payload) -> None:
        """Keep a part that the leader has read."""
        self._host.put(digest, part)

    def drop(self, digests: Sequence[bytes]) -> None:
        """Forget parts, those on their way too."""
        with self._changed:
            for digest in digests:
                self._expected.pop(digest, None)
                self._host.discard(digest)
            self._changed.notify_all()

    def get(self, digest: bytes) -> paged.Payload:
        """A part; waits while it is on its way. Raises ProcessLost if it is not kept here."""
        with self._changed:
            while digest in self._expected and digest not in self._host and self.problem is None:
                self._changed.wait(WAIT_SECONDS)
        try:
            return self._host.get(digest)
        except KeyError:
            raise ProcessLost(f"page {digest.hex()} is to be restored, which is not kept here") from self.problem

    def fetch(self, digest: bytes) -> None:
        """Send a part to the leader, when those on their way before it have come."""
        self._jobs.put(lambda: self._send(digest))

    def close(self) -> None:
        """Forget everything, and end the thread."""
        self._jobs.put(None)
        self._thread.join(1.0)
        self._host.clear()

    def _send(self, digest: bytes) -> None:
        self._tell(digest, self._host.peek(digest))

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException as error:
            with self._changed:
                self.problem = error
                self._changed.notify_all()
