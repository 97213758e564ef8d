"""`run_tools`: functions are run, their results go back to the model, and the transcript is on the result."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from typing import Any

import anyio
import pytest

from helpers.chatting import saying
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import ToolLoop, ToolRun
from rekindle.errors import RequestAborted

anyio_test = pytest.mark.anyio
USER = [{"role": "user", "content": "What is 2 + 3?"}]
PLACES: list[str] = []


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def adder(prompt: str) -> str:
    """A model that adds by a tool, and then says what the tool said."""
    _, tool, result = prompt.rpartition("<|tool|>")
    return f"It is {result.removesuffix('<|assistant|>')}." if tool else "Let me add." + call("add", a=2, b=3)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    PLACES.append(threading.current_thread().name)
    return a + b


async def add_async(a: int, b: int) -> int:
    await anyio.sleep(0.001)
    PLACES.append(threading.current_thread().name)
    return a + b


add_async.__name__ = "add"


@anyio_test
@pytest.mark.parametrize("function", [add, add_async])
async def test_functions_are_run_and_the_model_answers(function: Any) -> None:
    PLACES.clear()
    with saying(adder) as session:
        loop = session.chat(USER, tools=[function], run_tools=True)
        run = await loop
        assert isinstance(loop, ToolLoop) and isinstance(run, ToolRun)
        assert run.content == str(run) == "It is 5." and run.tool_calls == () and len(run.rounds) == 2
        assert [message["role"] for message in run.messages] == ["user", "assistant", "tool", "assistant"]
        asked = run.rounds[0].tool_calls[0]
        assert run.messages[2] == {"role": "tool", "tool_call_id": asked.id, "name": "add", "content": "5"}
        assert run.usage.completion_tokens == sum(len(done.token_ids) for done in run.rounds)
        assert await loop is run
        here = threading.current_thread().name
        assert ([here] == PLACES) == (function is add_async), "what is not async runs in a worker thread"
        assert "2 rounds, 1 call run" in repr(run) and "Call of add" in run._repr_html_()


@anyio_test
async def test_the_deltas_of_all_replies_come_in_one_stream() -> None:
    with saying(adder) as session:
        loop = session.chat(USER, tools=[add], run_tools=True)
        said = "".join([delta.content async for delta in loop])
        assert said == "Let me add.It is 5."
        assert (await loop).content == "It is 5." and loop.done


def test_without_an_event_loop() -> None:
    with saying(adder) as session:
        for function in (add, add_async):
            assert session.chat(USER, tools=[function], run_tools=True).result_sync().content == "It is 5."
        loop = session.chat(USER, tools=[add], run_tools=True)
        assert "".join(delta.content for delta in loop.stream_sync()) == "Let me add.It is 5."

    async def inside() -> str:
        with saying(adder) as session:
            return session.chat(USER, tools=[add_async], run_tools=True).result_sync().content

    assert asyncio.run(inside()) == "It is 5.", "a loop that runs in this thread does no harm"


@anyio_test
async def test_an_error_of_a_function_is_told_to_the_model(caplog: Any) -> None:
    def fails(a: int, b: int) -> int:
        raise ValueError(f"{a} is too small")

    fails.__name__ = "add"

    def other(x: int) -> int:
        return x

    with saying(adder) as session, caplog.at_level(logging.WARNING, "rekindle.tools"):
        run = await session.chat(USER, tools=[fails], run_tools=True)
        assert run.content == "It is Error: ValueError: 2 is too small."
        run = await session.chat(USER, tools=[other], run_tools=True)
        assert "there is no tool 'add'. The tools are: other" in run.content
    assert "tool add failed" in caplog.text

    def strict(a: int) -> int:
        return a

    strict.__name__ = "add"
    with saying(adder) as session:
        run = await session.chat(USER, tools=[strict], run_tools=True)
        assert "unexpected keyword argument 'b'" in run.content


@anyio_test
async def test_rounds_are_bounded() -> None:
    with saying(call("add", a=1, b=1)) as session:
        run = await session.chat(USER, tools=[add], run_tools=True, max_rounds=3)
        assert len(run.rounds) == 4 and len(run.tool_calls) == 1
        assert [message["role"] for message in run.messages] == ["user", *["assistant", "tool"] * 3, "assistant"]


@anyio_test
async def test_calls_of_one_reply_run_at_the_same_time_and_answer_in_their_order() -> None:
    inside = threading.Barrier(3, timeout=20)

    def wait(key: str) -> str:
        inside.wait()
        time.sleep(0.05 if key == "a" else 0.0)
        return key

    def script(prompt: str) -> str:
        return "Done." if "<|tool|>" in prompt else "".join(call("wait", key=key) for key in "abc")

    with saying(script) as session:
        run = await session.chat(USER, tools=[wait], run_tools=True)
        assert [message["content"] for message in run.messages[2:5]] == ["a", "b", "c"]


@anyio_test
async def test_cancelling_does_not_wait_for_a_function_in_a_thread() -> None:
    release, returned = threading.Event(), list[bool]()

    def slow(a: int, b: int) -> int:
        release.wait(60)
        returned.append(True)
        return 0

    slow.__name__ = "add"
    with saying(adder) as session:
        with anyio.move_on_after(0.3) as scope:
            await session.chat(USER, tools=[slow], run_tools=True)
        assert scope.cancelled_caught and not returned, "it waited for the function"
        release.set()
        loop = session.chat(USER, tools=[add], run_tools=True, ignore_eos=True, max_tokens=3000)
        stream = aiter(loop)
        await anext(stream)
        loop.cancel()
        with pytest.raises(RequestAborted):
            await loop


@anyio_test
async def test_a_conversation_runs_tools_and_keeps_calls_and_results(tmp_path: Any) -> None:
    with saying(adder) as session:
        chat = session.conversation(system="Add.", tools=[add], run_tools=True)
        done = await chat.say("What is 2 + 3?")
        assert done.content == "It is 5."
        assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert chat.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
        chat.save(tmp_path / "chat.json")
        again = session.conversation(restore=tmp_path / "chat.json", tools=[add], run_tools=True)
        assert again.messages == chat.messages
        said = "".join([delta.content async for delta in chat.fork().stream("And now?")])
        assert said == "It is 5\n<|user|>And now?." or "5" in said
        assert "Call of add" in chat._repr_html_()
        chat.undo()
        assert [m["role"] for m in chat.messages] == ["system"]


@anyio_test
async def test_a_conversation_is_told_results_by_hand() -> None:
    with saying(adder) as session:
        chat = session.conversation(tools=[add])
        asked = await chat.say("What is 2 + 3?")
        done = await chat.answer([one.answer(add(**one.arguments)) for one in asked.tool_calls])
        assert done.content == "It is 5."
        assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]
        with pytest.raises(ValueError, match="are no results of calls"):
            chat.answer([{"role": "user", "content": "x"}])


@anyio_test
async def test_a_stream_that_is_left_keeps_what_is_whole() -> None:
    with saying(lambda prompt: "It is certainly five." if "<|tool|>" in prompt else adder(prompt)) as session:
        chat = session.conversation(tools=[add], run_tools=True)
        said = ""
        async for delta in chat.stream("What is 2 + 3?"):
            said += delta.content
            if "It is" in said:
                break
        del delta
        kept = chat.messages
        assert [m["role"] for m in kept] == ["user", "assistant", "tool", "assistant"]
        assert "certainly five.".startswith(kept[-1]["content"].removeprefix("It is").strip()[:4])
