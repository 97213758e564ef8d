"""What each step costs the host in the real loop, part by part, and how long the device waits for it.

    python host_time.py [--model FOLDER | 360m] [--layers 8] [--hidden 384] [--rows 1 4 16] [--tokens 200]
    python host_time.py --deltas 2000 [--rate 1000] [--rows 1]

Medians per step in µs: `plan` and `commit` of the scheduler, `pack` into the uploads, the whole `dispatch`,
`detokenize` for all rows together, `turn` from one result to the next dispatch. `idle` is the share of time in which no
step was on the device, seen by a thread that waits for every output.

With `--deltas`, how long a token takes from the device's result to the caller, in one piece: from the moment `fetch`
has it on the host, through commit, detokenizing and the mailbox, until the body of the caller's `async for` runs. The
device is then a fake that takes as long per step as the rate asks for; everything else is the real session. Medians and
99th percentiles on asyncio, uvloop and trio.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import harness
import jax
import trio

import rekindle
from helpers.sessions import CONFIG, fake_session
from rekindle._src.dispatch import detokenize
from rekindle._src.programs.packing import Upload
from rekindle._src.session.session import Session

COLUMNS = ("plan", "pack", "dispatch", "commit", "detokenize", "turn")


def main() -> None:
    given = harness.options(
        __doc__, model="", layers=8, hidden=384, rows=[1, 4, 16], tokens=200, deltas=0, rate=1000.0
    )  # fmt: skip
    if given.deltas:
        latency(given.deltas, given.rate, given.rows[0])
        return
    model = harness.model(given.model) if given.model else harness.llama(given.layers, given.hidden)
    print(f"{'rows':>4}" + "".join(f"{name:>12}" for name in COLUMNS) + f"{'step':>12}{'idle':>8}")
    with (
        tempfile.TemporaryDirectory() as folder,
        rekindle.open_sync(model, max_requests=max(given.rows), cache_dir=folder, disk_memory=0) as session,
        Clock(session) as clock,
    ):
        for rows in given.rows:
            for count in (8, given.tokens):  # the first time compiles
                clock.clear()
                prompts = [list(range(5 + row, 25 + row)) for row in range(rows)]
                session.generate_sync(prompts, max_tokens=count, ignore_eos=True)
            clock.show(rows)


class Clock:
    """Wraps the parts of one session's loop and notes how long each call took."""

    def __init__(self, session: Session) -> None:
        engine: Any = session._engine
        self._runner, self._scheduler = engine.runner, engine.scheduler
        self._outputs: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Clock:
        self.clear()
        self._undo = [
            self._wrap(self._scheduler, "plan"),
            self._wrap(self._scheduler, "commit"),
            self._wrap(Upload, "pack"),
            self._wrap(detokenize._Delivery, "deliver", "detokenize"),
            self._wrap(self._runner, "dispatch", after=self._dispatched),
            self._wrap(self._runner, "fetch", after=self._fetched),
        ]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._outputs.put(None)
        self._thread.join()
        for undo in self._undo:
            undo()

    def clear(self) -> None:
        self._seconds: dict[str, list[float]] = collections.defaultdict(list)
        self._dispatches: list[float] = []
        self._ready: dict[int, float] = {}
        self._last_fetched = 0.0

    def show(self, rows: int) -> None:
        time.sleep(0.1)  # the watching thread sees the last step
        seconds, steps = self._seconds, len(self._dispatches)
        found = {name: statistics.median(seconds[name]) for name in COLUMNS if seconds[name]}
        found["detokenize"] = sum(seconds["detokenize"]) / steps
        waits = [max(0.0, self._dispatches[at + 1] - self._ready[at]) for at in range(steps - 1)]
        whole = self._ready[steps - 1] - self._dispatches[0]
        cells = "".join(f"{found.get(name, 0.0) * 1e6:12.0f}" for name in COLUMNS)
        print(f"{rows:4}{cells}{whole / steps * 1e6:12.0f}{sum(waits) / whole:8.1%}", flush=True)

    def _wrap(
        self, owner: Any, name: str, column: str = "", *, after: Callable[[Any, float], object] | None = None
    ) -> Callable[[], None]:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = inner(*args, **options)
            self._seconds[column or name].append(time.perf_counter() - start)
            if after is not None:
                after(result, start)
            return result

        setattr(owner, name, timed)
        return lambda: setattr(owner, name, inner)

    def _dispatched(self, in_flight: Any, start: float) -> None:
        if self._last_fetched:
            self._seconds["turn"].append(start - self._last_fetched)
        if in_flight.output is not None:
            self._outputs.put((len(self._dispatches), in_flight.output.rows))
            self._dispatches.append(in_flight.dispatched)

    def _fetched(self, result: Any, start: float) -> None:
        self._last_fetched = time.perf_counter()

    def _watch(self) -> None:
        while (entry := self._outputs.get()) is not None:
            jax.block_until_ready(entry[1])
            self._ready[entry[0]] = time.perf_counter()


def latency(deltas: int, rate: float, rows: int) -> None:
    runs: dict[str, Callable[..., Any]] = {"asyncio": lambda job: asyncio.run(job()), "trio": trio.run}
    try:
        import uvloop
    except ImportError:
        pass
    else:
        runs["uvloop"] = lambda job: uvloop.run(job())
    for name, run in runs.items():
        times = run(functools.partial(latencies, deltas, rate, rows))
        middle, late = (harness.quantile(times, share) * 1e6 for share in (0.5, 0.99))
        print(f"{name:8} median {middle:5.0f} µs, 99th percentile {late:5.0f} µs")


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
