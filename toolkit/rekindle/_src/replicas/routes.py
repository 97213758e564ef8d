"""The requests of a fleet: where each runs, the tokens it has, and where it continues after the loss of a replica."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import anyio
import numpy as np

from rekindle._src.core.drawable import Record
from rekindle._src.core.extension import Extension
from rekindle._src.core.own_failure import own_failure
from rekindle._src.core.records import FinishReason, Request, ResumeState, Status, TokenEvent
from rekindle._src.core.report_kinds import PROMPT_LOGPROBS
from rekindle._src.dispatch.backend import Events
from rekindle._src.kvcache.sharing import PageAddress
from rekindle._src.replicas.autoscaling import FleetLoad
from rekindle._src.replicas.routing import (
    AffinityKeys,
    Load,
    Role,
    Router,
    goes_two_ways,
    keys_of_messages,
    keys_of_tokens,
    prompt_only,
)
from rekindle._src.replicas.wire import News, RequestMessage, encode
from rekindle.errors import QueueFull, RekindleError, ReplicaLost, RequestQuarantined, SessionClosed

E = TypeVar("E", bound=Extension)

log = logging.getLogger("rekindle.fleet")
# Consecutive deaths of replicas before a request has given a new token there. After so many that only this request can
# have caused, it is quarantined. After so many others, it runs apart from other possible causes.
DEATHS = 2
MOVES = 8  # deaths of replicas that a request survives at most
RECENT = 60.0  # seconds for which an unexplained death speaks in favour of the requests on the next dead replicas
_REMEMBERED = 1024  # ended requests remembered for `explain`


class LinkLike(Protocol):
    """The link to one replica, as far as routing needs it."""

    @property
    def name(self) -> str: ...
    @property
    def takes(self) -> bool:
        """True if it is open and takes requests."""
        ...

    @property
    def places(self) -> int: ...
    @property
    def rows(self) -> int:
        """The number of sequences in one of its steps."""
        ...

    @property
    def role(self) -> Role: ...
    @property
    def pages(self) -> PageAddress | None:
        """The address where others take its pages."""
        ...

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its answer together."""
        ...

    def post(self, sent: RequestMessage) -> None:
        """Send it a request, soon."""

    def drop(self, request_id: str) -> None:
        """Abort a request there."""


class LiveSequence:
    """One sequence that has not ended."""

    __slots__ = (
        "blamed", "cached", "deaths", "first", "generated", "keys", "link", "moves", "pages", "proven", "reason",
        "request", "scored", "sent", "wire",
    )  # fmt: skip

    def __init__(self, request: Request, keys: AffinityKeys) -> None:
        self.request, self.keys = request, keys
        self.link: LinkLike | None = None
        self.wire = ""  # its id for the replica: a new one each time that it is sent
        self.moves = 0  # from replica to replica
        self.deaths: list[int] = []  # numbers of consecutive deaths before it gave a new token there
        self.blamed = 0  # deaths that only this request can have caused
        self.proven = False  # it has given a token on its current replica
        self.generated: list[int] = []
        self.scored = 0  # prompt positions with log-probabilities that have arrived
        self.cached: int | None = None  # prompt tokens in the cache of its first replica
        self.sent = 0.0
        self.reason = "waits for a replica that takes it"
        self.first = False  # it is on a replica that only computes its prompt
        self.pages: PageAddress | None = None  # of the replica that has computed the prompt

    @property
    def suspect(self) -> bool:
        """True if it was on so many dead replicas that it must first prove its innocence."""
        return len(self.deaths) >= DEATHS

    def resumed(self, wire: str) -> Request:
        """Return the request to send; it continues after the tokens that have arrived."""
        request = dataclasses.replace(self.request, id=wire, group=wire)
        if self.first:
            request = prompt_only(request)
        if not self.generated and not self.scored:
            return request
        return dataclasses.replace(request, resumed=ResumeState(np.asarray(self.generated, np.int32), self.scored))


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Placed(Record):
    """The current or last replica of a fleet's request."""

    replica: str  # empty while it waits for one
    why: str
    moves: int  # from replica to replica


class Death(NamedTuple):
    """The death of a replica: its time, and the only submission that can have caused it, or None."""

    at: float
    culprit: str | None


class Counts:
    def __init__(self) -> None:
        self.moved = 0  # sequences that went on elsewhere
        self.lost = 0  # deaths of replicas
        self.handed_over = 0  # sequences with a prompt that one replica has computed for another
        self.routed: dict[str, int] = {}  # by replica


