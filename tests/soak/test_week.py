"""A week in an hour: a great many tiny requests over one engine whose caches are turned over again and again.

    pytest -m slow -s tests/soak/test_week.py                            # a few thousand, within a minute
    pytest -m soak -s tests/soak/test_week.py                            # a million
    REKINDLE_WEEK_REQUESTS=50000 pytest -m slow -s tests/soak/test_week.py

What is counted after each tenth (memory, threads, descriptors, files, nodes, programs, grammars) stays what it was, and
the last tenth takes about as much of a processor as the same requests in a new session. `-s` shows the curves, with the
callers' share of that time as `load`. With REKINDLE_WEEK_SECONDS, each tenth ends after a tenth of that time at the
latest.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import gc
import json
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import psutil
import pytest

import rekindle
from helpers import checkpoints
from helpers.sessions import engine_of, front_of, wait_until_idle
from rekindle import Session
from rekindle._src.capabilities.guides.request import GRAMMARS
from rekindle._src.structured import grammar
from rekindle.errors import InvalidRequest, RequestAborted
from soak.test_http import live_bytes

REQUESTS = int(os.environ.get("REKINDLE_WEEK_REQUESTS", "0"))
SECONDS = float(os.environ.get("REKINDLE_WEEK_SECONDS", "inf"))
AT_ONCE = 64
PAGES, PAGE = 96, 8
TENTHS = 10
LEAST, MANY = 4_000, 1_000_000
FRESH = 5_000  # requests at most, twice, of a new session
TURNS = 100  # how often the pages on the device are others
KEPT_NODES = 8_000  # what all tiers hold: from 40,000 requests on there are 6,000 to 6,800 of them
KEPT_GRAMMARS = 2 << 20  # bytes; less than usual, so that the first tenth fills it
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_requests": 16, "max_tokens_per_step": 128, "page_size": PAGE,
    "device_pages": PAGES + 1, "host_memory": 1 << 20, "disk_memory": 8 << 20, "quiet": True, "seed": 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Figures:
    """What there is after a part of the requests."""

    requests: int
    per_second: float  # of a processor: the machine may be busy with others
    wall: float  # of them in a second of the clock
    driver: float  # the callers' share of that time of processors
    resident: int
    live: int  # bytes that are allocated
    objects: int  # of Python
    threads: int
    descriptors: int
    files: int
    disk: int  # bytes of files
    nodes: int
    host: int  # bytes of pages in host memory
    programs: int
    grammars: int
    grammar_bytes: int
    evicted: int

    def __str__(self) -> str:
        return (
            f"{self.requests:>9,} {self.per_second:>7.0f}/s {self.wall:>5.0f}/s {self.driver:>5.0%} "
            f"{self.resident >> 20:>6} MiB {self.live / 2**20:>7.1f} MiB "
            f"{self.objects:>9,} {self.threads:>4} {self.descriptors:>4} {self.files:>6} {self.disk / 2**20:>6.1f} MiB "
            f"{self.nodes:>6} {self.host / 2**20:>6.2f} MiB {self.programs:>4} {self.grammars:>4} "
            f"{self.grammar_bytes / 2**20:>5.1f} MiB {self.evicted:>10,}"
        )


HEAD = (
    f"{'requests':>9} {'rate':>9} {'clock':>7} {'load':>5} {'resident':>10} {'allocated':>11} {'objects':>9} "
    f"{'thr':>4} {'fds':>4} {'files':>6} "
    f"{'on disk':>10} {'nodes':>6} {'host':>10} {'prog':>4} {'gram':>4} {'kept':>9} {'evicted':>10}"
)


class Times(NamedTuple):
    """Seconds of the process's processors, of this thread's, and of the clock."""

    process: float
    thread: float
    clock: float

    @classmethod
    def now(cls) -> Times:
        return cls(time.process_time(), time.thread_time(), time.monotonic())

    def since(self, began: Times) -> Times:
        return Times(*(now - before for now, before in zip(self, began, strict=True)))


class Week:
    """Draws tiny requests, and counts them."""

    def __init__(self, session: Session, requests: int, seconds: float) -> None:
        self.session, self.requests, self.seconds, self.began = session, requests, seconds, time.monotonic()
        self.until = self.began
        self.draw = random.Random(1)
        self.done = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.vocab = front_of(session).vocab_size
        self.stop_at = 0
        kinds: list[tuple[int, Callable[[], Coroutine[Any, Any, object]]]] = [
            (60, self.plain), (10, self.shared), (5, self.left), (4, self.cancelled), (5, self.drawn), (3, self.chat),
            (2, self.chosen), (1, self.matched), (3, self.salted), (2, self.captured), (3, self.refused),
            (2, self.several),
        ]  # fmt: skip
        self.kinds = [kind for weight, kind in kinds for _ in range(weight)]
        self.story = "The little cat"
        self.known = session.generate_sync(self.story, max_tokens=8, temperature=0.0).token_ids

    async def run(self, share: float) -> None:
        """Go on, `AT_ONCE` requests at a time, until this share of all requests is sent, or of the time is over."""
        self.stop_at, self.until = round(self.requests * share), self.began + self.seconds * share
        async with anyio.create_task_group() as group:
            for _ in range(AT_ONCE):
                group.start_soon(self.worker)

    async def worker(self) -> None:
        while self.done < self.stop_at and time.monotonic() < self.until:
            self.done += 1
            if self.done % 500 == 0:
                again = await self.session.generate(self.story, max_tokens=8, temperature=0.0)
                assert again.token_ids == self.known, "a text changed"
                continue
            kind = self.draw.choice(self.kinds)
            self.counts[kind.__name__] += 1
            await kind()

    def prompt(self) -> list[int]:
        return [self.draw.randrange(3, self.vocab) for _ in range(self.draw.randrange(3, 24))]

    def few(self) -> dict[str, Any]:
        return {"max_tokens": self.draw.randrange(1, 3)}

    async def plain(self) -> None:
        await self.session.generate(self.prompt(), **self.few())

    async def shared(self) -> None:
        stem = [7 + self.draw.randrange(5)] * 24
        await self.session.generate([*stem, *self.prompt()], **self.few())

    async def left(self) -> None:
        async for _ in self.session.stream(self.prompt(), max_tokens=20):
            break

    async def cancelled(self) -> None:
        handle = self.session.submit(self.prompt(), max_tokens=20)
        if self.draw.random() < 0.5:
            await anyio.lowlevel.checkpoint()
        handle.cancel()
        with suppress(RequestAborted):
            await handle

    async def drawn(self) -> None:
        options = self.draw.choice(
            ({"logprobs": 3}, {"top_k": 5}, {"repetition_penalty": 1.2}, {"stop": ["e"]}, {"prompt_logprobs": 1})
        )
        await self.session.generate(
            self.prompt(), temperature=0.9, seed=self.draw.getrandbits(30), **self.few(), **options
        )

    async def chat(self) -> None:
        await self.session.chat([{"role": "user", "content": f"Say {self.draw.getrandbits(40)}"}], **self.few())

    async def chosen(self) -> None:
        await self.session.generate("x", choice=[f"{self.draw.getrandbits(40)}", "no"], max_tokens=3)

    async def matched(self) -> None:
        await self.session.generate("x", regex=f"[0-9]{{1,{self.draw.randrange(1, 1000)}}}", max_tokens=2)

    async def salted(self) -> None:
        await self.session.generate(self.prompt(), salt=f"{self.draw.getrandbits(40)}", **self.few())

    async def captured(self) -> None:
        await self.session.generate(self.prompt(), capture={"norm": True}, **self.few())

    async def refused(self) -> None:
        with suppress(InvalidRequest):
            await self.session.generate(self.prompt() * 20, **self.few())

    async def several(self) -> None:
        await self.session.generate([self.prompt() for _ in range(3)], n=2, temperature=1.0, **self.few())

    def figures(self, before: int, times: Times, folder: Path) -> Figures:
        session = self.session
        wait_until_idle(session)
        gc.collect()
        with suppress(OSError, AttributeError):  # not on glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        process, stats, cache = psutil.Process(), session.stats(), session.cache.stats()
        files = [path for path in folder.rglob("*") if path.is_file()]
        grammars: Any = GRAMMARS.of(front_of(session))
        scheduler: Any = engine_of(session).scheduler
        return Figures(
            requests=self.done,
            per_second=(self.done - before) / times.process,
            wall=(self.done - before) / times.clock,
            driver=times.thread / times.process,
            resident=process.memory_info().rss,
            live=live_bytes(),
            objects=len(gc.get_objects()),
            threads=process.num_threads(),
            descriptors=process.num_fds(),
            files=len(files),
            disk=sum(_size(path) for path in files),
            nodes=len(scheduler.cache),
            host=cache.host.bytes if cache.host is not None else 0,
            programs=stats.compilations,
            grammars=len(grammars.kept),
            grammar_bytes=grammars.kept_bytes,
            evicted=cache.evicted_pages,
        )


def _size(path: Path) -> int:
    with suppress(OSError):  # removed meanwhile
        return path.stat().st_size
    return 0


def small_model(folder: Path) -> str:
    """Write a model with the embedded one's text and a tenth of its width, so that the engine's own work is most."""
    embedded = Path(rekindle.__file__).parent / "tiny" / "model"
    raw = json.loads((embedded / "config.json").read_text())
    raw |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    checkpoints.write(folder, raw)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(embedded / name, folder)
    return str(folder)


def week(folder: Path, requests: int, seconds: float) -> tuple[list[Figures], Figures]:
    """Send the requests. Return the figures after each tenth, and those of a new session right after the last."""
    model, folder = small_model(folder / "model"), folder / "cache"
    with rekindle.open_sync(model, cache_dir=str(folder), **OPTIONS) as session:
        run = Week(session, requests, seconds)
        curve: list[Figures] = []
        print(f"\n{HEAD}", flush=True)
        kinds: list[collections.Counter[str]] = []
        for tenth in range(TENTHS):
            before, began = run.done, Times.now()
            anyio.run(run.run, (tenth + 1) / TENTHS)
            curve.append(run.figures(before, Times.now().since(began), folder))
            kinds.append(collections.Counter(type(one).__name__ for one in gc.get_objects()))
            print(curve[-1], flush=True)
        if len(kinds) > 3:
            grown = (kinds[-1] - kinds[2]).most_common(8)
            print(f"objects more than after the third part: {grown}")
        print(f"requests: {dict(run.counts)}")
        session.check_integrity()
    part = min(FRESH, requests // TENTHS)
    with rekindle.open_sync(model, cache_dir=str(folder), **OPTIONS) as session:
        run = Week(session, 2 * part, float("inf"))
        anyio.run(run.run, 0.5)  # until each program has been made or loaded
        before, began = run.done, Times.now()
        anyio.run(run.run, 1.0)
        fresh = run.figures(before, Times.now().since(began), folder)
        print(f"{fresh}  of a new session", flush=True)
    return curve, fresh


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(LEAST, marks=pytest.mark.slow, id="short"),
        pytest.param(MANY, marks=pytest.mark.soak, id="week"),
    ],
)
@pytest.mark.timeout(6 * 3600)
def test_a_great_many_requests_leave_nothing_behind(
    tmp_path: Path, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "KEPT_BYTES", KEPT_GRAMMARS)
    check(*week(tmp_path, REQUESTS or requests, SECONDS))


def check(curve: list[Figures], fresh: Figures) -> None:
    """Counts stay what they were when everything had been used once.

    The last rates are compared with that of a new session: what else the machine does changes all of them.
    """
    assert len(curve) >= 5, "too few parts to compare"
    warm, last = curve[2], curve[-1]
    served = last.requests - warm.requests
    assert last.evicted >= min(TURNS * PAGES, last.requests), "the caches were not turned over"
    for name, room in (("threads", 4), ("descriptors", 8), ("programs", 12), ("grammars", 8)):
        assert getattr(last, name) <= getattr(warm, name) + room, f"{name}: {warm} … {last}"
    assert last.grammar_bytes <= KEPT_GRAMMARS
    assert last.disk <= 2 * OPTIONS["disk_memory"] + (8 << 20) and last.host <= 2 * OPTIONS["host_memory"]
    most = {name: max(getattr(one, name) for one in curve[:5]) for name in ("files", "nodes", "objects")}
    assert last.files <= 1.5 * most["files"] + 64
    assert last.nodes <= max(1.5 * most["nodes"] + 256, KEPT_NODES)
    assert last.objects <= 1.1 * most["objects"] + 20_000 + 0.1 * served
    made = max(last.programs - warm.programs, 0)  # a program that is compiled takes 4 MiB, and rare ones come late
    assert last.live <= warm.live + (24 << 20) + made * (6 << 20) + 40 * served, "memory grew"
    late = statistics.harmonic_mean(one.per_second for one in curve[-3:])  # of as many requests each
    assert late > 0.5 * fresh.per_second, "it became slower"
