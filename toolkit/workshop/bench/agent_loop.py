"""A tool loop of several turns over HTTP, in the syntax of several families: what each turn finds in the cache.

    python agent_loop.py FILE.gguf TEMPLATE.jinja [TEMPLATE.jinja …] [--turns 6] [--own] [--llama-server PROGRAM]

The messages are the same for both servers: whatever the model writes, the call of a tool follows, and its result. So
each prompt begins with the one before it. With `--own`, a second row has a loop in which the model must write the calls
itself: its messages go back as the server gave them, and the next prompt begins with what was written, too.
llama.cpp's `tool_choice="required"` leaves a model free to write text before its calls, and small ones write no more.

`cached` is the share of the prompts from turn 2 on that the server found in its cache, then that of each. `computed` is
the number of other tokens of these prompts, `written` that of all replies. Seconds are those of a turn, and the
processor's; each is the median over turns 2 and later. Two turns with another tool go first, so that no program is
compiled while the loop is measured. llama.cpp's threads spin: next to other work its seconds say little, and with
`taskset -c 0` both servers have one thread.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import harness
from llama_server import LlamaServer

import rekindle
from helpers.asgi import post
from rekindle.serve import app as make_app

CONTEXT, WARM_UP = 4096, 2
TOKENS, OWN_TOKENS = 16, 160  # of a reply at most
BUSY, PAUSE = 503, 1.0  # the processor is, and the same request may be sent again after so many seconds
CITIES = ("Rome", "Paris", "Oslo")
RESULT = "It will be sunny in {city} for all of the {days} days, with some wind from the sea, and {place} of rain."
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Turn(NamedTuple):
    """The tokens and seconds of a turn."""

    prompt: int
    cached: int
    written: int
    seconds: float
    processor: float


def tool(name: str) -> dict[str, Any]:
    properties = {
        "city": {"type": "string", "enum": list(CITIES), "description": "Its name."},
        "days": {"type": "integer", "description": "How many days, at most nine.", "minimum": 1, "maximum": 9},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city", "days"]}
    return {"type": "function", "function": {"name": name, "description": "The weather.", "parameters": parameters}}


def call(name: str, place: int) -> dict[str, Any]:
    arguments = json.dumps({"city": CITIES[place % len(CITIES)], "days": place % 9 + 1})
    return {"id": f"call{place:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


async def loop(ask: Ask, name: str, turns: int, processor: Callable[[], float], *, own: bool = False) -> list[Turn]:
    """Run the loop with a tool of this name; its calls are the model's `own` or the same for all."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Please use {name} for three cities."}]
    fields: dict[str, Any] = {"tools": [tool(name)], "temperature": 0, "max_tokens": TOKENS}
    if own:
        fields |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": OWN_TOKENS}
    done = []
    for place in range(turns):
        start, before = time.perf_counter(), processor()
        answer = await ask({**fields, "messages": messages})
        seconds, used = time.perf_counter() - start, processor() - before
        message, usage = answer["choices"][0]["message"], answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        done.append(Turn(usage["prompt_tokens"], cached, usage["completion_tokens"], seconds, used))
        if not own:
            message = {"role": "assistant", "content": "", "tool_calls": [call(name, place)]}
        calls = message.get("tool_calls") or []
        if not calls:
            raise SystemExit(f"turn {place + 1} made no call: {message}")
        messages.append({key: value for key, value in message.items() if value is not None})
        for one in calls:
            arguments = json.loads(one["function"]["arguments"])
            result = RESULT.format(city=arguments["city"], days=arguments["days"], place=place)
            messages.append({"role": "tool", "tool_call_id": one["id"], "name": name, "content": result})
    return done


HEAD = ("template", "engine", "cached", "by turn", "computed", "written", "s/turn", "processor s/turn")


def show(*cells: str) -> None:
    """Print a row of the table as soon as it is there."""
    widths = (32, 13, 6, 20, 8, 7, 6, 0)
    print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)


def show_turns(engine: str, template: Path, turns: list[Turn]) -> None:
    later = turns[1:]
    prompts, cached = sum(turn.prompt for turn in later), sum(turn.cached for turn in later)
    show(
        template.stem[:32], engine, f"{cached / prompts:.1%}",
        " ".join(f"{turn.cached / turn.prompt:.0%}" for turn in later),
        str(prompts - cached), str(sum(turn.written for turn in turns)),
        f"{statistics.median(turn.seconds for turn in later):.2f}",
        f"{statistics.median(turn.processor for turn in later):.2f}",
    )  # fmt: skip


async def ours(file: Path, templates: list[Path], turns: int, *, own: bool) -> None:
    options: dict[str, Any] = {"max_model_len": CONTEXT, "max_requests": 2, "quiet": True}
    async with rekindle.open(file, **options) as session:
        app = make_app(session, trust_request_chat_template=True)
        for template in templates:
            text = template.read_text()

            async def ask(fields: dict[str, Any], text: str = text) -> dict[str, Any]:
                switch = {"enable_thinking": False}
                body = {**fields, "chat_template": text, "chat_template_kwargs": switch}
                while True:
                    answer = await post(app, "/v1/chat/completions", body)
                    if answer.status == 200:
                        return answer.json()  # type: ignore[no-any-return]
                    if answer.status != BUSY:
                        raise SystemExit(answer.body.decode()[:500])
                    await anyio.sleep(PAUSE)

            for engine, calls in (("rekindle", False), *([("rekindle, own", True)] if own else [])):
                await loop(ask, "get_forecast", WARM_UP, time.process_time, own=calls)
                done = await loop(ask, "get_weather", turns, time.process_time, own=calls)
                show_turns(engine, template, done)


async def theirs(program: Path, file: Path, template: Path, turns: int) -> None:
    options = ["--jinja", "--chat-template-file", str(template)]
    with LlamaServer(program, file, rows=1, context=CONTEXT, options=options) as server:

        async def ask(fields: dict[str, Any]) -> dict[str, Any]:
            body = {**fields, "chat_template_kwargs": {"enable_thinking": False}}
            return await anyio.to_thread.run_sync(server.chat, body)

        await loop(ask, "get_forecast", WARM_UP, server.processor_seconds)
        show_turns("llama.cpp", template, await loop(ask, "get_weather", turns, server.processor_seconds))


def main() -> int:
    given = harness.options(
        __doc__, "file templates", file=Path, templates=[Path()], turns=6, own=False, llama_server=Path
    )
    print(f"{given.turns} turns, {len(os.sched_getaffinity(0))} processors")
    show(*HEAD)
    anyio.run(partial(ours, own=given.own), given.file, given.templates, given.turns)
    for template in given.templates if given.llama_server is not None else ():
        anyio.run(theirs, given.llama_server, given.file, template, given.turns)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
