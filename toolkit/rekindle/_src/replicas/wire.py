"""Records that a fleet and its replicas send each other, and the encoding of a request. All can be pickled.

No user object is sent: a request is plain values as JSON and token ids as bytes. A type that was passed as `schema`
stays in the fleet's process, which builds the object from the text; the description of its grammar is sent. A replica
checks a request as a session checks a caller's. The fleet has placeholders for compiled grammars.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, get_args

import numpy as np

from rekindle._src.capabilities.guides.request import GrammarLike, after
from rekindle._src.capabilities.pooling.request import PromptPooling
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.embedder import Embedder
from rekindle._src.core.extension import NONE, Extensions
from rekindle._src.core.extensions import Guidance
from rekindle._src.core.records import GuideReport, Mask, NewGuide, Pooling, Request, ResumeState, TokenEvent
from rekindle._src.core.sampling import Sampling
from rekindle._src.kvcache.sharing import PageAddress
from rekindle._src.replicas.routing import Role
from rekindle._src.structured.reasoning import ReasoningRules
from rekindle._src.structured.spec import Spec
from rekindle._src.structured.token_rules import RestrictedGuide
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.session.session import Session


class RemoteGuide:
    """A placeholder for a guide: its description, and the tokens that it must consume first."""

    ended: bool = False
    spent: float = 0.0
    ahead: tuple[int, ...] = ()

    def __init__(
        self, spec: Spec | None, eos_ids: Collection[int], rules: ReasoningRules | None, budget: int | None
    ) -> None:
        self.spec = spec  # None: the answer is free
        self.eos_ids, self.rules, self.budget = tuple(eos_ids), rules, budget
        self.covered: list[int] = []
        self.consumed: int = 0

    def fill(self, mask: Mask) -> str:
        raise AssertionError("a guide was asked in a process that runs no steps")

    def consume(self, token: int) -> GuideReport:
        """Note a token of the prompt that belongs to the structured text."""
        self.covered.append(token)
        return GuideReport()

    def copy(self) -> RemoteGuide:
        """Return the placeholder of another sequence."""
        clone = RemoteGuide(self.spec, self.eos_ids, self.rules, self.budget)
        clone.covered, clone.consumed, clone.ended = [*self.covered], self.consumed, self.ended
        return clone

    def build(self, grammar: GrammarLike | None, reasoning_guide: Callable[[ReasoningRules], NewGuide]) -> NewGuide:
        """Return the guide itself, advanced past the covered tokens. Raise `InvalidRequest` if they don't match."""
        if grammar is None:
            assert self.rules is not None, "it guides something"
            return reasoning_guide(self.rules)
        guide = grammar.guide(self.eos_ids, self.rules, self.budget)
        return after(guide, self.covered, grammar.spec.kind, list)


class RemoteGrammar:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def guide(
        self, eos_ids: Collection[int], rules: ReasoningRules | None = None, budget: int | None = None
    ) -> RemoteGuide:
        return RemoteGuide(self.spec, eos_ids, rules, budget)


class RemoteGrammars:
    """A placeholder for `Grammars`. It accepts every spec; an invalid one is refused where it is compiled."""

    def find(self, spec: Spec) -> RemoteGrammar:
        return RemoteGrammar(spec)

    def reasoning_guide(self, rules: ReasoningRules) -> RemoteGuide:
        return RemoteGuide(None, (), rules, None)

    def begin(self, spec: Spec, caller: str = "") -> NoReturn:
        raise AssertionError("every grammar was found")

    def leave(self, job: object) -> None:
        """Do nothing: nothing is compiled here."""

    def compile(self, spec: Spec, *, patience: float | None = None) -> RemoteGrammar:
        return RemoteGrammar(spec)

    def close(self) -> None:
        """Do nothing: nothing is compiled here."""


# The fields of `Sampling` for the structure of a text: its guide has the same in a form that can be sent.
STRUCTURE = frozenset(("schema", "regex", "choice", "grammar", "json", "lenient", "whitespace_flexible"))
_TRAVELS = tuple(field.name for field in dataclasses.fields(Sampling) if field.name not in STRUCTURE)
_TOKEN = np.dtype("<i4")


class RequestMessage(NamedTuple):
    """A request in the form that is sent to a replica."""

    id: str
    fields: str  # JSON
    tokens: bytes  # of the prompt, then the generated ones
    pages: PageAddress | None = None  # of the replica that has computed its prompt
    own_call: bool = False  # in its own call: intake may take long, or end the process


class ReplicaInfo(NamedTuple):
    """A replica's model, as far as the fleet needs it for the intake of requests."""

    config: EngineConfig  # resolved
    tokenizer: Any
    chat: Any  # its template, or None
    vocab_size: int
    embedder: Embedder
    longest: int | None
    sampling: Sampling | None
    chat_sampling: Sampling | None
    think_ids: tuple[int, int] | None
    processors: tuple[str, ...]
    steering: tuple[str, ...]  # names of changes inside the model
    places: int  # sequences that it has room for
    pid: int
    host: str
    pages: PageAddress | None = None  # the address where other replicas take its pages


class SessionChange(Protocol):
    """A change that a fleet makes to the sessions of its replicas. It is pickled."""

    async def apply(self, session: Session) -> None:
        """Make it, in the replica's process. Raise the session's error."""
        ...


