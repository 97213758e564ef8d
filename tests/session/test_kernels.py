"""Sessions in real ipykernels: what a notebook user does, including what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import vocabularies
from helpers.bounds import Within
from helpers.kernels_under_test import Kernel, kernel
from helpers.thorough import by_default

# jupyter_client leaves event loops and their sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SETUP = """
import asyncio, gc, threading, time, anyio, rekindle
from helpers.sessions import fake_session, wait_until_idle, eventually, CONFIG
session = fake_session(step_seconds=0.005, num_pages=2048)
def live():
    return session.stats().live
"""
LONG = "session.generate('a long story', max_tokens=400)"


@pytest.fixture(scope="module")
def running() -> Iterator[Kernel]:
    with kernel() as started:
        started.ok(SETUP)
        yield started


@pytest.fixture
def asyncio_kernel(running: Kernel) -> Kernel:
    running.ok("%autoawait asyncio")
    return running


@pytest.fixture(params=by_default(["asyncio", "trio"]))
def notebook(running: Kernel, request: pytest.FixtureRequest) -> Kernel:
    running.ok(f"%autoawait {request.param}")
    return running


def check_nothing_leaked(notebook: Kernel) -> None:
    notebook.ok("wait_until_idle(session)")


def test_await(notebook: Kernel) -> None:
    assert notebook.ok("print(len((await session.generate('hi', max_tokens=5)).token_ids))") == "5"


def test_a_cell_with_a_scripts_event_loop_says_to_await(running: Kernel) -> None:
    running.ok("%autoawait asyncio")
    cell = running.run("asyncio.run(rekindle.open('tiny'))")
    assert cell.error == "RuntimeError" and "cannot be called from a running event loop" in cell.traceback
    assert "Write `await main()` in the cell, in place of asyncio.run(main())" in cell.text
    assert running.ok("print(1)") == "1"


@pytest.mark.thorough
def test_a_restarted_kernel_finds_its_pages_by_itself(tmp_path: Path) -> None:
    """As a notebook opens a model: without an option that says so."""
    options = f"cache_dir={str(tmp_path)!r}, max_requests=2, max_model_len=1024, quiet=True"
    opening = f"session = await rekindle.open('tiny', {options})"
    ask = "ids = [300 + n % 900 for n in range(541)]\ndone = await session.generate(ids, max_tokens=2)"
    with kernel() as first:
        first.ok(f"import rekindle\n{opening}\n{ask}")
        # The programs that bring pages back are stored, as some seconds later without this.
        first.ok("await session.save('x'); await session.aclose()")
    with kernel() as second:
        second.ok(f"import rekindle\n{opening}")
        assert second.ok("print(session.cache.tree(restored=True).total_pages)") == "0", "nothing was read ahead"
        assert second.ok(f"{ask}\nprint(done.usage.cached_tokens)") == "512"
        assert second.ok("print(session.stats().compilations)") == "0"


def test_stream(notebook: Kernel) -> None:
    code = "async for delta in session.stream('hi', max_tokens=5):\n    print(delta.text, end='')"
    assert notebook.ok(code) == notebook.ok("print(session.generate_sync('hi', max_tokens=5).text)")


def test_fifty_at_once(asyncio_kernel: Kernel) -> None:
    code = "print(len(await asyncio.gather(*(session.generate(f'p{i}', max_tokens=9) for i in range(50)))))"
    assert asyncio_kernel.ok(code) == "50"
    check_nothing_leaked(asyncio_kernel)


def test_fifty_at_once_in_a_task_group(notebook: Kernel) -> None:
    code = """
async with anyio.create_task_group() as group:
    for i in range(50):
        group.start_soon(session.generate, f'p{i}', rekindle.Sampling(max_tokens=9))
