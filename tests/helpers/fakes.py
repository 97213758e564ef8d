"""Typed fakes: a model that hashes the values it reads from its pages, the runner around it, a tokenizer, a host tier.

The fake's KV value of a position chains over every token before it, and its next token hashes all values that it reads
back through the row's page table. A page that is reused, published early, shared wrongly or restored from the wrong
place therefore changes the output, as it would in a real model.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.guides import allowed_in
from rekindle._src.capabilities.guides.guidance import Guidance
from rekindle._src.capabilities.guides.step import Guides
from rekindle._src.capabilities.pooling.request import POOLED, PromptPooling
from rekindle._src.capabilities.scores.request import PromptScoring
from rekindle._src.core.claims import Claim
from rekindle._src.core.contracts import InFlightLike
from rekindle._src.core.extension import Extension, Extensions
from rekindle._src.core.records import (
    GuideLike,
    IntArray,
    LostPage,
    Mask,
    PageMove,
    PageRun,
    Request,
    Row,
    RowResult,
    SlotPair,
    StepPlan,
    StepResult,
    TokenLogprobs,
    mask_words,
)
from rekindle._src.core.report_kinds import LOGPROBS, PROMPT_LOGPROBS
from rekindle._src.core.sampling import Sampling
from rekindle.errors import StoreError

EOS = 256
KV = NDArray[np.uint64]
PRINTABLE = tuple(range(32, 127))


@dataclasses.dataclass(frozen=True)
class FakeModel:
    """The next token is a pure function of the KV values of every position so far, the seed and the options."""

    alphabet: tuple[int, ...] = PRINTABLE
    eos_id: int = EOS
    eos_rate: float = 0.0  # how often the next token is `eos_id`
    salt: int = 0  # other weights

    def extend(self, before: KV, tokens: Iterable[int]) -> KV:
        """Return KV values of `tokens` after positions with the values `before`."""
        state = int(before[-1]) if len(before) else self.salt
        values = []
        for token in tokens:
            state = (state ^ (int(token) + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
            state ^= state >> 29
            values.append(state)
        return np.array(values, np.uint64)

    def choose(
        self, values: KV, sampling: Sampling, generated: int, forbidden: frozenset[int],
        allowed: Collection[int] | None = None,
    ) -> int:  # fmt: skip
        """Return the token after positions with the KV `values`; among `allowed`, if a guide restricts it."""
        salt = b"" if sampling.greedy else f"{sampling.seed}:{sampling.temperature}".encode()
        digest = hashlib.blake2b(values.tobytes() + salt, digest_size=16).digest()
        number = int.from_bytes(digest[:8], "little")
        ends = int.from_bytes(digest[8:], "little") / 2**64 < self.eos_rate
        banned = forbidden | {self.eos_id} if generated < sampling.min_tokens else frozenset[int]()
        if allowed is not None:
            return sorted(allowed)[number % len(allowed)]
        if ends and self.eos_id not in banned:
            return self.eos_id
        free = [token for token in self.alphabet if token not in banned]
        return free[number % len(free)]

    def generate(self, request: Request, count: int | None = None) -> list[int]:
        """The plain loop that everything is compared with: what `request` gives alone; `count` ignores every end."""
        values = self.extend(np.zeros(0, np.uint64), request.token_ids)
        output: list[int] = []
        sampling, guidance = request.sampling, request.extensions.get(Guidance)
        guide = None if guidance is None else guidance.guide.copy()
        while len(output) < (count or sampling.max_tokens):
            allowed = None if guide is None else allowed_by(guide)
            token = self.choose(values, sampling, len(output), request.eos_ids | request.stop_ids, allowed)
            output.append(token)
            if guide is not None and guide.consume(token).ended:
                break
            if count is None and len(output) > sampling.min_tokens and token in request.eos_ids | request.stop_ids:
                break
            values = np.concatenate([values, self.extend(values, [token])])
        return output


@dataclasses.dataclass(frozen=True)
class EchoModel(FakeModel):
    """Repeats the token from `period` tokens ago, except for rare surprises, so that its text can be guessed."""

    period: int = 5
    surprises: float = 0.1

    def extend(self, before: KV, tokens: Iterable[int]) -> KV:
        """As FakeModel's, with the token itself in the low bits."""
        values = before
        for token in tokens:
            value = super().extend(values, [token]) & ~np.uint64(0xFFFF) | np.uint64(token)
            values = np.concatenate([values, value])
        return values[len(before) :]

    def choose(
        self, values: KV, sampling: Sampling, generated: int, forbidden: frozenset[int],
        allowed: Collection[int] | None = None,
    ) -> int:  # fmt: skip
        other = super().choose(values, sampling, generated, forbidden, allowed)
        if allowed is not None:
            return other
        digest = hashlib.blake2b(values.tobytes() + b"surprise", digest_size=8).digest()
        if len(values) < self.period or int.from_bytes(digest, "little") / 2**64 < self.surprises:
            return other
        echo = int(values[-self.period]) & 0xFFFF
        return other if echo in forbidden and generated < sampling.min_tokens else echo


