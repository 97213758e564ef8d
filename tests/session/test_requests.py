"""What a request gives back: completions, lists of them, streams, live handles."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from helpers.fakes import EOS, FakeModel
from helpers.sessions import change_front, engine_of, expected, opened
from rekindle import Completion, Session
from rekindle._src.calls.handle import Batch
from rekindle._src.core.records import FinishReason, Status
from rekindle.errors import CheckpointError, InvalidRequest

anyio_test = pytest.mark.anyio


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
    call = session.generate(prompts, max_tokens=64)  # the first is still under way when the last comes
    assert isinstance(call, Batch)
    many = await call
    assert [list(done.token_ids) for done in many] == [expected(prompt, max_tokens=64) for prompt in prompts]
    rows = [len(plan.rows) for plan in engine_of(session).runner.plans]
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
async def test_stop_strings_end_the_request_in_the_scheduler_too(session: Session) -> None:
    whole = await session.generate("hello", max_tokens=200)
    stop = whole.text[20:23]
    done = await session.generate("hello", max_tokens=200, stop=stop)
    assert done.finish_reason is FinishReason.STOP
    assert done.text == whole.text[: whole.text.index(stop)]
    computed = engine_of(session).runner.computed[done.id]
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


@anyio_test
async def test_chat_renders_its_template(session: Session) -> None:
    from rekindle._src.text.chat import ChatTemplate

    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
    change_front(session, chat=template)
    handle = session.chat([{"role": "user", "content": "hi"}], max_tokens=5)
    done = await handle
    assert done.prompt == handle.prompt == "<user>hi<assistant>"
    assert list(done.token_ids) == expected("<user>hi<assistant>", max_tokens=5)


HOSTILE = {
    "braces": ("{{" * 60_000, "can't be compiled"),
    "colons": ("{{ ('{' ~ ':' * 2000000).format(1) }}", "expected '}'"),
    "words": ("{{ ('x ' * 2000000) | wordwrap(1) }}", "the filter 'wordwrap'"),
    "tags": ("{{ ('<' * 2000000) | striptags }}", "the filter 'striptags'"),
    "names": ("{{ ('\u00e9' * 2000000).encode('punycode') }}", "str.encode"),
}


@pytest.mark.usefixtures("short_turns")
@anyio_test
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_chat_template_fails_its_own_request(session: Session, name: str) -> None:
    from rekindle._src.text.chat import ChatTemplate

    template, problem = HOSTILE[name]
    change_front(session, chat=ChatTemplate(template))
    neighbour = await session.admit("hello", max_tokens=5)
    with pytest.raises((CheckpointError, InvalidRequest)) as caught:
        await session.chat([{"role": "user", "content": "hi"}])
    assert problem in str(caught.value)
    assert list((await neighbour).token_ids) == expected("hello", max_tokens=5)


@anyio_test
async def test_an_endless_chat_template_fails_its_own_request_and_leaves_the_callers_loop_running(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rekindle._src.text import chat, template_limits

    monkeypatch.setattr(template_limits, "SECONDS", 1.0)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    change_front(session, chat=chat.ChatTemplate(loop))
    neighbour = await session.admit("hello", max_tokens=5)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await anyio.sleep(0.01)
            ticks += 1

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        with pytest.raises(InvalidRequest, match="was stopped"):
            await session.chat([{"role": "user", "content": "hi"}])
        group.cancel_scope.cancel()
    assert ticks >= 3, "the template ran on the caller's loop"
    assert list((await neighbour).token_ids) == expected("hello", max_tokens=5)
