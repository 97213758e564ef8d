"""The end of a process with a session in it: forked children, interpreters that exit, devices that hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from pathlib import Path

import pytest

from helpers.sessions import opened
from rekindle.errors import SessionForked

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_is_told() -> None:
    with opened() as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # os.fork() in a process with threads, which is the point
        handle = session.submit("x", max_tokens=3)
        handle.result_sync()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for use in (lambda: session.generate("x"), session.stats, lambda: session.submit("x")):
                    try:
                        use()
                    except SessionForked:
                        code = 0
                    else:
                        code = 2
                        break
                session.close()
                handle.cancel()
            finally:
                os._exit(code)
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended[0] != pid:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the child hangs")
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        assert session.generate_sync("x", max_tokens=1).text, "the parent's session was harmed"


def run_script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels", "tests"))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("parent", ["open", pytest.param("closed", marks=pytest.mark.slow)])
def test_opening_in_a_forked_child_is_refused_at_once(parent: str) -> None:
    done = run_script(
        """
        import os, sys, time, warnings
        import anyio
        import rekindle
        warnings.simplefilter("ignore")  # os.fork() in a process with threads, which is the point
        async def awaited(opening):
            return await opening
        options = dict(cache_dir=sys.argv[2], precompile="lazy", quiet=True)
        earlier = rekindle.open("tiny", **options)
        session = rekindle.open_sync("tiny", **options)
        if sys.argv[1] == "closed":
            session.close()
        pid = os.fork()
        if pid == 0:
            for use in (
                lambda: rekindle.open_sync("tiny"),
                lambda: rekindle.open("tiny"),
                lambda: anyio.run(awaited, earlier),
                lambda: anyio.run(awaited, earlier, backend="trio"),
            ):
                start = time.perf_counter()
                try:
                    use()
                except rekindle.SessionForked as error:
                    print(f"{time.perf_counter() - start:.3f} {error}", flush=True)
            os._exit(0)
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended[0] != pid:
            os.kill(pid, 9)
            sys.exit("the child hangs")
        if sys.argv[1] == "open":
            print("parent", session.generate_sync([5, 6], max_tokens=1, ignore_eos=True).usage.completion_tokens)
        """,
        parent,
        tempfile.mkdtemp(),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    refused = [line for line in lines if "spawn" in line]
    assert len(refused) == 4, done.stdout + done.stderr
    assert all(float(line.split()[0]) < 2.0 for line in refused)
    assert (lines[-1] == "parent 1") == (parent == "open")


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("", id="falls off"),
        pytest.param("raise SystemExit(0)", id="exits", marks=pytest.mark.slow),
        pytest.param("del session", id="drops", marks=pytest.mark.slow),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", id="interrupted", marks=pytest.mark.thorough
        ),
    ],
)
def test_leaving_the_interpreter_with_work_in_flight(ending: str) -> None:
    done = run_script(
        f"""
        import os, signal, sys, time
        from helpers.sessions import fake_session
        session = fake_session(step_seconds=0.05)
        handles = [session.submit("x", max_tokens=400) for _ in range(4)]
        time.sleep(0.2)
        import atexit
        start = time.perf_counter()
        atexit.register(lambda: print(f"{{time.perf_counter() - start:.2f}}"))
        {ending}
        """
    )
    assert done.returncode in (0, -2, 130, 1), done.stderr
    assert "Fatal" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    if "SIGINT" not in ending:
        assert done.stderr == ""


@pytest.mark.thorough
def test_leaving_while_pages_are_saved_waits_for_them() -> None:
    """Python ends threads that are not waited for wherever they are: inside XLA that aborted the process."""
    done = run_script(
        """
        import sys, threading, time
        import rekindle
        from rekindle._src.kvcache.writer import CacheWriter
        saving, keep = threading.Event(), CacheWriter._keep
        def slow(writer, *arguments, **options):
            saving.set()
            time.sleep(0.5)
            keep(writer, *arguments, **options)
            print("saved")
        CacheWriter._keep = slow
        session = rekindle.open_sync("tiny", cache_dir=sys.argv[1], precompile="lazy", quiet=True)
        session.generate_sync(list(range(5, 150)), max_tokens=1)
        saving.wait(20)
        """,
        tempfile.mkdtemp(),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["saved"]


@pytest.mark.thorough
def test_exit_is_bounded_when_the_device_hangs() -> None:
    start = time.perf_counter()
    done = run_script(
        """
        import threading, time
        from helpers.sessions import fake_session
        session = fake_session(gate=threading.Event())
        handle = session.submit("x", max_tokens=400)
        time.sleep(0.2)
        print(time.perf_counter())
        import atexit
        atexit._run_exitfuncs()
        print(time.perf_counter())
        """
    )
    first, second = map(float, done.stdout.split())
    assert second - first < 3.0
    assert time.perf_counter() - start < 60