def allowed_by(guide: GuideLike) -> set[int]:
    """The tokens that a guide allows next."""
    mask = np.zeros(mask_words(EOS + 1), np.int32)
    problem = guide.fill(mask)
    assert not problem, problem
    return allowed_in(mask)


class DictTier:
    """A host tier: page payloads by digest, at most `limit` of them, oldest out first."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.payloads: dict[bytes, tuple[Any, ...]] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.payloads

    def put(self, digest: bytes, payload: tuple[Any, ...]) -> None:
        self.payloads.pop(digest, None)
        self.payloads[digest] = payload
        while len(self.payloads) > self.limit:
            del self.payloads[next(iter(self.payloads))]

    def get(self, digest: bytes) -> tuple[Any, ...]:
        return self.payloads[digest]

    def has(self, digest: bytes) -> bool:
        return digest in self.payloads

    def should_offload(self, digest: bytes) -> bool:
        return digest not in self.payloads

    def worth(self, pages: int) -> bool:
        return True

    def clear(self) -> None:
        """Keep everything: a digest's content never changes."""

    def discard(self, digest: bytes) -> None:
        self.payloads.pop(digest, None)

    def trim(self) -> None: ...

    def touch(self, digest: bytes) -> None: ...

    def record_copy(self, pages: int, seconds: float) -> None: ...

    def hold(self, digest: bytes) -> None: ...

    def release(self, digest: bytes) -> None: ...

    def observe(self, result: StepResult) -> None: ...


