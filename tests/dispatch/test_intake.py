"""Intake by itself: submissions in, requests out."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

from helpers import vocabularies
from helpers.asgi import until
from helpers.fakes import EOS
from helpers.sessions import byte_tokenizer, fake_front, rest, submission
from rekindle._src.capabilities import capabilities_of
from rekindle._src.capabilities.pictures.request import PICTURES, PromptPictures
from rekindle._src.core.extension import Extensions
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch import intake
from rekindle._src.dispatch.backend import Drain, Submission
from rekindle._src.dispatch.detokenize import OutputState
from rekindle._src.dispatch.host import Dispatch
from rekindle._src.dispatch.threads import Mailbox
from rekindle.errors import InvalidRequest, PromptTooLong, RequestAborted, RequestFailed

pytestmark = pytest.mark.anyio


class TestIntake:
    async def run(self, *submissions: Submission) -> tuple[list[Any], dict[str, OutputState]]:
        outputs: dict[str, OutputState] = {}
        send, receive = anyio.create_memory_object_stream[Submission](10)
        out, messages = anyio.create_memory_object_stream[Any](100)
        for one in submissions:
            send.send_nowait(one)
        send.close()
        with anyio.fail_after(60):
            await intake.run(receive, out, fake_front(), outputs, capabilities_of())
            return await rest(messages), outputs

    async def test_hands_on_requests_then_drains(self) -> None:
        given = submission("abc", n=3, seed=5, stop_token_ids=(7,))
        messages, outputs = await self.run(given)
        *requests, last = messages
        assert last == Drain()
        assert [request.id for request in requests] == ["s.0", "s.1", "s.2"] == list(outputs)
        assert [request.sampling.seed for request in requests] == [5, 6, 7]
        assert all(request.token_ids.tolist() == [97, 98, 99] for request in requests)
        assert all(request.stop_ids == {7} and request.eos_ids == {EOS} for request in requests)
        assert given.mailbox.request_ids == ["s.0", "s.1", "s.2"]

    @pytest.mark.parametrize("running", [True, False])
    async def test_many_are_taken_in_by_parts_next_to_requests_that_run(self, running: bool) -> None:
        """A ranking of 1,000 documents stopped every stream of its session for half a second."""
        outputs: dict[str, Any] = {"running": object()} if running else {}
        send, receive = anyio.create_memory_object_stream[Submission](200)
        out, messages = anyio.create_memory_object_stream[Any](200)
        for _ in range(200):
            send.send_nowait(submission(ids=[1, 2]))
        send.close()
        turns: list[int] = []
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group, messages:
                group.start_soon(intake.run, receive, out, fake_front(), outputs, capabilities_of())
                async for _ in messages:
                    waiting = messages.statistics().current_buffer_used
                    turns.append(1 + waiting)
                    for _ in range(waiting):
                        messages.receive_nowait()
        assert sum(turns) == 201
        assert max(turns) <= 2 * intake.AT_A_TIME if running else max(turns) >= 200

    async def test_many_that_are_refused_are_taken_in_by_parts_too(self) -> None:
        send, receive = anyio.create_memory_object_stream[Submission](200)
        out, messages = anyio.create_memory_object_stream[Any](200)
        for _ in range(200):
            send.send_nowait(submission(ids=[]))
        send.close()
        outputs: dict[str, Any] = {"running": object()}
        turns, over = 0, anyio.Event()

        async def running() -> None:
            nonlocal turns
            while not over.is_set():
                await anyio.lowlevel.checkpoint()
                turns += 1

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group, messages:
                group.start_soon(running)
                await intake.run(receive, out, fake_front(), outputs, capabilities_of())
                over.set()
                assert [type(message) for message in await rest(messages)] == [Drain]
        assert turns >= 200 // intake.AT_A_TIME

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
        messages, outputs = await self.run(given, submission("fine"))
        assert isinstance(given.mailbox.error, InvalidRequest) and given.mailbox.error.field == field
        assert len(messages) == 2 and len(outputs) == 1

    async def test_a_broken_tokenizer_fails_that_request_with_the_cause(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def encode(text: str, add_special_tokens: bool = True) -> list[int]:
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(byte_tokenizer(), "encode", encode)
        given = submission("abc")
        messages, outputs = await self.run(given)
        assert messages == [Drain()] and not outputs
        assert isinstance(given.mailbox.error, RequestFailed)
        assert isinstance(given.mailbox.error.__cause__, ZeroDivisionError)

    async def test_what_was_abandoned_meanwhile_goes_nowhere(self) -> None:
        given = submission("abc")
        given.mailbox.abandoned = True
        messages, outputs = await self.run(given)
        assert messages == [Drain()] and not outputs
        assert isinstance(given.mailbox.error, RequestAborted)

    async def test_a_long_text_is_encoded_in_a_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        threads = []
        tokenizer = byte_tokenizer()
        monkeypatch.setattr(
            tokenizer, "encode", lambda text, **_: threads.append(threading.get_ident()) or [1] * len(text)
        )
        ids = await intake.tokenize(submission("x" * intake.LONG_TEXT), fake_front())
        assert len(ids) == intake.LONG_TEXT and threads != [threading.get_ident()]


async def test_preparing_is_a_plain_function() -> None:
    ids = np.array([1, 2], np.int32)
    (request,) = intake.prepare(submission("abc"), ids, fake_front(), random.Random(0), capabilities_of())
    assert request.prompt_length == 2 and request.sampling.seed is not None


async def test_a_panic_of_the_tokenizer_fails_its_request_and_the_next_one_is_served() -> None:
    engine = fake_front()._replace(tokenizer=vocabularies.over(vocabularies.llama3_regex(), eos_ids=(EOS,)))
    engine = engine._replace(config=dataclasses.replace(engine.config, max_model_len=1 << 22))
    bad, good = submission(vocabularies.PANICS), submission("fine")
    outputs: dict[str, OutputState] = {}
    send, receive = anyio.create_memory_object_stream[Submission](10)
    out, messages = anyio.create_memory_object_stream[Any](100)
    for one in (bad, good):
        send.send_nowait(one)
    send.close()
    with anyio.fail_after(60):
        await intake.run(receive, out, engine, outputs, capabilities_of())
        handed_on = await rest(messages)
    assert isinstance(bad.mailbox.error, RequestFailed) and "panicked" in str(bad.mailbox.error)
    assert [type(message).__name__ for message in handed_on] == ["Request", "Drain"]


async def test_a_text_that_can_not_fit_is_refused_without_being_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_front()._replace(characters_per_token=lambda: 7)
    limit = engine.config.max_model_len
    assert limit is not None
    monkeypatch.setattr(byte_tokenizer(), "encode", lambda text, **_: [1])
    assert len(await intake.tokenize(submission("x" * limit * 7), engine)) == 1
    monkeypatch.setattr(byte_tokenizer(), "encode", None)  # calling it would be a TypeError
    with pytest.raises(PromptTooLong, match=f"at least {limit + 1:,} tokens, and max_model_len is {limit:,}") as caught:
        await intake.tokenize(submission("x" * (limit * 7 + 1)), engine)
    assert len(str(caught.value)) < 400


async def test_a_text_that_is_far_too_long_is_refused_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(len(text))
        return [97] * len(text)

    monkeypatch.setattr(byte_tokenizer(), "encode", encode)
    with pytest.raises(PromptTooLong, match="first 4,096 of its 200,000"):
        await intake.tokenize(submission("a" * 200_000), fake_front())
    assert encoded == [4096]


async def test_long_prompts_are_taken_in_by_turns_while_short_ones_go_on() -> None:
    """Two of them at a time, of several callers alike; what nobody waits for any more is not rendered."""
    gate, rendering = threading.Event(), list[str]()

    def one(name: str, caller: str) -> Submission:
        def render() -> str:
            rendering.append(name)
            gate.wait(20)
            return name

        return Submission(name, None, None, True, Sampling(), Mailbox(1), 1.0, render, long=True, caller=caller)

    several = [one(f"{caller}{index}", caller) for caller, index in zip("aaaaab", range(6), strict=True)]
    outputs: dict[str, OutputState] = {}
    send, receive = anyio.create_memory_object_stream[Submission](10)
    out, messages = anyio.create_memory_object_stream[Any](100)
    async with anyio.create_task_group() as group, messages:
        group.start_soon(intake.run, receive, out, fake_front(), outputs, capabilities_of())
        for submitted in (*several, submission("short")):
            send.send_nowait(submitted)
        send.close()
        with anyio.fail_after(60):
            assert (await messages.receive()).id == "s"  # the short one, while two long ones are being rendered
            await until(lambda: len(rendering) == 2)
        begun = set(rendering)  # trio begins them in any order
        left = [one for one in several if one.id not in begun and one.caller == "a"][:2]
        for one_of_them in left:
            one_of_them.mailbox.abandoned = True
        gate.set()
        with anyio.fail_after(60):
            handed_on = [message.id async for message in messages if message != Drain()]
    waited_for = {one.id for one in several if one not in left}
    assert len(rendering) == 4 and set(rendering) == set(handed_on) == waited_for
    assert all(isinstance(one.mailbox.error, RequestAborted) for one in left)


class Line:
    """Pictures that wait for others; the length of the line."""

    token = 1

    def __init__(self) -> None:
        self.length = 0

    def known(self, picture: Any, salt: str | None) -> bool:
        return False

    async def encoded(self, picture: Any, wanted: Callable[[], bool], *, caller: str, salt: str | None) -> Any:
        self.length += 1
        try:
            await anyio.sleep_forever()
        finally:
            self.length -= 1
            assert not wanted()


async def test_an_aborted_request_leaves_the_lines_of_pictures_and_of_long_prompts() -> None:
    """It kept its files, and its place among the session's requests, until all before it had been served."""
    gate, rendering, line = threading.Event(), list[str](), Line()

    def one(name: str) -> Submission:
        def render() -> str:
            rendering.append(name)
            gate.wait(60)
            return name

        return Submission(name, None, None, True, Sampling(), Mailbox(1), 1.0, render, long=True)

    dispatch = Dispatch(fake_front()._replace(services={PICTURES: line}), None, capabilities_of())  # type: ignore[arg-type]
    shown = submission(ids=[1])._replace(extensions=Extensions(PromptPictures((object(),))))  # type: ignore[arg-type]
    rendered, left = [one("a"), one("b")], one("c")
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(dispatch._tasks[0])
            with anyio.fail_after(60):
                for submitted in rendered:
                    dispatch.submit(submitted)
                await until(lambda: len(rendering) == 2)
                for submitted in (left, shown):
                    dispatch.submit(submitted)
                await until(lambda: line.length == 1)
                await anyio.wait_all_tasks_blocked()
            for submitted in (left, shown):
                dispatch.abort(submitted.mailbox)
            with anyio.move_on_after(20):
                await until(lambda: left.mailbox.ended and shown.mailbox.ended)
            ended = left.mailbox.ended, shown.mailbox.ended, line.length
            gate.set()
            dispatch.drain()
            if not all(ended[:2]):
                group.cancel_scope.cancel()
        assert ended == (True, True, 0)
        assert all(isinstance(mailbox.error, RequestAborted) for mailbox in (left.mailbox, shown.mailbox))
        assert len(rendering) == 2 and {one.id for one in rendered} == set(dispatch.outputs)
    finally:
        gate.set()
        for stream in dispatch._streams:
            stream.close()
