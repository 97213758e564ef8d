"""Why a sequence stopped, what is left of it, and requests that only score their prompt."""

from __future__ import annotations

import pytest

from helpers.fakes import FakeModel
from helpers.sessions import expected, opened
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import FinishReason, Session
from rekindle.errors import PromptTooLong

pytestmark = pytest.mark.anyio


async def test_stop_reason_is_the_string_or_the_token_that_ended_it(session: Session) -> None:
    ids = expected("hello", max_tokens=20)
    text = bytes(ids).decode()
    deltas = [delta async for delta in session.stream("hello", max_tokens=20, stop=[text[7:10], "\x00"])]
    assert [delta.stop_reason for delta in deltas] == [None] * (len(deltas) - 1) + [text[7:10]]
    done = await session.generate("hello", max_tokens=20, stop=[text[7:10], "\x00"])
    assert (done.stop_reason, done.text) == (text[7:10], text[:7])
    done = await session.generate("hello", max_tokens=20, stop_token_ids=[ids[4]])
    assert (done.stop_reason, done.finish_reason, done.text) == (ids[4], "stop", text[: ids.index(ids[4])])
    assert (await session.generate("hello", max_tokens=3)).stop_reason is None


async def test_include_stop_keeps_what_ended_it(session: Session) -> None:
    ids = expected("hello", max_tokens=20)
    text = bytes(ids).decode()
    done = await session.generate("hello", max_tokens=20, stop=text[7:10], include_stop=True)
    assert done.text == text[:10] and done.token_ids == tuple(ids[:10])
    done = await session.generate("hello", max_tokens=20, stop_token_ids=[ids[4]], include_stop=True)
    assert done.text == text[: ids.index(ids[4]) + 1]


async def test_an_end_of_sequence_has_no_stop_reason_and_no_text() -> None:
    with opened(model=FakeModel(eos_rate=0.2)) as session:
        done = await session.generate("hello", max_tokens=100, include_stop=True)
        assert done.finish_reason is FinishReason.EOS and done.stop_reason is None
        assert "</s>" not in done.text and len(done.text) == len(done.token_ids) - 1


async def test_no_tokens_at_all_scores_the_prompt(session: Session) -> None:
    done = await session.generate("hello", max_tokens=0, prompt_logprobs=1, logprobs=1, n=2)
    for one in done:
        assert (one.text, one.token_ids, one.logprobs, one.finish_reason) == ("", (), (), "length")
        assert one.usage.completion_tokens == 0 and len(one.prompt_logprobs or ()) == 4
    assert session.stats().finished == 2


async def test_no_tokens_end_by_their_number_whatever_was_sampled() -> None:
    with opened(model=FakeModel(eos_rate=1.0)) as session:
        done = await session.generate("hello", max_tokens=0)
        assert (done.finish_reason, done.token_ids, done.text) == (FinishReason.LENGTH, (), "")


async def test_a_prompt_may_fill_the_context_if_no_token_is_to_follow(session: Session) -> None:
    longest = session.config.max_model_len
    assert longest is not None
    prompt = [97] * longest
    done = await session.generate(prompt, max_tokens=0, prompt_logprobs=0)
    assert len(done.prompt_logprobs or ()) == longest - 1
    with pytest.raises(PromptTooLong):
        await session.generate(prompt, max_tokens=1)
    with pytest.raises(PromptTooLong):
        await session.generate([*prompt, 97], max_tokens=0)


async def test_a_streams_first_delta_has_the_prompts_log_probabilities(session: Session) -> None:
    deltas = [delta async for delta in session.stream("hello there", max_tokens=4, prompt_logprobs=0, n=2)]
    firsts = [next(delta for delta in deltas if delta.index == index) for index in (0, 1)]
    assert [len(delta.prompt_logprobs) for delta in firsts] == [10, 10]
    assert all(not delta.prompt_logprobs for delta in deltas if delta not in firsts)


async def test_no_tokens_keep_the_pages_for_the_next_request(session: Session) -> None:
    """So a prefix can be computed ahead of the requests that need it."""
    prompt = "a prefix of some length, which several requests share"
    await session.generate(prompt, max_tokens=0)
    done = await session.generate(prompt + " and then", max_tokens=1)
    assert done.usage.cached_tokens >= 48
