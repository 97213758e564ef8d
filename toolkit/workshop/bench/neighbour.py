"""How long a neighbour has to wait: while strangers send what could freeze a process, and while programs are made.

    python neighbour.py points     # a thread's longest turn in each test of what could freeze a process, and its memory
    python neighbour.py firsts     # the first use of each kind of request: that, and a stream's longest gap

Seconds are those of processors that the process used meanwhile, and of a clock. On a machine that is busy with others
only the first say something, and those of a stream count what compiles at the same time, too. 0.25 s are the bound.
"""

from __future__ import annotations

import ast
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import harness  # finds tests/helpers

import rekindle
from helpers import turns
from rekindle import Session

ROOT = harness.ROOT
SAYS = re.compile(r"usefixtures\(\"short_turns\"\)|record_property\(\"longest_turn\"")
QUESTION = [{"role": "user", "content": "Tell me a long story."}]
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tests_of(file: Path) -> list[str]:
    """Return the names of the tests in a file that note a neighbour's longest turn."""
    text = file.read_text()
    if not SAYS.search(text):
        return []
    lines, found = text.splitlines(), list[str]()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            first = min(one.lineno for one in (node, *node.decorator_list))
            found += [node.name] * bool(SAYS.search("\n".join(lines[first - 1 : node.end_lineno])))
    return found


def points(chosen: str) -> int:
    """Run the tests that take turns with a thread; print its longest turn and the memory. Return the exit status."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = [f"{file}::{name}" for file in files for name in tests_of(file)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
        command += ["-m", chosen, f"--junitxml={report}"]
        done = subprocess.run([*command, *tests], cwd=ROOT, check=False)
        noted: dict[str, dict[str, list[float]]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            for one in case.iter("property"):
                name = str(case.get("name")).partition("[")[0]
                noted.setdefault(name, {}).setdefault(str(one.get("name")), []).append(float(str(one.get("value"))))
    print(f"\n{'longest turn':>12} {'memory':>9}  cases  test")
    for name in (test.rpartition("::")[2] for test in tests):
        found, said = noted.get(name, {}), name.removeprefix("test_").replace("_", " ")
        turns_of, grown = found.get("longest_turn", []), found.get("grown", [])
        longest, most = max(turns_of, default=float("nan")), max(grown, default=float("nan"))
        print(f"{longest * 1e3:9.0f} ms {most / 2**20:5.0f} MiB  {len(turns_of):5}  {said}")
    return done.returncode


class Gaps:
    """The longest gap of a stream since the last look, by processors and by the clock."""

    def __init__(self) -> None:
        self.processors = self.clock = 0.0
        self.deltas = 0
        self.streams = asyncio.Event()

    async def read(self, session: Session) -> None:
        """Read one answer after the other, until this is cancelled."""
        while True:
            last = None
            async for _ in session.chat(QUESTION, max_tokens=200, temperature=0.0, ignore_eos=True):
                now = time.process_time(), time.monotonic()
                if last is not None:
                    self.processors = max(self.processors, now[0] - last[0])
                    self.clock = max(self.clock, now[1] - last[1])
                last = now
                self.deltas += 1
                self.streams.set()


def uses(session: Session) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return the kinds of requests that are sent for the first time, in order."""
    return {
        "nothing": lambda: asyncio.sleep(3.0),
        "a drawn text": lambda: session.generate("Hello", max_tokens=12, temperature=1.0),
        "four of one prompt": lambda: session.generate("Hello", max_tokens=12, n=4, temperature=1.0),
        "log-probabilities": lambda: session.generate("Hello", max_tokens=12, logprobs=5),
        "those of a prompt": lambda: session.generate("Hello", max_tokens=12, prompt_logprobs=5),
        "a long prompt": lambda: session.generate("so on " * 400, max_tokens=4),
        "a regex": lambda: session.generate("Hello", max_tokens=12, regex="[a-c]{8}"),
        "a schema": lambda: session.generate("Hello", max_tokens=40, schema=OBJECT),
        "four regexes": lambda: all_of(
            session.generate("Hello", max_tokens=12, regex=f"[a-c]{{{size}}}") for size in range(3, 7)
        ),
        "an embedding": lambda: session.embed(["Hello there"], pooling="mean"),
        "penalties": lambda: session.generate("Hello", max_tokens=12, repetition_penalty=1.2),
        "twelve at once": lambda: all_of(session.generate(f"{number}", max_tokens=20) for number in range(12)),
    }


async def all_of(requests: Any) -> None:
    await asyncio.gather(*requests)


async def firsts(model: str, precompile: str) -> None:
    """Open with an empty cache, and print what a stream and a thread wait for while each kind is used at first."""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"cache_dir": folder, "precompile": precompile, "quiet": True, "disk_memory": 0}
        async with rekindle.open(model, **options) as session:
            gaps = Gaps()
            reading = asyncio.create_task(gaps.read(session))
            await gaps.streams.wait()
            print(
                f"{'first use':<20} {'seconds':>8} {'a turn':>8} {'stream: processors':>20} {'clock':>8} {'deltas':>7}"
            )
            for what, use in uses(session).items():
                gaps.processors = gaps.clock = gaps.deltas = 0
                start = time.monotonic()
                with turns.neighbour() as thread:
                    await use()
                    await asyncio.sleep(0.5)
                print(
                    f"{what:<20} {time.monotonic() - start:>8.1f} {thread.longest * 1e3:>5.0f} ms "
                    f"{gaps.processors * 1e3:>17.0f} ms {gaps.clock * 1e3:>5.0f} ms {gaps.deltas:>7}",
                    flush=True,
                )
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def main() -> None:
    arguments = harness.options(
        __doc__, "what", what=(str, ("points", "firsts")), model="tiny", precompile="background",
        marks=("not slow and not soak", "tests that `points` runs, as pytest's -m chooses them"),
    )  # fmt: skip
    if arguments.what == "points":
        sys.exit(points(arguments.marks))
    asyncio.run(firsts(arguments.model, arguments.precompile))


if __name__ == "__main__":
    main()