print('ended')
"""
    assert notebook.ok(code) == "ended"
    check_nothing_leaked(notebook)


@pytest.mark.parametrize("consume", by_default(["call = {}\nawait call", "call = {}\nasync for delta in call: pass"]))
def test_interrupt_frees_the_cell_and_aborts_that_request(
    notebook: Kernel, consume: str, at_most: Callable[[float], float]
) -> None:
    notebook.ok("other = session.submit('another', max_tokens=400)")
    cell = notebook.run(interruptible(consume.format(LONG)), during=notebook.interrupt_after(0.5))
    assert cell.error in ("KeyboardInterrupt", "CancelledError"), cell
    assert freed_after(notebook) < at_most(0.3)
    assert cell.traceback.count("rekindle") <= 6, cell.traceback
    assert notebook.ok("eventually(lambda: call.done); print(call.status, len(call.token_ids) > 0)") == "aborted True"
    assert notebook.ok("print(other.status)") in ("decode", "finished")
    assert notebook.ok("print(len(other.result_sync().token_ids))") == "400"
    check_nothing_leaked(notebook)


def interruptible(code: str) -> str:
    """The cell with that code, which says that it has started and notes when it was freed."""
    body = code.replace("\n", "\n    ")
    return f"print('started', flush=True)\ntry:\n    {body}\nfinally:\n    freed = time.time()"


def freed_after(notebook: Kernel) -> float:
    """Seconds from the interrupt until the cell's code was out of its await; then IPython formats a traceback."""
    return float(notebook.ok("print(freed)")) - notebook.interrupted


@pytest.mark.thorough
def test_repeated_interrupts_are_harmless(asyncio_kernel: Kernel) -> None:
    for _ in range(3):
        cell = asyncio_kernel.run(interruptible(f"await {LONG}"), during=asyncio_kernel.interrupt_after(0.15, times=3))
        assert cell.status == "error"
        time.sleep(0.4)
    assert asyncio_kernel.ok("print((await session.generate('hi', max_tokens=2)).finish_reason)") == "length"
    check_nothing_leaked(asyncio_kernel)


def test_interrupt_of_a_blocking_call(asyncio_kernel: Kernel, at_most: Callable[[float], float]) -> None:
    cell = asyncio_kernel.run(
        interruptible("session.generate_sync('a', max_tokens=400)"), during=asyncio_kernel.interrupt_after(0.3)
    )
    assert cell.error == "KeyboardInterrupt"
    assert freed_after(asyncio_kernel) < at_most(0.3)
    check_nothing_leaked(asyncio_kernel)


def test_a_long_prompt_leaves_the_kernel_answering(asyncio_kernel: Kernel, tmp_path: Path) -> None:
    """The tokenizers library, before 0.23, printed a vocabulary's holes into the kernel's pipe, and held the GIL."""
    vocabularies.large_file(tmp_path / "large.gguf")
    asyncio_kernel.ok(f"""
import dataclasses
from rekindle._src.text import Tokenizer
from helpers.sessions import session_with
config = dataclasses.replace(CONFIG, max_model_len=4096, max_tokens_per_step=512)
long = session_with(Tokenizer.load({str(tmp_path / "large.gguf")!r}), config, num_pages=2048)
request = asyncio.ensure_future(long.generate("x " * 3000, max_tokens=3))
""")
    assert asyncio_kernel.ok("print(1 + 1)") == "2"
    assert asyncio_kernel.ok("print((await request).usage.prompt_tokens)") == "3001"
    asyncio_kernel.ok("long.close()")


def test_timeout(notebook: Kernel) -> None:
    cell = notebook.run(f"call = {LONG}\nwith anyio.fail_after(0.2):\n    await call")
    assert cell.error == "TimeoutError"
    assert notebook.ok("eventually(lambda: call.done); print(call.status)") == "aborted"
    check_nothing_leaked(notebook)


def test_asyncio_timeout(asyncio_kernel: Kernel) -> None:
    cell = asyncio_kernel.run(f"async with asyncio.timeout(0.2):\n    await {LONG}")
    assert cell.error == "TimeoutError"
    check_nothing_leaked(asyncio_kernel)


def test_break_aborts(notebook: Kernel) -> None:
    notebook.ok("async for delta in session.stream('a', max_tokens=400):\n    break")
    check_nothing_leaked(notebook)
    assert notebook.ok("print(session.stats().steps < 10**9)") == "True"