class DictStore:
    """A store of programs in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def load(self, name: str) -> Any:
        if name not in self.kept:
            raise StoreError("not stored yet")
        return self.kept[name]

    def holds(self, name: str) -> bool:
        return name in self.kept

    def save(self, name: str, compiled: Any, compile_seconds: float) -> bool:
        self.kept[name] = compiled
        return compile_seconds > 0

    def claim(self, name: str) -> Claim | None:
        return Claim()

    def wanted(self, since: float) -> bool:
        return False


@dataclasses.dataclass
class FakeInFlight:
    plan: StepPlan
    rows: tuple[RowResult, ...] | None  # None: a guide waits for tokens of the step before
    leaving: tuple[tuple[bytes, KV], ...]
    lost: tuple[LostPage, ...] = ()
    leaving_sides: tuple[tuple[PageMove, KV], ...] = ()
    lost_sides: tuple[LostPage, ...] = ()
    guide_errors: dict[str, Exception] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class FakeFigures:
    steps: int
    programs: dict[str, int]
    tokens: int = 0
    step_sizes: dict[int, int] = dataclasses.field(default_factory=dict)
    compilations: int = 0
    traces: int = 0


class FakeRunner:
    """Satisfies `RunnerLike` over host memory; checks every rule that a plan must keep while it runs it."""

    def __init__(
        self, *, num_pages: int, page_size: int, max_requests: int = 16, max_tokens_per_step: int = 512,
        max_prefill_rows: int = 1 << 30, model: FakeModel | None = None, host_tier: DictTier | None = None,
        step_seconds: float = 0.0, fail: Callable[[StepPlan], BaseException | None] | None = None,
        fail_fetch: Callable[[StepPlan], BaseException | None] | None = None,
        refuse: Callable[[Row], Exception | None] = lambda row: None,
        lose: Callable[[PageMove], Exception | None] = lambda move: None, gate: threading.Event | None = None,
        states: int = 0, side_tiers: Sequence[DictTier | None] = (),
        lose_entry: Callable[[PageMove], Exception | None] = lambda move: None, window_pages: int = 0, window: int = 0,
    ) -> None:  # fmt: skip
        """With `states` slots, the scratch one included, the model continues a state: the last value of the prefix.

        With `window_pages`, it has that many of a layer that reads the last `window` values of the prefix. With both,
        it has two side caches, in this order."""
        self.sides: list[KV] = []
        if states:
            self.sides.append(np.full(states, 0xDEAD, np.uint64))
        if window_pages:
            self.sides.append(np.full((window_pages, page_size), 0xDEAD, np.uint64))
        self.window = window
        self.lost: set[tuple[int | None, int]] = set()  # pages, and those of side caches, that could not be filled
        self.side_tiers, self.lose_entry = side_tiers, lose_entry
        self.programs = None  # nothing is compiled
        self.model = model if model is not None else FakeModel()
        self.page_size, self.max_requests = page_size, max_requests
        self.max_tokens_per_step, self.max_prefill_rows = max_tokens_per_step, max_prefill_rows
        self.host_tier, self.step_seconds = host_tier, step_seconds
        self.fail, self.fail_fetch, self.gate = fail, fail_fetch, gate
        self.refuse, self.lose = refuse, lose  # rows that can't be prepared, pages that can't be restored
        self.memory: KV = np.full((num_pages, page_size), 0xDEAD, np.uint64)
        self.slots: dict[int, tuple[str, int, int | None]] = {}  # request, epoch, last sampled token
        self.plans: list[StepPlan] = []  # every dispatched plan, in order
        self.computed: dict[str, int] = {}  # tokens computed for each request, cached ones excluded
        self.fetched = 0
        self.closed = False
        self.waiting: FakeInFlight | None = None

    def dispatch(self, plan: StepPlan) -> FakeInFlight:
        assert not self.closed, "dispatched after close"
        self.check(plan)
        self.plans.append(plan)
        if self.fail is not None and (error := self.fail(plan)) is not None:
            raise error
        leaving = tuple((move.digest, self.memory[move.page].copy()) for move in plan.offload)
        lost = []
        for move in plan.restore:
            assert self.host_tier is not None
            if (reason := self.lose(move)) is not None:
                lost.append(LostPage(move, reason))
                self.lost.add((None, move.page))
                continue
            self.lost.discard((None, move.page))
            self.memory[move.page] = self.host_tier.get(move.digest)[0][0]
        for copy in plan.copies:
            self.memory[copy.page] = self.memory[copy.source]
        leaving_sides = []
        for move in plan.sides_out:
            assert move.side is not None
            leaving_sides.append((move, self.sides[move.side][move.page : move.page + 1].copy()))
        lost_sides = []
        for move in plan.sides_in:
            if (reason := self.lose_entry(move)) is not None:
                lost_sides.append(LostPage(move, reason))
                self.lost.add((move.side, move.page))
                continue
            self.lost.discard((move.side, move.page))
            assert move.side is not None
            self.sides[move.side][move.page] = self.tier_of(move).get(move.digest)[0][0]
        in_flight = FakeInFlight(plan, None, leaving, tuple(lost), tuple(leaving_sides), tuple(lost_sides))
        if GUIDES.needs_unread_token(plan):
            assert self.waiting is None, "two steps wait for tokens"
            self.waiting = in_flight
        else:
            self.run_rows(in_flight)
        return in_flight

    def run_rows(self, in_flight: FakeInFlight) -> None:
        plan, rows = in_flight.plan, []
        self.sides_read = [array.copy() for array in self.sides]  # before any row writes
        self.entries_lost = {(lost.move.side, lost.move.page) for lost in in_flight.lost_sides}
        masks = np.empty((len(plan.rows), mask_words(EOS + 1)), np.int32)
        in_flight.guide_errors = GUIDES.fill(plan, len(plan.decode), masks)
        for index, row in enumerate(plan.rows):
            refused = self.refuse(row)
            mask = masks[index] if Guidance in row.request.extensions else None
            rows.append(RowResult(row.request.id, row.epoch, None, error=refused) if refused else self.run(row, mask))
        in_flight.rows = tuple(rows)

    def fetch(self, in_flight: InFlightLike) -> StepResult:
        assert isinstance(in_flight, FakeInFlight), "a step of this runner"
        if self.gate is not None:
            self.gate.wait()
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.fail_fetch is not None and (error := self.fail_fetch(in_flight.plan)) is not None:
            raise error
        for digest, values in in_flight.leaving:
            assert self.host_tier is not None
            self.host_tier.put(digest, (values[None],))
        for move, values in in_flight.leaving_sides:
            self.tier_of(move).put(move.digest, (values,))
        self.fetched += 1
        if in_flight is self.waiting:  # what it waited for failed
            self.waiting = None
            self.run_rows(in_flight)
        assert in_flight.rows is not None
        rows = GUIDES.advance(in_flight.plan, in_flight.rows, in_flight.guide_errors)
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            self.run_rows(waiting)
        return StepResult(
            in_flight.plan, rows, program="fake", device_seconds=self.step_seconds, lost=in_flight.lost,
            lost_sides=in_flight.lost_sides, seconds=self.step_seconds,
        )  # fmt: skip

    def program(self, plan: StepPlan) -> str:
        return "fake"

    def tier_of(self, move: PageMove) -> DictTier:
        tier = None if move.side is None else self.side_tiers[move.side]
        assert tier is not None, "an entry moves without a tier"
        return tier

    def read_side(self, side: int, slots: Sequence[int]) -> list[tuple[KV, ...]]:
        return [(self.sides[side][slot : slot + 1].copy(),) for slot in slots]

    def read_pages(self, pages: Sequence[int], digests: Sequence[bytes] = ()) -> list[tuple[KV, ...]]:
        return [(self.memory[page][None].copy(),) for page in pages]

    def statistics(self) -> FakeFigures:
        sizes = [plan.tokens for plan in self.plans if plan.rows]
        rounded = collections.Counter(1 << (size - 1).bit_length() for size in sizes)
        return FakeFigures(len(self.plans), {"fake": len(self.plans)}, sum(sizes), dict(rounded))

    def close(self) -> None:
        self.closed = True

    def run(self, row: Row, mask: Mask | None = None) -> RowResult:
        request, size = row.request, self.page_size
        if row.fresh:
            self.slots[row.slot] = (request.id, row.epoch, None)
        owner, epoch, last = self.slots[row.slot]
        assert (owner, epoch) == (request.id, row.epoch), f"slot {row.slot} belongs to {owner}, epoch {epoch}"
        if row.token_ids is None:
            assert last is not None, f"{request.id} decodes before it sampled anything"
            tokens = [last]
        else:
            tokens = row.token_ids.tolist()
        end = row.start + row.length
        positions = np.arange(row.start, end)
        before = self.memory[row.pages].reshape(-1)[: row.start]
        places, written = (row.pages[positions // size], positions % size), self.model.extend(before, tokens)
        if not self.lost.intersection((None, page) for page in row.pages[: row.start // size].tolist()):
            self.lost -= {(None, page) for page in places[0].tolist()}
        if row.kept:
            assert (self.memory[places] == written).all(), "a page that is kept has another content"
        else:
            self.memory[places] = written
        values = self.memory[row.pages].reshape(-1)[:end]
        assert len(row.sides) == len(self.sides), "a row without its part of a side cache"
        for number, side in enumerate(row.sides):
            if isinstance(side, PageRun):
                self.run_window(number, row, side, values)
                continue
            assert side.reads and side.writes and not row.kept, "a row without its state"
            if row.start and (number, side.reads) not in self.entries_lost:
                assert not row.draft or side.reads == self.last_written, "a draft continues another row"
                expected = (self.sides if row.draft else self.sides_read)[number][side.reads]
                assert expected == before[-1], f"{request.id} continues the state of another prefix"
            self.sides[number][side.writes] = written[-1]
            self.last_written = side.writes
        self.computed[request.id] = self.computed.get(request.id, 0) + row.length
        token, reports = None, dict[str, tuple[Any, ...]]()
        if row.samples:
            forbidden = request.eos_ids | request.stop_ids
            allowed = None if mask is None else allowed_in(mask)
            token = self.model.choose(values, request.sampling, row.generated, forbidden, allowed)
            if not row.draft:
                self.slots[row.slot] = (owner, epoch, token)
            if request.sampling.logprobs is not None:
                LOGPROBS.put(reports, self.logprobs(token, request.sampling.logprobs))
        if request.sampling.prompt_logprobs is not None:
            scored = request.token_ids[max(row.start, request.sampling.scored_from) + 1 : end + 1].tolist()
            PROMPT_LOGPROBS.put(reports, *(self.logprobs(each, request.sampling.prompt_logprobs) for each in scored))
        if (pooling := request.extensions.get(PromptPooling)) is not None:  # of the tokens computed, or of one
            of_one = {"last": values[-1:], "cls": values[row.start : row.start + 1]}
            part = of_one.get(pooling.kind, values[row.start : end])
            vector = np.array([(part >> np.uint64(40)).sum(), (part & np.uint64(0xFF)).sum()], np.float32)
            POOLED.put(reports, vector)
        return RowResult(request.id, row.epoch, token, reports)

    def run_window(self, number: int, row: Row, run: PageRun, values: KV) -> None:
        """Check the values of the window before a row, and write its own."""
        array = self.sides[number]
        oldest, end = max(0, row.start - self.window + 1), row.start + row.length
        at = np.arange(oldest, end)
        places = run.pages[at // self.page_size - run.first], at % self.page_size
        own = slice(row.start - oldest if not row.kept else len(at), None)
        array[places[0][own], places[1][own]] = values[at][own]
        self.lost -= {(number, page) for page in places[0][own].tolist()}
        read = [*((number, page) for page in run.pages.tolist()), *((None, page) for page in row.pages.tolist())]
        if not self.lost.intersection(read):
            assert (array[places] == values[at]).all(), f"{row.request.id} sees another window"

    def logprobs(self, token: int, count: int) -> TokenLogprobs:
        top = self.model.alphabet[:count]
        return TokenLogprobs(token, -1.0, top, tuple(-1.0 - index for index in range(len(top))))

    def check_repeated(self, plan: StepPlan) -> None:
        """Check that the rows of several steps follow each other, and that no other rows are among them."""
        if plan.steps == 1:
            return
        assert not plan.prefill and not plan.drafted and not plan.tasks, "these steps are not alike"
        assert len(plan.decode) == len(plan.first_decode) * plan.steps, "a request lacks a row"
        for place, row in enumerate(plan.decode):
            assert not row.fresh and not row.sides and not row.request.sampling.stop
            if place % plan.steps:
                before = plan.decode[place - 1]
                assert row.token_ids is None and not row.kept, "the device has its token, and nobody else its page"
                assert row.pages is before.pages, "the device gets one page table for all of them"
                assert (row.request.id, row.epoch, row.slot, row.start, row.generated) == (
                    before.request.id, before.epoch, before.slot, before.start + 1, before.generated + 1,
                ), "a row does not follow the one before"  # fmt: skip

    def check(self, plan: StepPlan) -> None:
        rows = plan.rows
        assert rows, "an empty step was planned"
        assert plan.tokens <= self.max_tokens_per_step * plan.steps, f"{plan.tokens} tokens are over the budget"
        self.check_repeated(plan)
        rows = (*plan.first_decode, *plan.prefill)
        assert len(plan.prefill) <= self.max_prefill_rows, f"{len(plan.prefill)} sequences prefill in one step"
        owners = [row for row in rows if not row.draft]
        assert len({row.slot for row in owners}) == len(owners) <= self.max_requests, "a slot is used twice"
        assert len(plan.first_decode) <= max(self.max_requests, 2), "there is no program of so many rows"
        assert all(0 <= row.slot < self.max_requests for row in rows)
        assert len({row.request.id for row in owners}) == len(owners), "a request has two rows"
        rows = plan.rows
        for before, row in itertools.pairwise(plan.decode):
            if row.draft:
                assert row.token_ids is not None and not row.fresh and not row.kept
                assert (row.request.id, row.epoch, row.slot, row.start, row.generated) == (
                    before.request.id, before.epoch, before.slot, before.start + 1, before.generated + 1,
                ), "a draft does not follow what it continues"  # fmt: skip
        assert not any(row.draft for row in (*plan.decode[:1], *plan.prefill))
        assert all(row.length == 1 and row.samples for row in plan.decode)
        assert all(row.start + 1 >= row.request.prompt_length for row in plan.decode), "a prompt has more tokens"
        assert not any(row.kept for row in plan.prefill)
        written: dict[int, str] = {}  # pages, and by which request
        for row in rows:
            assert row.token_ids is None or len(row.token_ids) == row.length >= 1
            assert row.fresh or row.outputs is None
            assert not row.fresh or (0 if row.outputs is None else len(row.outputs)) == row.generated
            assert len(row.pages) >= -(-(row.start + row.length) // self.page_size), "the page table is too short"
            assert row.pages.min() > 0 and row.pages.max() < len(self.memory), "a page is out of range"
            first, last = row.start // self.page_size, (row.start + row.length - 1) // self.page_size
            mine = set(row.pages[first : last + 1].tolist())
            if not row.kept:
                assert all(written.get(page, row.request.id) == row.request.id for page in mine), (
                    "a page has two writers"
                )
                written |= dict.fromkeys(mine, row.request.id)
        writers: dict[tuple[int | None, int], str] = {}
        written_slots = [
            (number, side.writes) for row in rows for number, side in enumerate(row.sides) if isinstance(side, SlotPair)
        ]
        assert len(set(written_slots)) == len(written_slots), "two rows write a slot"
        for row in rows:
            for number, run in enumerate(row.sides):
                if not isinstance(run, PageRun) or row.kept:
                    continue
                assert run.pages.min() > 0 and run.pages.max() < len(self.sides[number]), "a page is out of range"
                mine = {(number, page) for page in run.pages[row.start // self.page_size - run.first :].tolist()}
                assert all(writers.get(page, row.request.id) == row.request.id for page in mine), "two writers"
                writers |= dict.fromkeys(mine, row.request.id)
        assert writers.keys().isdisjoint((move.side, move.page) for move in plan.sides_in), "filled and written"
        restored = {move.page for move in plan.restore}
        assert len(restored) == len(plan.restore) and restored.isdisjoint(written)
        copied = {copy.page for copy in plan.copies}
        assert len(copied) == len(plan.copies) and copied.isdisjoint(restored), "a page is filled twice"
        assert copied.isdisjoint(copy.source for copy in plan.copies), "a copy is copied in the same step"


class ByteTokenizer:
    """UTF-8 bytes as token ids; 256 ends the sequence."""

    vocab_size = EOS + 1
    eos_ids = frozenset({EOS})
    has_text, encodes_apart = True, False
    bos_id: int | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in ids if token < EOS).decode("utf-8", errors="replace")


GUIDES = Guides()
_counter = iter(range(1 << 62))


def make_request(
    prompt: str | Sequence[int] | IntArray, *, id: str | None = None, eos_ids: Iterable[int] = (EOS,),
    stop_ids: Iterable[int] = (), group: str = "", index: int = 0, guide: GuideLike | None = None, **sampling: Any,
) -> Request:  # fmt: skip
    """A validated request with its seed drawn, as intake would hand it over."""
    tokens = list(prompt.encode()) if isinstance(prompt, str) else prompt
    sampling.setdefault("seed", 0)
    options = Sampling(**sampling)
    extensions = [] if options.prompt_logprobs is None else [PromptScoring(options.scored_from)]
    extensions += [] if guide is None else [Guidance(guide)]
    return Request(
        id=id if id is not None else f"r{next(_counter)}", token_ids=np.asarray(tokens, np.int32), sampling=options,
        stop_ids=frozenset(stop_ids), eos_ids=frozenset() if options.ignore_eos else frozenset(eos_ids), group=group,
        index=index, extensions=Extensions(*extensions),
    )  # fmt: skip


def extended(request: Request, *extensions: Extension) -> Request:
    """The request with these extensions, instead of its own of the same classes."""
    return dataclasses.replace(request, extensions=request.extensions.plus(*extensions))
