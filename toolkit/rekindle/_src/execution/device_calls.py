"""The device's side of a runner: weights, pages and request state, and every call of a program over them.

All calls pass here, in the order in which they run, and nothing else calls a program. So a session of several processes
needs this one seam: its `Recorder` is told of each call before it is made, and followers make the same calls over
weights, pages and state of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from rekindle._src.core.guides import Mask
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs import pinned_pages
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.helpers import COLLECT, GATHER, SCATTER, TABLES, Helper
from rekindle._src.programs.keys import Key
from rekindle._src.programs.page_tables import PUT
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.sent_tables import SentTables
from rekindle._src.programs.step import StepOutput
from rekindle_kernels import MaskGate

LOOK_SHARE = 0.03  # of a step's time, by which its end is noticed later where processes are looked at meanwhile
SHORTEST_LOOK, LONGEST_LOOK = 5e-5, 2e-3  # seconds


class Recorder(Protocol):
    """Is told of every call, before it is made. What it raises keeps the call from being made."""

    def prepare(self, key: Key) -> None:
        """A program is about to be loaded or compiled here."""

    def prepared(self, key: Key) -> None:
        """It is ready here; returns when it is ready everywhere."""

    def step(self, key: Bucket, ints: np.ndarray, floats: np.ndarray) -> None:
        """A step, or the first half of a guided one."""

    def choose(self, key: Bucket, masks: Mask) -> None:
        """The second half of the guided step that was told last."""

    def admit(self, ints: np.ndarray, floats: np.ndarray) -> None: ...
    def gather(self, ids: np.ndarray, digests: Sequence[bytes]) -> None:
        """Each process keeps its part of the pages, under these names."""

    def collect(self, ids: np.ndarray, digests: Sequence[bytes]) -> None:
        """Each process gets whole pages, and may be told to write its parts of them under these names."""

    def scatter(self, ids: np.ndarray, digests: Sequence[bytes]) -> None:
        """Pages are filled with the parts that each process has kept."""

    def renew(self) -> None:
        """New pages and state."""

    def replace_weights(self) -> None:
        """The weights that were loaded last are used from now on."""

    def result(self, rows: np.ndarray) -> None:
        """What the next step gave, in the order of the steps."""

    def failed(self, error: BaseException) -> None:
        """A call that it was told of, or reading its result, raised here."""

    def check(self) -> None:
        """Raises if a process is gone, so that no result will come."""


class Buffers(Protocol):
    """What a step uploads; see `packing.Upload`."""

    @property
    def ints(self) -> np.ndarray: ...
    @property
    def floats(self) -> np.ndarray: ...


class Forwarded(NamedTuple):
    """What the first half of a guided step gives."""

    scores: Any
    prompt: Any
    pooled: Any


class DeviceCalls:
    """Owns what is on the device. One thread makes the calls."""

    def __init__(self, programs: Programs, leaves: Sequence[Any], recorder: Recorder | None = None) -> None:
        self.programs = programs
        self.leaves: tuple[Any, ...] = tuple(leaves)
        self._recorder = recorder
        self._everywhere: set[Key] = set()  # programs that are ready in every process
        self._copies = jax.default_backend() != "cpu"  # results have to be copied to the host
        self._scores: Any = None  # of the guided step whose tokens have not been chosen
        slots = programs.config.max_requests
        self.tables = SentTables(slots, programs.width) if programs.resident else None
        self.kv, self.state = self._new()

    def program(self, key: Key) -> Any:
        """The executable, loaded or compiled now if need be."""
        if self._recorder is None or key in self._everywhere:
            return self.programs.get(key)
        self._recorder.prepare(key)
        program = self.programs.get(key)
        self._recorder.prepared(key)
        self._everywhere.add(key)
        return program

    def step(self, key: Bucket, program: Any, upload: Buffers, gate: MaskGate | None = None) -> StepOutput:
        """A whole step. Its numpy buffers are passed as they are: a device_put costs 60 of the 190 µs of a dispatch.

        A step with guided rows waits for its masks at the gate; no other process does.
        """
        assert gate is None or self._recorder is None, "followers have no gates"
        if self._recorder is not None:
            self._recorder.step(key, upload.ints, upload.floats)
        try:
            self._put_tables()
            masks = () if gate is None else (gate.address,)
            self.kv, self.state, output = program(self.leaves, self.kv, self.state, upload.ints, upload.floats, *masks)
            if self._copies:
                output.rows.copy_to_host_async()
                if output.pooled is not None:
                    output.pooled.copy_to_host_async()
            self._tables_dispatched()
        except BaseException as error:
            self._failed(error)
            raise
        found: StepOutput = output
        return found

    def forward(self, key: Bucket, program: Any, upload: Buffers) -> Forwarded:
        """The first half of a guided step."""
        if self._recorder is not None:
            self._recorder.step(key, upload.ints, upload.floats)
        try:
            self._put_tables()
            state = self.state
            tables = () if state.tables is None else (state.tables,)
            self.kv, *rest = program(self.leaves, self.kv, state.last_token, upload.ints, upload.floats, *tables)
            if tables:
                self.state = state._replace(tables=rest.pop())
            self._tables_dispatched()
        except BaseException as error:
            self._failed(error)
            raise
        found = Forwarded(*rest)
        if self._recorder is not None:
            self._scores = found.scores
        return found

    def choose(self, key: Bucket, program: Any, scores: Any, upload: Buffers, masks: Mask) -> Any:
        """The second half; returns the rows."""
        if self._recorder is not None:
            assert scores is self._scores, "followers have the scores of the latest guided step only"
            self._scores = None
            self._recorder.choose(key, masks)
        try:
            self.state, rows = program(self.state, scores, upload.ints, upload.floats, masks)
            if self._copies:
                rows.copy_to_host_async()
        except BaseException as error:
            self._failed(error)
            raise
        return rows

    def admit(self, program: Any, ints: np.ndarray, floats: np.ndarray) -> None:
        """Write a request's history into its slot."""
        if self._recorder is not None:
            self._recorder.admit(ints, floats)
        try:
            self.state = program(self.state, ints, floats)
        except BaseException as error:
            self._failed(error)
            raise

    def gather(self, ids: np.ndarray, digests: Sequence[bytes] = ()) -> paged.Payload:
        """Begin to read pages out, as many as there are `ids` for each shard, and to copy them to the host.

        Each process gets what its devices have of them, and other processes keep theirs under the `digests`.
        """
        program = self.program(self._mover(GATHER, ids))
        if self._recorder is not None:
            self._recorder.gather(ids, digests)
        return self._reading(program, ids)

    def collect(self, ids: np.ndarray, digests: Sequence[bytes] = ()) -> paged.Payload:
        """The same, where every process gets the whole pages."""
        program = self.program(self._mover(COLLECT if self.programs.parts.several else GATHER, ids))
        if self._recorder is not None:
            self._recorder.collect(ids, digests)
        return self._reading(program, ids)

    def _reading(self, program: Any, ids: np.ndarray) -> paged.Payload:
        try:
            payload: paged.Payload = program(self.kv, ids)
            if self.programs.pinned:
                payload = pinned_pages.begin_to_host(self.programs.parts, payload)
            elif self._copies:
                for leaf in payload:
                    leaf.copy_to_host_async()
        except BaseException as error:
            self._failed(error)
            raise
        return payload

    def scatter(self, ids: np.ndarray, pages: Sequence[paged.Payload], digests: Sequence[bytes] = ()) -> None:
        """Fill pages, at most as many as there are `ids` for each shard; the rest of these is 0.

        Other processes fill in what they have kept under the `digests`.
        """
        key = self._mover(SCATTER, ids)
        program = self.program(key)
        if self._recorder is not None:
            self._recorder.scatter(ids, digests)
        padded = (*pages, *[pages[0]] * (key.pages - len(pages)))  # padding goes to page 0
        try:
            self.kv = program(self.kv, ids, padded)
        except BaseException as error:
            self._failed(error)
            raise

    def scatter_pinned(self, ids: np.ndarray, payload: Sequence[np.ndarray]) -> None:
        """Fill the pages `ids` from one payload for all of them, whose arrays are not written any more."""
        assert self._recorder is None, "processes exchange pages one by one"
        program = self.program(self._mover(SCATTER, ids))
        self.kv = program(self.kv, ids, pinned_pages.begin_to_device(self.programs.parts, payload))

    def _mover(self, key: Helper, ids: np.ndarray) -> Helper:
        return Helper(key.kind, len(ids) // self.programs.shards.count)

    def rows(self, output: StepOutput) -> np.ndarray:
        """The rows of a step: the place that waits for the device. Steps are read in the order of their calls."""
        try:
            self.arrive(output.rows)
            rows = np.asarray(output.rows)
        except BaseException as error:
            self._failed(error)
            raise
        if self._recorder is not None:
            self._recorder.result(rows)
        return rows

    def wait(self, arrays: Any) -> None:
        """Wait for arrays."""
        if self._recorder is None:
            jax.block_until_ready(arrays)
        self.arrive(arrays)

    def arrive(self, arrays: Any) -> None:
        """Before arrays are read: with other processes it looks again and again whether they are there.

        Reading waits for them as well, but without an end if a process is gone.
        """
        if self._recorder is None:
            return
        start = time.perf_counter()
        for leaf in jax.tree.leaves(arrays):
            while not leaf.is_ready():
                self._recorder.check()
                waited = time.perf_counter() - start
                time.sleep(min(max(waited * LOOK_SHARE, SHORTEST_LOOK), LONGEST_LOOK))

    def replace_weights(self, leaves: Sequence[Any]) -> None:
        """Use other weights from the next step on."""
        if self._recorder is not None:
            self._recorder.replace_weights()
        self.leaves = tuple(leaves)

    @property
    def memory(self) -> list[Any]:
        """The arrays of pages and state."""
        return jax.tree.leaves((self.kv, self.state))

    def renew(self) -> None:
        """Replace pages and state by new ones, whose content is lost."""
        self._delete()
        self.kv, self.state = self._new()

    def free(self) -> None:
        """Give pages and state back, once no step reads them; the weights are the caller's."""
        try:
            self.wait(self.state)
        finally:
            self._delete()
            self.leaves = ()

    def _put_tables(self) -> None:
        """Write the tables in which the next step changes more than it can bring."""
        if self.tables is None:
            return
        for ints in self.tables.packed_whole(PUT):
            self.state = self.state._replace(tables=self.program(TABLES)(self.state.tables, ints))

    def _tables_dispatched(self) -> None:
        if self.tables is not None:
            self.tables.dispatched()

    def _new(self) -> tuple[paged.KV, Any]:
        if self.tables is not None:
            self.tables.forget()
        if self._recorder is not None:
            self._recorder.renew()
        memory: tuple[paged.KV, Any] = self.programs.memory()
        return memory

    def _delete(self) -> None:
        for leaf in self.memory:
            leaf.delete()

    def _failed(self, error: BaseException) -> None:
        if self.tables is not None:
            self.tables.forget()
        if self._recorder is not None:
            self._recorder.failed(error)