class WeightsVersion(NamedTuple):
    """Weights that replicas have or will take."""

    number: int  # of the swap; 0: the weights that the replicas were opened with
    name: str  # a folder or hub id; empty with 0

    async def apply(self, session: Session) -> None:
        """Swap the session's weights. Running requests keep their tokens."""
        await session.swap_weights(self.name)


class News(NamedTuple):
    """The news of one sequence since the previous mail."""

    event: TokenEvent
    waited: float | None = None  # seconds until it first ran; in the first news of a sequence


class Mail(NamedTuple):
    """A replica's message to one fleet."""

    news: tuple[News, ...]
    figures: Mapping[str, Any]  # of its session, at most a few seconds old
    silent: float  # seconds since the session's loop last answered


class Connection(Protocol):
    """A fleet's connection to one replica. Calls raise `ReplicaGone` if its process is gone or can't be reached."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    async def open(self) -> ReplicaInfo:
        """Wait until its session is open. Raise the error of opening it."""
        ...

    async def send(self, sender: str, requests: tuple[RequestMessage, ...], ended: tuple[str, ...]) -> None:
        """Send it requests, and the ids of requests to abort."""
        ...

    async def warm(self, addresses: tuple[PageAddress, ...]) -> int:
        """Let it take pages that its neighbours likely need again. Return their number."""
        ...

    async def change(self, change: SessionChange) -> None:
        """Change its session. Raise the session's error."""
        ...

    async def mail(self, sender: str, patience: float) -> Mail:
        """Wait for news, but not longer than `patience` seconds."""
        ...

    def kill(self) -> None:
        """End its process. Another one takes its place."""

    def close(self) -> None:
        """End its process for good."""


class ReplicaGone(Exception):
    """The process of a replica is gone, or does not answer."""


class ReceivedRequest(NamedTuple):
    """A request as a replica decodes it. Its guide, if any, is built from the description that comes with it."""

    request: Request
    guide: RemoteGuide | None


def encode(request: Request, pages: PageAddress | None = None, *, own_call: bool = False) -> RequestMessage:
    """Encode a request. Raise if one of its values can't be sent."""
    sampling, resumed, guide = request.sampling, request.resumed, _remote(request)
    options = {name: getattr(sampling, name) for name in _TRAVELS}
    for extension in request.extensions.values():
        options |= extension.elsewhere
    pooling = request.extensions.get(PromptPooling)
    fields: dict[str, Any] = {
        "sampling": options | {"logit_bias": list(sampling.logit_bias.items())},
        "stop_ids": sorted(request.stop_ids),
        "eos_ids": sorted(request.eos_ids),
        "pooling": None if pooling is None else pooling.kind,
        "prompt": request.prompt_length,
        "caller": request.caller,
        "scored": None if resumed is None else resumed.scored,
    }
    if guide is not None:
        fields["guide"] = {
            "spec": None if guide.spec is None else dataclasses.asdict(guide.spec),
            "eos_ids": sorted(guide.eos_ids),
            "rules": None if guide.rules is None else guide.rules.values(),
            "budget": guide.budget,
            "covered": guide.covered,
        }
    generated = b"" if resumed is None else np.asarray(resumed.token_ids, _TOKEN).tobytes()
    tokens = np.asarray(request.token_ids, _TOKEN).tobytes() + generated
    return RequestMessage(request.id, json.dumps(fields), tokens, pages, own_call or guide is not None)


def decode(sent: RequestMessage, vocab_size: int) -> ReceivedRequest:
    """Decode a request. Raise `InvalidRequest` if it is malformed."""
    try:
        fields = json.loads(sent.fields)
        tokens, length, guide = np.frombuffer(sent.tokens, _TOKEN).astype(np.int32), fields["prompt"], None
        if not 0 < length <= len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"it has no prompt, or token ids beyond {vocab_size - 1}")
        if (pooling := fields["pooling"]) is not None and pooling not in get_args(Pooling):
            raise ValueError(f"it pools by {pooling!r}")
        if (description := fields.get("guide")) is not None:
            rules = None if description["rules"] is None else ReasoningRules.read(description["rules"])
            spec = None if description["spec"] is None else Spec(**description["spec"])
            if spec is None and rules is None:
                raise ValueError("its guide has nothing to guide")
            guide = RemoteGuide(spec, description["eos_ids"], rules, description["budget"])
            guide.covered = list(description["covered"])
        options = fields["sampling"]
        request = Request(
            id=sent.id,
            token_ids=tokens[:length],
            sampling=Sampling(**options | {"logit_bias": dict(options["logit_bias"])}),
            stop_ids=frozenset(fields["stop_ids"]),
            eos_ids=frozenset(fields["eos_ids"]),
            group=sent.id,
            resumed=None if fields["scored"] is None else ResumeState(tokens[length:], fields["scored"]),
            caller=str(fields["caller"]),
            extensions=NONE if pooling is None else Extensions(PromptPooling(pooling)),
        )
    except (TypeError, ValueError, LookupError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest("request", sent.id, f"can't be read: {error}", "Use one version everywhere") from error
    return ReceivedRequest(request, guide)


def _remote(request: Request) -> RemoteGuide | None:
    guidance = request.extensions.get(Guidance)
    guide = None if guidance is None else guidance.guide
    if isinstance(guide, RestrictedGuide):  # its rules follow from the options, and are built where it runs
        guide = guide.inner
    assert guide is None or isinstance(guide, RemoteGuide), "a fleet compiles no grammars"
    return guide
