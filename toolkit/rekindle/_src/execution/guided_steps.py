"""Steps with guided rows on the way to the device: their masks are filled while the model runs, and come behind it.

Where a program can wait (`rekindle_kernels.MaskGate`), a step is one program that is dispatched like any other.
Elsewhere it is two programs, the second of which is dispatched once the masks are filled.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rekindle._src.core.guides import Mask, mask_words
from rekindle._src.core.records import RowResult, StepPlan
from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.execution.guiding import advance_guides, fill_masks, needs_unread_token, new_masks
from rekindle._src.execution.in_flight import Choice, InFlight
from rekindle._src.programs.buckets import GATED, Bucket
from rekindle._src.programs.data_upload import AnyUpload
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.step import StepOutput
from rekindle_kernels import MaskGate


class Started(NamedTuple):
    """The state of a dispatched step that `InFlight` takes over."""

    output: StepOutput | None
    choice: Choice | MaskGate | None = None
    masks: Mask | MaskGate | None = None
    guide_errors: dict[str, Exception] = {}  # noqa: RUF012  never written


class GuidedSteps:
    """Starts guided steps and fills their masks. Masks and gates are reused when their step has ended."""

    def __init__(self, programs: Programs, calls: DeviceCalls) -> None:
        self._programs, self._calls, self._shards = programs, calls, programs.shards
        self._words = mask_words(programs.model.vocab_size)
        self._masks: dict[Bucket, list[Mask]] = collections.defaultdict(list)
        self._gates: dict[Bucket, list[MaskGate]] = collections.defaultdict(list)
        self.seconds: float = 0.0  # wall time spent on masks and on advancing guides

    def start(
        self,
        bucket: Bucket,
        programs: Sequence[Any],
        upload: AnyUpload,
        plan: StepPlan,
        latest: InFlight | None,
        read: Callable[[InFlight], object],
    ) -> Started:
        """Dispatch a step behind the `latest` one, whose tokens may be needed for its masks.

        Without asynchronous dispatch XLA runs a program in the thread that dispatches it, which then could not
        open its gate. In that case the latest step has ended: it is read at once, and the gate opens before dispatch.
        """
        if bucket.part != GATED:
            forwarded = self._calls.forward(bucket.programs[0], programs[0], upload)
            free = self._masks[bucket]
            masks = free.pop() if free else new_masks(self._programs.layout(bucket), self._words, self._shards)
            return Started(None, Choice(bucket.programs[1], programs[1], forwarded, masks))
        if needs_unread_token(plan) and latest is not None and latest.output is not None and _has_ended(latest.output):
            try:
                read(latest)
            except Exception as error:  # it is the latest step's
                latest.error = error
        gates = self._gates[bucket]
        gate = gates.pop() if gates else MaskGate(self._programs.layout(bucket).sequences, self._words)
        gate.close()
        try:
            deferred = latest is not None and latest.results is None and needs_unread_token(plan)
            guide_errors = {} if deferred else self._open(gate, plan, upload)
            output = self._calls.step(bucket, programs[0], upload, gate)
        except BaseException:
            gate.open()
            raise
        return Started(output, gate if deferred else None, gate, guide_errors)

    def choose(self, in_flight: InFlight) -> None:
        """Fill the masks of a step, if it has none yet."""
        choice, bucket, upload = in_flight.choice, in_flight.bucket, in_flight.upload
        in_flight.choice = None
        if choice is None or bucket is None or upload is None:
            return
        try:
            if isinstance(choice, MaskGate):
                in_flight.guide_errors = self._open(choice, in_flight.ran_plan, upload)
                return
            in_flight.guide_errors = self._fill(in_flight.ran_plan, upload, choice.masks)
            scores, prompt, pooled = choice.forwarded
            rows = self._calls.choose(choice.key, choice.program, scores, upload, choice.masks)
            in_flight.output, in_flight.masks = StepOutput(rows, prompt, pooled), choice.masks
        except Exception as error:
            in_flight.error = error

    def release_gate(self, in_flight: InFlight | None) -> None:
        """Let a step end whose tokens will not be read. Call it before waiting for everything on the device."""
        if in_flight is not None and isinstance(in_flight.choice, MaskGate):
            in_flight.choice.open()
            in_flight.choice = None

    def advance_guides(self, in_flight: InFlight, results: tuple[RowResult, ...]) -> tuple[RowResult, ...]:
        """Return the results of a step with each guide's report on its token."""
        start = time.perf_counter()
        try:
            return advance_guides(in_flight.ran_plan, results, in_flight.guide_errors)
        finally:
            self.seconds += time.perf_counter() - start

    def ended(self, in_flight: InFlight) -> None:
        """Take back the masks of a step, for reuse."""
        bucket, masks = in_flight.bucket, in_flight.masks
        if bucket is None or masks is None:
            return
        if isinstance(masks, MaskGate):
            masks.release()
            self._gates[bucket].append(masks)
        else:
            self._masks[bucket].append(masks)

    def _open(self, gate: MaskGate, plan: StepPlan, upload: AnyUpload) -> dict[str, Exception]:
        """Fill the masks behind a gate. Returns the errors of requests whose guides can't go on."""
        try:
            return self._fill(plan, upload, gate.masks)
        finally:
            gate.open()

    def _fill(self, plan: StepPlan, upload: AnyUpload, masks: Mask) -> dict[str, Exception]:
        start = time.perf_counter()
        try:
            return fill_masks(plan, upload.layout, masks, self._shards)
        finally:
            self.seconds += time.perf_counter() - start


def _has_ended(output: StepOutput) -> bool:
    rows: Any = output.rows  # jax.Array does not declare is_ready
    return bool(rows.is_ready())
