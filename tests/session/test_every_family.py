"""Chats, tool loops, conversations and streams of a server in every family's syntax, from a checkpoint on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rekindle
from helpers.asgi import post
from helpers.thorough import anyio_backend, by_default  # noqa: F401  the fixture
from helpers.written import POSITIONS, Writer
from rekindle._src.calls.tool_functions import tools_of
from rekindle._src.text.replies import ReplyFormat
from rekindle._src.text.replies.harmony import START

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("large_steps")]
QUESTION = "How is the weather in Paris? Answer in one sentence."
CALL = ("weather", {"city": "Paris", "days": 3})
THOUGHTS = "They ask for Paris."
ANSWER = "It is sunny in Paris for 3 days."
ANSWERED_BY = "It is sunny in {} for {} days, and the wind comes from the sea in the afternoon."
# Families whose templates are recognized by more than one text.
SIGNS = {"kimi_k3": "<|open|>", "deepseek_r1": "<｜tool▁sep｜>```json", "gigachat3": "function call<|role_sep|>"}
PAGE = 16
TINY: dict[str, Any] = {
    "dtype": "float32", "max_requests": 2, "max_tokens_per_step": 256, "max_model_len": POSITIONS, "page_size": PAGE,
    "device_pages": 256, "precompile": "lazy", "disk_memory": 0, "seed": 0, "quiet": True,
}  # fmt: skip


def weather(city: str, days: int) -> str:
    """The weather of the next days."""
    return ANSWERED_BY.format(city, days)


def template_of(family: str) -> str:
    """A template in our own words that shows a family's syntax, and leaves writing calls to us."""
    format = ReplyFormat.of_family(family)
    assert format.calls is not None
    sign = SIGNS.get(family, format.calls.signs[0])
    shown = "".join([sign] if isinstance(sign, str) else sign).replace("'", "\\'").replace("\n", "\\n")
    tags, thoughts = format.thoughts, ""
    if tags is not None:
        closes = tags.closing + tags.bridge
        thoughts = f"{{% if m.reasoning_content %}}{tags.opening}{{{{ m.reasoning_content }}}}{closes}{{% endif %}}"
    begins = f"{START}assistant" if format.in_channels else "[assistant]"
    return (
        f"{{% if false %}}{{{{ '{shown}' }}}}{{% endif %}}{{{{ tools | tojson if tools }}}}{{% for m in messages %}}"
        f"{{% if m.role == 'assistant' %}}{begins}{thoughts}{{{{ m.content or '' }}}}{{{{ eos_token }}}}"
        "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{begins}{{% endif %}}"
    )


def writer_of(family: str, tool: str = CALL[0]) -> tuple[Writer, list[str]]:
    """The writer of a family, with the two replies of its tool loop."""
    format = ReplyFormat.of_family(family)
    assert format.calls is not None
    markers = [text for text in format.markers(tools=True) if not text[-1].isspace()]
    call = format.calls.write([(tool, CALL[1])])
    tags, thoughts = format.thoughts, ""
    if tags is not None:
        space = "" if format.in_channels else "\n"
        thoughts = f"{tags.opening}{format.marks.header}{space}{THOUGHTS}{space}{tags.closing}{tags.bridge}"
    before = format.lead if format.in_channels else ""
    return Writer(template_of(family), special=sorted(markers)), [thoughts + call, before + ANSWER]


async def streamed(session: rekindle.Session, messages: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, Any]]]:
    """The content, the reasoning and the calls that a server's stream adds up to."""
    from rekindle.serve import app

    tools = [one.schema for one in tools_of([weather])]
    answer = await post(app(session), "/v1/chat/completions", {"messages": messages, "tools": tools, "stream": True})
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    for event in answer.events[:-1]:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            named = calls.setdefault(call["index"], ["", ""])
            named[0] += call["function"].get("name", "")
            named[1] += call["function"]["arguments"]
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("family", by_default(ReplyFormat.names(), 3))
async def test_a_chat_with_tools_from_end_to_end(tmp_path: Path, family: str) -> None:
    writer, replies = writer_of(family)
    first, last = writer.play(QUESTION, replies, [weather])
    thinks = THOUGHTS if THOUGHTS in replies[0] else ""
    assert (first.reply.content, first.reply.reasoning, last.reply.content) == ("", thinks, ANSWER)
    async with rekindle.open(writer.save(tmp_path / family), **TINY) as session:
        reply = await session.chat(QUESTION, tools=[weather])
        assert [(call.name, call.arguments) for call in reply.tool_calls] == [CALL] and reply.reasoning == thinks
        run = await session.chat(QUESTION, tools=[weather], run_tools=True)
        assert [message["role"] for message in run.messages] == ["user", "assistant", "tool", "assistant"]
        assert run.content == ANSWER and run.messages[2]["content"] == weather(**CALL[1])
        assert [done.prompt_token_ids for done in run.rounds] == [tuple(turn.prompt_ids) for turn in (first, last)]
        computed = len(first.prompt_ids) + len(writer.encode(first.text))  # the end token was not read
        assert run.rounds[1].usage.cached_tokens == computed // PAGE * PAGE, "the reply is as it was written"
        chat = session.conversation(tools=[weather], run_tools=True)
        assert (await chat.say(QUESTION)).content == ANSWER
        assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
        assert await streamed(session, list(run.messages[:1])) == ("", thinks, [CALL])
        assert await streamed(session, list(run.messages[:3])) == (ANSWER, "", [])


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("family", by_default(ReplyFormat.names(), 1))
async def test_a_server_s_tools_run_from_end_to_end(tmp_path: Path, family: str) -> None:
    server = pytest.importorskip("mcp.server.mcpserver", reason="the extra `mcp`").MCPServer(
        "sky", log_level="CRITICAL"
    )
    server.tool()(weather)
    async with rekindle.mcp_tools(server, consent=lambda offer: True) as tools:
        name = tools[0].__name__

        def same(**arguments: Any) -> str:
            return weather(**arguments)

        same.__name__, same.tool_schema = name, tools[0].tool_schema  # type: ignore[attr-defined]
        writer, replies = writer_of(family, name)
        first, last = writer.play(QUESTION, replies, [same])
        async with rekindle.open(writer.save(tmp_path / family), **TINY) as session:
            run = await session.chat(QUESTION, tools=tools, run_tools=True)
            assert [(call.name, call.arguments) for call in first.reply.tool_calls] == [(name, CALL[1])]
            assert run.content == ANSWER and run.messages[2]["content"] == weather(**CALL[1])
            assert [done.prompt_token_ids for done in run.rounds] == [tuple(turn.prompt_ids) for turn in (first, last)]
