"""Each of the four tasks by itself: messages in, messages out."""

from __future__ import annotations

import random
import threading
from typing import Any

import anyio
import numpy as np
import pytest

from fakes import EOS, FakeModel, make_request
from rekindle.config import Sampling
from rekindle.errors import InvalidRequest, PromptTooLong, RequestAborted, RequestFailed
from rekindle.records import Completion, FinishReason, Request, StepPlan, TokenEvent
from rekindle.session import real_detokenizer
from rekindle.tasks import detokenize, intake, schedule, step
from rekindle.tasks.detokenize import Ticket
from rekindle.tasks.device import DeviceThread
from rekindle.tasks.mailbox import Mailbox, Slot
from rekindle.tasks.messages import (
    Abort,
    Drain,
    Engine,
    Events,
    Exclusive,
    Finish,
    Outcome,
    Pause,
    Resume,
    StepOnce,
    Stepped,
    Submission,
    Turn,
)
from sessions import CONFIG, byte_tokenizer, parts

pytestmark = pytest.mark.anyio


def engine(**options: Any) -> Engine:
    scheduler, runner = parts(CONFIG, **options)
    tokenizer = byte_tokenizer()
    return Engine(scheduler, runner, tokenizer, real_detokenizer(tokenizer), CONFIG, EOS + 1)


def submission(text: str | None = "abc", ids: list[int] | None = None, **sampling: Any) -> Submission:
    options = Sampling(**sampling)
    token_ids = None if ids is None else np.asarray(ids, np.int32)
    return Submission("s", text if ids is None else None, token_ids, True, options, Mailbox(options.n), 1.0)


async def rest(stream: Any) -> list[Any]:
    """Everything that is in a stream whose senders are gone."""
    async with stream:
        return [message async for message in stream]


def run_calls(batch: Events) -> None:
    for call in batch.then:
        call()


