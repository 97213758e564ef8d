"""Kernels compiled by other processes: they are there afterwards, and what fails is refused with its reason."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.kernel_state import begin_with, store
from helpers.thorough import by_default
from rekindle_kernels import build_kernels, environment, int4_format, kernels_for
from rekindle_kernels.native import background_build, build, kernel_files, library

pytestmark = pytest.mark.skipif(
    build.unavailable_reason() is not None or not build.can_compile(), reason="nothing compiles kernels here"
)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which nothing is compiled, and whose installation brought nothing."""
    monkeypatch.setenv(library.FOLDER, str(tmp_path / "none"))
    monkeypatch.setenv("REKINDLE_BACKGROUND_BUILD", "1")
    monkeypatch.setattr(kernel_files, "cache_folder", tmp_path)
    begin_with(monkeypatch, ready=set())
    monkeypatch.setattr(background_build, "_latest", None)
    yield
    for one in background_build._all:
        one.wait()


# Compiles once there is a file named `go` in its folder, and not before.
SLOW = background_build._CODE.replace(
    "b.main()",
    "b.build.keep = lambda name: ("
    "any(iter(lambda: b.time.sleep(0.01) or (b.kernel_files.cache_folder / 'go').exists(), True)),"
    " b.build._store(name, b'code')); b.main()",
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that take half a second of waiting: compiling one takes five of a core."""
    keep = "b.build.keep = lambda name: (b.time.sleep(0.5), b.build._store(name, b'code')); b.main()"
    monkeypatch.setattr(background_build, "_CODE", background_build._CODE.replace("b.main()", keep))
    monkeypatch.setattr(build, "keep", lambda name: store(name, b"code"))


@pytest.mark.parametrize("compiled", by_default([False, True]))
def test_kernels_are_there_afterwards_and_sessions_share_the_work(
    compiled: bool, request: pytest.FixtureRequest
) -> None:
    if not compiled:
        request.getfixturevalue("quick")
    names = ["argmax", "norm"]
    first = build_kernels(names)
    assert first is not None and first.running
    assert build_kernels(["norm"]) is first, "another session waits for the same processes"
    assert not first.wait(lambda: True), "who is stopped does not wait"
    assert first.wait() and not first.running
    assert all(build.is_there(name) for name in names)
    assert build_kernels(names) is None
    assert sorted(path.name.split("-")[0] for path in kernel_files.folder().glob("*.o")) == names


@pytest.mark.thorough
def test_a_failure_is_said_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, build.__name__):
        found = build_kernels(["nothing_float32"])
        assert found is not None and found.wait()
    assert "nothing_float32 can't be used" in caplog.text and "unknown kernel 'nothing_float32'" in caplog.text
    assert not build.builds("nothing_float32") and build_kernels(["nothing_float32"]) is None


def test_what_ends_its_process_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    found = build_kernels(["prefill_bfloat16_64"])
    assert found is not None
    found._processes[0][0].send_signal(signal.SIGKILL)
    with caplog.at_level(logging.WARNING, build.__name__):
        assert found.wait()
    assert "ended with status -9" in caplog.text
    assert not build.builds("prefill_bfloat16_64")


@contextlib.contextmanager
def claimed() -> Iterator[None]:
    """Hold the lock of the folder, as the processes of another program would."""
    with background_build._claimed() as claim:
        assert claim, "the lock is free"
        yield


@pytest.mark.thorough
def test_another_program_waits_for_those_at_work_and_compiles_what_they_leave(quick: None) -> None:
    with claimed():
        found = build_kernels(["argmax", "norm"])
        assert found is not None and found.running and build_kernels(["norm"]) is found
        assert not found.wait(lambda: True) and not found._processes
        build.keep("norm")
    assert found.wait() and [names for _, names in found._processes] == [["argmax"]]
    assert build.is_there("argmax")


def test_another_program_starts_nothing_where_nothing_is_left(quick: None) -> None:
    with claimed():
        found = build_kernels(["norm"])
        build.keep("norm")
    assert found is not None and found.wait() and not found._processes


@pytest.mark.thorough
def test_its_processes_keep_others_waiting_until_the_last_one_has_ended(quick: None) -> None:
    found = build_kernels(["argmax", "norm"])
    assert found is not None
    with background_build._claimed() as claim:
        assert claim is None, "although this program has closed its own descriptor"
    assert found.wait()
    with claimed():
        pass


@pytest.mark.thorough
def test_without_locks_each_program_compiles_for_itself(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EBADF, "no lock on a folder")

    monkeypatch.setattr("fcntl.flock", refused)
    found = build_kernels(["norm"])
    assert found is not None and found._processes and found.wait()


@pytest.mark.thorough
def test_a_process_that_hangs_is_ended_and_lets_others_go_on() -> None:
    hanging = "b.LONGEST = 1; b.build.keep = lambda name: b.time.sleep(100); b.main()"
    code = background_build._CODE.format(path=sys.path).replace("b.main()", hanging)
    done = subprocess.run([sys.executable, "-c", code, "norm"], timeout=60, check=False)
    assert done.returncode == -signal.SIGALRM


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "getsid"), reason="a matter of Unix")
def test_its_processes_leave_the_cores_to_the_user_and_the_keyboard_to_the_program(quick: None) -> None:
    found = build_kernels(["norm"])
    assert found is not None
    process = found._processes[0][0]
    assert os.getsid(process.pid) == os.getsid(0), "Linux shares cores among sessions first, whatever their niceness"
    assert os.getpgid(process.pid) != os.getpgid(0), "Ctrl-C is not for them"
    while found.running and os.getpriority(os.PRIO_PROCESS, process.pid) <= os.getpriority(os.PRIO_PROCESS, 0):
        time.sleep(0.01)
    assert found.running, "it became nicer only at its end"
    assert found.wait()


def test_a_program_does_without_what_takes_too_long_and_the_next_one_finds_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background_build, "_CODE", SLOW)
    before = environment()
    with caplog.at_level(logging.WARNING, build.__name__):
        found = build_kernels(["norm"])
        assert found is not None and found.wait(longest=0.0)
    assert found.put_off == ("norm",) and found.running, "it goes on being compiled"
    assert not build.builds("norm") and build_kernels(["norm"]) is None and not caplog.records
    assert environment() != before, "programs without it are others"
    assert kernel_files.cache_folder is not None
    (kernel_files.cache_folder / "go").touch()
    assert found.wait() and not build.builds("norm"), "this process computes in one way until it ends"
    begin_with(monkeypatch)
    assert build.is_there("norm"), "for the next one"


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_BACKGROUND_BUILD", "0")
    assert build_kernels(["norm"]) is None


def test_the_kernels_of_a_model_follow_from_its_dtypes() -> None:
    names = kernels_for(["bfloat16", "bfloat16", "uint32"], "bfloat16", 64)
    assert len(set(names)) == len(names)
    assert {"chain", "matvec_bfloat16", "decode_bfloat16_64", "prefill_bfloat16_64", "write_bfloat16"} <= {*names}
    assert not {"matvec_float32", "gemm_int8", "adaptergate_bfloat16", "adapter_bfloat16"} & {*names}
    adapted = kernels_for(["uint8"], "bfloat16", 64, adapters="bfloat16")
    assert {"adaptergate_bfloat16", "adapter_bfloat16"} <= {*adapted}
    assert not [name for name in kernels_for(["int8"], "int8", 8) if name.startswith(("decode", "write"))]
    scaled = [("uint8", "int8", 32), ("uint8", "int8", 16), ("uint32", "int8", 16), ("uint32", "float32", 32)]
    scaled += [("int16", int4_format.EXPONENTS, 32), ("int16", "float32", 16), ("int8", "float32", 0)]
    grouped = kernels_for(["uint8", "uint32", "int32", "int16", "int8"], "bfloat16", 64, scaled)
    assert sorted(name for name in grouped if name.startswith(("int", "code"))) == [
        "codebook_float8_e8m0fnu", "codebookof16_float32", "int4_int8", "int4of16_int8",
        "int6groups_float32", "int6groups_int8", "int8groups_float16"
    ]  # fmt: skip
