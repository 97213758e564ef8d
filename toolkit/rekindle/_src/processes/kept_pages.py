"""The host memory and the disk of a follower: its parts of pages, kept and dropped on its leader's orders."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from rekindle._src.kvcache.persist.segment import Page
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.kvcache.tiers.host import HostTier, size
from rekindle._src.processes.call_codec import CallCodec
from rekindle._src.processes.kinds import Kind
from rekindle._src.programs import kv_layout as paged
from rekindle.errors import ProcessLost, StoreError

CLOSE_SECONDS = 5.0  # for parts that are still to be written when the session ends
WAIT_SECONDS = 0.5  # between two checks that the thread that reads pages still runs
COLLECTED_BYTES = 128 << 20  # of pages that were read from the devices and not written yet; the oldest go first


class KeptPages:
    """Parts by digest. The thread that makes calls uses it; another one waits for devices and disk, and answers."""

    def __init__(self, codec: CallCodec, send: Callable[[Kind, bytes], object], disk: DiskTier | None = None) -> None:
        """Set up; `send` sends the leader a message. Without a `disk` nothing is written or read."""
        self._codec, self._parts, self._send, self._disk = codec, codec.parts, send, disk
        self._host = HostTier(sys.maxsize)  # the leader's budget bounds it: it drops pages beyond that
        self._changed = threading.Condition()
        self._expected: dict[bytes, object] = {}  # by digest, the gather that brings it
        self._read: dict[bytes, paged.Payload] = {}  # from disk; the leader knows them, and decides which are kept
        self._collected: OrderedDict[bytes, paged.Payload] = OrderedDict()  # may be written
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="rekindle pages", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._host)

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return self._host.nbytes

    # -- host memory

    def expect(self, digests: Sequence[bytes], payload: paged.Payload) -> None:
        """Keep the leading pages of a gather, once they have left the devices."""
        gather = object()
        with self._changed:
            self._expected.update(dict.fromkeys(digests, gather))

        def store() -> None:
            arrays = self._parts.to_host(payload)
            with self._changed:
                for at, digest in enumerate(digests):
                    if self._expected.get(digest) is gather:  # it was not dropped meanwhile
                        del self._expected[digest]
                        self._host.put(digest, tuple(array[at : at + 1] for array in arrays))
                self._changed.notify_all()

        self._jobs.put(store)

    def keep(self, digest: bytes, part: paged.Payload | None) -> None:
        """Keep a part that the leader sends; without one, the part that was read here."""
        if part is not None:
            self._host.put(digest, part)
            return
        try:
            self._host.put(digest, self._read.pop(digest), owned=True)
        except KeyError:
            raise ProcessLost(f"page {digest.hex()} is to be kept, which was not read here") from None

    def drop(self, digests: Sequence[bytes]) -> None:
        """Forget parts, those on their way too."""
        with self._changed:
            for digest in digests:
                self._expected.pop(digest, None)
                self._host.discard(digest)
            self._changed.notify_all()

    def get(self, digest: bytes) -> paged.Payload:
        """Return a part; waits while it is on its way. Raises ProcessLost if it is not kept here."""
        with self._changed:
            while digest in self._expected and digest not in self._host and self.problem is None:
                self._changed.wait(WAIT_SECONDS)
        try:
            return self._host.get(digest)
        except KeyError:
            raise ProcessLost(f"page {digest.hex()} is to be restored, which is not kept here") from self.problem

    def fetch(self, digest: bytes) -> None:
        """Send a part to the leader, once all earlier ones have arrived."""
        self._jobs.put(lambda: self._send(Kind.PART, self._codec.part(digest, self._host.peek(digest))))

    # -- the disk

    def belong_to(self, fingerprint: str) -> None:
        """Mark parts that are written from now on as parts of these weights."""
        if self._disk is not None:
            self._disk.identity = dataclasses.replace(self._disk.identity, fingerprint=fingerprint)

    def collected(self, digests: Sequence[bytes], payload: paged.Payload) -> None:
        """Keep the parts of whole pages that the leader reads, since it may have them written next."""
        if self._disk is None:
            return

        def remember() -> None:
            arrays = self._parts.collect(payload)
            for at, digest in enumerate(digests):
                self._collected[digest] = tuple(array[at : at + 1].copy() for array in arrays)
            while sum(map(size, self._collected.values())) > COLLECTED_BYTES:
                self._collected.popitem(last=False)

        self._jobs.put(remember)

    def store(self, pages: Sequence[Page]) -> None:
        """Write the parts of pages that are in memory; the leader has all of them whole."""
        self._jobs.put(lambda: self._write(pages))

    def read(self, digests: Sequence[bytes]) -> None:
        """Read parts from disk and tell the leader which are there."""
        self._jobs.put(lambda: self._load(digests))

    def forget(self) -> None:
        """Remove the parts on disk for these weights."""
        self._jobs.put(self._clear)

    def close(self) -> None:
        """Forget everything in memory, and end the thread once it has done its jobs."""
        self._jobs.put(None)
        self._thread.join(CLOSE_SECONDS)
        self._host.clear()
        if self._disk is not None:
            self._disk.close()

    def _write(self, pages: Sequence[Page]) -> None:
        disk, pairs = self._disk, list[tuple[Page, paged.Payload]]()
        for page in pages:
            part = self._collected.pop(page.digest, None) or self._host.peek(page.digest)
            if part is not None:
                pairs.append((page, part))
        if disk is None or not pairs:
            return
        total = sum(size(part) for _, part in pairs)
        try:
            if disk.room(total) < total:
                disk.log_once(
                    "full", f"disk_memory of {disk.budget >> 20} MiB is full; newer parts of pages are not saved"
                )
            else:
                disk.write(pairs)
        except (OSError, StoreError) as error:
            disk.log_once("write", f"parts of pages are not saved, and will come from the leader: {error}")

    def _clear(self) -> None:
        if self._disk is not None:
            with contextlib.suppress(OSError):  # remains are content-addressed, and leave with the budget
                self._disk.clear()

    def _load(self, digests: Sequence[bytes]) -> None:
        parts: dict[bytes, paged.Payload] = {}
        if self._disk is not None:
            for run in self._disk.runs(digests):
                parts.update(self._disk.load_run(run, self._host.memory))
        self._read = parts
        self._send(Kind.HAVE, self._codec.encode_digests(list(parts)))

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException as error:
            with self._changed:
                self.problem = error
                self._changed.notify_all()
