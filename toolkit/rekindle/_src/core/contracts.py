"""The contracts between the host side and its parts: scheduler, runner, tokenizer, detokenizer, chat template.

An engine and the front before it need only these; tests and tutorials put fakes in their place.

    plan = scheduler.plan()             # who runs, on which pages; None when there is nothing to do
    current = runner.dispatch(plan)     # returns at once, the device works
    result = runner.fetch(previous)     # the result of the step before
    events = scheduler.commit(result)   # tokens, ends, pages published to the prefix cache

A contract has all that production code uses. No part of it is optional, so that an incomplete fake is a type error and
not another way through the code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from rekindle._src.core.prefix import Prefix
from rekindle._src.core.prompt_hit import PromptHit
from rekindle._src.core.records import (
    FinishReason,
    PageMove,
    Request,
    Status,
    StepPlan,
    StepResult,
    TokenEvent,
    WaitingRequest,
)


class SchedulerFigures(Protocol):
    """The figures that the dispatch loop logs; a scheduler's statistics have more, which `session.stats()` shows."""

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
        """True if a request waits or runs, or if a planned step has not been committed."""

    @property
    def held(self) -> bool:
        """True if a request is in no step for now: it waits for its program, or for a disk to read its pages or to
        write its captures.
        """

    @property
    def cache(self) -> object | None:
        """The prefix cache, or None. A session looks into it and saves it if it is a `PrefixCache`."""

    @property
    def weights_version(self) -> int:
        """How often weights were swapped."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `PromptTooLong`, `OutOfPages` or `QueueFull`; the scheduler is unchanged then."""

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request in any state. Pages that a step in flight still writes return when that step is committed."""

    def finish(self, request_id: str, reason: FinishReason) -> TokenEvent | None:
        """End a running request from outside, because the detokenizer met a stop string."""

    def failures(self) -> tuple[TokenEvent, ...]:
        """Take out the events of requests that ended outside of a step: none can have them, or pages are out of use."""
        ...

    def plan(self, *, now: bool = False) -> StepPlan | None:
        """Return the next step, assuming that every step planned before succeeds.

        Rows may wait for their programs, unless the step is to run `now`.
        """

    def commit(self, result: StepResult) -> tuple[TokenEvent, ...]:
        """Take over a step's tokens; steps are committed in the order of their plans."""

    def fail(self, plan: StepPlan, cause: BaseException) -> tuple[TokenEvent, ...]:
        """End with `StepFailed` the requests of a step that raised; everything else goes on."""

    def flush_cache(self, root_key: bytes | None = None, *, recompute: bool = False, keep: bool = False) -> None:
        """Forget all cached pages, and with `recompute` the work of running requests. No step may be in flight.

        With `keep`, pages below the device are set aside under their root, after `vacate`.
        """

    def vacate(self) -> tuple[PageMove, ...]:
        """Take all pages, which are about to be freed; return those to read out before. No step may be in flight."""
        ...

    def vacated(self) -> None:
        """End the read-out of pages that `vacate` returned."""

    def pin(self, prefix: Prefix) -> int:
        """Keep the cached pages of a prompt; return the number of tokens that they cover."""

    def forecast(self, request: Request) -> PromptHit:
        """Return where a request would find the beginning of its prompt if it were admitted now. There is a cache."""
        ...

    def unpin(self, prefix: Prefix) -> int:
        """Undo one `pin`; return the number of tokens that are no longer pinned."""

    def status(self, request_id: str) -> Status | None:
        """Return the state of a request; None if the scheduler doesn't know it."""

    def waits(self, limit: int) -> list[WaitingRequest]:
        """Return the requests that wait and why, the oldest first, at most `limit`."""

    def explain(self, request_id: str) -> object:
        """Return why a request is in its state, in words and numbers; None if the scheduler doesn't know it."""

    def statistics(self) -> SchedulerFigures:
        """Return the present sizes, and counts since the start."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + held + cached pages are all pages, each with the right count."""


class InFlightLike(Protocol):
    """A step on the device with an unread result."""

    @property
    def plan(self) -> StepPlan: ...


