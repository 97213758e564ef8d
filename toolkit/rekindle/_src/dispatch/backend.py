"""The two sides of a session: a front, which turns prompts into requests and tokens into text, over any backend.

The front is the same for a session and for a fleet; only the backend differs, which runs the requests. A backend is an
`Engine` over one device or mesh, or the replicas of a fleet. First come the messages between callers, front and
backend, in addition to the records of rekindle._src.core.records.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rekindle._src.core.activity import NO_WAIT, ProgramWait
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.contracts import ChatLike, DetokenizerLike, TokenizerLike
from rekindle._src.core.embedder import Embedder
from rekindle._src.core.extension import NONE, Extension, Extensions
from rekindle._src.core.own_failure import own_failure
from rekindle._src.core.pictures import EncodedRows, PictureLike, PictureStatistics
from rekindle._src.core.records import (
    FinishReason,
    IntArray,
    NewGuide,
    Request,
    Status,
    StepPlan,
    StepResult,
    TokenEvent,
)
from rekindle._src.core.sampling import Sampling
from rekindle._src.core.tapped import TapFacts
from rekindle._src.dispatch.threads import DeviceThread, Mailbox, OneShot
from rekindle.errors import RekindleError

if TYPE_CHECKING:
    from rekindle._src.structured.compilers import Job
    from rekindle._src.structured.grammar import Reasoning
    from rekindle._src.structured.spec import Spec

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
ScheduleMessage = BackendMessage | TurnOutcome


def next_waiting(inbox: MemoryObjectReceiveStream[M]) -> M | None:
    """Return the next message if there is one now; None if the inbox is empty or has ended."""
    try:
        return inbox.receive_nowait()
    except (anyio.WouldBlock, anyio.EndOfStream):
        return None


class GrammarLike(Protocol):
    """A structure that texts can follow: compiled, or in a fleet only described."""

    @property
    def spec(self) -> Spec: ...
    def guide(
        self, eos_ids: Collection[int], reasoning: Reasoning | None = None, budget: int | None = None
    ) -> NewGuide:
        """Return a guide for one sequence."""
        ...


class GrammarsLike(Protocol):
    """The grammars of a front; `find` knows all of them where nothing is compiled."""

    def find(self, spec: Spec) -> GrammarLike | None: ...
    def begin(self, spec: Spec, caller: str = "") -> Job[Any]: ...
    def leave(self, job: Job[Any]) -> None: ...
    def compile(self, spec: Spec, *, patience: float | None = None) -> GrammarLike: ...
    def close(self) -> None: ...


class AdaptersLike(Protocol):
    """The adapters of a session or a fleet."""

    @property
    def names(self) -> tuple[str, ...]: ...
    def use(self, value: str | Mapping[str, float]) -> Extension:
        """Return the extension of a request with this option. Raise `InvalidRequest` for an unknown name."""
        ...


class PicturesLike(Protocol):
    """The pictures of a session: how prompts spell them, and the encoder that makes rows of them."""

    @property
    def marker(self) -> str:
        """The text that stands for one picture in a prompt, before it is spelled."""
        ...

    @property
    def whole(self) -> bool:
        """True if a step computes either all or no tokens of a picture."""
        ...

    @property
    def token(self) -> int:
        """The id of the tokens that rows of pictures take the place of."""
        ...

    def read(self, values: Sequence[object], field: str = "images") -> tuple[PictureLike, ...]:
        """Return the pictures in values of the caller. Raises `InvalidRequest` for anything else."""
        ...

    def spelled(self, text: str, pictures: Sequence[PictureLike]) -> str:
        """Return a text with one token for each run of rows, from one with a marker for each picture."""
        ...

    def filled(self, token_ids: IntArray, pictures: Sequence[PictureLike], field: str = "images") -> IntArray:
        """Return a prompt's token ids with all tokens of its pictures, from ids with one placeholder for each picture.

        Ids that have them all are returned as they are. Raises `InvalidRequest` for another number.
        """
        ...

    def counts(self, picture: PictureLike) -> Sequence[int]:
        """Return the lengths of the runs of rows of a picture."""
        ...

    def identify(self, picture: PictureLike) -> None:
        """Decode a picture, so that its digest is known."""
        ...

    def known(self, picture: PictureLike, salt: str | None) -> bool:
        """True if the rows of a picture are here, for requests with this salt."""
        ...

    async def encoded(
        self, picture: PictureLike, wanted: Callable[[], bool], *, caller: str, salt: str | None
    ) -> EncodedRows:
        """Return the rows of a picture. Callers take turns; requests with a salt share rows with that salt alone.

        Raises `RequestAborted` once it is not `wanted`.
        """
        ...

    def statistics(self) -> PictureStatistics:
        """Return the figures of now."""
        ...

    def use(
        self, token_ids: IntArray, runs: Sequence[tuple[int, int]], pictures: Sequence[PictureLike]
    ) -> tuple[IntArray | None, int]:
        """Return the coordinates of a prompt's tokens, and the offset after them; None and 0 for other ropes."""
        ...


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


class Front(NamedTuple):
    """Takes requests in and returns their text. Tests and tutorials put fakes in place of its parts."""

    backend: Backend
    tokenizer: TokenizerLike
    detokenizer: Callable[[Sampling, frozenset[str]], DetokenizerLike]  # the second: special tokens with a text
    config: EngineConfig  # resolved
    vocab_size: int
    chat: ChatLike | None = None  # where the model brings a template
    model: str = ""
    processors: tuple[str, ...] = ()  # names that requests may use
    adapters: AdaptersLike | None = None  # usable by requests; None: there can't be any
    # Most characters that one token can stand for, computed at first use; None: longer prompts are encoded.
    characters_per_token: Callable[[], int] | None = None
    longest: int | None = None  # positions of the model
    embedder: Embedder = Embedder()  # what becomes of a text's hidden states
    sampling: Sampling | None = None  # default of requests without their own, from the checkpoint
    chat_sampling: Sampling | None = None  # the same of chats
    program_wait: ProgramWait = NO_WAIT  # how long steps waited for programs
    expect_chat: Callable[[], object] = lambda: None  # makes the programs of a first message ahead
    grammars: GrammarsLike | None = None  # compiles the structures of requests' texts
    taps: TapFacts | None = None  # what requests may read and change inside the model; None: nothing
    think_ids: tuple[int, int] | None = None  # tokens around a model's reasoning, if it has them
    pictures: PicturesLike | None = None  # reads and encodes pictures; None: the model reads text alone

    @property
    def steering(self) -> tuple[str, ...]:
        """The names of changes that requests may use."""
        return () if self.taps is None else tuple(self.taps.steering)

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
