"""The requests of a fleet: where each one runs, what it has so far, and where it goes on when its replica is gone."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import anyio
import numpy as np

from rekindle._src.core import html
from rekindle._src.core.own_failure import own_failure
from rekindle._src.core.records import FinishReason, Request, Resumed, Status, TokenEvent
from rekindle._src.replicas.autoscaling import Demand
from rekindle._src.replicas.request_codec import Sent, packed
from rekindle._src.replicas.roles import Role, goes_two_ways, prompt_only
from rekindle._src.replicas.routing import Keys, Load, Router
from rekindle._src.replicas.wire import News
from rekindle._src.session.sharing.source import PageAddress
from rekindle.errors import QueueFull, RekindleError, ReplicaLost, RequestQuarantined, SessionClosed

log = logging.getLogger("rekindle.fleet")
# Replicas that die one after another before a request has given a new token there. It is quarantined after so many that
# it alone can be the reason of; after so many others it is tried without others that can be the reason.
DEATHS = 2
MOVES = 8  # deaths that it survives at most
RECENT = 60.0  # seconds for which a death that no request explains speaks for those that meet the next ones
_REMEMBERED = 1024  # ended requests that can still be explained


class LinkLike(Protocol):
    """The way to one replica, as far as routing needs it."""

    @property
    def name(self) -> str: ...
    @property
    def takes(self) -> bool:
        """Whether it is open and takes requests."""
        ...

    @property
    def places(self) -> int: ...
    @property
    def rows(self) -> int:
        """How many sequences its steps compute at once."""
        ...

    @property
    def role(self) -> Role: ...
    @property
    def pages(self) -> PageAddress | None:
        """Where its pages can be taken."""
        ...

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer together."""
        ...

    def post(self, sent: Sent) -> None:
        """Send it a request, soon."""

    def drop(self, request_id: str) -> None:
        """Tell it that a request is no longer wanted."""


class Live:
    """One sequence that has not ended."""

    __slots__ = (
        "blamed", "cached", "first", "keys", "link", "made", "moves", "pages", "proven", "request", "scored", "sent",
        "vain", "why", "wire",
    )  # fmt: skip

    def __init__(self, request: Request, keys: Keys) -> None:
        self.request, self.keys = request, keys
        self.link: LinkLike | None = None
        self.wire = ""  # its id on the way: one for each replica that it is sent to
        self.moves = 0  # from replica to replica
        self.vain: list[int] = []  # deaths of replicas, one after another, before it had given a new token there
        self.blamed = 0  # times that it alone can have been the reason
        self.proven = False  # it has given a token since it was sent to where it is
        self.made: list[int] = []
        self.scored = 0  # prompt positions whose log-probabilities have come
        self.cached: int | None = None  # tokens that its first replica found in its cache
        self.sent = 0.0
        self.why = "waits for a replica that takes it"
        self.first = False  # it was sent to a replica that only computes its prompt
        self.pages: PageAddress | None = None  # of the replica that has computed it

    @property
    def suspect(self) -> bool:
        """True if so many replicas died with it that it has to show that it was not the reason."""
        return len(self.vain) >= DEATHS

    def resumed(self, wire: str) -> Request:
        """What is sent: the request, behind the tokens that have come."""
        request = dataclasses.replace(self.request, id=wire, group=wire)
        if self.first:
            request = prompt_only(request)
        if not self.made and not self.scored:
            return request
        return dataclasses.replace(request, resumed=Resumed(np.asarray(self.made, np.int32), self.scored))


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Placed(html.Record):
    """Where a request of a fleet is, or was last."""

    replica: str  # empty while it waits for one
    why: str
    moves: int  # from replica to replica


class Death(NamedTuple):
    """Of a replica: when, and of which submission's requests if it can only have been theirs."""

    at: float
    culprit: str | None


class Counts:
    """What has happened since the fleet was opened."""

    def __init__(self) -> None:
        self.moved = 0  # sequences that went on elsewhere
        self.lost = 0  # deaths of replicas
        self.handed_over = 0  # sequences whose prompt one replica has computed for another
        self.routed: dict[str, int] = {}  # by replica


