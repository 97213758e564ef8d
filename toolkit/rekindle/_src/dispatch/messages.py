"""The messages between callers and tasks, beside the records of rekindle._src.core.records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from rekindle._src.core.records import FinishReason, IntArray, Pooling, Request, StepPlan, StepResult, TokenEvent
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.mailbox import Mailbox, OneShot

if TYPE_CHECKING:
    from rekindle._src.structured.spec import Structure
    from rekindle._src.text.replies import ReplyPlan

M = TypeVar("M")


class Submission(NamedTuple):
    """caller → intake: one prompt as text, as token ids or as a function that renders it; `sampling.n` sequences."""

    id: str
    text: str | None
    token_ids: IntArray | None  # instead of text
    add_special_tokens: bool
    sampling: Sampling
    mailbox: Mailbox
    arrival: float
    render: Callable[[], str] | None = None  # makes the text, off every event loop; a chat template does it
    pooling: Pooling | None = None  # embed the prompt rather than go on with it
    reply: ReplyPlan | None = None  # how a chat's reply is read for reasoning and calls of tools
    structure: Structure | None = None  # the structure of the text that `sampling` asks for
    covered: int = 0  # tokens at the prompt's end that belong to that structure already
    messages: Sequence[Mapping[str, Any]] | None = None  # of a chat, for routing
    long: bool = False  # there is so much to render that others go on meanwhile
    caller: str = ""  # those with long prompts or grammars take turns


class Abort(NamedTuple):
    """caller → backend: end one sequence."""

    request_id: str


class Finish(NamedTuple):
    """detokenize → backend: a stop string ended it."""

    request_id: str
    reason: FinishReason


class Pause(NamedTuple):
    """caller → schedule: plan no more steps; `quiet` is filled once none is in flight."""

    quiet: OneShot[None]


class Resume(NamedTuple):
    """caller → schedule: the opposite of one `Pause`."""


class Stepped(NamedTuple):
    """The outcome of a single step; `result` is None if there was nothing to do."""

    result: StepResult | None
    events: tuple[TokenEvent, ...]


class StepOnce(NamedTuple):
    """caller → schedule: run exactly one step of a paused session."""

    report: OneShot[Stepped]


class Exclusive(NamedTuple):
    """caller → schedule: call `job` on the device thread while no step is in flight, then `after` on the loop."""

    job: Callable[[], Any]
    after: Callable[[Any], object]
    done: OneShot[Any]
    vital: bool = False  # the session can't go on if it fails


class Drain(NamedTuple):
    """intake → backend, last of all: end once every request has ended."""


class Turn(NamedTuple):
    """schedule → step: dispatch `plan`, then fetch the step dispatched in the turn before."""

    plan: StepPlan | None
    job: Callable[[], Any] | None = None  # instead of a step


class Outcome(NamedTuple):
    """step → schedule: the results of a turn."""

    result: StepResult | None = None
    failed: tuple[tuple[StepPlan, BaseException], ...] = ()  # in the order in which they were planned
    returned: Any = None  # by the job
    error: BaseException | None = None  # raised by the job


class Events(NamedTuple):
    """backend → detokenize: tokens and ends of one or more steps, and the requests that ran for the first time."""

    events: tuple[TokenEvent, ...]
    started: Mapping[str, float] = {}  # when each of them began, by `time.perf_counter()`
    then: tuple[Callable[[], object], ...] = ()  # called when callers have received the events before


Control = Pause | Resume | StepOnce | Exclusive  # sent through intake, so that they never overtake a submission
BackendMessage = Request | Abort | Finish | Control | Drain
ScheduleMessage = BackendMessage | Outcome


def next_waiting(inbox: MemoryObjectReceiveStream[M]) -> M | None:
    """Return the next message if there is one now; None if the inbox is empty or has ended."""
    try:
        return inbox.receive_nowait()
    except (anyio.WouldBlock, anyio.EndOfStream):
        return None
