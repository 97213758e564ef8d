"""The public API over fakes: what callers on asyncio, trio, in threads and without a loop get."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest
import trio

from fakes import EOS, FakeModel
from rekindle import Completion, EngineConfig, Sampling, Session
from rekindle.errors import InvalidRequest, QueueFull, RequestAborted, SessionClosed
from rekindle.handle import Batch, Handle
from rekindle.records import FinishReason, Status
from rekindle.tasks.ports import AsyncioBell
from sessions import CONFIG, eventually, expected, opened, settled

anyio_test = pytest.mark.anyio


@pytest.fixture
def session() -> Iterator[Session]:
    with opened() as made:
        yield made


@pytest.fixture
def slow() -> Iterator[Session]:
    """Ten milliseconds a step, so that things can happen in between."""
    with opened(step_seconds=0.01) as made:
        yield made


@anyio_test
async def test_generate_gives_the_whole_completion(session: Session) -> None:
    done = await session.generate("hello", max_tokens=20)
    assert isinstance(done, Completion)
    assert list(done.token_ids) == expected("hello", max_tokens=20)
    assert done.text == bytes(done.token_ids).decode()
    assert done.finish_reason is FinishReason.LENGTH
    assert done.prompt == "hello" and bytes(done.prompt_token_ids) == b"hello"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 20)
    assert 0 < done.timings.queued <= done.timings.first_token < done.timings.total


@anyio_test
@pytest.mark.parametrize("prompt", [[104, 105], (104, 105), np.array([104, 105]), "hi"], ids=str)
async def test_a_prompt_is_text_or_token_ids(session: Session, prompt: Any) -> None:
    done = await session.generate(prompt, max_tokens=4)
    assert list(done.token_ids) == expected("hi", max_tokens=4)
    assert done.prompt == ("hi" if isinstance(prompt, str) else None)


@anyio_test
async def test_a_list_in_is_a_list_out_and_one_batch(session: Session) -> None:
    prompts = [f"prompt {i}" for i in range(6)]
    call = session.generate(prompts, max_tokens=8)
    assert isinstance(call, Batch)
    many = await call
    assert [list(done.token_ids) for done in many] == [expected(prompt, max_tokens=8) for prompt in prompts]
    rows = [len(plan.rows) for plan in session._engine.runner.plans]
    assert max(rows) == 6, "they did not run together"
    assert await session.generate([]) == []
    assert [done.text for done in await session.generate([[97], "b"], max_tokens=1)] != []


@anyio_test
async def test_n_sequences_of_one_prompt(session: Session) -> None:
    several = await session.generate("abc", n=3, seed=7, temperature=1.0, max_tokens=6)
    assert [done.index for done in several] == [0, 1, 2]
    assert [done.seed for done in several] == [7, 8, 9]
    assert len({done.token_ids for done in several}) == 3
    alone = await session.generate("abc", seed=8, temperature=1.0, max_tokens=6)
    assert alone.token_ids == several[1].token_ids
    nested = await session.generate(["a", "b"], n=2, max_tokens=2)
    assert [len(group) for group in nested] == [2, 2]
    indices = [delta.index async for delta in session.stream("abc", n=2, max_tokens=3)]
    assert sorted(indices) == [0, 0, 0, 1, 1, 1]


@anyio_test
async def test_a_stream_adds_up_to_the_completion(session: Session) -> None:
    deltas = [delta async for delta in session.stream("hello", max_tokens=12)]
    done = await session.generate("hello", max_tokens=12)
    assert "".join(delta.text for delta in deltas) == done.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == done.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * 11
    assert deltas[-1].finish_reason is FinishReason.LENGTH


@anyio_test
async def test_a_handle_is_live(slow: Session) -> None:
    handle = slow.submit("hello", max_tokens=100)
    assert not handle.done and handle.status in (Status.QUEUED, Status.PREFILL, Status.DECODE)
    async for _ in handle:
        if len(handle.token_ids) == 3:
            break
    assert handle.status is Status.DECODE and handle.text
    done = await handle  # leaving the loop over a handle that is kept does not end it
    assert len(done.token_ids) == 100 and handle.status is Status.FINISHED
    assert done is await handle, "a handle can be awaited again"
    assert "".join([delta.text async for delta in handle]) == done.text, "and read again"
    assert handle.prompt_token_ids == done.prompt_token_ids
    assert "ended" in repr(handle)


@anyio_test
async def test_several_readers_of_one_handle(slow: Session) -> None:
    handle = slow.submit("hello", max_tokens=10)
    texts = []

    async def read() -> None:
        texts.append("".join([delta.text async for delta in handle]))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(read)
    assert texts == [(await handle).text] * 3


@anyio_test
async def test_calls_can_be_started_by_task_groups(session: Session) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(session.generate, "hello", Sampling(max_tokens=2))


def test_calls_can_be_gathered_and_made_tasks(session: Session) -> None:
    async def main() -> None:
        task = asyncio.create_task(session.generate("x", max_tokens=2))
        done = await asyncio.gather(*(session.generate(f"{i}", max_tokens=5) for i in range(50)))
        assert len(done) == 50 and len((await task).token_ids) == 2
        assert (await asyncio.wait_for(session.generate("x", max_tokens=1), 10)).text

    asyncio.run(main())


def test_calls_can_be_started_by_a_nursery(session: Session) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.generate, "hello", Sampling(max_tokens=2))

    trio.run(main)


@anyio_test
async def test_a_call_that_is_never_awaited_does_nothing_and_says_nothing(session: Session) -> None:
    call = session.generate("hello")
    stream = session.stream("hello")
    del call, stream
    gc.collect()
    assert session.stats().live == 0


def test_callers_on_several_loops_and_none_at_once(session: Session) -> None:
    want = expected("hello", max_tokens=40)
    results: list[list[int]] = []

    async def on_loop() -> None:
        for _ in range(5):
            results.append(list((await session.generate("hello", max_tokens=40)).token_ids))
            results.append([t async for delta in session.stream("hello", max_tokens=40) for t in delta.token_ids])

    def on_none() -> None:
        for _ in range(5):
            results.append(list(session.generate_sync("hello", max_tokens=40).token_ids))
            results.append([t for delta in session.stream_sync("hello", max_tokens=40) for t in delta.token_ids])

    uvloop = pytest.importorskip("uvloop")
    runners = [lambda: asyncio.run(on_loop()), lambda: trio.run(on_loop), lambda: uvloop.run(on_loop()), on_none]
    threads = [threading.Thread(target=runner) for runner in runners * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [want] * 80


@pytest.mark.parametrize(("backend", "options"), [("asyncio", {"use_uvloop": True}), ("trio", None)])
def test_the_host_runs_on_other_loops_too(backend: str, options: Any) -> None:
    from rekindle.session import real_detokenizer
    from rekindle.tasks.host import Host, wait
    from rekindle.tasks.messages import Engine
    from sessions import byte_tokenizer, parts

    tokenizer = byte_tokenizer()
    scheduler, runner = parts()
    engine = Engine(scheduler, runner, tokenizer, real_detokenizer(tokenizer), CONFIG, EOS + 1)
    host = Host(lambda: engine, backend=backend, backend_options=options)
    host.start()
    with Session.attached(host, wait(host.opened)) as session:
        assert list(session.generate_sync("hello", max_tokens=20).token_ids) == expected("hello", max_tokens=20)


@anyio_test
async def test_stop_strings_end_the_request_in_the_scheduler_too(session: Session) -> None:
    whole = await session.generate("hello", max_tokens=200)
    stop = whole.text[20:23]
    done = await session.generate("hello", max_tokens=200, stop=stop)
    assert done.finish_reason is FinishReason.STOP
    assert done.text == whole.text[: whole.text.index(stop)]
    computed = session._engine.runner.computed[done.id]
    assert computed < 5 + len(done.token_ids) + 4, "it went on in the engine"


@anyio_test
async def test_eos_and_stop_tokens(session: Session) -> None:
    whole = await session.generate("hello", max_tokens=50)
    token = whole.token_ids[10]
    first = whole.token_ids.index(token)
    done = await session.generate("hello", max_tokens=50, stop_token_ids=(token,))
    assert done.finish_reason is FinishReason.STOP and len(done.token_ids) == first + 1
    assert done.text == bytes(whole.token_ids[:first]).decode()


def test_eos_of_the_model_ends_a_request() -> None:
    model = FakeModel(eos_rate=0.2)
    with opened(model=model) as session:
        done = session.generate_sync("hello", max_tokens=200)
        assert done.finish_reason is FinishReason.EOS and done.token_ids[-1] == EOS
        assert list(done.token_ids) == expected("hello", model, max_tokens=200)
        assert done.text == bytes(done.token_ids[:-1]).decode()
        assert len(session.generate_sync("hello", max_tokens=200, ignore_eos=True).token_ids) == 200


@anyio_test
async def test_drawn_seeds_reproduce(session: Session) -> None:
    done = await session.generate("hello", temperature=1.0, max_tokens=10)
    assert (await session.generate("hello", temperature=1.0, max_tokens=10)).token_ids != done.token_ids
    again = await session.generate("hello", temperature=1.0, max_tokens=10, seed=done.seed)
    assert again.token_ids == done.token_ids


@anyio_test
async def test_logprobs(session: Session) -> None:
    handle = session.submit("hello", max_tokens=4, logprobs=2, prompt_logprobs=1)
    done = await handle
    assert done.logprobs is not None and [entry.token_id for entry in done.logprobs] == list(done.token_ids)
    assert handle.logprobs == done.logprobs
    assert done.prompt_logprobs is not None
    assert [entry.token_id for entry in done.prompt_logprobs] == list(b"ello")
    assert (await session.generate("hello", max_tokens=1)).logprobs is None


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (5, {}, "prompt"),
        (b"bytes", {}, "prompt"),
        ({"a": 1}, {}, "prompt"),
        ([[1], 5.0], {}, "prompt"),
        ([-1], {}, "prompt"),
        ("x", {"temprature": 1}, "temprature"),
        ("x", {"max_tokens": 0}, "max_tokens"),
        ("x", {"n": 10_000}, "n"),
    ],
)
def test_wrong_arguments_name_themselves(session: Session, prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        session.generate_sync(prompt, **options)
    assert caught.value.field == field


@anyio_test
async def test_one_bad_prompt_of_a_list_ends_the_others() -> None:
    gate = threading.Event()
    with opened(gate=gate) as session:
        call = session.generate(["fine", "x" * 600, "fine too"], max_tokens=200)
        with pytest.raises(InvalidRequest), anyio.fail_after(30):  # the others can't end before the gate opens
            await call
        gate.set()
        eventually(lambda: all(handle.done for handle in call.handles))
        assert [handle.status for handle in call.handles] == [Status.ABORTED, Status.FAILED, Status.ABORTED]


@anyio_test
async def test_cancelling_a_handle_from_another_thread(slow: Session) -> None:
    handle = slow.submit("hello", max_tokens=400)
    timer = threading.Timer(0.1, handle.cancel)
    timer.start()
    with pytest.raises(RequestAborted, match="What it had produced"):
        await handle
    assert handle.status is Status.ABORTED and 0 < len(handle.token_ids) < 400
    handle.cancel()
    timer.join()


@anyio_test
async def test_a_handle_cancelled_before_it_was_submitted(session: Session) -> None:
    call = session.generate("hello")
    call.cancel()
    with pytest.raises(RequestAborted):
        await call
    assert call.status is Status.ABORTED


@anyio_test
async def test_cancelling_the_awaiting_task_aborts_exactly_that_request(slow: Session) -> None:
    other = slow.submit("other", max_tokens=60)
    call = slow.generate("hello", max_tokens=400)
    with anyio.move_on_after(0.1):
        await call
    with pytest.raises(TimeoutError), anyio.fail_after(0.1):
        await slow.generate("third", max_tokens=400)
    eventually(lambda: call.done)
    assert call.status is Status.ABORTED and call.text
    assert len((await other).token_ids) == 60


@anyio_test
async def test_leaving_a_stream_aborts_it(slow: Session) -> None:
    async for _ in slow.stream("hello", max_tokens=400):
        break

    async def fails() -> None:
        async for _ in slow.stream("hello", max_tokens=400):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fails()
    kept = slow.stream("hello", max_tokens=400)
    async for _ in kept:
        break
    eventually(lambda: kept.done, 2.0)
    assert kept.status is Status.ABORTED
    for _ in slow.stream_sync("hello", max_tokens=400):
        break
    settled(slow)


@anyio_test
async def test_a_dropped_handle_aborts(slow: Session) -> None:
    slow.submit("hello", max_tokens=400)
    handle = slow.submit("hello", max_tokens=400)
    await anyio.sleep(0.05)
    del handle
    eventually(lambda: slow.stats().live == 0, 2.0)


def test_a_handle_keeps_its_session_alive(session: Session) -> None:
    from sessions import fake_session

    handle = fake_session(step_seconds=0.001).submit("hello", max_tokens=20)
    gc.collect()
    assert len(handle.result_sync().token_ids) == 20


SMALL = EngineConfig(max_requests=2, max_tokens_per_step=16, max_model_len=512, page_size=8, max_queue=2)


@anyio_test
async def test_a_full_queue_is_told_or_waited_for() -> None:
    with opened(SMALL, step_seconds=0.002) as session:
        handles = [session.submit(f"{i}", max_tokens=10) for i in range(4)]
        with pytest.raises(QueueFull, match="4 of 4 places"):
            session.submit("one more")
        admitted: list[Handle] = []

        async def admit() -> None:
            admitted.append(await session.admit("waits", max_tokens=2))

        async with anyio.create_task_group() as group:
            group.start_soon(admit)
            group.start_soon(session.generate, [f"batch {i}" for i in range(20)], Sampling(max_tokens=2))
        assert all([len((await handle).token_ids) == 10 for handle in handles])
        assert len((await admitted[0]).token_ids) == 2


@anyio_test
async def test_waiting_for_a_place_can_be_cancelled_from_both_sides() -> None:
    with opened(SMALL, step_seconds=0.01) as session:
        handles = [session.submit(f"{i}", max_tokens=300) for i in range(4)]
        with anyio.move_on_after(0.05):
            await session.generate("impatient")
        waiting = session.generate("cancelled by another thread")
        timer = threading.Timer(0.05, waiting.cancel)
        timer.start()
        with pytest.raises(RequestAborted), anyio.fail_after(2):
            await waiting
        timer.join()
        assert session.stats().waiting_for_a_place == 0
        for handle in handles:
            handle.cancel()


@anyio_test
async def test_chat_needs_a_template(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        session.chat([{"role": "user", "content": "hi"}])


@anyio_test
async def test_chat_renders_its_template(session: Session) -> None:
    from rekindle.text.chat import ChatTemplate

    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
    session._engine = session._engine._replace(chat=template)
    handle = session.chat([{"role": "user", "content": "hi"}], max_tokens=5)
    done = await handle
    assert done.prompt == "<user>hi<assistant>"
    assert list(done.token_ids) == expected("<user>hi<assistant>", max_tokens=5)


@anyio_test
async def test_fork_repeats_or_departs(session: Session) -> None:
    done = await session.generate("hello", temperature=1.0, seed=3, max_tokens=20)
    same = await session.fork(done, at=8)
    assert same.token_ids == done.token_ids[8:]
    other = await session.fork(done, at=8, seed=4)
    assert other.prompt_token_ids == (*done.prompt_token_ids, *done.token_ids[:8])
    assert len(other.token_ids) == 12 and other.token_ids != same.token_ids
    edited = await session.fork(done, at=8, edit="!", max_tokens=3)
    assert bytes(edited.prompt_token_ids) == b"hello" + bytes(done.token_ids[:8]) + b"!"
    with pytest.raises(InvalidRequest, match="outside of the 20 tokens"):
        session.fork(done, at=21)


@anyio_test
async def test_fork_of_a_running_request(slow: Session) -> None:
    handle = slow.submit("hello", max_tokens=40)
    async for _ in handle:
        if len(handle.token_ids) >= 5:
            break
    branch = slow.fork(handle, at=5)
    assert (await branch).token_ids == (await handle).token_ids[5:]


@anyio_test
async def test_stepping_a_paused_session(session: Session) -> None:
    running = session.submit("earlier", max_tokens=300)
    async with session.paused():
        assert session.stats().paused
        before = running.token_ids
        await anyio.sleep(0.05)
        assert running.token_ids == before, "it ran while paused"
        handle = session.submit("hello", max_tokens=2)
        report = await session.step()
        while handle.id not in {row.request_id for row in report.rows}:
            report = await session.step()
        mine = next(row for row in report.rows if row.request_id == handle.id)
        assert (mine.kind, mine.start, mine.stop) == ("prefill", 0, 5)
        assert handle.token_ids == (mine.token_id,), "the delta is there when step() returns"
        assert f"prefill {handle.id}" in str(report) and "positions 0–4 on pages" in str(report)
        report = await session.step()
        assert "ended by length" in str(report)
        running.cancel()
    assert not session.stats().paused
    assert len((await handle).token_ids) == 2
    with session.paused():
        assert session.step_sync() is None, "there was nothing to do"
    with pytest.raises(Exception, match=r"session\.paused"):
        await session.step()


@anyio_test
async def test_a_failing_single_step_raises_its_cause() -> None:
    with opened(fail=lambda plan: ValueError("broken") if plan.step == 0 else None) as session:
        async with session.paused():
            handle = session.submit("hello", max_tokens=3)
            with pytest.raises(ValueError, match="broken"):
                await session.step()
        with pytest.raises(Exception, match="broken"):
            await handle


@anyio_test
async def test_stats_and_explain(slow: Session) -> None:
    handle = slow.submit("hello", max_tokens=50)
    async for _ in handle:
        break
    stats = slow.stats()
    assert (stats.live, stats.model, stats.running) == (1, "fake", 1)
    assert stats.steps >= 1 and "running" in str(stats) and stats.as_dict()["live"] == 1
    with pytest.raises(AttributeError):
        _ = stats.nonsense
    assert str(slow.explain(handle)) and str(slow.explain(handle.id))
    handle.cancel()


def test_the_asyncio_loop_turns_while_somebody_waits(slow: Session) -> None:
    """ipykernel's interrupt does not wake an idle loop."""

    async def main() -> int:
        turns = 0
        loop = asyncio.get_running_loop()
        select = loop._selector.select  # type: ignore[attr-defined]

        def counted(timeout: float | None) -> Any:
            nonlocal turns
            turns += 1
            assert timeout is None or timeout <= 0.11
            assert timeout is not None, "the loop sleeps without end"
            return select(timeout)

        loop._selector.select = counted  # type: ignore[attr-defined]
        try:
            await slow.generate("hello", max_tokens=30)
        finally:
            loop._selector.select = select  # type: ignore[attr-defined]
        return turns

    assert asyncio.run(main()) >= 2


def test_bells_are_of_the_loop_that_waits(session: Session) -> None:
    async def main() -> None:
        from rekindle.tasks.ports import new_bell

        assert isinstance(new_bell(), AsyncioBell)

    asyncio.run(main())


@anyio_test
async def test_closed_sessions_refuse(session: Session) -> None:
    from sessions import fake_session

    other = fake_session()
    await other.aclose()
    for use in (other.stats, lambda: other.generate("x"), lambda: other.submit("x"), other.paused().__enter__):
        with pytest.raises(SessionClosed, match="Open another one"):
            use()
    assert other.closed and "closed" in repr(other)


@anyio_test
async def test_a_processor_that_nobody_registered_is_refused_before_it_runs(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="known: none") as caught:
        await session.generate("hello", processors="no-e")
    assert caught.value.field == "processors"
    assert session._engine.runner.plans == []
