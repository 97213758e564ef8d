"""The contracts between the host side of the engine and what drives it: `SchedulerLike` and `RunnerLike`.

The dispatch loop needs nothing but these two; tests and tutorials put fakes in their place.

    plan = scheduler.plan()             # who runs, on which pages; None when there is nothing to do
    current = runner.dispatch(plan)     # returns at once, the device works
    result = runner.fetch(previous)     # one step behind
    events = scheduler.commit(result)   # tokens, ends, pages published to the prefix cache
"""

from __future__ import annotations

from typing import Any, Protocol

from rekindle._src.core.records import FinishReason, IntArray, Request, Status, StepPlan, StepResult, TokenEvent


class InFlightLike(Protocol):
    """A dispatched step whose result has not been read."""

    @property
    def plan(self) -> StepPlan: ...


class SchedulerLike(Protocol):
    """Pure host state with one owner; every method is synchronous, exact and quick."""

    @property
    def has_work(self) -> bool:
        """A request is waiting or running, or a planned step has not been committed."""

    def submit(self, request: Request) -> None:
        """Queue it. Raises `PromptTooLong`, `OutOfPages` or `QueueFull`; the scheduler is unchanged then."""

    def abort(self, request_id: str) -> TokenEvent | None:
        """End it wherever it is. Pages that a step in flight still writes return when that step is committed."""

    def finish(self, request_id: str, reason: FinishReason) -> TokenEvent | None:
        """End a running request from outside: the detokenizer found a stop string."""

    def plan(self) -> StepPlan | None:
        """The next step, assuming that every step planned before succeeds."""

    def commit(self, result: StepResult) -> tuple[TokenEvent, ...]:
        """Take a step's tokens over, in the order in which the steps were planned."""

    def fail(self, plan: StepPlan, cause: BaseException) -> tuple[TokenEvent, ...]:
        """A planned step raised: its requests end with `StepFailed`, everything else goes on."""

    def flush_cache(self, root_key: bytes | None = None, *, recompute: bool = False) -> None:
        """Forget every cached page, and with `recompute` what running requests have computed. No step is in flight."""

    def pin(self, tokens: IntArray) -> int:
        """Keep the cached pages of `tokens`; how many tokens that covers."""

    def unpin(self, tokens: IntArray) -> int:
        """Undo one `pin`; how many tokens are no longer pinned."""

    def status(self, request_id: str) -> Status | None: ...

    def explain(self, request_id: str) -> Any: ...

    def statistics(self) -> Any: ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + held + cached pages are all pages, each with its right count."""


class RunnerLike(Protocol):
    """The device side. `fetch` blocks and is called from a worker thread; the rest returns at once."""

    def dispatch(self, plan: StepPlan) -> InFlightLike: ...

    def fetch(self, in_flight: Any) -> StepResult:
        """Wait for what `dispatch` returned."""
        ...

    def statistics(self) -> Any: ...

    def close(self) -> None:
        """Give the device memory back; idempotent."""
