"""What a server's memory is made of while strangers attack: all that becomes resident has an owner, and a bound.

A server that nobody used has pages that were never touched, and few of the programs that requests can need. So its
resident memory grows for as long as requests are of new kinds. Here the growth is accounted for: by arrays of the
device, programs, pages in host memory and kept grammars. What is left is bounded.

    pytest -m slow -s tests/soak/test_resident.py                        # -s shows the account
    REKINDLE_ATTACK_SECONDS=600 pytest -m slow -s tests/soak/test_resident.py
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

from soak.test_http import ATTACKS, Attackers

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")

SECONDS = float(os.environ.get("REKINDLE_ATTACK_SECONDS", "30"))
PROGRAM = 6 << 20  # bytes; one that is compiled takes 4.5 MiB, one from the store 1
REST = 128 << 20  # bytes without an owner: holes, the compiler's, JAX's and the interpreter's own; 96 MiB were seen
OPTIONS: dict[str, Any] = {
    "max_model_len": 512, "max_requests": 16, "device_pages": 1025, "host_memory": 16 << 20, "disk_memory": 0,
    "quiet": True, "seed": 0,
}  # fmt: skip
SERVER = """
import ctypes, gc, json, logging, sys
from contextlib import suppress

import jax, psutil

import rekindle
from helpers.sessions import wait_until_idle, engine_of, front_of
from rekindle._src.capabilities.guides.request import GRAMMARS
from soak.test_http import live_bytes

logging.disable(logging.WARNING)
with rekindle.open_sync("tiny-vision", cache_dir=sys.argv[1], **json.loads(sys.argv[2])) as session:
    server = session.serve().result_sync()
    print(server.port, flush=True)
    for line in sys.stdin:
        wait_until_idle(session)
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        host, grammars = session.cache.stats().host, GRAMMARS.of(front_of(session))
        print(json.dumps({
            "resident": psutil.Process().memory_info().rss,
            "live": live_bytes(),
            "arrays": sum(array.nbytes for array in jax.live_arrays()),
            "programs": len(engine_of(session).runner.programs.manifest()),
            "host": host.bytes if host is not None else 0,
            "grammars": grammars.kept_bytes,
        }), flush=True)
"""


class Account(NamedTuple):
    """What a server has, in bytes."""

    resident: int
    live: int  # allocated
    arrays: int  # of the device, as large as they can become resident
    programs: int  # their number
    host: int  # pages in host memory
    grammars: int  # about, of those that are kept

    def __str__(self) -> str:
        sizes = {name: value for name, value in self._asdict().items() if name != "programs"}
        return f"{self.programs} programs, " + ", ".join(f"{name} {size >> 20} MiB" for name, size in sizes.items())


class Attacked:
    """A server in a process of its own."""

    def __init__(self, port: int, commands: IO[str], answers: IO[str]) -> None:
        self.port, self._commands, self._answers = port, commands, answers

    def account(self) -> Account:
        """Return what it has, once it is idle."""
        self._commands.write("\n")
        self._commands.flush()
        return Account(**json.loads(self._answers.readline()))


@contextmanager
def served(folder: Path) -> Iterator[Attacked]:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(str(root / part) for part in ("toolkit", "kernels", "tests"))
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder), json.dumps(OPTIONS)],
        env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    with process:
        try:
            yield Attacked(int(process.stdout.readline()), process.stdin, process.stdout)
        finally:
            process.kill()


async def attack(port: int, seed: int, seconds: float) -> Attackers:
    """Let all attacks run at once; meanwhile long prompts fill the pages."""
    attackers, draw = Attackers(port, seed), random.Random(seed)
    until = asyncio.get_running_loop().time() + seconds

    async def fill() -> None:
        prompt = [draw.randrange(10, 2_000) for _ in range(draw.choice((40, 400)))]
        for path, body in (
            ("/v1/completions", {"prompt": prompt, "max_tokens": 2}),
            ("/v1/embeddings", {"input": [prompt]}),
        ):
            attackers.note("fill", await attackers.post(path, json.dumps(body).encode(), patience=20.0))

    async with asyncio.TaskGroup() as group:
        for one in ATTACKS:
            group.create_task(attackers.run(functools.partial(one, attackers), until))
        group.create_task(attackers.run(fill, until))
    return attackers


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 2 + 900)
def test_all_memory_that_an_attack_makes_resident_has_an_owner(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        before = server.account()
        print(f"\nbefore: {before}")
        for seed in range(3):
            counts = asyncio.run(attack(server.port, seed, SECONDS / 3)).counts
            after = server.account()
            print(f"{dict(sorted(counts.items()))}\nafter: {after}")
            owned = after.arrays + (after.programs - before.programs) * PROGRAM + after.host + after.grammars
            rest = after.resident - before.resident - owned
            assert rest < REST, f"{rest >> 20} MiB more are nobody's: {before} … {after}"
            assert after.host <= OPTIONS["host_memory"]
            # Pages are allocated from the beginning.
            grown = after.live - before.live - (after.programs - before.programs) * PROGRAM
            assert grown - after.host - after.grammars < REST, f"{grown >> 20} MiB: {before} … {after}"