class RunnerFigures(Protocol):
    """The figures that the dispatch loop and `session.programs()` read; a runner's statistics may have more."""

    @property
    def compilations(self) -> int: ...
    @property
    def traces(self) -> int: ...
    @property
    def programs(self) -> Mapping[str, int]:
        """The numbers of steps that ran in each program, by its name."""
        ...


class ProgramsLike(Protocol):
    """The compiled programs of a runner."""

    @property
    def keys(self) -> Collection[Any]:
        """The programs that the runner may ever need."""
        ...

    def manifest(self) -> Sequence[Any]:
        """Return a record of each ready program: name, origin, seconds and why it was not loaded."""
        ...


class RunnerLike(Protocol):
    """The device side. `fetch` blocks and is called from a worker thread; the rest returns at once."""

    @property
    def programs(self) -> ProgramsLike | None:
        """None if steps need no compiled programs."""

    def dispatch(self, plan: StepPlan) -> InFlightLike: ...

    def fetch(self, in_flight: InFlightLike) -> StepResult:
        """Wait for the result of a `dispatch` and return it."""
        ...

    def program(self, plan: StepPlan) -> str:
        """Return the name of the program that runs a plan."""
        ...

    def read_side(self, side: int, slots: Sequence[int]) -> Sequence[tuple[NDArray[Any], ...]]:
        """Return the entries in slots of a side cache of the model, by its number. Called between steps."""
        ...

    def read_pages(self, pages: Sequence[int], digests: Sequence[bytes] = ()) -> Sequence[tuple[NDArray[Any], ...]]:
        """Return a copy of pages: for each, one array per leaf of the KV cache. No step may be in flight."""
        ...

    def statistics(self) -> RunnerFigures: ...

    def close(self) -> None:
        """Free the device memory; idempotent."""


class TokenizerLike(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_ids(self) -> Collection[int]: ...
    @property
    def has_text(self) -> bool:
        """False if it knows only ids. Prompts are then token ids, and completions have no text."""
        ...

    @property
    def encodes_apart(self) -> bool:
        """True if a separate process encodes, so that even a short text may take seconds."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class DetokenizerLike(Protocol):
    """Turns the tokens of one sequence into text that is final, and finds stop strings in it."""

    stopped: str | None  # the stop string that ended the text
    tokens: int  # pushed, up to the one that completed a stop string
    released: int  # of them, the tokens with text that was returned

    @property
    def ends(self) -> Sequence[int]:
        """The number of characters decoded when each of them had arrived."""
        ...

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """Return the text that became final with these tokens, and the stop string that ended it, or None."""
        ...

    def flush(self) -> str:
        """Return the text that was held back, once no token follows."""
        ...


class TemplateLike(Protocol):
    """A parsed chat template; it reports the variables and texts that it uses."""

    def reads(self, name: str) -> bool:
        """True if it uses a variable."""
        ...

    def writes(self, text: str) -> bool:
        """True if the text is in one of its strings, or in its output."""
        ...

    @property
    def takes_tools(self) -> bool:
        """True if it shows tools to the model."""
        ...

    @property
    def reads_calls(self) -> bool:
        """True if it shows the calls in an assistant's message."""
        ...


class ChatLike(Protocol):
    """A model's chat template."""

    def reply_format(self, template: str | None = None, *, tools: bool = False) -> object:
        """Return the `ReplyFormat` of replies to prompts that `prepare` makes."""
        ...

    def text(self, template: str | None = None, *, tools: bool = False) -> str:
        """Return the text of the template that `prepare` would use."""
        ...

    def code(self, template: str | None = None, *, tools: bool = False) -> TemplateLike:
        """Return the template that `prepare` would use, parsed. Raises `CheckpointError` if it can't be."""
        ...

    def prepare(
        self,
        messages: Sequence[Mapping[str, object]],
        /,  # a variable may have any name
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: object,
    ) -> Callable[[], str]:
        """Check a conversation now; return a function that renders its prompt, with special tokens, in any thread."""
        ...
