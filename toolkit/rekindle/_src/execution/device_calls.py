"""The device's side of a runner: weights, pages and request state, and every call of a program over them.

All calls pass here, in the order of their execution, and nothing else calls a program. So a session of several
processes needs only this seam: its `CallRecorder` is notified of each call before it is made, and followers make the
same calls over weights, pages and state of their own.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import Array

from rekindle._src.core.records import IntArray, LostPage, RowResult, StepPlan
from rekindle._src.programs import host_pages
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import (
    COLLECT,
    COPY,
    GATHER,
    LENS,
    SCATTER,
    TABLES,
    Bucket,
    Helper,
    Key,
    StepSpan,
)
from rekindle._src.programs.packing import PUT, AnyUpload, PageBatch, SentTables
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.side_caches import DevicePlan
from rekindle._src.programs.step import StepOutput
from rekindle._src.programs.store import CompiledProgram
from rekindle_kernels import MaskGate

Leaving = list[tuple[PageBatch, paged.Payload]]  # pages read out together, not yet on the host


class CallRecorder:
    """Is notified of every call before it is made; an error raised here prevents the call.

    This one belongs to a session of one process, and does nothing. `processes.team.Team` passes calls on to followers.
    """

    def prepare(self, key: Key) -> None:
        """Note that a program is about to be loaded or compiled here."""

    def prepared(self, key: Key) -> None:
        """Note that the program is ready here. Returns when it is ready everywhere."""

    def step(self, key: Bucket, ints: np.ndarray, floats: np.ndarray, gate: MaskGate | None = None) -> None:
        """Note a step, or the first half of a late one."""

    def forwarded(self, scores: Array) -> None:
        """Note the scores from the first half of a late step."""

    def choose(self, key: Bucket, scores: Array, operand: IntArray) -> None:
        """Note the second half of the latest late step."""

    def admit(self, ints: np.ndarray, floats: np.ndarray) -> None:
        """Note that a request's history is written into its slot."""

    def gather(self, ids: np.ndarray, digests: Sequence[bytes]) -> None:
        """Note that each process keeps its part of the pages, under these digests."""

    def collect(self, ids: np.ndarray, digests: Sequence[bytes]) -> None:
        """Note that each process gets whole pages; it may have to write its parts of them under these digests."""

    def scatter(self, ids: np.ndarray, digests: Sequence[bytes]) -> None:
        """Note that pages are filled with each process's own parts."""

    def copy(self, sources: np.ndarray, ids: np.ndarray) -> None:
        """Note that pages are copied to others on the device."""

    def scatter_pinned(self) -> None:
        """Note that pages are filled from one payload for all of them."""

    def renew(self) -> None:
        """Note that pages and state are replaced by new ones."""

    def replace_weights(self) -> None:
        """Note that the last loaded weights are used from now on."""

    def arrive(self, arrays: object) -> None:
        """Note that arrays are about to be read, which waits for them. Raises if they will never be ready."""

    def result(self, rows: np.ndarray) -> None:
        """Note the rows of the next step, in the order of the steps."""

    def failed(self, error: BaseException) -> None:
        """Note that a recorded call, or reading its result, raised here."""


class Buffers(Protocol):
    """The buffers that a step uploads; see `packing.Upload`."""

    @property
    def ints(self) -> np.ndarray: ...
    @property
    def floats(self) -> np.ndarray: ...


class ForwardOutput(NamedTuple):
    """The output of the first half of a late step."""

    scores: Array
    extra: tuple[Any, ...]  # as in `StepOutput`


