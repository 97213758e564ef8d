"""Late steps on the way to the device: an operand of theirs is filled while the model runs, and comes behind it.

Where a program can wait (`rekindle_kernels.MaskGate`), a step is one program that is dispatched like any other.
Elsewhere it is two programs, the second of which is dispatched once the operand is filled.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rekindle._src.core.records import IntArray, RowResult, StepPlan
from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.execution.results import Choice, InFlight
from rekindle._src.programs.buckets import GATED, Bucket
from rekindle._src.programs.packing import AnyUpload, Layout
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.step import StepOutput
from rekindle_kernels import MaskGate


class Started(NamedTuple):
    """The state of a dispatched step that `InFlight` takes over."""

    output: StepOutput | None
    choice: Choice | MaskGate | None = None
    operand: IntArray | MaskGate | None = None
    late_errors: dict[str, Exception] = {}  # noqa: RUF012  never written


class LateSteps:
    """Starts late steps and fills their operands. Operands and gates are reused when their step has ended."""

    def __init__(self, programs: Programs, calls: DeviceCalls) -> None:
        self._calls, self._shards = calls, programs.shards
        self._late = programs.features.late
        self._width = self._late.operand_width(programs.model.vocab_size)
        self._operands: dict[Bucket, list[IntArray]] = collections.defaultdict(list)
        self._gates: dict[Bucket, list[MaskGate]] = collections.defaultdict(list)
        self.seconds: float = 0.0  # wall time spent on operands, and on taking tokens

    def start(
        self,
        bucket: Bucket,
        programs: Sequence[Any],
        upload: AnyUpload,
        plan: StepPlan,
        latest: InFlight | None,
        read: Callable[[InFlight], object],
    ) -> Started:
        """Dispatch a step behind the `latest` one, whose tokens may be needed for its operand.

        Without asynchronous dispatch XLA runs a program in the thread that dispatches it, which then could not
        open its gate. In that case the latest step has ended: it is read at once, and the gate opens before dispatch.
        """
        if bucket.part != GATED:
            forwarded = self._calls.forward(bucket.programs[0], programs[0], upload)
            free = self._operands[bucket]
            operand = free.pop() if free else self._new_operand(upload.layout)
            return Started(None, Choice(bucket.programs[1], programs[1], forwarded, operand))
        if latest is not None and _has_ended(latest.output) and self.needs_unread_token(plan):
            try:
                read(latest)
            except Exception as error:  # it is the latest step's
                latest.error = error
        gates = self._gates[bucket]
        gate = gates.pop() if gates else MaskGate(upload.layout.sequences, self._width)
        gate.close()
        try:
            deferred = latest is not None and latest.results is None and self.needs_unread_token(plan)
            errors = {} if deferred else self._open(gate, plan, upload)
            output = self._calls.step(bucket, programs[0], upload, gate)
        except BaseException:
            gate.open()
            raise
        return Started(output, gate if deferred else None, gate, errors)

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
        """Let a step end whose tokens will not be read. Call it before waiting for everything on the device."""
        if in_flight is not None and isinstance(in_flight.choice, MaskGate):
            in_flight.choice.open()
            in_flight.choice = None

    def needs_unread_token(self, plan: StepPlan) -> bool:
        """True if the operand of a step needs a token that has not been read yet."""
        return self._late.needs_unread_token(plan)

    def advance(self, in_flight: InFlight, results: tuple[RowResult, ...]) -> tuple[RowResult, ...]:
        """Return the results of a late step, whose tokens are taken; of another one as they are."""
        if in_flight.bucket is None or not in_flight.bucket.part:
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
        """Fill the operand behind a gate. Returns the errors of requests that can't go on."""
        try:
            return self._fill(plan, upload, gate.masks)
        finally:
            gate.open()

    def _new_operand(self, layout: Layout) -> IntArray:
        return np.full((self._shards.count * layout.sequences, self._width), -1, np.int32)

    def _fill(self, plan: StepPlan, upload: AnyUpload, operand: IntArray) -> dict[str, Exception]:
        start = time.perf_counter()
        try:
            errors: dict[str, Exception] = {}
            for shard, part in enumerate(self._shards.split(plan)):
                errors |= self._late.fill(part, upload.layout.rows, self._shards.part(shard, operand))
            return errors
        finally:
            self.seconds += time.perf_counter() - start


def _has_ended(output: StepOutput | None) -> bool:
    rows: Any = None if output is None else output.rows  # jax.Array does not declare is_ready
    return rows is not None and bool(rows.is_ready())
