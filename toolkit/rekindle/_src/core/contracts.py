"""The contracts between the host side and what drives it: scheduler, runner, tokenizer, detokenizer, chat template.

The dispatch loop needs nothing but these; tests and tutorials put fakes in their place.

    plan = scheduler.plan()             # who runs, on which pages; None when there is nothing to do
    current = runner.dispatch(plan)     # returns at once, the device works
    result = runner.fetch(previous)     # one step behind
    events = scheduler.commit(result)   # tokens, ends, pages published to the prefix cache

A contract has all that production code uses. Nothing in it is optional, so that a fake that lacks something is a type
error and not another way through the code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from rekindle._src.core.records import FinishReason, IntArray, Request, Status, StepPlan, StepResult, TokenEvent


class SchedulerFigures(Protocol):
    """What the dispatch loop logs; a scheduler's statistics hold more, which `session.stats()` shows as they are."""

    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def pages_total(self) -> int: ...
    @property
    def pages_free(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...


class SchedulerLike(Protocol):
    """Pure host state with one owner; every method is synchronous, exact and quick."""

    @property
    def has_work(self) -> bool:
        """A request is waiting or running, or a planned step has not been committed."""

    @property
    def cache(self) -> object | None:
        """The prefix cache, or None. A session looks into it and saves it if it is a `PrefixCache`."""

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

    def pin(self, tokens: IntArray, salt: str | None = None) -> int:
        """Keep the cached pages of `tokens`; how many tokens they cover."""

    def unpin(self, tokens: IntArray, salt: str | None = None) -> int:
        """Undo one `pin`; how many tokens are no longer pinned."""

    def status(self, request_id: str) -> Status | None:
        """Where a request is; None if the scheduler doesn't know it."""

    def explain(self, request_id: str) -> Any:
        """Why a request is where it is, in words and numbers; None if the scheduler doesn't know it."""

    def statistics(self) -> SchedulerFigures:
        """Sizes now, and counts since the start."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + held + cached pages are all pages, each with its right count."""


class InFlightLike(Protocol):
    """A dispatched step whose result has not been read."""

    @property
    def plan(self) -> StepPlan: ...


class RunnerFigures(Protocol):
    """What the dispatch loop and `session.programs()` read; a runner's statistics may hold more."""

    @property
    def compilations(self) -> int: ...
    @property
    def traces(self) -> int: ...
    @property
    def programs(self) -> Mapping[str, int]:
        """Steps by program."""
        ...


class ProgramsLike(Protocol):
    """The compiled programs of a runner."""

    @property
    def keys(self) -> Collection[Any]:
        """All programs that the runner may ever ask for."""
        ...

    def manifest(self) -> Sequence[Any]:
        """Records of the programs that are ready: name, origin, seconds and why it was not loaded."""
        ...


class RunnerLike(Protocol):
    """The device side. `fetch` blocks and is called from a worker thread; the rest returns at once."""

    @property
    def programs(self) -> ProgramsLike | None:
        """None if steps need no compiled programs."""

    def dispatch(self, plan: StepPlan) -> InFlightLike: ...

    def fetch(self, in_flight: Any) -> StepResult:
        """Wait for what `dispatch` returned."""
        ...

    def program(self, plan: StepPlan) -> str:
        """The name of the program that runs a plan."""
        ...

    def read_pages(self, pages: Sequence[int], digests: Sequence[bytes] = ()) -> Sequence[tuple[Any, ...]]:
        """Copies of what pages hold: for each of them one array per leaf of the KV cache. No step is in flight."""
        ...

    def statistics(self) -> RunnerFigures: ...

    def close(self) -> None:
        """Give the device memory back; idempotent."""


class TokenizerLike(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> Collection[int]: ...
    @property
    def has_text(self) -> bool:
        """False if it knows only ids: prompts are token ids then, and completions have no text."""
        ...

    @property
    def encodes_apart(self) -> bool:
        """True if a process of its own encodes, so that even a short text may take seconds."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class DetokenizerLike(Protocol):
    """Turns the tokens of one sequence into text that is final, and finds stop strings in it."""

    stopped: str | None  # the stop string that was found
    tokens: int  # taken, up to the one that completed a stop string
    released: int  # of them, those whose text was returned

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """The text that became final with these tokens, and the stop string that ended it, if one did."""
        ...

    def flush(self) -> str:
        """The text that was held back, now that no token follows."""
        ...


class ChatLike(Protocol):
    """A model's chat template."""

    def text(self, template: str | None = None, *, tools: bool = False) -> str:
        """The text of the template that `prepare` would use."""
        ...

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> Callable[[], str]:
        """Check a conversation now; the result renders its prompt, special tokens included, in any thread."""
        ...
