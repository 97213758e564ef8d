"""Budgets of reasoning, and structures after it, through chats and the server, from a checkpoint on."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import rekindle
from helpers.asgi import post
from helpers.chatting import HERMES, OPENED, saying
from helpers.small import TINY
from helpers.thorough import anyio_backend, by_default  # noqa: F401  the fixture
from helpers.written import POSITIONS, Writer
from rekindle import FinishReason, Session
from rekindle._src.core import words
from rekindle._src.core.sampling import ANSWER_TOKENS
from rekindle._src.text.replies import ReplyFormat
from rekindle.errors import InvalidRequest

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("large_steps")]
QUESTION = "How is the weather?"
WRITTEN: dict[str, Any] = {**TINY, "max_model_len": POSITIONS, "device_pages": 256, "max_requests": 2}
TAGS = ("<think>", "</think>")
OPENS = OPENED.replace("enable_thinking is not defined", "enable_thinking is not defined or enable_thinking")


@contextlib.asynccontextmanager
async def written(folder: Path, text: str, template: str = OPENS, **changes: Any) -> AsyncIterator[Session]:
    """A session with a model that goes on with this text after any prompt of the question."""
    writer = Writer(template, special=changes.pop("special", TAGS))
    writer.turn([{"role": "user", "content": QUESTION}], text)
    async with rekindle.open(writer.save(folder / "model"), **{**WRITTEN, **changes}) as session:
        yield session


async def test_a_budget_ends_reasoning_and_the_answer_follows(tmp_path: Path) -> None:
    async with written(tmp_path, "abcdefghij</think>Yes.") as session:
        free = await session.chat(QUESTION)
        assert (free.reasoning, free.content) == ("abcdefghij", "Yes.") and free.usage.reasoning_tokens == 10
        cut = await session.chat(QUESTION, reasoning_budget=4)
        assert (cut.reasoning, cut.content) == ("abcd", "fghij</think>Yes."), "its own tag is text by now"
        assert cut.usage.reasoning_tokens == 4 and sum(cut.forced) == 1
        assert 0 <= cut.timings.reasoning <= cut.timings.total
        for one, tokens in ((cut, 4), (free, 10)):
            assert (
                f"it reasoned for {words.seconds(one.timings.reasoning)}, {tokens} tokens" in session.explain(one).text
            )
        none = await session.chat(QUESTION, reasoning_budget=0)
        assert none.reasoning == "" and none.text.startswith("</think>bcd")
        told = await session.chat(QUESTION, reasoning_budget=2, reasoning_budget_message=" Stop.\n")
        assert told.reasoning == "ab Stop."
        wide = await session.chat(QUESTION, reasoning_budget=10)
        assert wide.text == free.text
        assert (await session.chat(QUESTION, reasoning_budget=500)).sampling.max_tokens == 500 + ANSWER_TOKENS
        chat = session.conversation(reasoning_budget=4)
        assert (await chat.say(QUESTION)).content == cut.content


async def test_reasoning_can_be_turned_off(tmp_path: Path) -> None:
    async with written(tmp_path, "abc</think>Yes.", HERMES + "{{ '<think>' if add_generation_prompt }}") as session:
        for options in ({"reasoning": False}, {"reasoning_effort": "none"}):
            reply = await session.chat(QUESTION, **options)  # type: ignore[call-overload]
            assert reply.reasoning == "" and reply.text.startswith("</think>"), options
    with saying("Yes.", OPENS) as session:
        assert session.chat(QUESTION, reasoning=False).result_sync().prompt.endswith("<think>\n\n</think>\n\n")
        assert session.chat(QUESTION, reasoning=True).result_sync().prompt.endswith("<|assistant|><think>\n")
        assert session.render(QUESTION, reasoning=False).endswith("</think>\n\n")


def test_budgets_that_make_no_sense() -> None:
    with saying("Yes.", OPENED) as session:
        for options, field in (
            ({"reasoning_budget": -1}, "reasoning_budget"),
            ({"reasoning_budget": True}, "reasoning_budget"),
            ({"reasoning_budget": "5"}, "reasoning_budget"),
            ({"reasoning": 1}, "reasoning"),
            ({"reasoning": False, "reasoning_budget": 5}, "reasoning_budget"),
            ({"reasoning": False, "reasoning_effort": "high"}, "reasoning_effort"),
            ({"reasoning_budget_message": "So"}, "reasoning_budget_message"),
            ({"reasoning_budget": 5, "reasoning_budget_message": "x" * 5_000}, "reasoning_budget_message"),
            ({"template_options": {"thinking_token_budget": 5}}, "template_options"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                session.chat(QUESTION, **options)  # type: ignore[call-overload]
            assert refused.value.field == field, options
    with saying("Yes.", "{% for m in messages %}{{ m.content }}{% endfor %}") as session:
        for options in ({"reasoning_budget": 5}, {"reasoning": False}):
            with pytest.raises(InvalidRequest, match="marks no reasoning"):
                session.chat(QUESTION, **options)  # type: ignore[call-overload]


async def test_a_fork_and_a_continued_message_go_on_counting(tmp_path: Path) -> None:
    async with written(tmp_path, "abcdefghij</think>Yes.") as session:
        handle = session.chat(QUESTION, reasoning_budget=6)
        whole = await handle
        for at in (2, 6, 7, 9):
            assert (await session.fork(handle, at=at)).token_ids == whole.token_ids[at:], at
        several = await session.chat(QUESTION, reasoning_budget=3, n=3)
        assert {one.reasoning for one in several} == {"abc"}
        begun = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "<think>abcd"}]
        reply = await session.chat(begun, reasoning_budget=6, continue_final_message=True, max_tokens=8)
        assert len(reply.reasoning) == 2 and "</think>" in reply.text


async def test_a_fork_of_a_completion_is_one_of_its_handle(tmp_path: Path) -> None:
    """It lost the budget, and took the reasoning for a part of the structure."""
    async with written(tmp_path, "abcdefghij</think>Yes.") as session:
        done = await session.chat(QUESTION, reasoning_budget=6)
        fork = await session.fork(done, at=2)
        assert fork.token_ids == done.token_ids[2:] and (fork.reasoning, fork.content) == ("cdef", done.content)
        again = await session.fork(fork, at=1)
        assert again.token_ids == done.token_ids[3:] and again.reasoning == "def"
        several = await session.chat(QUESTION, reasoning_budget=6, n=2)
        assert (await session.fork(several[1], at=3)).token_ids == several[1].token_ids[3:]
        copied = pickle.loads(pickle.dumps(done))
        assert copied == done and (await session.fork(copied, at=9)).reply is None


async def test_a_fork_of_a_structured_completion_goes_on_with_it(tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema = {"type": "object", "properties": {"sky": {"type": "string"}}, "required": ["sky"]}
    async with written(tmp_path, '{not this}</think>\n\n{"sky":"blue"}', special=(*TAGS, "\n\n")) as session:
        done = await session.chat(QUESTION, schema=schema, reasoning_budget=3)
        for at in (1, 3, 6, 9):
            fork = await session.fork(done, at=at)
            assert fork.token_ids == done.token_ids[at:] and fork.parsed == done.parsed, at
        copied = pickle.loads(pickle.dumps(done))
        with pytest.raises(InvalidRequest, match="doesn't know where its structure begins") as refused:
            session.fork(copied, at=6)
        assert refused.value.field == "source"
        assert (await session.fork(copied, at=6, schema=None, max_tokens=3)).text


async def test_a_structure_begins_with_the_answer(tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    answer = '{"sky":"blue"}'
    schema = {"type": "object", "properties": {"sky": {"type": "string"}}, "required": ["sky"]}
    async with written(tmp_path, f"{{not this}}</think>\n\n{answer}", special=(*TAGS, "\n\n")) as session:
        reply = await session.chat(QUESTION, schema=schema)
        assert (reply.reasoning, reply.content, reply.parsed) == ("{not this}", answer, {"sky": "blue"})
        for budget in (0, 3):
            cut = await session.chat(QUESTION, schema=schema, reasoning_budget=budget)
            assert isinstance(cut.parsed["sky"], str) and len(cut.reasoning) == budget, cut.text
        chosen = await session.chat(QUESTION, choice=["red", "blue"], reasoning_budget=1)
        assert chosen.parsed in ("red", "blue") and chosen.reasoning == "{"
        pattern = await session.chat(QUESTION, regex="[0-9]{3}")
        assert pattern.reasoning == "{not this}" and pattern.parsed.isdigit()
        handle = session.chat(QUESTION, schema=schema, reasoning_budget=3)  # many letters are as likely as each other
        whole = await handle
        assert handle.seed is not None and handle.seed == whole.seed
        for at in (1, 3, 6, 9):
            assert (await session.fork(handle, at=at)).parsed == whole.parsed, at


def called(days: int) -> str:
    """The days."""
    return str(days)


@pytest.mark.parametrize("family", by_default(sorted(ReplyFormat.names()), 6))
async def test_a_call_is_forced_after_a_forced_end(tmp_path: Path, family: str) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    from tests.session.test_every_family import template_of

    thoughts = ReplyFormat.of_family(family).thoughts
    if thoughts is None:
        pytest.skip("it marks no reasoning")
    markers = sorted(text for text in ReplyFormat.of_family(family).markers(tools=True) if not text[-1].isspace())
    said = f"{thoughts.opening}{ReplyFormat.of_family(family).marks.header}\n" + "Hm. " * 30
    writer = Writer(template_of(family), special=markers)
    from rekindle._src.calls.tool_functions import tools_of

    writer.turn([{"role": "user", "content": QUESTION}], said, tools=tools_of([called]))
    async with rekindle.open(writer.save(tmp_path / family), **WRITTEN) as session:
        reply = await session.chat(
            QUESTION,
            tools=[called],
            tool_choice="required",
            reasoning_budget=8,
            max_tokens=400,
            parallel_tool_calls=False,
        )
        (call,) = reply.tool_calls
        assert call.name == "called" and isinstance(call.arguments["days"], int), reply.text
        assert 0 < len(reply.reasoning) <= 8 and reply.content == "" and reply.finish_reason != FinishReason.LENGTH


async def test_every_server_s_name_of_a_budget(tmp_path: Path) -> None:
    from rekindle.serve import app as make_app

    async with written(tmp_path, "abcdefghij</think>Yes.") as session:
        app = make_app(session)
        messages = [{"role": "user", "content": QUESTION}]

        async def thought(path: str = "/v1/chat/completions", **fields: Any) -> Any:
            body = {"messages": messages, "temperature": 0, **fields}
            if path.endswith("responses"):
                body["input"] = body.pop("messages")
            answer = await post(app, path, body)
            assert answer.status == 200, answer.body
            return answer.json()

        for name in ("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"):
            answer = await thought(**{name: 4})
            assert answer["choices"][0]["message"]["reasoning"] == "abcd", name
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
            assert (await thought(**{name: -1}))["choices"][0]["message"]["reasoning"] == "abcdefghij"
        answer = await thought(reasoning={"max_tokens": 4}, reasoning_budget_message="!")
        assert answer["choices"][0]["message"]["reasoning"].startswith("abcd")
        for off in ({"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}):
            assert "reasoning" not in (await thought(**off))["choices"][0]["message"]
        answer = await thought("/v1/messages", thinking={"type": "enabled", "budget_tokens": 4}, max_tokens=30)
        assert answer["content"][0] == {"type": "thinking", "thinking": "abcd", "signature": ""}
        answer = await thought("/v1/messages", thinking={"type": "disabled"}, max_tokens=30)
        assert answer["content"][0]["type"] == "text"
        answer = await thought("/v1/responses", thinking_token_budget=4)
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
        for fields, param in (
            ({"reasoning_budget": 4}, "reasoning_budget"),
            ({"thinking_budget": 4}, "thinking_budget"),
            ({"extra_body": {"thinking_token_budget": 4}}, "extra_body"),
            ({"vllm_xargs": {"thinking_token_budget": 4}}, "vllm_xargs"),
            ({"custom_params": {"thinking_budget": 4}}, "custom_params"),
            ({"nvext": {"max_thinking_tokens": 4}}, "nvext"),
            ({"reasoning": {"budget": 4}}, "reasoning.budget"),
            ({"chat_template_kwargs": {"thinking_token_budget": 4}}, "chat_template_kwargs"),
            ({"reasoning_budget_tokens": 4, "thinking_token_budget": 5}, "thinking_token_budget"),
            ({"reasoning_effort": "none", "thinking_token_budget": 5}, "thinking_token_budget"),
            ({"reasoning_budget_tokens": -2}, "reasoning_budget_tokens"),
        ):
            answer = await post(app, "/v1/chat/completions", {"messages": messages, **fields})
            assert answer.status == 400 and json.loads(answer.body)["error"]["param"] == param, (fields, answer.body)


async def test_a_model_that_does_not_reason_refuses_a_budget_and_ignores_a_switch() -> None:
    from rekindle.serve import app as make_app

    with saying("Yes.", "{% for m in messages %}{{ m.content }}{% endfor %}") as session:
        app, messages = make_app(session), [{"role": "user", "content": QUESTION}]
        answer = await post(app, "/v1/chat/completions", {"messages": messages, "thinking_token_budget": 4})
        assert answer.status == 400 and b"marks no reasoning" in answer.body
        for thinking in ({"type": "enabled", "budget_tokens": 4}, {"type": "disabled"}):
            body = {"messages": messages, "thinking": thinking, "max_tokens": 9}
            assert (await post(app, "/v1/messages", body)).status == 200
        body = {"messages": messages, "reasoning_effort": "none", "max_tokens": 9}
        assert (await post(app, "/v1/chat/completions", body)).status == 200
