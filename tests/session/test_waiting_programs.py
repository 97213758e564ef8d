"""A request whose program is not compiled yet waits for it; streams that run in the meantime do not (float32).

The compiler stands still until the test lets it go on, so that nothing depends on how long compiling takes: the
neighbour's text is complete before the program is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import rekindle
from helpers.adapters import write
from helpers.small import CONTEXT, MODEL, opening, plain, prompt
from helpers.thorough import anyio_backend, by_default  # noqa: F401  the fixture
from rekindle._src.dispatch import host
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.programs import Programs
from rekindle.errors import CompileError, RequestAborted, SessionClosed, StepFailed

pytestmark = pytest.mark.usefixtures("large_steps")
NEW = CONTEXT - 4  # tokens of the neighbour
TEXT, OTHER = prompt(2, 4), prompt(3, 4)
WHOLE = {"logprobs": 40}  # has a program of its own


class Compiler:
    """Stands still before programs that are not for plain steps until it is released; fails if it is told to."""

    def __init__(self, get: Callable[..., Any]) -> None:
        self._get = get
        self.holds, self.fails = False, False
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, programs: Programs, key: Any) -> Any:
        plain_step = isinstance(key, Bucket) and not key.variants and not key.span
        if self.holds and not plain_step and not programs.ready(key):
            self.reached.set()
            assert self.released.wait(60), "the test never released the compiler"
            if self.fails:
                raise CompileError(f"program {key.name} was told to fail")
        return self._get(programs, key)

    async def arrived(self) -> None:
        """Wait until it stands still."""
        assert await anyio.to_thread.run_sync(self.reached.wait, 60), "nothing was compiled"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    own = Compiler(Programs.get)
    monkeypatch.setattr(Programs, "get", lambda *args: own(*args))
    yield own
    own.released.set()


def session(**changes: Any) -> Any:
    """A session of whose programs those of plain steps may be in the run's cache."""
    return opening(**{"precompile": "lazy"} | changes)


async def streaming(opened: rekindle.Session) -> rekindle.Handle:
    """A stream that has begun, in a session that has its plain programs."""
    await opened.generate([TEXT, OTHER], max_tokens=2, ignore_eos=True)
    handle = opened.submit(TEXT, max_tokens=NEW, ignore_eos=True)
    async for _ in handle:
        break
    return handle


@pytest.mark.anyio
@pytest.mark.parametrize("precompile", by_default(["lazy", "background"]))
async def test_the_neighbour_goes_on(precompile: str, compiler: Compiler) -> None:
    async with session(precompile=precompile) as opened:
        stream = await streaming(opened)
        compiler.holds = True
        other = opened.submit(OTHER, max_tokens=1, ignore_eos=True, **WHOLE)
        await compiler.arrived()
        assert (await stream).token_ids == plain(TEXT, NEW)
        assert not other.done
        assert "which is being compiled" in opened.explain(other).text
        # One that needs none of this begins, and ends, meanwhile.
        assert (await opened.generate(prompt(4, 5), max_tokens=3, ignore_eos=True)).token_ids == plain(prompt(4, 5), 3)
        compiler.released.set()
        done = await other
        assert done.token_ids == plain(OTHER, 1)
        assert done.logprobs is not None and len(done.logprobs[0].top_ids) == 40
        assert 0.0 < done.timings.compiling <= done.timings.total
        assert (await stream).timings.compiling < done.timings.compiling
        opened.check_integrity()


VARIANTS: dict[str, dict[str, Any]] = {
    "prompt scores": {"prompt_logprobs": 1},
    "guide": {"allowed_token_ids": list(range(3, 40))},
    "captures": {"capture": {"residual": [0]}},
    "inner captures": {"capture": {"mlp": [0]}},
    "steering": {"steer": [rekindle.Steer(layer=0, vector=np.ones(MODEL.config.hidden_size, np.float32), scale=0.1)]},
    "lens": {"capture": {"logits": [0]}},
    "penalties": {"repetition_penalty": 1.1},
    "adapter": {"adapter": "own"},
}


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("name", by_default(VARIANTS))
async def test_so_it_does_beside_every_variant(name: str, compiler: Compiler, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if name == "adapter":
        more = {"adapters": {"own": str(write(tmp_path / "own", MODEL.config))}, "max_adapters": 2}
    async with session(**more) as opened:
        stream = await streaming(opened)
        compiler.holds = True
        other = opened.submit(OTHER, max_tokens=1, ignore_eos=True, **VARIANTS[name])
        await compiler.arrived()
        assert (await stream).token_ids == plain(TEXT, NEW)
        assert not other.done
        compiler.released.set()
        assert len((await other).token_ids) == 1


@pytest.mark.anyio
async def test_cancelled_while_it_waits(compiler: Compiler) -> None:
    async with session() as opened:
        stream = await streaming(opened)
        compiler.holds = True
        other = opened.submit(OTHER, max_tokens=1, **WHOLE)
        await compiler.arrived()
        other.cancel()
        with pytest.raises(RequestAborted):
            await other
        assert (await stream).token_ids == plain(TEXT, NEW)
        opened.check_integrity()
        compiler.fails = True
        compiler.released.set()


@pytest.mark.anyio
async def test_a_program_that_does_not_compile_fails_its_request_alone(compiler: Compiler) -> None:
    async with session() as opened:
        stream = await streaming(opened)
        compiler.holds = compiler.fails = True
        other = opened.submit(OTHER, max_tokens=1, **WHOLE)
        await compiler.arrived()
        compiler.released.set()
        with pytest.raises(StepFailed, match="was told to fail") as caught:
            await other
        assert isinstance(caught.value.__cause__, CompileError)
        assert (await stream).token_ids == plain(TEXT, NEW)
        opened.check_integrity()


@pytest.mark.anyio
async def test_closed_while_it_waits(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CLOSE_SECONDS", 0.2)  # for which it waits for the compiler, twice
    opened = await session()
    await streaming(opened)
    compiler.holds = compiler.fails = True
    other = opened.submit(OTHER, max_tokens=1, **WHOLE)
    await compiler.arrived()
    await opened.aclose()
    with pytest.raises((RequestAborted, SessionClosed)):
        await other


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_single_step_waits_for_its_program(compiler: Compiler) -> None:
    """Whoever steps by hand sees the same rows each time."""
    async with session() as opened:
        await streaming(opened)
        async with opened.paused():
            compiler.holds = compiler.fails = True
            compiler.released.set()
            other = opened.submit(OTHER, max_tokens=1, **WHOLE)

            async def steps() -> None:
                for _ in range(3):  # the first may be over before the request is there
                    await opened.step()

            with pytest.raises(CompileError, match="was told to fail"):
                await steps()
        with pytest.raises(StepFailed, match="was told to fail"):
            await other
