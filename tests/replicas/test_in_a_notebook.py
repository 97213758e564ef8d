"""A fleet in a notebook's kernel while its replicas die: 300 streams of cells that await, and none is lost."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import rekindle

pytest.importorskip("ray", reason="fleets need the extra `ray`")
jupyter_client = pytest.importorskip("jupyter_client", reason="starts the kernel")
pytest.importorskip("ipykernel", reason="the kernel")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

STREAMS, TOKENS, SECONDS, REPLICAS = 300, 100, 120.0, 2
OPTIONS: dict[str, Any] = {
    "deterministic": True, "max_requests": 8, "max_tokens_per_step": 128, "max_model_len": 512, "disk_memory": 0,
    "host_memory": 1 << 26,
}  # fmt: skip
OPENING = """
import asyncio, json, os, random, signal, time
import rekindle
fleet = await rekindle.fleet("tiny", replicas={replicas}, cache_dir={cache!r}, **{options!r})
while fleet.stats().ready < {replicas}:
    await asyncio.sleep(0.1)
asked = json.load(open({asked!r}))
"""
STREAMING = """
texts, deaths, draw, begun = [""] * len(asked), 0, random.Random(7), time.monotonic()

async def stream(number):
    await asyncio.sleep({seconds} * number / len(asked))
    async for delta in fleet.stream(asked[number]["prompt"], **asked[number]["given"]):
        texts[number] += delta.text

async def kill():
    global deaths
    while True:
        await asyncio.sleep(5)
        alive = [one for one in fleet.stats().replicas if one.state == "ready"]
        if alive:
            os.kill(draw.choice(alive).pid, signal.SIGKILL)
            deaths += 1

killing = asyncio.create_task(kill())
await asyncio.gather(*[stream(number) for number in range(len(asked))])
killing.cancel()
stats = fleet.stats()
again = sorted(seconds for one in stats.replicas for seconds in one.reopened_after)
print(json.dumps({{"texts": texts, "deaths": deaths, "moved": stats.moved, "again": again}}))
"""
WATCHING = "fleet.watch()"
CLOSING = "await fleet.aclose()"


def given(number: int) -> dict[str, Any]:
    size = TOKENS // 2 + number * 37 % TOKENS
    return {"max_tokens": size, "temperature": 0.8, "seed": number, "ignore_eos": True}


def run(client: Any, code: str, seconds: float) -> str:
    """What a cell prints. Fails with its traceback."""
    printed: list[str] = []
    failed: list[str] = []

    def output(message: Any) -> None:
        content = message["content"]
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            printed.append(content["text"])
        if message["msg_type"] == "error":
            failed.extend(content["traceback"])

    client.execute_interactive(code, timeout=seconds, output_hook=output)
    assert not failed, "\n".join(failed)
    return "".join(printed)


def test_random_deaths_for_two_minutes(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    prompts = [f"{['Once upon a time', 'Tom and Anna', 'One day a dog'][n % 3]}, number {n}, " for n in range(STREAMS)]
    with rekindle.open_sync("tiny", cache_dir=cache, **OPTIONS) as session:
        handles = [session.submit(prompt, **given(number)) for number, prompt in enumerate(prompts)]
        wanted = [handle.result_sync().text for handle in handles]
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps([{"prompt": prompt, "given": given(n)} for n, prompt in enumerate(prompts)]))
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        run(client, OPENING.format(replicas=REPLICAS, cache=cache, options=OPTIONS, asked=str(asked)), 180)
        run(client, WATCHING, 60)
        begun = time.monotonic()
        found = json.loads(run(client, STREAMING.format(seconds=SECONDS), 600).splitlines()[-1])
        took = time.monotonic() - begun
        run(client, CLOSING, 60)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    wrong = [number for number in range(STREAMS) if found["texts"][number] != wanted[number]]
    deaths, moved, again = found["deaths"], found["moved"], [f"{one:.1f}" for one in found["again"]]
    print(f"{REPLICAS} replicas, {took:.0f} s: {deaths} deaths, {moved} requests moved, {len(wrong)} wrong")
    print(f"seconds to replacement: {', '.join(again)}", flush=True)
    assert wrong == []
    assert deaths >= 10 and moved >= 10
