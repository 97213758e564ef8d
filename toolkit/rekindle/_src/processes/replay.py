"""A follower makes the calls that its leader makes, in their order, over weights, pages and state of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.processes.call_codec import CallCodec, StepCall
from rekindle._src.processes.channel import Channel
from rekindle._src.processes.facts import as_json, from_json
from rekindle._src.processes.kept_pages import KeptPages
from rekindle._src.processes.kinds import Kind
from rekindle._src.processes.results import DONE, checksum
from rekindle._src.programs.helpers import ADMIT
from rekindle._src.programs.programs import Programs
from rekindle.errors import CompileError, ProcessLost

WAITING_CALLS = 64  # messages read ahead; beyond, the leader waits in its next call
LONGEST_ERROR = 4096  # characters
WAITING_RESULTS = 4  # steps that the device may have before it; beyond, this process waits


class LoadedWeights(NamedTuple):
    """Weights on this process's devices."""

    leaves: Sequence[Any]
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
        self._guided: tuple[Any, _Buffers, np.ndarray] | None = None  # a step whose tokens have not been chosen
        self._steps = 0
        self._results: queue.Queue[tuple[int, Any, np.ndarray] | None] = queue.Queue(WAITING_RESULTS)
        self._problem: BaseException | None = None

    def run(self) -> None:
        """Make calls until the leader closes the session. Raises the error of any other end."""
        messages: queue.Queue[tuple[Kind, bytes] | BaseException] = queue.Queue(WAITING_CALLS)
        threading.Thread(target=self._receive, args=(messages,), name="rekindle leader", daemon=True).start()
        reader = threading.Thread(target=self._read, name="rekindle results", daemon=True)
        reader.start()
        while True:
            message = messages.get()
            if isinstance(message, BaseException):
                raise message
            kind, content = message
            if kind is Kind.CLOSE:
                break
            self._make(kind, content)
        self._results.put(None)
        reader.join()
        self._pages.close()
        if self._calls is not None:
            self._calls.free()
        self._weights.delete()

    def _receive(self, messages: queue.Queue[tuple[Kind, bytes] | BaseException]) -> None:
        try:
            while True:
                kind, content = self._channel.receive()
                messages.put((kind, content))
                if kind is Kind.CLOSE:
                    return
        except BaseException as error:
            self._lost(error)
            messages.put(error)

    def _read(self) -> None:
        """Send the leader a checksum of each step's tokens."""
        try:
            while (entry := self._results.get()) is not None:
                step, rows, chosen = entry
                self._channel.send(Kind.DONE, DONE.pack(step, checksum(np.asarray(rows), chosen)))
        except BaseException as error:
            self._problem = error
            while self._results.get() is not None:
                pass

    def _make(self, kind: Kind, content: bytes) -> None:
        problem = self._problem or self._pages.problem
        if problem is not None:
            raise problem
        codec = self._codec
        match kind:
            case Kind.PREPARE:
                self._prepare(content)
            case Kind.RENEW:
                if self._calls is None:
                    self._calls = DeviceCalls(self._programs, self._weights.leaves)
                else:
                    self._calls.renew()
            case Kind.STEP:
                self._step(codec.read_step(content))
            case Kind.CHOOSE:
                key, masks = codec.read_choose(content)
                if self._guided is None:
                    raise ProcessLost("tokens are to be chosen of no step")
                (scores, upload, chosen), self._guided = self._guided, None
                calls = self._device_calls
                self._report_rows(calls.choose(key, calls.program(key), scores, upload, masks), chosen)
            case Kind.ADMIT:
                self._device_calls.admit(self._device_calls.program(ADMIT), *codec.read_admit(content))
            case Kind.COLLECT:
                ids, digests = codec.read_move(content)
                self._pages.collected(digests, self._device_calls.collect(ids, digests))
            case Kind.GATHER:
                ids, digests = codec.read_move(content)
                self._pages.expect(digests, self._device_calls.gather(ids, digests))
            case Kind.SCATTER:
                ids, digests = codec.read_move(content)
                pages = [codec.parts.to_scatter(self._pages.get(digest)) for digest in digests]
                self._device_calls.scatter(ids, pages, digests)
            case Kind.KEEP:
                digest, part = codec.read_part(content)
                self._pages.keep(digest, part)
            case Kind.DROP:
                self._pages.drop(codec.read_digests(content))
            case Kind.FETCH:
                self._pages.fetch(content)
            case Kind.READ:
                self._pages.read(codec.read_digests(content))
            case Kind.STORE:
                self._pages.store(codec.read_records(content))
            case Kind.FORGET:
                self._pages.forget()
            case Kind.LOAD_WEIGHTS:
                self._load_weights(content)
            case Kind.TAKE_WEIGHTS:
                if self._loaded is None:
                    raise ProcessLost("weights are to be used that were not loaded")
                self._device_calls.replace_weights(self._loaded.leaves)
                self._weights.delete()
                self._weights, self._loaded = self._loaded, None
                self._pages.belong_to(self._weights.fingerprint)
            case Kind.DROP_WEIGHTS:
                if self._loaded is not None:
                    self._loaded.delete()
                self._loaded = None
            case Kind.FAILED:
                raise ProcessLost(f"the leader ends the session: {from_json(content).get('error')}")
            case _:
                raise ProcessLost(f"the leader sent a {kind.name} message, which followers don't take")

    @property
    def _device_calls(self) -> DeviceCalls:
        if self._calls is None:
            raise ProcessLost("a call came before there were pages")
        return self._calls

    def _step(self, call: StepCall) -> None:
        calls, upload = self._device_calls, _Buffers(call.ints, call.floats)
        chosen = self._codec.sampling(call.key, call.ints)
        if call.key.part:
            forwarded = calls.forward(call.key, calls.program(call.key), upload)
            self._guided = forwarded.scores, upload, chosen
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
        self._channel.send(Kind.READY, as_json(fields))

    def _load_weights(self, content: bytes) -> None:
        try:
            self._loaded = self._load(str(from_json(content).get("weights")))
            fields = {"fingerprint": self._loaded.fingerprint}
        except Exception as error:
            fields = {"error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]}
        self._channel.send(Kind.WEIGHTS, as_json(fields))
