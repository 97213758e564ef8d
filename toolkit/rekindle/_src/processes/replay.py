"""A follower makes the calls that its leader makes, in their order, over weights, pages and state of its own.

Its host memory and its disk have its parts of pages, which are kept and dropped on the leader's orders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from rekindle._src.channels.channel import Channel, MessageKind, as_json, from_json
from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.kvcache.persist.segment import Page
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.kvcache.tiers.host import HostTier, size
from rekindle._src.processes.codec import DONE, CallCodec, StepCall, checksum
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import ADMIT
from rekindle._src.programs.programs import Programs
from rekindle.errors import CompileError, ProcessLost, StoreError

WAITING_CALLS = 64  # messages read ahead; beyond, the leader waits in its next call
LONGEST_ERROR = 4096  # characters
WAITING_RESULTS = 4  # steps that the device may have before it; beyond, this process waits
CLOSE_SECONDS = 5.0  # for parts that are still to be written when the session ends
WAIT_SECONDS = 0.5  # between two checks that the thread that reads pages still runs
COLLECTED_BYTES = 128 << 20  # of pages that were read from the devices and not written yet; the oldest go first


class LoadedWeights(NamedTuple):
    leaves: Sequence[Array]
    fingerprint: str
    delete: Callable[[], None]


class _Buffers(NamedTuple):
    """The buffers of an `Upload` that `DeviceCalls` needs."""

    ints: np.ndarray
    floats: np.ndarray


class Replay:
    """The calls of one session in a follower."""

    def __init__(
        self,
        channel: Channel,
        programs: Programs,
        weights: LoadedWeights,
        load: Callable[[str], LoadedWeights],
        *,
        disk: DiskTier | None = None,
        lost: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        """Set up. `load` reads other weights by name. `disk` is for this process's parts of pages. `lost` is called in
        another thread when the leader is gone.
        """
        self._channel, self._programs, self._load, self._lost = channel, programs, load, lost
        self._codec = codec = CallCodec(programs)
        self._pages = KeptPages(codec, channel.send, disk)
        self._weights = weights
        self._loaded: LoadedWeights | None = None  # weights that may replace them
        self._calls: DeviceCalls | None = None
        self._forwarded: tuple[Any, _Buffers, np.ndarray] | None = None  # a step before its tokens are chosen
        self._steps = 0
        self._results: queue.Queue[tuple[int, Any, np.ndarray] | None] = queue.Queue(WAITING_RESULTS)
        self._problem: BaseException | None = None

    def run(self) -> None:
        """Make calls until the leader closes the session. Raises the error of any other end."""
        messages: queue.Queue[tuple[MessageKind, bytes] | BaseException] = queue.Queue(WAITING_CALLS)
        threading.Thread(target=self._receive, args=(messages,), name="rekindle leader", daemon=True).start()
        reader = threading.Thread(target=self._read, name="rekindle results", daemon=True)
        reader.start()
        while True:
            message = messages.get()
            if isinstance(message, BaseException):
                raise message
            kind, content = message
            if kind is MessageKind.CLOSE:
                break
            self._make(kind, content)
        self._results.put(None)
        reader.join()
        self._pages.close()
        if self._calls is not None:
            self._calls.free()
        self._weights.delete()

    def _receive(self, messages: queue.Queue[tuple[MessageKind, bytes] | BaseException]) -> None:
        try:
            while True:
                kind, content = self._channel.receive()
                messages.put((kind, content))
                if kind is MessageKind.CLOSE:
                    return
        except BaseException as error:
            self._lost(error)
            messages.put(error)

    def _read(self) -> None:
        """Send the leader a checksum of each step's tokens."""
        try:
            while (entry := self._results.get()) is not None:
                step, rows, chosen = entry
                self._channel.send(MessageKind.DONE, DONE.pack(step, checksum(np.asarray(rows), chosen)))
        except BaseException as error:
            self._problem = error
            while self._results.get() is not None:
                pass

    def _make(self, kind: MessageKind, content: bytes) -> None:
        problem = self._problem or self._pages.problem
        if problem is not None:
            raise problem
        codec = self._codec
        match kind:
            case MessageKind.PREPARE:
                self._prepare(content)
            case MessageKind.RENEW:
                if self._calls is None:
                    self._calls = DeviceCalls(self._programs, self._weights.leaves)
                else:
                    self._calls.renew()
            case MessageKind.STEP:
                self._step(codec.read_step(content))
            case MessageKind.CHOOSE:
                key, masks = codec.read_choose(content)
                if self._forwarded is None:
                    raise ProcessLost("tokens are to be chosen of no step")
                (scores, upload, chosen), self._forwarded = self._forwarded, None
                calls = self._device_calls
                self._report_rows(calls.choose(key, calls.program(key), scores, upload, masks), chosen)
            case MessageKind.ADMIT:
                self._device_calls.admit(self._device_calls.program(ADMIT), *codec.read_admit(content))
            case MessageKind.COLLECT:
                ids, digests = codec.read_move(content)
                self._pages.collected(digests, self._device_calls.collect(ids, digests))
            case MessageKind.GATHER:
                ids, digests = codec.read_move(content)
                self._pages.expect(digests, self._device_calls.gather(ids, digests))
            case MessageKind.SCATTER:
                ids, digests = codec.read_move(content)
                pages = [codec.parts.to_scatter(self._pages.get(digest)) for digest in digests]
                self._device_calls.scatter(ids, pages, digests)
            case MessageKind.COPY:
                self._device_calls.copy(*codec.read_copy(content))
            case MessageKind.KEEP:
                digest, part = codec.read_part(content)
                self._pages.keep(digest, part)
            case MessageKind.DROP:
                self._pages.drop(codec.read_digests(content))
            case MessageKind.FETCH:
                self._pages.fetch(content)
            case MessageKind.READ:
                self._pages.read(codec.read_digests(content))
            case MessageKind.STORE:
                self._pages.store(codec.read_records(content))
            case MessageKind.FORGET:
                self._pages.forget()
            case MessageKind.LOAD_WEIGHTS:
                self._load_weights(content)
            case MessageKind.TAKE_WEIGHTS:
                if self._loaded is None:
                    raise ProcessLost("weights are to be used that were not loaded")
                self._device_calls.replace_weights(self._loaded.leaves)
                self._weights.delete()
                self._weights, self._loaded = self._loaded, None
                self._pages.belong_to(self._weights.fingerprint)
            case MessageKind.DROP_WEIGHTS:
                if self._loaded is not None:
                    self._loaded.delete()
                self._loaded = None
            case MessageKind.FAILED:
                raise ProcessLost(f"the leader ends the session: {from_json(content).get('error')}")
            case _:
                raise ProcessLost(f"the leader sent a {kind.name} message, which followers don't take")

    @property
    def calls(self) -> DeviceCalls | None:
        """The calls of programs; None until there are pages."""
        return self._calls

    @property
    def _device_calls(self) -> DeviceCalls:
        if self._calls is None:
            raise ProcessLost("a call came before there were pages")
        return self._calls

    def _step(self, call: StepCall) -> None:
        calls, upload = self._device_calls, _Buffers(call.ints, call.floats)
        chosen = self._codec.sampling(call.key, call.ints)
        if call.key.span:
            forwarded = calls.forward(call.key, calls.program(call.key), upload)
            self._forwarded = forwarded.scores, upload, chosen
        else:
            self._report_rows(calls.step(call.key, calls.program(call.key), upload).rows, chosen)

    def _report_rows(self, rows: Any, chosen: np.ndarray) -> None:
        self._results.put((self._steps, rows, chosen))
        self._steps += 1

    def _prepare(self, content: bytes) -> None:
        key = self._codec.program(content)
        fields = {"program": key.name}
        try:
            self._programs.get(key)
        except CompileError as error:
            fields["error"] = str(error)[:LONGEST_ERROR]
        self._channel.send(MessageKind.READY, as_json(fields))

    def _load_weights(self, content: bytes) -> None:
        try:
            self._loaded = self._load(str(from_json(content).get("weights")))
            fields = {"fingerprint": self._loaded.fingerprint}
        except Exception as error:
            fields = {"error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]}
        self._channel.send(MessageKind.WEIGHTS, as_json(fields))


class KeptPages:
    """Parts by digest. The thread that makes calls uses it; another one waits for devices and disk, and answers."""

    def __init__(
        self, codec: CallCodec, send: Callable[[MessageKind, bytes], object], disk: DiskTier | None = None
    ) -> None:
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
        self._jobs.put(lambda: self._send(MessageKind.PART, self._codec.part(digest, self._host.peek(digest))))

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
                size_of_disk = f"disk_memory of {disk.budget >> 20} MiB"
                disk.log_once("full", f"{size_of_disk} is full; newer parts of pages are not saved")
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
        self._send(MessageKind.HAVE, self._codec.encode_digests(list(parts)))

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException as error:
            with self._changed:
                self.problem = error
                self._changed.notify_all()
