"""What HTTP costs: tokens a second of streams over a server, compared with the same requests in its process.

    python serving.py --model tiny [--streams 1 32] [--tokens 128] [--rounds 7]
    python serving.py --model 135m [--llama-server BINARY]

Each request has a prompt of its own of 32 tokens and makes `--tokens` tokens, one event each. Both arms take turns, in
an order that changes from round to round, and the ratio is the median of the rounds' own. The client is a process of
its own, which reads plain sockets: what it computes is not the server's, but on a machine with few cores it takes part.
With `--llama-server` that of llama.cpp takes a turn, too: on the same weights in a GGUF file, in 16 bits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from llama_server import LlamaServer


def main() -> None:
    if sys.argv[1:] == ["--client"]:
        client()
        return
    given = harness.options(
        __doc__, model=("tiny", "tiny, or a shape"), streams=[1, 32], tokens=128, rounds=7,
        llama_server=(Path, "the program of that name from llama.cpp"),
    )  # fmt: skip
    asyncio.run(measure(**vars(given)))


async def measure(model: str, streams: list[int], tokens: int, rounds: int, llama_server: Path | None) -> None:
    import rekindle
    from rekindle._src.bench.shapes import write_checkpoint

    folder: Any = model
    if model != "tiny":
        folder = write_checkpoint(model, Path(tempfile.gettempdir()) / f"rekindle-serving-{model}")
    longest = 64 + tokens
    command = [sys.executable, __file__, "--client"]
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            rekindle.open(folder, max_requests=max(streams), max_model_len=longest, quiet=True)
        )
        server = await session.serve()
        stack.push_async_callback(server.aclose)
        ports = {"http": server.port}
        if llama_server is not None:
            file = Path(tempfile.gettempdir()) / f"{Path(folder).name}.gguf"
            if not file.exists():
                subprocess.run([sys.executable, "-m", "rekindle", "export", str(folder), str(file)], check=True)  # noqa: ASYNC221
            peer = LlamaServer(llama_server, file, rows=max(streams), context=longest)
            ports["llama"] = stack.enter_context(peer).port
        reader = stack.enter_context(
            subprocess.Popen(  # noqa: ASYNC220 (it takes milliseconds)
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        assert reader.stdin is not None
        stack.callback(reader.stdin.close)
        for count in streams:
            await compare(session, ports, reader, count, tokens, rounds)


async def compare(session: Any, ports: dict[str, int], reader: Any, count: int, tokens: int, rounds: int) -> None:
    """Run all arms in turns and print what came out."""
    names = ("process", *ports)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn, name in harness.turns(names, rounds):
        prompts = [[100 + turn % 50, 3 + index, *range(20, 50)] for index in range(count)]
        await session.cache.clear(tier="memory")
        await asyncio.sleep(1.0)  # the arm before may still be busy with what it has answered
        if name == "process":
            times = await in_process(session, prompts, tokens)
        else:
            asked = {"port": ports[name], "prompts": prompts, "tokens": tokens}
            times = await asyncio.to_thread(over_http, reader, asked)
        if turn >= 0:  # the first one compiles
            found[name].append(figures(times, tokens))
    for other in (name for name in names if name != "http"):
        ratios = harness.ratios(*([one["rate"] for one in found[name]] for name in ("http", other)))
        print(f"{count} streams: over HTTP {harness.spread(ratios)} of the tokens/s of {other}")
    for name in names:
        middle = harness.medians(found[name])
        print(
            f"  {name:8}{middle['rate']:8.1f} tokens/s, first token p50 {middle['first50']:.1f} and p99 "
            f"{middle['first99']:.1f} ms, then p50 {middle['between50']:.2f} and p99 {middle['between99']:.2f} ms",
            flush=True,
        )


async def in_process(session: Any, prompts: list[list[int]], tokens: int) -> list[list[float]]:
    """When each token of each stream was there, in seconds from the start."""
    began = time.perf_counter()

    async def one(prompt: list[int]) -> list[float]:
        return [
            time.perf_counter() - began
            async for delta in session.stream(prompt, max_tokens=tokens, ignore_eos=True, temperature=0)
            for _ in delta.token_ids
        ]

    return await asyncio.gather(*map(one, prompts))


def over_http(reader: Any, asked: dict[str, Any]) -> list[list[float]]:
    reader.stdin.write(json.dumps(asked) + "\n")
    reader.stdin.flush()
    found: list[list[float]] = json.loads(reader.stdout.readline())
    return found


def client() -> None:
    for line in sys.stdin:
        print(json.dumps(read_all(**json.loads(line))), flush=True)


def read_all(port: int, prompts: list[list[int]], tokens: int) -> list[list[float]]:
    """When each event of each stream was there. One thread reads all sockets, so that the client takes little part."""
    began = time.perf_counter()
    streams = [Stream(port, prompt, tokens) for prompt in prompts]
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read(time.perf_counter() - began):
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
    return [stream.times for stream in streams]


class Stream:
    """A request for a stream of events, and when they were there."""

    def __init__(self, port: int, prompt: list[int], tokens: int) -> None:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        self.times: list[float] = []
        self._rest = b""  # what may be the beginning of an event
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def read(self, now: float) -> bool:
        """Take what came; False at the end."""
        came = self.socket.recv(1 << 16)
        text = self._rest + came
        self.times += [now] * text.count(b"data: {")
        self._rest = text[-6:]  # shorter than what is counted
        return bool(came)


def figures(times: list[list[float]], tokens: int) -> dict[str, float]:
    # A token that ends in the middle of a character has no event of its own in llama.cpp's server.
    assert all(len(one) >= tokens * 0.6 for one in times), [len(one) for one in times]
    firsts, between = [one[0] * 1e3 for one in times], [gap * 1e3 for one in times for gap in harness.gaps(one)]
    found = {"rate": len(times) * tokens / max(one[-1] for one in times)}
    for name, values in (("first", firsts), ("between", between)):
        found |= {f"{name}{share}": harness.quantile(values, share / 100) for share in (50, 99)}
    return found


if __name__ == "__main__":
    main()