class Routes:
    """Owned by the fleet's loop. What comes out is in `events`; `wake` is called when something was added."""

    def __init__(self, router: Router, sender: str) -> None:
        self._router, self.sender = router, sender
        self.links: dict[str, LinkLike] = {}
        self.events: list[TokenEvent] = []
        self.wake: Callable[[], object] = lambda: None
        self.began: Callable[[str, float], object] = lambda *_: None  # is told when a sequence first ran
        self.told = anyio.Event()  # set, and replaced, when events were handed on
        self.broken: RekindleError | None = None  # why there is no replica any more
        self.counts: Counts = Counts()
        self._by_id: dict[str, Live] = {}
        self._by_wire: dict[str, Live] = {}
        self._backlog: deque[Live] = deque()
        self._inside: dict[str, int] = {}
        self._unexplained: dict[int, Death] = {}  # lately; those that a quarantined request explains are left out
        self._tried: dict[str, Live] = {}  # the one suspect that each replica may have at a time
        self._number = 0
        self._placed: OrderedDict[str, Placed] = OrderedDict()

    # What intake and detokenize say.

    @property
    def live(self) -> int:
        return len(self._by_id)

    @property
    def waiting(self) -> int:
        """Sequences that no replica has taken."""
        return len(self._backlog)

    @property
    def demand(self) -> Demand:
        """What there is to do, for the number of replicas that follows it."""
        begins = (live.request.prompt_length for live in self._by_id.values() if not live.made and not live.scored)
        return Demand(len(self._by_id), sum(begins))

    def submit(self, request: Request, keys: Keys) -> None:
        live = self._by_id[request.id] = Live(request, keys)
        if self.broken is not None:
            self._fail(live, self.broken)
            return
        self._backlog.append(live)
        self.place()

    def end(self, request_id: str, reason: FinishReason) -> None:
        """It was cancelled, or a stop string was found."""
        live = self._by_id.get(request_id)
        if live is not None:
            self._leave(live, tell=True)
            self._ended(live, TokenEvent(request_id, cached_tokens=live.cached or 0, finish_reason=reason))

    def fail(self, request_id: str, error: RekindleError) -> None:
        """What the fleet does for it has failed."""
        live = self._by_id.get(request_id)
        if live is not None:
            self._fail(live, error)
        else:
            self.events.append(TokenEvent(request_id, finish_reason=FinishReason.FAILED, error=error))
            self.wake()

    # What links say.

    def inside(self, name: str) -> int:
        """How many sequences a replica has."""
        return self._inside.get(name, 0)

    def arrived(self, link: LinkLike, news: Iterable[News]) -> None:
        """Mail of a replica. What belongs to a request that has left it is dropped."""
        for one in news:
            live = self._by_wire.get(one.event.request_id)
            if live is None or live.link is not link:
                continue
            try:
                if one.waited is not None and not live.moves:
                    self.began(live.request.id, live.sent + one.waited)
                self._take(live, one.event)
            except BaseException as error:
                self._fail(live, own_failure(error, f"tokens of request {live.request.id} could not be taken over"))
        self.place()
        self.wake()

    def _take(self, live: Live, event: TokenEvent) -> None:
        if isinstance(event.error, QueueFull):  # another fleet was quicker
            self._leave(live)
            self._backlog.append(live)
            return
        if isinstance(event.error, SessionClosed):  # its replica is about to be found lost, and its requests are moved
            return
        live.made += event.token_ids
        live.scored += len(event.prompt_logprobs)
        if event.token_ids or event.prompt_logprobs:
            live.proven, live.vain, live.blamed = True, [], 0
            self._stop_trying(live)
        if live.cached is None:
            live.cached = event.cached_tokens
        event = dataclasses.replace(event, request_id=live.request.id, cached_tokens=live.cached)
        if event.finish_reason is None:
            self.events.append(event)
            return
        if live.first and event.finish_reason is FinishReason.LENGTH:
            self._hand_over(live, event)
            return
        self._leave(live)
        self._ended(live, event)

    def _hand_over(self, live: Live, event: TokenEvent) -> None:
        """Its prompt was computed and has given a token: another replica takes the pages over and goes on."""
        assert live.link is not None, "it came from there"
        live.pages, live.first = live.link.pages, False
        self.events.append(dataclasses.replace(event, finish_reason=None))
        self._leave(live)
        self.counts.handed_over += 1
        self._backlog.appendleft(live)  # it has waited before

    def lost(self, link: LinkLike, why: str) -> None:
        """A replica is gone: its requests go on elsewhere, from the tokens that have come.

        A request that alone can be the reason, and was so before, goes nowhere: it is quarantined. Where replicas die
        without it, too, it takes as many deaths more; those that seem to be another request's count once for each.
        """
        self.counts.lost += 1
        now = time.monotonic()
        self._unexplained = {number: one for number, one in self._unexplained.items() if now - one.at < RECENT}
        unproven = [live for live in self._by_wire.values() if live.link is link and not live.proven]
        culprit = _culprit(unproven)
        self._unexplained[self.counts.lost] = Death(now, culprit)
        for live in unproven:
            live.vain.append(self.counts.lost)
            live.blamed += live.request.group == culprit
            needed = 2 * DEATHS if live.made else DEATHS  # replicas have lived with one that has tokens
            if live.blamed >= needed + self._elsewhere(live):
                for number in live.vain:
                    self._unexplained.pop(number, None)
                error = RequestQuarantined(
                    f"request {live.request.id} was on {len(live.vain)} replicas that died one after another, each "
                    f"before its token {len(live.made) + 1}, and for {live.blamed} of them no other request can be the "
                    "reason. It is sent to no other replica. Look into their logs before you send it again"
                )
                self._fail(live, error)
        self.evict(link, f"{link.name} {why}")

    def _elsewhere(self, live: Live) -> int:
        """How many other reasons there were for replicas to die lately."""
        own = live.request.group
        return len({
            number if one.culprit is None else one.culprit
            for number, one in self._unexplained.items()
            if one.culprit != own and (one.culprit is not None or number not in live.vain)
        })  # fmt: skip

    def evict(self, link: LinkLike, why: str, *, tell: bool = False) -> None:
        """Its requests go on elsewhere."""
        moved = [live for live in self._by_wire.values() if live.link is link]
        for live in reversed(moved):
            self._leave(live, tell=tell)
            live.moves += 1
            self.counts.moved += 1
            live.why = f"moved, because {why}"
            if len(live.vain) > MOVES:
                error = ReplicaLost(
                    f"request {live.request.id} was on {len(live.vain)} replicas that died one after another, each "
                    f"before its token {len(live.made) + 1}. Look into their logs before you send it again"
                )
                self._fail(live, error)
            else:
                self._backlog.appendleft(live)  # they are older than what waits
        self.place()
        self.wake()

    def take_events(self) -> tuple[TokenEvent, ...]:
        """What came out since the last call."""
        events, self.events = tuple(self.events), []
        told, self.told = self.told, anyio.Event()
        told.set()
        return events

    def fail_waiting(self, error: RekindleError) -> None:
        """There is no replica any more, and there will be none."""
        self.broken = error
        while self._backlog:
            self._fail(self._backlog.popleft(), error)
        self.wake()

    def place(self) -> None:
        """Send what waits to where there is room now, in turn; a suspect that has to wait lets others pass."""
        held: list[Live] = []
        while self._backlog:
            live = self._backlog.popleft()
            try:
                placed = self._place(live)
            except BaseException as error:
                self._fail(live, own_failure(error, f"request {live.request.id} could not be sent to a replica"))
                continue
            if not placed:
                held.append(live)
                if not live.suspect:
                    break
        self._backlog.extendleft(reversed(held))

    def spread(self, to: LinkLike) -> None:
        """A replica was opened: it gets its share of what waits in the queues of others. What runs there stays."""
        same = [link for link in self.links.values() if link.takes and link.role == to.role]
        share = math.ceil(sum(self.inside(link.name) for link in same) / max(1, len(same)))
        found: list[Live] = []
        for link in same:
            many = self.inside(link.name) - max(share, link.rows)
            if link is to or many <= 0:
                continue
            waiting = [live for live in self._by_wire.values() if live.link is link and not (live.made or live.scored)]
            found += waiting[-many:]  # the latest ones
        for live in found:
            self._leave(live, tell=True)
        self._backlog.extend(found)
        self.place()

    # Inside.

    def _place(self, live: Live) -> bool:
        role, near = self._suited(live)
        if live.suspect:
            near = [link for link in near if link.name not in self._tried]
        loads = [Load(link.name, self.inside(link.name), link.places) for link in near]
        route = self._router.choose(live.keys, loads) if loads else None
        if route is None:
            return False
        self._number += 1
        live.first = role == "prefill"
        live.wire = f"{self.sender}/{live.request.id}/{self._number}"
        link = self.links[route.name]
        sent = packed(live.resumed(live.wire), None if live.pages == link.pages else live.pages, alone=bool(live.vain))
        live.link, live.sent, live.proven = link, time.perf_counter(), False
        if live.suspect:
            self._tried[link.name] = live
        live.why = route.why if not live.moves else f"{live.why}; here: {route.why}"
        self._by_wire[live.wire] = live
        self.counts.routed[route.name] = self.counts.routed.get(route.name, 0) + 1
        self._inside[route.name] = self.inside(route.name) + 1
        link.post(sent)
        return True

    def _suited(self, live: Live) -> tuple[Role, list[LinkLike]]:
        """The role that suits what is left of a request, and the replicas that have it.

        If there is none now, all that take requests: each of them can compute the whole of it.
        """
        taking = [link for link in self.links.values() if link.takes]
        if all(link.role == "both" for link in taking):
            return "both", taking
        begun = live.made or live.scored
        for link in taking if not begun else ():
            if link.role == "prefill" and goes_two_ways(live.request, link.longest):
                return "prefill", [link for link in taking if link.role == "prefill"]
        return "decode", [link for link in taking if link.role != "prefill"] or taking

    def _leave(self, live: Live, *, tell: bool = False) -> None:
        if live.link is None:
            if live in self._backlog:
                self._backlog.remove(live)
            return
        if tell:
            live.link.drop(live.wire)
        self._stop_trying(live)
        del self._by_wire[live.wire]
        self._inside[live.link.name] -= 1
        self._placed[live.request.id] = Placed(live.link.name, live.why, live.moves)
        live.link = None

    def _stop_trying(self, live: Live) -> None:
        if live.link is not None and self._tried.get(live.link.name) is live:
            del self._tried[live.link.name]

    def _fail(self, live: Live, error: BaseException) -> None:
        self._leave(live, tell=True)
        self._ended(live, TokenEvent(live.request.id, finish_reason=FinishReason.FAILED, error=error))

    def _ended(self, live: Live, event: TokenEvent) -> None:
        self._by_id.pop(live.request.id, None)
        if len(self._placed) > _REMEMBERED:
            self._placed.popitem(last=False)
        self.events.append(event)
        self.wake()

    # Looking inside.

    def status(self, request_id: str) -> Status | None:
        live = self._by_id.get(request_id)
        if live is None:
            return None
        if live.link is None:
            return Status.QUEUED
        return Status.DECODE if live.made else Status.PREFILL

    def explain(self, request_id: str) -> Placed | None:
        live = self._by_id.get(request_id)
        if live is None:
            return self._placed.get(request_id)
        return Placed("" if live.link is None else live.link.name, live.why, live.moves)

    def statistics(self) -> Any:
        raise AssertionError("a fleet's figures come from its replicas")


def _culprit(unproven: Sequence[Live]) -> str | None:
    """The submission that a replica has died of, if it can have been only one; rather one that was to blame before."""
    near = [live for live in unproven if live.blamed] or [live for live in unproven if live.suspect] or unproven
    groups = {live.request.group for live in near}
    return groups.pop() if len(groups) == 1 else None