def test_dropped_handle_aborts(notebook: Kernel) -> None:
    notebook.ok("before = session.stats().steps")
    notebook.ok("handle = session.submit('a', max_tokens=400)\ndel handle")
    notebook.ok("wait_until_idle(session); assert session.stats().steps - before < 400, 'it ran to its end'")


def test_a_call_that_is_never_awaited_says_nothing(asyncio_kernel: Kernel) -> None:
    assert asyncio_kernel.ok("call = session.generate('a'); call = None; gc.collect(); print('quiet')") == "quiet"
    check_nothing_leaked(asyncio_kernel)


def test_a_blocking_cell_does_not_stop_generation(asyncio_kernel: Kernel) -> None:
    asyncio_kernel.ok("handle = session.submit('a', max_tokens=100)")
    assert asyncio_kernel.ok("eventually(lambda: handle.done); print(handle.done)")  # sleeps on the loop == "True"


def test_sync_calls_in_a_cell(notebook: Kernel) -> None:
    assert notebook.ok("print(len(session.generate_sync('a', max_tokens=4).token_ids))") == "4"
    assert notebook.ok("print(sum(1 for _ in session.stream_sync('a', max_tokens=4)))") == "4"


def test_a_session_outlives_its_cell_and_is_paused_in_another(notebook: Kernel) -> None:
    notebook.ok("handle = session.submit('a', max_tokens=3)")
    notebook.ok("await handle")
    out = notebook.ok(
        "async with session.paused():\n    h = session.submit('two', max_tokens=2)\n    print(await session.step())"
    )
    assert "prefill" in out
    assert notebook.ok("print((await h).finish_reason)") == "length"


def test_a_crash_tells_every_waiter_and_the_kernel_opens_another(asyncio_kernel: Kernel) -> None:
    code = """
crashing = fake_session(step_seconds=0.005)
def broken(result):
    raise ZeroDivisionError("a defect")
waiting = [asyncio.create_task(crashing.generate('a', max_tokens=400)) for _ in range(3)]
await asyncio.sleep(0.05)
crashing._engine.scheduler.commit = broken
answers = await asyncio.gather(*waiting, return_exceptions=True)
print([type(answer).__name__ + '/' + type(answer.__cause__).__name__ for answer in answers])
"""
    assert asyncio_kernel.ok(code) == str(["SessionClosed/ZeroDivisionError"] * 3)
    reopened = "again = fake_session(); print(len((await again.generate('a', max_tokens=2)).token_ids))"
    assert asyncio_kernel.ok(reopened) == "2"
    asyncio_kernel.ok("await again.aclose()")


@pytest.mark.thorough
@pytest.mark.parametrize("now", by_default([True, False]))
def test_restart(now: bool, within: Within) -> None:
    with kernel() as notebook:
        notebook.ok(SETUP)
        notebook.ok("handle = session.submit('a', max_tokens=400)")
        with within(30.0):
            notebook.restart(now=now)
        assert notebook.run("session").error == "NameError"
        notebook.ok(SETUP)
        assert notebook.ok("print(len((await session.generate('hi', max_tokens=5)).token_ids))") == "5"


@pytest.mark.thorough
def test_a_list_of_prompts_shows_a_bar_that_goes(notebook: Kernel) -> None:
    cell = notebook.run("many = await session.generate(['a', 'b', 'c'], max_tokens=300, ignore_eos=True)")
    assert cell.status == "ok"
    assert " of 3 prompts" in cell.text
    assert cell.updates[-1] == ""
    assert any("tokens/s" in update for update in cell.updates)
    quick = notebook.run("many = await session.generate(['a', 'b', 'c'], max_tokens=3)")
    assert (quick.text, quick.updates) == ("", ())


@pytest.mark.thorough
def test_a_compilation_inside_a_call_is_shown_in_its_cell(notebook: Kernel) -> None:
    """The session's own thread draws it, while the cell waits."""
    notebook.ok("from rekindle._src.core.activity import ProgramWait\nprograms = ProgramWait(quiet=False)")
    cell = notebook.run("""
def compile():
    with programs.waiting("r2t32"):
        time.sleep(1.5)
threading.Thread(target=compile).start()
await anyio.sleep(2)
""")
    assert "compiling program r2t32" in cell.text
    assert cell.updates[-1] == ""
