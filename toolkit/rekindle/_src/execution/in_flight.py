"""The runner's record of a dispatched step, and its counts."""

from __future__ import annotations

import dataclasses
from typing import Any

from rekindle._src.core import html
from rekindle._src.core.records import IntArray, LostPage, RowResult, StepPlan
from rekindle._src.execution.device_calls import Forwarded
from rekindle._src.execution.page_transfers import Leaving
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.packing import AnyUpload
from rekindle._src.programs.step import StepOutput
from rekindle_kernels import MaskGate


@dataclasses.dataclass(slots=True)
class Choice:
    """The second half of a late step that is two programs; it is dispatched once it has its operand."""

    key: Bucket
    program: Any
    forwarded: Forwarded
    operand: IntArray


@dataclasses.dataclass(slots=True)
class InFlight:
    """A dispatched step."""

    plan: StepPlan
    bucket: Bucket | None  # None: the step ran no rows, it only moved pages
    output: StepOutput | None
    upload: AnyUpload | None
    leaving: Leaving
    dispatched: float
    host_seconds: float
    ran_plan: StepPlan  # `plan` without the rows that could not be prepared
    refused: dict[str, Exception]  # by request, why its rows could not be prepared
    choice: Choice | MaskGate | None = None  # of a late step, until it has its operand
    late_errors: dict[str, Exception] = dataclasses.field(default_factory=dict)  # by request: it can't go on
    error: Exception | None = None  # raised while the choice was dispatched
    operand: IntArray | MaskGate | None = None  # the step reads it until it has ended
    results: tuple[RowResult, ...] | None = None  # once they have been read
    lost: tuple[LostPage, ...] = ()
    leaving_states: Any = dataclasses.field(default_factory=list)
    lost_states: tuple[LostPage, ...] = ()
    began: float = 0.0  # when the host began to prepare it
    idle_seconds: float = 0.0  # the device had nothing to do before it
    ended: float | None = None  # estimated, if it ended before its result was read


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RunnerStatistics(html.Record):
    """Counts since the runner was made."""

    steps: int
    tokens: int
    padding: int  # tokens that programs computed beyond those of their steps
    host_seconds: float  # packing and dispatch
    device_seconds: float  # during which a step ran, as far as the host can tell
    traces: int
    compilations: int
    programs: dict[str, int]  # steps by program
    pages_out: int
    pages_in: int
    step_sizes: dict[int, int]  # steps by how many tokens they computed, rounded up to a power of two