class TestIntake:
    async def run(self, *submissions: Submission) -> tuple[list[Any], dict[str, Ticket]]:
        tickets: dict[str, Ticket] = {}
        send, receive = anyio.create_memory_object_stream[Submission](10)
        out, messages = anyio.create_memory_object_stream[Any](100)
        for one in submissions:
            send.send_nowait(one)
        send.close()
        with anyio.fail_after(10):
            await intake.run(receive, out, engine(), tickets)
            return await rest(messages), tickets

    async def test_hands_on_requests_then_drains(self) -> None:
        given = submission("abc", n=3, seed=5, stop_token_ids=(7,))
        messages, tickets = await self.run(given)
        *requests, last = messages
        assert last == Drain()
        assert [request.id for request in requests] == ["s.0", "s.1", "s.2"] == list(tickets)
        assert [request.sampling.seed for request in requests] == [5, 6, 7]
        assert all(request.token_ids.tolist() == [97, 98, 99] for request in requests)
        assert all(request.stop_ids == {7} and request.eos_ids == {EOS} for request in requests)
        assert given.mailbox.request_ids == ["s.0", "s.1", "s.2"]

    async def test_ignoring_eos_leaves_no_eos_ids(self) -> None:
        messages, _ = await self.run(submission(ignore_eos=True))
        assert messages[0].eos_ids == frozenset()

    async def test_seeds_are_drawn_from_the_configs_seed(self) -> None:
        drawn = [(await self.run(submission(), submission()))[0] for _ in range(2)]
        seeds = [[message.sampling.seed for message in messages[:-1]] for messages in drawn]
        assert seeds[0] == seeds[1] and seeds[0][0] != seeds[0][1]

    @pytest.mark.parametrize(
        ("given", "field"),
        [
            (submission(""), "prompt"),
            (submission(ids=[5, 999]), "prompt"),
            (submission(stop_token_ids=(999,)), "stop_token_ids"),
            (submission(logit_bias={999: 1.0}), "logit_bias"),
        ],
    )
    async def test_what_does_not_fit_the_model_is_refused_and_the_next_one_is_not(
        self, given: Submission, field: str
    ) -> None:
        given = given._replace(mailbox=Mailbox(1))  # parameters are shared by both backends
        messages, tickets = await self.run(given, submission("fine"))
        assert isinstance(given.mailbox.error, InvalidRequest) and given.mailbox.error.field == field
        assert len(messages) == 2 and len(tickets) == 1

    async def test_a_broken_tokenizer_fails_that_request_with_the_cause(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def encode(text: str, add_special_tokens: bool = True) -> list[int]:
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(byte_tokenizer(), "encode", encode)
        given = submission("abc")
        messages, tickets = await self.run(given)
        assert messages == [Drain()] and not tickets
        assert isinstance(given.mailbox.error, RequestFailed)
        assert isinstance(given.mailbox.error.__cause__, ZeroDivisionError)

    async def test_what_was_abandoned_meanwhile_goes_nowhere(self) -> None:
        given = submission("abc")
        given.mailbox.abandoned = True
        messages, tickets = await self.run(given)
        assert messages == [Drain()] and not tickets
        assert isinstance(given.mailbox.error, RequestAborted)

    async def test_a_long_text_is_encoded_in_a_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        threads = []
        tokenizer = byte_tokenizer()
        monkeypatch.setattr(
            tokenizer, "encode", lambda text, **_: threads.append(threading.get_ident()) or [1] * len(text)
        )
        ids = await intake.tokenize(submission("x" * intake.LONG_TEXT), engine())
        assert len(ids) == intake.LONG_TEXT and threads != [threading.get_ident()]


class TestSchedule:
    """The test plays the step task, so it sees every turn."""

    async def start(self, group: Any, **options: Any) -> Any:
        made = engine(**options)
        self.runner = made.runner
        self.inbox, receive = anyio.create_memory_object_stream[Any](100)
        turns, self.turns = anyio.create_memory_object_stream[Turn](1)
        events, self.events = anyio.create_memory_object_stream[Events](100)
        self.last = None
        group.start_soon(schedule.run, receive, turns, events, made.scheduler)
        return made.scheduler

    async def turn(self) -> Turn:
        with anyio.fail_after(10):
            return await self.turns.receive()

    async def answer(self, turn: Turn) -> None:
        outcome, self.last = step.advance(self.runner, turn.plan, self.last)
        await self.inbox.send(outcome)

    async def delivered(self) -> None:
        """Play the detokenize task for what is there by now."""
        await anyio.wait_all_tasks_blocked()
        while self.events.statistics().current_buffer_used:
            run_calls(self.events.receive_nowait())

    async def test_plans_ahead_of_results_and_ends_after_the_last_one(self) -> None:
        plans: list[StepPlan | None] = []
        async with anyio.create_task_group() as group:
            await self.start(group)
            await self.inbox.send(make_request("abc", id="a", max_tokens=3))
            await self.inbox.send(Drain())
            async for turn in self.turns:
                plans.append(turn.plan)
                await self.answer(turn)
        # Three steps, each dispatched before the one before was read, then one turn that only reads.
        assert [plan.step if plan else None for plan in plans] == [0, 1, 2, None]
        events = [event for batch in await rest(self.events) for event in batch.events]
        assert [event.finish_reason for event in events] == [None, None, FinishReason.LENGTH]
        tokens = [token for event in events for token in event.token_ids]
        assert tokens == FakeModel().generate(make_request("abc", max_tokens=3))

    async def test_says_when_a_request_first_ran(self) -> None:
        async with anyio.create_task_group() as group:
            await self.start(group)
            await self.inbox.send(make_request("abc", id="a", max_tokens=2))
            await self.inbox.send(Drain())
            async for turn in self.turns:
                await self.answer(turn)
        batches = await rest(self.events)
        assert batches[0].started == ("a",) and batches[0].at > 0
        assert not any(batch.started for batch in batches[1:])

    async def test_refusals_of_the_scheduler_become_events(self) -> None:
        async with anyio.create_task_group() as group:
            await self.start(group)
            await self.inbox.send(make_request("x" * 600, id="long"))
            await self.inbox.send(Drain())
        (batch,) = await rest(self.events)
        (event,) = batch.events
        assert event.finish_reason is FinishReason.FAILED and isinstance(event.error, PromptTooLong)

    async def test_takes_messages_while_the_device_works(self) -> None:
        async with anyio.create_task_group() as group:
            scheduler = await self.start(group)
            await self.inbox.send(make_request("abc", id="a", max_tokens=9))
            turn = await self.turn()
            await self.inbox.send(Abort("a"))
            with anyio.fail_after(5):
                batches = [await self.events.receive(), await self.events.receive()]
            reasons = [event.finish_reason for batch in batches for event in batch.events]
            assert reasons == [FinishReason.ABORTED]
            await self.inbox.send(Drain())
            await self.answer(turn)
            async for turn in self.turns:
                await self.answer(turn)
        scheduler.check_integrity()

    async def test_a_failed_step_fails_its_requests(self) -> None:
        async with anyio.create_task_group() as group:
            scheduler = await self.start(group, fail=lambda plan: ValueError("no") if plan.step == 1 else None)
            await self.inbox.send(make_request("abc", id="a", max_tokens=9))
            await self.inbox.send(Drain())
            async for turn in self.turns:
                await self.answer(turn)
        events = [event for batch in await rest(self.events) for event in batch.events]
        assert events[-1].finish_reason is FinishReason.FAILED
        assert isinstance(events[-1].error.__cause__, ValueError)
        scheduler.check_integrity()

    async def test_pausing_waits_for_the_step_in_flight_and_steps_run_singly(self) -> None:
        quiet: Slot[None] = Slot()
        reports: list[Slot[Stepped]] = [Slot(), Slot()]
        async with anyio.create_task_group() as group:
            await self.start(group)
            await self.inbox.send(make_request("abc", id="a", max_tokens=5))
            turn = await self.turn()
            await self.inbox.send(Pause(quiet))
            await anyio.wait_all_tasks_blocked()
            assert not quiet.filled
            await self.answer(turn)
            turn = await self.turn()
            assert turn.plan is None, "a step was planned in a paused session"
            await self.answer(turn)
            await self.delivered()
            assert quiet.filled
            for report in reports:
                await self.inbox.send(StepOnce(report))
            for _ in reports:
                for expects_plan in (True, False):
                    turn = await self.turn()
                    assert (turn.plan is not None) == expects_plan
                    await self.answer(turn)
            await self.inbox.send(Resume())
            await self.inbox.send(Drain())
            batches = []
            async for turn in self.turns:
                await self.answer(turn)
            batches = await rest(self.events)
        for batch in batches:
            run_calls(batch)
        steps = [(await report.get()).result.plan.step for report in reports]
        assert steps == [1, 2]

    async def test_a_step_of_a_running_session_is_refused(self) -> None:
        report: Slot[Stepped] = Slot()
        async with anyio.create_task_group() as group:
            await self.start(group)
            await self.inbox.send(StepOnce(report))
            await self.inbox.send(Drain())
        with pytest.raises(Exception, match="paused"):
            await report.get()

    async def test_exclusive_jobs_run_between_steps(self) -> None:
        done: Slot[Any] = Slot()
        after: list[Any] = []
        async with anyio.create_task_group() as group:
            await self.start(group)
            await self.inbox.send(make_request("abc", id="a", max_tokens=4))
            turn = await self.turn()
            await self.inbox.send(Exclusive(lambda: 42, after.append, done))
            await self.answer(turn)
            turn = await self.turn()
            assert turn.plan is None and turn.job is None
            await self.answer(turn)
            turn = await self.turn()
            assert turn.job is not None
            await self.inbox.send(Outcome(returned=turn.job()))
            turn = await self.turn()
            assert turn.plan is not None, "the session did not go on"
            await self.answer(turn)
            await self.inbox.send(Drain())
            async for turn in self.turns:
                await self.answer(turn)
        assert after == [42] and await done.get() == 42

    async def test_a_scheduler_that_waits_for_a_copy_is_asked_again(self) -> None:
        class Waiting:
            has_work, asked = True, 0

            def plan(self) -> None:
                self.asked += 1
                if self.asked == 5:
                    self.has_work = False

            def submit(self, request: Request) -> None: ...

        scheduler: Any = Waiting()
        send, receive = anyio.create_memory_object_stream[Any](10)
        turns, _turns = anyio.create_memory_object_stream[Turn](1)
        events, _events = anyio.create_memory_object_stream[Events](10)
        send.send_nowait(make_request("abc"))
        send.send_nowait(Drain())
        with anyio.fail_after(10):
            await schedule.run(receive, turns, events, scheduler)
        assert scheduler.asked >= 5
        for stream in (send, _turns, _events):
            stream.close()


class TestStep:
    async def test_reads_each_step_after_the_next_one_was_dispatched(self) -> None:
        made = engine()
        made.scheduler.submit(make_request("abc", max_tokens=3))
        order: list[str] = []
        dispatch, fetch = made.runner.dispatch, made.runner.fetch
        made.runner.dispatch = lambda plan: (order.append(f"dispatch {plan.step}"), dispatch(plan))[1]
        made.runner.fetch = lambda flight: (order.append(f"fetch {flight.plan.step}"), fetch(flight))[1]
        device = DeviceThread()
        turns, inbox = anyio.create_memory_object_stream[Turn](4)
        outbox, outcomes = anyio.create_memory_object_stream[Any](4)
        for plan in (made.scheduler.plan(), made.scheduler.plan(), None):
            turns.send_nowait(Turn(plan))
        turns.close()
        with anyio.fail_after(10):
            await step.run(inbox, outbox, made.runner, device)
        assert order == ["dispatch 0", "dispatch 1", "fetch 0", "fetch 1"]
        results = [outcome.result for outcome in await rest(outcomes)]
        assert [result and result.plan.step for result in results] == [None, 0, 1]
        assert device.stop(5)

    async def test_a_failing_dispatch_leaves_the_step_before_it_alone(self) -> None:
        made = engine(fail=lambda plan: ValueError("no") if plan.step == 1 else None)
        made.scheduler.submit(make_request("abc", max_tokens=3))
        first, second = made.scheduler.plan(), made.scheduler.plan()
        _, flight = step.advance(made.runner, first, None)
        outcome, current = step.advance(made.runner, second, flight)
        assert outcome.result.plan is first and current is None
        ((failed, cause),) = outcome.failed
        assert failed is second and isinstance(cause, ValueError)

    async def test_the_loop_stays_free_while_the_device_works(self) -> None:
        release = threading.Event()
        device = DeviceThread()
        ticks = 0
        async with anyio.create_task_group() as group:
            group.start_soon(device.run, lambda: release.wait(10))
            for _ in range(5):
                await anyio.sleep(0.001)
                ticks += 1
            release.set()
        assert ticks == 5 and device.stop(5)

    async def test_what_a_job_raises_comes_back_with_its_traceback(self) -> None:
        device = DeviceThread()
        with pytest.raises(ZeroDivisionError) as caught:
            await device.run(lambda: 1 / 0)
        assert "1 / 0" in str(caught.traceback[-1].statement)
        assert device.stop(5)


class TestDetokenize:
    def ticket(self, **sampling: Any) -> Ticket:
        request = make_request("abc", id="r", **sampling)
        return Ticket(request, Mailbox(1), "abc", real_detokenizer(byte_tokenizer())(request.sampling))

    async def run(self, ticket: Ticket, *events: TokenEvent) -> list[Any]:
        send, receive = anyio.create_memory_object_stream[Events](100)
        feedback, said = anyio.create_memory_object_stream[Any](100)
        self.tickets = {"r": ticket}
        for event in events:
            send.send_nowait(Events((event,), ("r",), 2.0))
        send.close()
        with anyio.fail_after(10):
            await detokenize.run(receive, feedback, self.tickets)
            return await rest(said)

    def events(self, text: bytes, reason: FinishReason | None = FinishReason.LENGTH) -> list[TokenEvent]:
        last = len(text) - 1
        return [
            TokenEvent("r", (byte,), cached_tokens=2, finish_reason=reason if i == last else None)
            for i, byte in enumerate(text)
        ]

    async def test_deltas_add_up_to_the_completion(self) -> None:
        ticket = self.ticket()
        assert await self.run(ticket, *self.events("né 😀!".encode())) == []
        done = ticket.mailbox.results[0]
        assert isinstance(done, Completion) and done.text == "né 😀!"
        assert "".join(delta.text for delta in ticket.mailbox.deltas) == done.text
        assert [t for delta in ticket.mailbox.deltas for t in delta.token_ids] == list(done.token_ids)
        assert done.usage.cached_tokens == 2 and done.usage.completion_tokens == len("né 😀!".encode())
        assert ticket.mailbox.deltas[-1].finish_reason is FinishReason.LENGTH
        assert not self.tickets

    async def test_half_a_character_waits_for_its_other_half(self) -> None:
        ticket = self.ticket()
        await self.run(ticket, *self.events("é".encode()[:1], None))
        assert not ticket.mailbox.deltas

    async def test_the_eos_token_is_no_text(self) -> None:
        ticket = self.ticket()
        await self.run(ticket, *self.events(b"ab", None), TokenEvent("r", (EOS,), finish_reason=FinishReason.EOS))
        done = ticket.mailbox.results[0]
        assert isinstance(done, Completion) and (done.text, done.token_ids) == ("ab", (97, 98, EOS))

    async def test_a_stop_string_ends_the_request_at_once(self) -> None:
        ticket = self.ticket(stop=("xyz",))
        assert await self.run(ticket, *self.events(b"abxyzcd", None)) == [Finish("r", FinishReason.STOP)]
        done = ticket.mailbox.results[0]
        assert isinstance(done, Completion)
        assert (done.text, done.finish_reason) == ("ab", FinishReason.STOP)
        assert bytes(done.token_ids) == b"abxyz"
        assert all("x" not in delta.text for delta in ticket.mailbox.deltas)

    async def test_an_abort_keeps_what_there_was(self) -> None:
        ticket = self.ticket(stop=("bcd",))
        await self.run(ticket, *self.events(b"abc", None), TokenEvent("r", finish_reason=FinishReason.ABORTED))
        assert isinstance(ticket.mailbox.error, RequestAborted)
        assert "".join(delta.text for delta in ticket.mailbox.deltas) == "abc"

    async def test_undecodable_text_fails_that_request_and_frees_it(self) -> None:
        ticket = self.ticket()
        ticket._detokenizer.push = lambda ids: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        assert await self.run(ticket, *self.events(b"abc", None)) == [Abort("r")]
        assert isinstance(ticket.mailbox.error, RequestFailed)
        assert isinstance(ticket.mailbox.error.__cause__, ZeroDivisionError)


async def test_preparing_is_a_plain_function() -> None:
    (request,) = intake.prepare(submission("abc"), np.array([1, 2], np.int32), engine(), random.Random(0))
    assert request.prompt_length == 2 and request.sampling.seed is not None