class DeviceCalls:
    """Owns weights, pages and state on the device. One thread makes the calls."""

    def __init__(self, programs: Programs, leaves: Sequence[Array], recorder: CallRecorder | None = None) -> None:
        self.programs = programs
        self.leaves: tuple[Array, ...] = tuple(leaves)
        self._recorder = recorder or CallRecorder()
        self._copies = jax.default_backend() != "cpu"  # results have to be copied to the host
        self._reported = _ErrorReporter(self)
        slots = programs.config.max_requests
        self.tables = SentTables(slots, programs.recipes.width) if programs.recipes.resident else None
        self._reads: list[Any] = []  # an array of each program that reads pages, until it is known to have ended
        self.kv: paged.KV
        self.state: Any  # without the features' own parts, which most programs lack
        self.own: tuple[object, ...]
        self._renew()

    def program(self, key: Key) -> CompiledProgram:
        """Return the executable; loads or compiles it if necessary."""
        self._recorder.prepare(key)
        program = self.programs.get(key)
        self._recorder.prepared(key)
        return program

    def step(self, key: Bucket, program: CompiledProgram, upload: Buffers, gate: MaskGate | None = None) -> StepOutput:
        """Run a whole step. Its numpy buffers are passed as they are: device_put costs 60 of the 190 µs of a dispatch.

        A late step waits for its operand at the gate; no other process does.
        """
        self._recorder.step(key, upload.ints, upload.floats, gate)
        with self._reported:
            self._put_tables()
            uploaded = upload.ints, upload.floats, self.programs.features.operands(key.variants)
            late = () if gate is None else (gate.address,)
            self.kv, state, output = program(self.leaves, self.kv, self._state_in(key), *uploaded, *late)
            self._keep(state)
            if self._copies:
                output.rows.copy_to_host_async()
                for array, copied in zip(output.extra, self.programs.features.copied, strict=True):
                    if copied and array is not None:
                        array.copy_to_host_async()
            self._tables_dispatched()
        result: StepOutput = output
        return result

    def forward(self, key: Bucket, program: CompiledProgram, upload: Buffers) -> ForwardOutput:
        """Run the first half of a late step."""
        self._recorder.step(key, upload.ints, upload.floats)
        with self._reported:
            self._put_tables()
            state = self.state
            tables = () if state.tables is None else (state.tables,)
            uploaded = upload.ints, upload.floats, self.programs.features.operands(key.variants)
            self.kv, *outputs = program(self.leaves, self.kv, state.last_token, *uploaded, *tables)
            if tables:
                self.state = state._replace(tables=outputs.pop())
            self._tables_dispatched()
        forwarded = ForwardOutput(*outputs)
        self._recorder.forwarded(forwarded.scores)
        return forwarded

    def choose(self, key: Bucket, program: CompiledProgram, scores: Array, upload: Buffers, operand: IntArray) -> Array:
        """Run the second half of a late step and return its rows."""
        self._recorder.choose(key, scores, operand)
        with self._reported:
            state, rows = program(self._state_in(key), scores, upload.ints, upload.floats, operand)
            self._keep(state)
            if self._copies:
                rows.copy_to_host_async()
        return rows

    def ahead(self, program: CompiledProgram, leaves: Sequence[Array], *buffers: np.ndarray) -> Array:
        """Run a program before a step: by weights of its own, from the present pages and state. Return its result."""
        with self._reported:
            result: Array = program(leaves, self.leaves, self.kv, self.state, *buffers)
        return result

    def write_ahead(self, program: CompiledProgram, leaves: Sequence[Array], *buffers: np.ndarray) -> Array:
        """Run such a program that writes into the pages, too."""
        with self._reported:
            self.kv, result = program(leaves, self.leaves, self.kv, self.state, *buffers)
        written: Array = result
        return written

    def lens(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the logits of rows of the residual stream. Any thread may call it, between or during steps."""
        program, size = self.program(LENS), LENS.pages
        parts = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            padded = np.concatenate([part, np.zeros((size - len(part), *rows.shape[1:]), rows.dtype)])
            parts.append(np.asarray(program(self.leaves, padded))[: len(part)])
        return np.concatenate(parts)

    def admit(self, program: CompiledProgram, ints: np.ndarray, floats: np.ndarray) -> None:
        """Write a request's history into its slot."""
        self._recorder.admit(ints, floats)
        with self._reported:
            self._keep(program(self.state._replace(own=self.own), ints, floats))

    def gather(self, ids: np.ndarray, digests: Sequence[bytes] = ()) -> paged.Payload:
        """Begin to read pages out, as many as `ids` has room for, and to copy them to the host.

        Each process gets the part that its devices have; other processes keep their parts under the `digests`.
        """
        program = self.program(self._mover(GATHER, ids))
        self._recorder.gather(ids, digests)
        return self._reading(program, ids)

    def collect(self, ids: np.ndarray, digests: Sequence[bytes] = ()) -> paged.Payload:
        """Begin to read pages out as `gather` does; every process gets the whole pages."""
        program = self.program(self._mover(COLLECT if self.programs.recipes.parts.multi_process else GATHER, ids))
        self._recorder.collect(ids, digests)
        return self._reading(program, ids)

    def _reading(self, program: CompiledProgram, ids: np.ndarray, *, pinned: bool = True) -> paged.Payload:
        with self._reported:
            payload: paged.Payload = program(self.kv, ids)
            if not self._copies:  # else the host reads no memory of the device
                self._reads = [*(array for array in self._reads if not array.is_ready()), *payload[:1]]
            if self.programs.recipes.pinned and pinned:
                payload = host_pages.begin_to_host(self.programs.recipes.parts, payload)
            elif self._copies:
                for leaf in payload:
                    leaf.copy_to_host_async()
        return payload

    def scatter(self, ids: np.ndarray, pages: Sequence[paged.Payload], digests: Sequence[bytes] = ()) -> None:
        """Fill pages, at most as many as `ids` has room for; the rest of these is 0.

        Other processes fill in the parts that they have kept under the `digests`.
        """
        key = self._mover(SCATTER, ids)
        program = self.program(key)
        self._recorder.scatter(ids, digests)
        padded = (*pages, *[pages[0]] * (key.pages - len(pages)))  # padding goes to page 0
        with self._reported:
            self.kv = program(self.kv, ids, padded)

    def scatter_pinned(self, ids: np.ndarray, payload: Sequence[np.ndarray]) -> None:
        """Fill the pages `ids` from one payload for all of them; its arrays are not written any more."""
        self._recorder.scatter_pinned()
        program = self.program(self._mover(SCATTER, ids))
        self.kv = program(self.kv, ids, host_pages.begin_to_device(self.programs.recipes.parts, payload))

    def copy(self, sources: np.ndarray, ids: np.ndarray) -> None:
        """Copy the pages `sources` to the pages `ids`, as many as one call copies."""
        program = self.program(COPY)
        self._recorder.copy(sources, ids)
        with self._reported:
            self.kv = program(self.kv, sources, ids)

    def read_side(self, plan: DevicePlan, ids: np.ndarray) -> paged.Payload:
        """Begin to read entries of a side cache out, and to copy them to the host."""
        return self._reading(self.program(plan.read_out), ids, pinned=plan.pinned)

    def fill_side(self, plan: DevicePlan, ids: np.ndarray, entries: Mapping[int, paged.Payload]) -> None:
        """Fill slots of a side cache, each with the entry for its place among `ids`; the remaining ids are 0."""
        key = plan.fill
        program = self.program(key)
        payload: Any
        if self.programs.recipes.pinned and plan.pinned:
            joined = host_pages.joined(entries, len(ids))
            payload = host_pages.begin_to_device(self.programs.recipes.parts, joined)
        else:
            each = list(entries.values())
            payload = (*each, *each[:1] * (key.pages - len(each)))  # padding goes to slot 0
        with self._reported:
            self.kv = program(self.kv, ids, payload)

    def _mover(self, key: Helper, ids: np.ndarray) -> Helper:
        return Helper(key.kind, self.programs.packing.pages_of(ids))

    def rows(self, output: StepOutput) -> np.ndarray:
        """Wait for the device and return the rows of a step. Steps are read in the order of their calls."""
        with self._reported:
            self.arrive(output.rows)
            rows = np.asarray(output.rows)
        self._recorder.result(rows)
        return rows

    def arrive(self, arrays: object) -> None:
        """Announce that arrays are about to be read. Raises if they will never be ready."""
        self._recorder.arrive(arrays)

    def wait(self, arrays: object) -> None:
        """Announce that arrays are about to be read, and wait until they are ready."""
        self.arrive(arrays)
        jax.block_until_ready(arrays)

    def at_rest(self) -> paged.KV:
        """Return the pages once no program reads or writes them, for `page_memory`."""
        reads, self._reads = self._reads, []
        self.wait((self.kv, reads))
        return self.kv

    def replace_weights(self, leaves: Sequence[Array]) -> None:
        """Use new weights from the next step on."""
        self._recorder.replace_weights()
        self.leaves = tuple(leaves)

    @property
    def memory(self) -> list[Array]:
        """The arrays of pages and state."""
        return jax.tree.leaves((self.kv, self.state, self.own))

    def renew(self) -> None:
        """Replace pages and state by new ones; their content is lost."""
        self._delete()
        self._renew()

    def sleep(self) -> None:
        """Give pages and state back, and forget the weights, which are the caller's. `wake` follows."""
        self.wait(self.memory)
        self._delete()
        self.kv, self.state, self.own, self.leaves, self._reads = (), None, (), (), []

    def wake(self, leaves: Sequence[Array]) -> None:
        """Use new pages and state, and these weights."""
        self.leaves = tuple(leaves)
        self._renew()

    def free(self) -> None:
        """Give pages and state back, once no step reads them; the weights are the caller's."""
        try:
            self.wait((self.state, self.own))
        finally:
            self._delete()
            self.leaves, self._reads = (), []

    def failed(self, error: BaseException) -> None:
        """Report a call that raised; the tables that it should have written are sent again."""
        if self.tables is not None:
            self.tables.forget()
        self._recorder.failed(error)

    def _put_tables(self) -> None:
        """Write the tables if the next step changes more of them than its upload can carry."""
        if self.tables is None:
            return
        for ints in self.tables.packed_whole(PUT):
            self.state = self.state._replace(tables=self.program(TABLES)(self.state.tables, ints))

    def _tables_dispatched(self) -> None:
        if self.tables is not None:
            self.tables.dispatched()

    def _renew(self) -> None:
        if self.tables is not None:
            self.tables.forget()
        self._recorder.renew()
        self._reads = []
        self.kv, self.state, self.own = self.programs.memory()

    def _state_in(self, key: Bucket) -> Any:
        """Return the state that a program takes."""
        return self.state._replace(own=self.own) if self.programs.features.keeps_own(key.variants) else self.state

    def _keep(self, state: Any) -> None:
        """Take the state that a program returned, and the features' own parts if it has some."""
        if state.own:
            self.own, state = state.own, state._replace(own=())
        self.state = state

    def _delete(self) -> None:
        for leaf in self.memory:
            leaf.delete()


class _ErrorReporter:
    """Reports errors raised inside it to the recorder; other processes may have made the same call."""

    def __init__(self, calls: DeviceCalls) -> None:
        self._calls = calls

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._calls.failed(error)


class ChoiceCall(NamedTuple):
    """The second half of a late step that is two programs; it is dispatched once it has its operand."""

    key: Bucket
    program: CompiledProgram
    forwarded: ForwardOutput
    operand: IntArray


@dataclasses.dataclass(slots=True)
class InFlight:
    """A dispatched step. Without a bucket it ran no rows and only moved pages."""

    plan: StepPlan
    ran_plan: StepPlan  # `plan` without the rows that could not be prepared
    refused: dict[str, Exception]  # by request, why its rows could not be prepared
    began: float  # when the host began to prepare it
    leaving: Leaving
    lost: tuple[LostPage, ...]
    leaving_sides: list[Leaving]
    lost_sides: tuple[LostPage, ...]
    bucket: Bucket | None = None
    upload: AnyUpload | None = None
    output: StepOutput | None = None
    dispatched: float = 0.0
    host_seconds: float = 0.0
    idle_seconds: float = 0.0  # the device had nothing to do before it
    choice: ChoiceCall | MaskGate | None = None  # of a late step, until it has its operand
    operand: IntArray | MaskGate | None = None  # the step reads it until it has ended
    late_errors: dict[str, Exception] = dataclasses.field(default_factory=dict)  # by request: it can't go on
    error: Exception | None = None  # raised while the choice was dispatched
    results: tuple[RowResult, ...] | None = None  # once they have been read
    ended: float | None = None  # estimated, if it ended before its result was read


class LateSteps:
    """Starts late steps: one of their operands is filled while the model runs, and reaches the device after it.

    Where a program can wait (`rekindle_kernels.MaskGate`), a step is one program that is dispatched like any other.
    Elsewhere it is two programs, and the second is dispatched once the operand is filled. Operands and gates are reused
    when their step has ended.
    """

    def __init__(self, programs: Programs, calls: DeviceCalls) -> None:
        self._calls, self._packing = calls, programs.packing
        self._late = programs.features.late
        self._width = self._late.operand_width(programs.recipes.model.vocab_size)
        self._operands: dict[Bucket, list[IntArray]] = collections.defaultdict(list)
        self._gates: dict[Bucket, list[MaskGate]] = collections.defaultdict(list)
        self.seconds: float = 0.0  # wall time spent on operands, and on taking tokens

    def start(
        self, step: InFlight, programs: Sequence[Any], latest: InFlight | None, read: Callable[[InFlight], object]
    ) -> None:
        """Dispatch a step after the `latest` one; its operand may depend on the tokens of that step.

        Without asynchronous dispatch XLA runs a program in the thread that dispatches it, which then could not
        open its gate. In that case the latest step has ended: it is read at once, and the gate opens before dispatch.
        """
        bucket, upload, plan = step.bucket, step.upload, step.ran_plan
        assert bucket is not None, "a late step has rows"
        assert upload is not None, "a late step has rows"
        if bucket.span is not StepSpan.GATED:
            forwarded = self._calls.forward(bucket.programs[0], programs[0], upload)
            free = self._operands[bucket]
            operand = free.pop() if free else np.full((upload.sequences, self._width), -1, np.int32)
            step.choice = ChoiceCall(bucket.programs[1], programs[1], forwarded, operand)
            return
        before = latest if self.needs_unread_token(plan) else None  # the step with the tokens it needs
        if before is not None and _has_ended(before.output):
            try:
                read(before)
            except Exception as error:  # it is that step's
                before.error = error
        gates = self._gates[bucket]
        step.operand = gate = gates.pop() if gates else MaskGate(upload.sequences, self._width)
        gate.close()
        try:
            if before is not None and before.results is None:
                step.choice = gate
            else:
                step.late_errors = self._open(gate, plan, upload)
            step.output = self._calls.step(bucket, programs[0], upload, gate)
        except BaseException:
            gate.open()
            raise

    def choose(self, in_flight: InFlight) -> None:
        """Fill the operand of a step, if it has none yet."""
        choice, bucket, upload = in_flight.choice, in_flight.bucket, in_flight.upload
        in_flight.choice = None
        if choice is None or bucket is None or upload is None:
            return
        try:
            if isinstance(choice, MaskGate):
                in_flight.late_errors = self._open(choice, in_flight.ran_plan, upload)
                return
            in_flight.late_errors = self._fill(in_flight.ran_plan, upload, choice.operand)
            scores, extra = choice.forwarded
            rows = self._calls.choose(choice.key, choice.program, scores, upload, choice.operand)
            in_flight.output, in_flight.operand = StepOutput(rows, extra), choice.operand
        except Exception as error:
            in_flight.error = error

    def release_gate(self, in_flight: InFlight | None) -> None:
        """Let a step end although its tokens will not be read. Call it before waiting for everything on the device."""
        if in_flight is not None and isinstance(in_flight.choice, MaskGate):
            in_flight.choice.open()
            in_flight.choice = None

    def needs_unread_token(self, plan: StepPlan) -> bool:
        """True if the operand of a step needs a token that has not been read yet."""
        return self._late.needs_unread_token(plan)

    def advance(self, in_flight: InFlight, results: tuple[RowResult, ...]) -> tuple[RowResult, ...]:
        """Return the results of a late step with its tokens taken; results of other steps are returned as they are."""
        if in_flight.bucket is None or not in_flight.bucket.late:
            return results
        if isinstance(in_flight.operand, MaskGate) and in_flight.operand.missed:
            raise RuntimeError("a step with guided rows did not get its masks in time")
        start = time.perf_counter()
        try:
            return self._late.advance(in_flight.ran_plan, results, in_flight.late_errors)
        finally:
            self.seconds += time.perf_counter() - start

    def ended(self, in_flight: InFlight) -> None:
        """Take back the operand of a step, for reuse."""
        bucket, operand = in_flight.bucket, in_flight.operand
        if bucket is None or operand is None:
            return
        if isinstance(operand, MaskGate):
            operand.release()
            self._gates[bucket].append(operand)
        else:
            self._operands[bucket].append(operand)

    def _open(self, gate: MaskGate, plan: StepPlan, upload: AnyUpload) -> dict[str, Exception]:
        """Fill the operand of a gate, then open the gate. Return the errors of requests that can't go on."""
        try:
            return self._fill(plan, upload, gate.masks)
        finally:
            gate.open()

    def _fill(self, plan: StepPlan, upload: AnyUpload, operand: IntArray) -> dict[str, Exception]:
        start = time.perf_counter()
        try:
            errors: dict[str, Exception] = {}
            for part, own in self._packing.parts(plan, operand):
                errors |= self._late.fill(part, upload.layout.rows, own)
            return errors
        finally:
            self.seconds += time.perf_counter() - start


def _has_ended(output: StepOutput | None) -> bool:
    rows: Any = None if output is None else output.rows  # jax.Array does not declare is_ready
    return rows is not None and bool(rows.is_ready())
