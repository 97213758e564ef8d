"""Read by pyright and never run: what the public door promises to editors. See test_typed_door.py."""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import assert_type

import jax
import numpy as np
from numpy.typing import NDArray

import rekindle
from rekindle import (
    Batch,
    Completion,
    Conversation,
    Handle,
    MeshReport,
    PhaseKind,
    RekindleError,
    Repetition,
    RowAnswer,
    RowAnswers,
    Scores,
    ScoreTable,
    Server,
    Session,
    SessionStats,
    StepReport,
    TextDelta,
    ToolCall,
    ToolLoop,
    ToolRun,
    Turn,
)  # fmt: skip

Vector = NDArray[np.float32]


def meshes(mesh: jax.sharding.Mesh) -> None:
    rekindle.open("tiny", mesh=4)
    rekindle.open("tiny", mesh={"model": 4, "expert": 2})
    rekindle.open("tiny", mesh=mesh)
    rekindle.open("tiny", mesh="4")  # pyright: ignore[reportArgumentType]


def dtypes() -> None:
    rekindle.open("tiny", dtype="bf16", kv_dtype="int8")
    rekindle.open("tiny", dtype=np.float32, kv_dtype=np.dtype("float32"))
    rekindle.open("tiny", dtype=jax.numpy.bfloat16)


async def door(k: int) -> None:
    session = await rekindle.open("tiny", max_requests=4, dtype="bfloat16", seed=None)
    assert_type(session, Session)
    async with rekindle.open() as other:
        assert_type(other, Session)
    with rekindle.open_sync("tiny", quiet=True) as third:
        assert_type(third, Session)
        assert_type(third.stats().mesh, MeshReport | None)

    assert_type(session.generate("x"), Handle[Completion])
    assert_type(await session.generate("x"), Completion)
    assert_type(await session.generate([1, 2, 3]), Completion)
    assert_type(await session.generate(["x", "y"], temperature=0.8), list[Completion])
    assert_type(await session.generate([[1, 2], [3]]), list[Completion])
    assert_type(session.generate(["x", "y"]), Batch[Completion])
    assert_type(await session.generate("x", n=3), list[Completion])
    assert_type(await session.generate("x", n=k), list[Completion])
    assert_type(await session.generate("x", n=1), Completion)
    assert_type(await session.generate("x", n=None), Completion)
    assert_type(await session.generate(["x", "y"], n=2), list[list[Completion]])
    assert_type(session.generate_sync("x", max_tokens=None), Completion)
    assert_type(session.generate_sync(["x"]), list[Completion])
    assert_type(await session.generate("x", rekindle.Sampling(stop="y", n=None), top_k=3), Completion)

    assert_type(await session.generate(["x", "y"], errors="return"), list[Completion | RekindleError])
    assert_type(await session.generate(["x"], errors="return", n=2), list[list[Completion] | RekindleError])
    assert_type(session.generate_sync(["x", "y"], errors="return"), list[Completion | RekindleError])
    chat = session.conversation(system="x", temperature=0.8)
    assert_type(chat, Conversation)
    assert_type(chat.say("x", max_tokens=3), Turn)
    assert_type(await chat.say("x"), Completion)
    async for delta in chat.stream("x"):
        assert_type(delta, TextDelta)
    assert_type(chat.fork(), Conversation)

    async for delta in session.stream("x", stop=["a", "b"], logit_bias={3: 1.0}):
        assert_type(delta, TextDelta)
    for delta in session.stream_sync("x"):
        assert_type(delta, TextDelta)
    handle = session.submit("x", seed=3)
    assert_type(handle, Handle[Completion])
    assert_type(handle.text, str)
    assert_type(handle.result_sync(), Completion)
    assert_type(session.fork(handle, at=1), Handle[Completion])
    assert_type(await session.admit("x"), Handle[Completion])
    assert_type(await session.chat([{"role": "user", "content": "x"}]), Completion)
    assert_type(await session.chat("x"), Completion)
    assert_type(await session.chat("x", images=["photo.png"]), Completion)
    assert_type((await session.chat("x", n=k))[0].repetition, Repetition | None)
    assert_type(session.explain("r0").timeline[0].kind, PhaseKind)
    print(session.view.cache)  # pyright: ignore
    session.embed("x", poling="mean")  # pyright: ignore
    session.score("x", ["y"], prioriti=1)  # pyright: ignore
    assert_type(await session.score("x", ["y"]), Scores)
    assert_type(session.score_sync(["x", "z"], ["y"]), ScoreTable)
    assert_type((await session.score(["x"], [["y"]])).accuracy([0]), float)
    session.view.distribution([0.5, 1.5])  # a list, too
    function, params = session.trainable()
    assert_type(function(params, np.zeros((1, 2), np.int32)), jax.Array)
    assert_type(params, dict[str, jax.Array])
    assert_type(await session.chat([{"role": "user", "content": "x"}], n=k, tools=[add]), list[Completion])
    reply = await session.chat([{"role": "user", "content": "x"}], tools=[add, {"name": "x"}], tool_choice="none")
    assert_type(reply.tool_calls, tuple[ToolCall, ...])
    assert_type(reply.reasoning, str)
    loop = session.chat([{"role": "user", "content": "x"}], tools=[add], run_tools=True, max_rounds=2, seed=1)
    assert_type(loop, ToolLoop)
    assert_type(await loop, ToolRun)
    async for delta in loop:
        assert_type(delta, TextDelta)
        assert_type(delta.tool_calls, tuple[ToolCall, ...])
    tooled = session.conversation(tools=[add], run_tools=True)
    assert_type(await tooled.answer([reply.tool_calls[0].answer(3)]), Completion)

    assert_type(await session.embed("x"), Vector)
    assert_type(await session.embed(["x", [1, 2]], pooling="last"), Vector)
    assert_type(await session.embed(["x"], errors="return"), list[Vector | RekindleError])
    assert_type(session.embed_sync("x", dimensions=8), Vector)
    assert_type(session.embed("x", adapter={"a": 0.5}).usage.prompt_tokens, int)
    assert_type(await session.score("x", ["y"], adapter="a"), Scores)
    assert_type(session.score_sync("x", ["y"], adapter={"a": 0.5}), Scores)
    rows = [{"a": 1}, {"a": 2}]
    assert_type(await session.map(rows, "{a}", out="x.jsonl", max_tokens=3), RowAnswers)
    assert_type(session.map_sync(rows, lambda row: str(row["a"]), chat=True)[0], RowAnswer)
    assert_type(session.map(rows, "{a}").answers.errors, dict[int, RekindleError])

    stats = session.stats()
    assert_type(stats, SessionStats)
    assert_type(stats.running, int)
    assert_type(stats.compilations, int)
    assert_type(stats.hit_rate, float)
    assert_type(await session.step(), StepReport | None)
    assert_type(await session.serve(port=0), Server)
    assert_type(session.render([]), str)


