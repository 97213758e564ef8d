"""The two sides of a session: a front, which turns prompts into requests and tokens into text, over any backend.

The front is the same for a session and for a fleet; only the backend differs, which runs the requests. A backend is an
`Engine` over one device or mesh, or the replicas of a fleet. First come the messages between callers, front and
backend, in addition to the records of rekindle._src.core.records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rekindle._src.core.activity import NO_WAIT, ProgramWait
from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.contracts import ChatLike, DetokenizerLike, TokenizerLike
from rekindle._src.core.embedder import Embedder
from rekindle._src.core.extension import NONE, Extensions
from rekindle._src.core.own_failure import own_failure
from rekindle._src.core.records import (
    FinishReason,
    IntArray,
    Request,
    Status,
    StepPlan,
    StepResult,
    TokenEvent,
)
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.threads import DeviceThread, Mailbox, OneShot
from rekindle.errors import RekindleError

M = TypeVar("M")
T = TypeVar("T")


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
    extensions: Extensions = NONE  # what its caller has resolved, for the capabilities
    messages: Sequence[Mapping[str, object]] | None = None  # of a chat, for routing
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


class StepOutcome(NamedTuple):
    """The outcome of a single step; `result` is None if there was nothing to do."""

    result: StepResult | None
    events: tuple[TokenEvent, ...]


class StepOnce(NamedTuple):
    """caller → schedule: run exactly one step of a paused session."""

    report: OneShot[StepOutcome]


class Exclusive(NamedTuple, Generic[T]):
    """caller → schedule: call `job` on the device thread while no step is in flight, then `after` on the loop."""

    job: Callable[[], T]
    after: Callable[[T], object]
    done: OneShot[T]
    vital: bool = False  # the session can't go on if it fails


class Drain(NamedTuple):
    """intake → backend, last of all: end once every request has ended."""


class LoopTurn(NamedTuple):
    """schedule → step: dispatch `plan`, then fetch the step dispatched in the turn before."""

    plan: StepPlan | None
    job: Callable[[], object] | None = None  # instead of a step


class TurnOutcome(NamedTuple):
    """step → schedule: the results of a turn."""

    result: StepResult | None = None
    failed: tuple[tuple[StepPlan, BaseException], ...] = ()  # in the order of their plans
    returned: object = None  # by the job
    error: BaseException | None = None  # raised by the job


class Events(NamedTuple):
    """backend → detokenize: tokens and ends of one or more steps, and the requests that ran for the first time."""

    events: tuple[TokenEvent, ...]
    started: Mapping[str, float] = {}  # when each of them began, by `time.perf_counter()`
    then: tuple[Callable[[], object], ...] = ()  # called when callers have received the events before


Control = (
    Pause | Resume | StepOnce | Exclusive[Any]
)  # sent through intake: they overtake no submission that is taken in soon
BackendMessage = Request | Abort | Finish | Control | Drain
ScheduleMessage = BackendMessage | OneShot[TurnOutcome]


def next_waiting(inbox: MemoryObjectReceiveStream[M]) -> M | None:
    """Return the next message if there is one now; None if the inbox is empty or has ended."""
    try:
        return inbox.receive_nowait()
    except (anyio.WouldBlock, anyio.EndOfStream):
        return None


class Backend(Protocol):
    """Runs requests. It is owned by the host's loop, on which all methods but `close` are called and return at once."""

    @property
    def places(self) -> int:
        """Sequences that callers may have in it at once, running or queued."""
        ...

    @property
    def bound(self) -> int:
        """The most that `places` may ever be."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; its events come as the backend runs it."""

    def abort(self, request_id: str) -> None:
        """End a request in any state; nothing happens if it has ended."""

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request because its text has a stop string and is complete."""

    def fail(self, request_id: str, error: RekindleError) -> None:
        """End a request by an error of the backend's own work for it."""

    def control(self, message: Control | Drain) -> None:
        """Pause, resume, run one step, call a job between two steps, or end after the last request."""

    def events(self) -> Events | None:
        """Return the events since the last call; None if there are none."""

    def status(self, request_id: str) -> Status | None:
        """Return the state of a request; None if it is unknown."""

    def explain(self, request_id: str) -> Any:
        """Return why a request is in its state, in words and numbers; None if it is unknown."""

    async def serve(
        self,
        inbox: MemoryObjectReceiveStream[ScheduleMessage],
        post: MemoryObjectSendStream[ScheduleMessage],
        outbox: MemoryObjectSendStream[Events],
        device: DeviceThread,
    ) -> None:
        """Take messages and send events until a `Drain` has come and no request is left; `post` feeds the inbox."""

    def attach(self, lost: Callable[[BaseException], object], resize: Callable[[int], object]) -> None:
        """Take the host's callbacks: `lost` ends the session, in any thread; `resize` changes the number of places."""

    def close(self) -> None:
        """Free its resources. Called on the device thread, last of all."""


class SessionService(Generic[T]):
    """One kind of service: an object that a session has for the requests of one capability."""

    __slots__ = ("_close", "name")

    def __init__(self, name: str, *, close: Callable[[T], object] = lambda service: None) -> None:
        """The host calls `close` on the device thread, after the backend's."""
        self.name, self._close = name, close

    def of(self, front: Front) -> T | None:
        """Return a front's service of this kind; None if it has none."""
        return front.services.get(self)

    def close(self, front: Front) -> None:
        """Close a front's service of this kind, if it has one."""
        service = self.of(front)
        if service is not None:
            self._close(service)

    def __repr__(self) -> str:
        return f"<service {self.name}>"


Services = Mapping[SessionService[Any], Any]
NO_SERVICES: Services = MappingProxyType({})


class Front(NamedTuple):
    """Takes requests in and returns their text. Tests and tutorials put fakes in place of its parts."""

    backend: Backend
    tokenizer: TokenizerLike
    detokenizer: Callable[[Sampling, frozenset[str]], DetokenizerLike]  # the second: special tokens with a text
    config: ResolvedConfig
    vocab_size: int
    chat: ChatLike | None = None  # where the model brings a template
    model: str = ""
    processors: tuple[str, ...] = ()  # names that requests may use
    # Most characters that one token can stand for, computed at first use; None: longer prompts are encoded.
    characters_per_token: Callable[[], int] | None = None
    longest: int | None = None  # positions of the model
    embedder: Embedder = Embedder()  # what becomes of a text's hidden states
    sampling: Sampling | None = None  # default of requests without their own, from the checkpoint
    chat_sampling: Sampling | None = None  # the same of chats
    program_wait: ProgramWait = NO_WAIT  # how long steps waited for programs
    expect_chat: Callable[[], object] = lambda: None  # makes the programs of a first message ahead
    services: Services = NO_SERVICES  # of the capabilities, for their requests

    def eos_ids(self, sampling: Sampling) -> frozenset[int]:
        """Return the tokens that end a text on their own; empty with `ignore_eos`."""
        return frozenset() if sampling.ignore_eos else frozenset(self.tokenizer.eos_ids)


def take(backend: Backend, message: BackendMessage) -> None:
    """Hand a message to a backend. An exception of any kind in a request's own work ends that request and no other."""
    match message:
        case Request():
            request_id, change = message.id, partial(backend.submit, message)
        case Abort(request_id):
            change = partial(backend.abort, request_id)
        case Finish(request_id, reason):
            change = partial(backend.finish, request_id, reason)
        case _:
            backend.control(message)
            return
    try:
        change()
    except BaseException as error:
        backend.fail(request_id, own_failure(error, f"request {request_id} could not be scheduled"))