class Routes:
    """The requests of a fleet, owned by its loop. `wake` is called after additions to the events."""

    def __init__(self, router: Router, sender: str) -> None:
        self._router, self.sender = router, sender
        self.links: dict[str, LinkLike] = {}
        self._events: list[TokenEvent] = []
        self._started: dict[str, float] = {}  # when sequences first ran
        self.delivered = anyio.Event()  # set and replaced when events are handed on
        self.broken: RekindleError | None = None  # the reason why no replica is left
        self.counts: Counts = Counts()
        self._by_id: dict[str, LiveSequence] = {}
        self._by_wire: dict[str, LiveSequence] = {}
        self._backlog: deque[LiveSequence] = deque()
        self._inside: dict[str, int] = {}
        self._unexplained: dict[int, Death] = {}  # recent deaths, without those explained by a quarantined request
        self._tried: dict[str, LiveSequence] = {}  # the suspect on each replica, at most one at a time
        self._number = 0
        self._placed: OrderedDict[str, Placed] = OrderedDict()
        self._latest_keys: tuple[str, AffinityKeys] = ("", keys_of_tokens(np.zeros(0, np.int32)))  # by submission

    def wake(self) -> None:
        """Have the events delivered; called after additions."""

    # Called by intake and detokenize.

    @property
    def live(self) -> int:
        return len(self._by_id)

    def extensions(self, kind: type[E]) -> list[E]:
        """Return the extensions of one class that requests have."""
        extensions = (live.request.extensions.get(kind) for live in self._by_id.values())
        return [extension for extension in extensions if extension is not None]

    @property
    def waiting(self) -> int:
        return len(self._backlog)

    @property
    def demand(self) -> FleetLoad:
        """The demand that the number of replicas follows."""
        fresh = (live for live in self._by_id.values() if not live.generated and not live.scored)
        return FleetLoad(len(self._by_id), sum(live.request.prompt_length for live in fresh))

    def submit(self, request: Request) -> None:
        """Send a request to a replica, or queue it until one has room."""
        live = self._by_id[request.id] = LiveSequence(request, self._keys(request))
        if self.broken is not None:
            self._fail(live, self.broken)
            return
        self._backlog.append(live)
        self.place()

    def _keys(self, request: Request) -> AffinityKeys:
        """Return the keys of a request; the sequences of one prompt share them."""
        if self._latest_keys[0] != request.group:
            messages, salt = request.messages, request.sampling.salt
            keys = keys_of_tokens(request.token_ids, salt) if messages is None else keys_of_messages(messages, salt)
            self._latest_keys = request.group, keys
        return self._latest_keys[1]

    def abort(self, request_id: str) -> None:
        self.finish(request_id, FinishReason.ABORTED)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request: it was cancelled, or its text has a stop string."""
        live = self._by_id.get(request_id)
        if live is not None:
            self._leave(live, tell=True)
            self._ended(live, TokenEvent(request_id, cached_tokens=live.cached or 0, finish_reason=reason))

    def fail(self, request_id: str, error: RekindleError) -> None:
        """End a request by an error of the fleet's own work for it."""
        live = self._by_id.get(request_id)
        if live is not None:
            self._fail(live, error)
        else:
            self._events.append(TokenEvent(request_id, finish_reason=FinishReason.FAILED, error=error))
            self.wake()

    # Called by links.

    def inside(self, name: str) -> int:
        return self._inside.get(name, 0)

    def arrived(self, link: LinkLike, news: Iterable[News]) -> None:
        """Take a replica's news. Drop the news of requests that have moved to another replica."""
        for item in news:
            live = self._by_wire.get(item.event.request_id)
            if live is None or live.link is not link:
                continue
            try:
                if item.waited is not None and not live.moves:
                    self._started[live.request.id] = live.sent + item.waited
                self._take(live, item.event)
            except BaseException as error:
                self._fail(live, own_failure(error, f"tokens of request {live.request.id} could not be taken over"))
        self.place()
        self.wake()

    def _take(self, live: LiveSequence, event: TokenEvent) -> None:
        if isinstance(event.error, QueueFull):  # another fleet has taken the place
            self._leave(live)
            self._backlog.append(live)
            return
        if isinstance(event.error, SessionClosed):  # the link soon reports its replica's loss, which moves its requests
            return
        live.generated += event.token_ids
        scored = len(PROMPT_LOGPROBS.of(event))
        live.scored += scored
        if event.token_ids or scored:
            live.proven, live.deaths, live.blamed = True, [], 0
            self._stop_trying(live)
        if live.cached is None:
            live.cached = event.cached_tokens
        event = event._replace(request_id=live.request.id, cached_tokens=live.cached)
        if event.finish_reason is None:
            self._events.append(event)
            return
        if live.first and event.finish_reason is FinishReason.LENGTH:
            self._hand_over(live, event)
            return
        self._leave(live)
        self._ended(live, event)

    def _hand_over(self, live: LiveSequence, event: TokenEvent) -> None:
        """Hand a request over after its prompt and first token: another replica takes its pages and continues."""
        assert live.link is not None, "it came from there"
        live.pages, live.first = live.link.pages, False
        self._events.append(event._replace(finish_reason=None))
        self._leave(live)
        self.counts.handed_over += 1
        self._backlog.appendleft(live)  # at the front: it has waited before

    def lost(self, link: LinkLike, why: str) -> None:
        """Move the requests of a lost replica. They continue elsewhere, after the tokens that have arrived.

        If only one request can have caused this death and earlier ones, it is quarantined instead of moved. If replicas
        also die without it, it takes that many more deaths; deaths that seem caused by another submission count as one.
        """
        self.counts.lost += 1
        now = time.monotonic()
        self._unexplained = {number: death for number, death in self._unexplained.items() if now - death.at < RECENT}
        unproven = [live for live in self._by_wire.values() if live.link is link and not live.proven]
        culprit = _culprit(unproven)
        self._unexplained[self.counts.lost] = Death(now, culprit)
        for live in unproven:
            live.deaths.append(self.counts.lost)
            live.blamed += live.request.group == culprit
            limit = 2 * DEATHS if live.generated else DEATHS  # a replica has survived a request that has tokens
            if live.blamed >= limit + self._other_causes(live):
                for number in live.deaths:
                    self._unexplained.pop(number, None)
                error = RequestQuarantined(
                    f"request {live.request.id} was on {len(live.deaths)} replicas that died one after another, each "
                    f"before its token {len(live.generated) + 1}, and for {live.blamed} of them no other request can "
                    "be the reason. It is sent to no other replica. Look into their logs before you send it again"
                )
                self._fail(live, error)
        self.evict(link, f"{link.name} {why}")

    def _other_causes(self, live: LiveSequence) -> int:
        """Return the number of other causes of recent deaths."""
        submission = live.request.group
        return len({
            number if death.culprit is None else death.culprit
            for number, death in self._unexplained.items()
            if death.culprit != submission and (death.culprit is not None or number not in live.deaths)
        })  # fmt: skip

    def evict(self, link: LinkLike, why: str, *, tell: bool = False) -> None:
        moved = [live for live in self._by_wire.values() if live.link is link]
        for live in reversed(moved):
            self._leave(live, tell=tell)
            live.moves += 1
            self.counts.moved += 1
            live.reason = f"moved, because {why}"
            if len(live.deaths) > MOVES:
                error = ReplicaLost(
                    f"request {live.request.id} was on {len(live.deaths)} replicas that died one after another, each "
                    f"before its token {len(live.generated) + 1}. Look into their logs before you send it again"
                )
                self._fail(live, error)
            else:
                self._backlog.appendleft(live)  # at the front: they are older than the backlog
        self.place()
        self.wake()

    def events(self) -> Events | None:
        """Return the events since the last call; None if there are none."""
        if not self._events:
            return None
        batch = Events(tuple(self._events), self._started)
        self._events, self._started = [], {}
        previous, self.delivered = self.delivered, anyio.Event()
        previous.set()
        return batch

    @property
    def undelivered(self) -> int:
        """Events that wait to be delivered."""
        return len(self._events)

    def fail_waiting(self, error: RekindleError) -> None:
        """Fail all waiting requests, now and later: no replica is left, and none will come."""
        self.broken = error
        while self._backlog:
            self._fail(self._backlog.popleft(), error)
        self.wake()

    def place(self) -> None:
        """Send waiting requests, in turn, to replicas with room. A suspect that must wait lets others pass."""
        deferred: list[LiveSequence] = []
        while self._backlog:
            live = self._backlog.popleft()
            try:
                placed = self._place(live)
            except BaseException as error:
                self._fail(live, own_failure(error, f"request {live.request.id} could not be sent to a replica"))
                continue
            if not placed:
                deferred.append(live)
                if not live.suspect:
                    break
        self._backlog.extendleft(reversed(deferred))

    def spread(self, to: LinkLike) -> None:
        """Give a new replica its share of the requests in other replicas' queues. Running requests stay."""
        peers = [link for link in self.links.values() if link.takes and link.role == to.role]
        share = math.ceil(sum(self.inside(link.name) for link in peers) / max(1, len(peers)))
        surplus: list[LiveSequence] = []
        for link in peers:
            excess = self.inside(link.name) - max(share, link.rows)
            if link is to or excess <= 0:
                continue
            there = (live for live in self._by_wire.values() if live.link is link)
            queued = [live for live in there if not (live.generated or live.scored)]
            surplus += queued[-excess:]  # the latest ones
        for live in surplus:
            self._leave(live, tell=True)
        self._backlog.extend(surplus)
        self.place()

    # Inside.

    def _place(self, live: LiveSequence) -> bool:
        role, candidates = self._candidates(live)
        if live.suspect:
            candidates = [link for link in candidates if link.name not in self._tried]
        loads = [Load(link.name, self.inside(link.name), link.places) for link in candidates]
        route = self._router.choose(live.keys, loads) if loads else None
        if route is None:
            return False
        self._number += 1
        live.first = role == "prefill"
        live.wire = f"{self.sender}/{live.request.id}/{self._number}"
        link = self.links[route.name]
        pages = None if live.pages == link.pages else live.pages
        message = encode(live.resumed(live.wire), pages, own_call=bool(live.deaths))
        live.link, live.sent, live.proven = link, time.perf_counter(), False
        if live.suspect:
            self._tried[link.name] = live
        live.reason = route.why if not live.moves else f"{live.reason}; here: {route.why}"
        self._by_wire[live.wire] = live
        self.counts.routed[route.name] = self.counts.routed.get(route.name, 0) + 1
        self._inside[route.name] = self.inside(route.name) + 1
        link.post(message)
        return True

    def _candidates(self, live: LiveSequence) -> tuple[Role, list[LinkLike]]:
        """Return the role for the rest of a request, and the replicas with this role.

        If there is none now, return all that take requests: each can compute the whole request.
        """
        taking = [link for link in self.links.values() if link.takes]
        if all(link.role == "both" for link in taking):
            return "both", taking
        started = live.generated or live.scored
        for link in taking if not started else ():
            if link.role == "prefill" and goes_two_ways(live.request, link.longest):
                return "prefill", [link for link in taking if link.role == "prefill"]
        return "decode", [link for link in taking if link.role != "prefill"] or taking

    def _leave(self, live: LiveSequence, *, tell: bool = False) -> None:
        if live.link is None:
            if live in self._backlog:
                self._backlog.remove(live)
            return
        if tell:
            live.link.drop(live.wire)
        self._stop_trying(live)
        del self._by_wire[live.wire]
        self._inside[live.link.name] -= 1
        self._placed[live.request.id] = Placed(live.link.name, live.reason, live.moves)
        live.link = None

    def _stop_trying(self, live: LiveSequence) -> None:
        if live.link is not None and self._tried.get(live.link.name) is live:
            del self._tried[live.link.name]

    def _fail(self, live: LiveSequence, error: BaseException) -> None:
        self._leave(live, tell=True)
        self._ended(live, TokenEvent(live.request.id, finish_reason=FinishReason.FAILED, error=error))

    def _ended(self, live: LiveSequence, event: TokenEvent) -> None:
        self._by_id.pop(live.request.id, None)
        if len(self._placed) > _REMEMBERED:
            self._placed.popitem(last=False)
        self._events.append(event)
        self.wake()

    # Looking inside.

    def status(self, request_id: str) -> Status | None:
        """Return the state of a request; None if it is unknown."""
        live = self._by_id.get(request_id)
        if live is None:
            return None
        if live.link is None:
            return Status.QUEUED
        return Status.DECODE if live.generated else Status.PREFILL

    def explain(self, request_id: str) -> Placed | None:
        """Return the current or last replica of a request; None if it is unknown."""
        live = self._by_id.get(request_id)
        if live is None:
            return self._placed.get(request_id)
        return Placed("" if live.link is None else live.link.name, live.reason, live.moves)


def _culprit(unproven: Sequence[LiveSequence]) -> str | None:
    """Return the only submission that can have caused a replica's death, or None. Earlier suspects come first."""
    suspects = [live for live in unproven if live.blamed] or [live for live in unproven if live.suspect] or unproven
    groups = {live.request.group for live in suspects}
    return groups.pop() if len(groups) == 1 else None
