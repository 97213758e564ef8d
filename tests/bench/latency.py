"""How long a token takes from the device's result to the caller, in one piece, at a thousand deltas a second.

    python tests/bench/latency.py [--deltas 2000] [--rate 1000] [--rows 1]

From the moment `fetch` has the token on the host, through commit, detokenizing and the mailbox, until the body of the
caller's `async for` runs. The device is a fake that takes as long per step as the rate asks for; everything else is the
real session. Prints medians and 99th percentiles on asyncio, uvloop and trio, and asserts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("tests", "toolkit", "kernels")]

import anyio  # noqa: E402
import trio  # noqa: E402

from helpers.sessions import CONFIG, fake_session  # noqa: E402

Run = Callable[[Callable[[], Awaitable[list[float]]]], list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deltas", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=1000.0, help="deltas a second over all requests")
    parser.add_argument("--rows", type=int, default=1, help="requests that stream at once")
    arguments = parser.parse_args()
    for name, run in runners().items():
        found = sorted(run(lambda: latencies(arguments.deltas, arguments.rate, arguments.rows)))
        late = found[int(len(found) * 0.99)]
        print(f"{name:8} median {statistics.median(found) * 1e6:5.0f} µs, 99th percentile {late * 1e6:5.0f} µs")


def runners() -> dict[str, Run]:
    found: dict[str, Run] = {
        "asyncio": lambda job: asyncio.run(job()),  # type: ignore[arg-type]
        "trio": lambda job: trio.run(job),
    }
    try:
        import uvloop
    except ImportError:
        return found
    return found | {"uvloop": lambda job: uvloop.run(job())}  # type: ignore[arg-type]


async def latencies(deltas: int, rate: float, rows: int) -> list[float]:
    config = dataclasses.replace(CONFIG, max_model_len=deltas + 64, max_requests=max(8, rows))
    arrived: dict[tuple[str, int], float] = {}  # when a request's i-th token was on the host
    counts: dict[str, int] = {}
    found: list[float] = []
    async with fake_session(config, num_pages=rows * (deltas // 8 + 16)) as session:
        runner: Any = session._engine.runner
        fetch, pace = runner.fetch, Pace(rows / rate)

        def fetched(in_flight: Any) -> Any:
            result = fetch(in_flight)
            pace.wait()
            now = time.perf_counter()
            for row in result.rows:
                if row.token_id is not None:
                    counts[row.request_id] = counts.get(row.request_id, -1) + 1
                    arrived[row.request_id, counts[row.request_id]] = now
            return result

        runner.fetch = fetched

        async def consume(text: str) -> None:
            handle, seen = session.stream(text, max_tokens=deltas // rows, ignore_eos=True), 0
            async for delta in handle:
                now = time.perf_counter()
                # The last token of a delta is the one that let it go.
                seen += len(delta.token_ids)
                found.append(now - arrived[delta.request_id, seen - 1])

        async with anyio.create_task_group() as group:
            for index in range(rows):
                group.start_soon(consume, f"request {index}")
    return found[len(found) // 10 :]  # without the start


class Pace:
    """Steps at a steady rate, whatever the host needs in between; a late one does not make the next ones hurry."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._due = seconds, time.perf_counter()

    def wait(self) -> None:
        self._due = max(self._due + self._seconds, time.perf_counter())
        while (left := self._due - time.perf_counter()) > 0:
            time.sleep(left)


if __name__ == "__main__":
    main()
