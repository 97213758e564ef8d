"""Any interleaving of submits, aborts, plans, commits and failures keeps the pool whole and the outputs exact."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers.fakes import EOS, DictTier, EchoModel, FakeModel, make_request
from helpers.scheduling import Loop, LoopBuilder, NoReserve
from rekindle._src.core.config import POLICIES, DraftSource
from rekindle._src.core.prefix import Prefix
from rekindle._src.core.records import FinishReason, IntArray, Request
from rekindle._src.core.report_kinds import PROMPT_LOGPROBS
from rekindle.errors import OutOfPages, PromptTooLong, QueueFull


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts are cut from a few long texts, so that prefixes are shared, found, and computed at the same time."""

    loop: Loop
    requests: dict[str, Request]

    @initialize(
        pages=st.integers(4, 24),
        page_size=st.sampled_from([2, 4]),
        max_requests=st.integers(1, 4),
        budget=st.integers(1, 24),
        prefill_rows=st.integers(1, 4),
        max_model_len=st.sampled_from([20, 40, 80]),
        policy=st.sampled_from(POLICIES),
        cached=st.sampled_from([True, True, False]),
        tier=st.sampled_from([None, 0, 5, 1000]),
        depth=st.integers(0, 2),
        eos_rate=st.sampled_from([0.0, 0.05, 0.3]),
        overtakes=st.integers(0, 3),
        greedy=st.booleans(),
        drafts=st.sampled_from([0, 1, 4]),
        source=st.sampled_from(["auto", "suffix"]),
        states=st.sampled_from([None, None, 0, 1, 3, 10]),
        state_step=st.sampled_from([1, 2]),
        edge=st.sampled_from([1, 2, 4]),
        state_tier=st.sampled_from([None, 2, 1000]),
        least_copied=st.sampled_from([0, 1, 2]),
        window=st.sampled_from([0, 1, 3, 8, 13]),
        window_pages=st.sampled_from([0, 3, 1000]),
        repeated=st.sampled_from([1, 3, 8]),
    )
    def start(
        self,
        pages: int,
        page_size: int,
        max_requests: int,
        budget: int,
        prefill_rows: int,
        max_model_len: int,
        policy: str,
        cached: bool,
        tier: int | None,
        depth: int,
        eos_rate: float,
        overtakes: int,
        greedy: bool,
        drafts: int,
        source: DraftSource,
        states: int | None,
        state_step: int,
        edge: int,
        state_tier: int | None,
        least_copied: int,
        window: int,
        window_pages: int,
        repeated: int,
    ) -> None:
        self.depth, self.page_size = depth, page_size
        self.turns = 0
        self.pinned: list[IntArray] = []
        model = functools.partial(EchoModel, period=3, surprises=0.3) if drafts else FakeModel
        self.loop = (
            LoopBuilder(
                pages=pages,
                page_size=page_size,
                max_requests=max_requests,
                max_tokens_per_step=budget,
                max_prefill_rows=prefill_rows,
                max_model_len=max_model_len,
                model=model(eos_rate=eos_rate, alphabet=tuple(range(4))),
            )
            .queue(max_queue=6, policy=policy, seed=0, max_overtakes=overtakes, reserve=NoReserve() if greedy else None)
            .drafts(lookup=drafts, source=source if drafts else "auto")
            .cache(prefixes=cached, least_copied=least_copied, host_tier=None if tier is None else DictTier(tier))
            .states(
                slots=states,
                step=state_step,
                edge=edge if states is not None and edge <= budget - max_requests else 1,
                tier=None if state_tier is None else DictTier(state_tier),
            )
            .window(positions=window, pages=window_pages)
            .steps(repeated=repeated)
            .loop()
        )
        self.requests = {}
        self.expected_reason: dict[str, FinishReason] = {}

    @rule(
        text=st.integers(0, 2),
        length=st.integers(1, 30),
        suffix=st.lists(st.integers(0, 3), max_size=3),
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        n=st.integers(1, 3),
    )
    def submit(self, text: int, length: int, suffix: list[int], n: int, **options: Any) -> None:
        options["min_tokens"] = min(options["min_tokens"], options["max_tokens"])
        prompt = [(position * (text + 3)) % 4 for position in range(length)] + suffix
        for index in range(n):
            request = make_request(prompt, stop_ids=(3,), seed=index, **options)
            waiting = self.loop.scheduler.statistics().waiting
            try:
                self.loop.submit(request)
            except PromptTooLong:
                assert len(prompt) >= self.loop.scheduler.limits.max_model_len
            except OutOfPages:
                pinned = self.loop.cache.pinned_pages
                assert -(-len(prompt) // self.page_size) > self.loop.pool.total - pinned
            except QueueFull:
                assert waiting >= 6
            else:
                self.requests[request.id] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORTED, FinishReason.STOP]))
    def end_from_outside(self, data: st.DataObject, reason: FinishReason) -> None:
        request = data.draw(st.sampled_from([*self.requests.values()]))  # in their order, which no name decides
        ended = self.loop.reason(request)
        event = self.loop.scheduler.finish(request.id, reason)
        assert (event is None) == (ended is not None)
        self.loop.take(event)
        if event is not None:
            self.expected_reason[request.id] = reason

    @rule(steps=st.integers(1, 12))
    def plan_and_dispatch(self, steps: int) -> None:
        self.turns += 1
        for _ in range(steps):
            while len(self.loop.in_flight) > self.depth:
                self.loop.commit()
            plan = self.loop.scheduler.plan()
            if plan is not None:
                self.loop.in_flight.append(self.loop.runner.dispatch(plan))

    @rule()
    def commit(self) -> None:
        if self.loop.in_flight:
            self.loop.commit()

    @precondition(lambda self: self.turns % 8 == 7)
    @rule()
    def fail_a_dispatch(self) -> None:
        plan = self.loop.scheduler.plan()
        if plan is not None:
            self.loop.take(*self.loop.scheduler.fail(plan, RuntimeError("the device is on fire")))

    @rule(text=st.integers(0, 2), length=st.integers(1, 40))
    def pin(self, text: int, length: int) -> None:
        tokens = make_request([(position * (text + 3)) % 4 for position in range(length)]).token_ids
        try:
            self.loop.scheduler.pin(Prefix(tokens))
        except OutOfPages:
            return
        self.pinned = [*self.pinned, tokens]

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            self.loop.scheduler.unpin(Prefix(self.pinned.pop()))

    @precondition(lambda self: self.turns % 8 == 3)
    @rule(recompute=st.booleans())
    def flush(self, recompute: bool) -> None:
        self.loop.scheduler.flush_cache(recompute=recompute)
        self.pinned = []

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "loop"):
            self.loop.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.run()
        statistics = self.loop.scheduler.statistics()
        assert statistics.pages_held == sum(bool(node.pins and node.page) for node in self.loop.cache)
        assert statistics.running == statistics.waiting == statistics.leaving == 0
        for request in self.requests.values():
            self.compare(request)

    def compare(self, request: Request) -> None:
        output, reason = self.loop.output(request), self.loop.reason(request)
        assert reason is not None, f"{request.id} never ended"
        expected = self.loop.model.generate(request, len(output)) if output else []
        assert output == expected, f"{request.id} differs from the plain loop"
        if reason is FinishReason.FAILED or request.id in self.expected_reason:
            return
        plain = self.loop.model.generate(request)
        if output != plain:
            assert reason is FinishReason.CONTEXT and output == plain[: len(output)]
        elif plain[-1] in (EOS, 3) and len(plain) > request.sampling.min_tokens:
            assert reason is (FinishReason.EOS if plain[-1] == EOS else FinishReason.STOP)
        else:
            assert reason in (FinishReason.LENGTH, FinishReason.CONTEXT)
        if request.sampling.prompt_logprobs:
            scored = [score.token_id for event in self.loop.events[request.id] for score in PROMPT_LOGPROBS.of(event)]
            assert scored == request.token_ids[1:].tolist()


EXAMPLES = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


class TestSchedulerMachine(SchedulerMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(EXAMPLES, max_examples=40)


@pytest.mark.thorough
@pytest.mark.timeout(900)
class TestSchedulerMachineForLonger(SchedulerMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(EXAMPLES, max_examples=100)
