"""What HTTP costs: tokens a second of streams over a server beside the same requests made in its process.

    python tests/bench/serving.py --model tiny [--streams 1 32] [--tokens 128] [--rounds 7]
    python tests/bench/serving.py --model 135m
    python tests/bench/serving.py --model 135m --llama-server PATH  # and llama.cpp's on the same weights (needs gguf)

Each request has a prompt of its own of 32 tokens and makes `--tokens` tokens, one event each. Both arms take turns, in
an order that changes from round to round, and the ratio is the median of the rounds' own. The client is a process of
its own, which reads plain sockets: what it computes is not the server's, but on a machine with few cores it takes part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("toolkit", "kernels")]


def main() -> None:
    if sys.argv[1:] == ["--client"]:
        client()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, or a shape of rekindle._src.bench.shapes")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 32))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server; not with the tiny model")
    asyncio.run(measure(**vars(parser.parse_args())))


async def measure(model: str, streams: list[int], tokens: int, rounds: int, llama_server: Path | None) -> None:
    import rekindle
    from rekindle._src.bench.folder import write_checkpoint

    folder: Any = model
    if model != "tiny":
        folder = write_checkpoint(model, Path(tempfile.gettempdir()) / f"rekindle-serving-{model}")
    longest = 64 + tokens
    command = [sys.executable, __file__, "--client"]
    async with rekindle.open(folder, max_requests=max(streams), max_model_len=longest, quiet=True) as session:
        server = await session.serve()
        with (
            serving(llama_server, folder, max(streams), longest) as peer,
            subprocess.Popen(  # noqa: ASYNC220 (it takes milliseconds)
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as reader,
        ):
            ports = {"http": server.port, **({} if peer is None else {"llama.cpp": peer})}
            for count in streams:
                await compare(session, ports, reader, count, tokens, rounds)
            assert reader.stdin is not None
            reader.stdin.close()
        await server.aclose()


@contextlib.contextmanager
def serving(program: Path | None, folder: Path, streams: int, longest: int) -> Iterator[int | None]:
    """The port of llama.cpp's server on the weights of a checkpoint folder, with a place for each stream."""
    if program is None:
        yield None
        return
    sys.path.append(str(ROOT / "tests/bench/peers"))
    import gguf_file

    file = folder / "model.gguf"
    if not file.exists():
        gguf_file.write(str(folder), file, eight_bit=False, vocabulary=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    command = [str(program), "-m", str(file), "--port", str(port), "-np", str(streams), "-c", str(streams * longest)]
    command += ["-t", str(threads), "-tb", str(threads), "--no-webui"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()


async def compare(session: Any, ports: dict[str, int], reader: Any, count: int, tokens: int, rounds: int) -> None:
    """Run the arms in turns and print what came out."""
    names = ("process", *ports)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(-1, rounds):
        for name in names if turn % 2 else names[::-1]:
            prompts = [[100 + turn % 50, 3 + index, *range(20, 50)] for index in range(count)]
            await session.cache.clear(tier="memory")
            cpu = time.process_time()
            if name == "process":
                times = await in_process(session, prompts, tokens)
            else:
                asked = {"port": ports[name], "prompts": prompts, "tokens": tokens}
                times = await asyncio.to_thread(over_http, reader, asked)
            cpu = time.process_time() - cpu
            if turn >= 0:  # the first one compiles
                found[name].append({**figures(times, tokens), "cpu": cpu / (count * tokens) * 1e3})
    ratios = [http["rate"] / own["rate"] for own, http in zip(found["process"], found["http"], strict=True)]
    spread = f"rounds {min(ratios):.3f}–{max(ratios):.3f}"
    print(f"{count} streams: over http {statistics.median(ratios):.3f} of the tokens/s, {spread}")
    costs = [http["cpu"] - own["cpu"] for own, http in zip(found["process"], found["http"], strict=True)]
    print(f"  of this process's CPU a token over http takes {statistics.median(costs) * 1e3:+.0f} µs more")
    for name in names:
        middle = {key: statistics.median(one[key] for one in found[name]) for key in found[name][0]}
        print(
            f"  {name:10}{middle['rate']:8.1f} tokens/s, first token p50 {middle['first50']:.1f} and p99 "
            f"{middle['first99']:.1f} ms, then p50 {middle['between50']:.2f} and p99 {middle['between99']:.2f} ms"
            + (f", {middle['cpu']:.2f} ms of CPU a token" if name != "llama.cpp" else ""),
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
        print(json.dumps(asyncio.run(read_all(**json.loads(line)))), flush=True)


async def read_all(port: int, prompts: list[list[int]], tokens: int) -> list[list[float]]:
    """When each event of each stream was there."""
    began = time.perf_counter()

    async def one(prompt: list[int]) -> list[float]:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        data = json.dumps(body).encode()
        stream, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        times: list[float] = []
        while line := await stream.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - began)
        writer.close()
        return times

    return await asyncio.gather(*map(one, prompts))


def figures(times: list[list[float]], tokens: int) -> dict[str, float]:
    assert all(len(one) >= tokens * 0.9 for one in times), [len(one) for one in times]
    last = max(one[-1] for one in times)
    firsts = [one[0] * 1e3 for one in times]
    between = [(later - earlier) * 1e3 for one in times for earlier, later in itertools.pairwise(one)]
    return {
        "rate": len(times) * tokens / last,
        "first50": quantile(firsts, 0.5),
        "first99": quantile(firsts, 0.99),
        "between50": quantile(between, 0.5),
        "between99": quantile(between, 0.99),
    }


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    main()