def add(a: int, b: int) -> int:
    return a + b


async def mistakes(session: Session) -> None:
    """Each line is an error: pyright reports an ignore comment that is not needed."""
    await rekindle.open("tiny", max_reqests=4)  # pyright: ignore[reportCallIssue]
    await rekindle.open("tiny", dtype="float8")  # pyright: ignore[reportArgumentType]
    await session.generate("x", temprature=0.8)  # pyright: ignore
    await session.map([], "x", temprature=0.8)  # pyright: ignore
    await session.embed("x", pooling="max")  # pyright: ignore
    await session.embed("x", errors="return", n=2)  # pyright: ignore
    await session.embed("x", adapter=1)  # pyright: ignore
    await session.score("x", ["y"], adapter=1)  # pyright: ignore
    await session.generate("x", temperature="hot")  # pyright: ignore
    await session.serve(prt=8000)  # pyright: ignore[reportCallIssue]
    session.conversation(temprature=0.8)  # pyright: ignore[reportCallIssue]
    rekindle.Sampling(max_token=3)  # pyright: ignore[reportCallIssue]
    _ = session.stats().runing  # pyright: ignore
    for _ in session.stream("x"):  # pyright: ignore
        pass
    with rekindle.open("tiny"):  # pyright: ignore
        pass
    rekindle.open("tiny").generate("x")  # pyright: ignore
    session.chat([], run_tools=True)  # pyright: ignore
    session.chat([], tool=[add])  # pyright: ignore
    await session.chat([], tools=[add], run_tools=True, n=2)  # pyright: ignore
