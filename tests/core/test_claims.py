"""One process makes an entry while others wait for it; one that dies, or takes too long, holds nobody up."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.driving import tiny_config, tiny_model
from rekindle._src.core.claims import Claim, claimed, wanted
from rekindle._src.programs import store
from rekindle._src.programs.buckets import ADMIT
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.store import ExecutableStore, LateStore, ProgramStore

PATIENCE = 240.0  # seconds: whoever waits for a program does not make it, however busy the machine is
HOLDER = """
import sys, time
from pathlib import Path
from rekindle._src.core.claims import claimed
claim = claimed(Path(sys.argv[1]), "x", lambda: False, 1.0)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "programs"


def test_the_second_waits_for_the_first_and_takes_what_it_has_made(folder: Path) -> None:
    entry, began = folder / "x", time.time()
    first = claimed(folder, "x", entry.exists, 60.0)
    assert first is not None and not wanted(folder, began)
    results: list[object] = []
    waiter = threading.Thread(target=lambda: results.append(claimed(folder, "x", entry.exists, 60.0)))
    waiter.start()
    deadline = time.monotonic() + 60
    while not wanted(folder, began - 1) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert waiter.is_alive() and wanted(folder, began - 1)
    entry.mkdir()
    first.release()
    first.release()
    waiter.join(60)
    assert results == [None] and not list(folder.glob("*.making"))
    assert claimed(folder, "x", entry.exists, 60.0) is None, "it was made before this one asked"
    other = claimed(folder, "y", (folder / "y").exists, 60.0)
    assert other is not None
    other.release()


def test_the_claim_of_a_process_that_dies_ends_with_it(folder: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        results: list[Claim | None] = []
        waiter = threading.Thread(target=lambda: results.append(claimed(folder, "x", lambda: False, 600.0)))
        waiter.start()
        waiter.join(0.3)
        waited = waiter.is_alive()
        holder.kill()
    assert waited, "it did not wait for a process that lives"
    waiter.join(60)
    assert results and results[0] is not None and results[0]._file >= 0, "it waits for a process that died"
    results[0].release()


def test_waits_for_a_claim_end_with_patience_or_in_an_unwritable_folder(folder: Path, tmp_path: Path) -> None:
    first = claimed(folder, "x", lambda: False, 60.0)
    late = claimed(folder, "x", lambda: False, 0.0)
    assert first is not None and late is not None and late._file < 0, "it makes its own"
    first.release()
    (tmp_path / "file").write_text("")
    claim = claimed(tmp_path / "file" / "programs", "x", lambda: False, 60.0)
    assert claim is not None and claim._file < 0
    claim.release()


def programs_in(folder: Path) -> Programs:
    model = tiny_model()
    kept = ProgramStore(ExecutableStore(folder), "tiny", "the same model")
    return Programs(model.config, model.graph, model.leaves, tiny_config(), store=kept)


@pytest.mark.parametrize("late", [False, True])
def test_two_sessions_on_a_fresh_cache_compile_a_program_once(
    folder: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that writes its programs late writes them when another waits."""
    monkeypatch.setattr(store, "PATIENCE", PATIENCE)
    both = [programs_in(folder), programs_in(folder)]
    for programs in both:
        programs._store.late = late
    threads = [threading.Thread(target=programs.get, args=(ADMIT,)) for programs in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE / 2)
    try:
        assert not any(thread.is_alive() for thread in threads), "it ran out of patience"
        assert sorted(programs.counts.compilations for programs in both) == [0, 1]
        assert sorted(programs.manifest()[0].origin for programs in both) == ["compiled", "loaded"]
    finally:
        for programs in both:
            programs.close()
    assert not list(folder.glob("*.making"))


PROCESS = """
import sys
from pathlib import Path
from core.test_claims import ADMIT, PATIENCE, programs_in, store
store.PATIENCE = PATIENCE
programs = programs_in(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
keys = (ADMIT, programs.lattice.ahead[0])
for key in keys:
    programs.get(key)
print(*(record.origin for record in programs.manifest() if record.name in {key.name for key in keys}), flush=True)
programs.close()
"""


@pytest.mark.thorough
def test_two_processes_that_start_at_once_compile_each_program_once(folder: Path) -> None:
    """Two notebooks that are opened at once on a new machine share their compilations."""
    command = [sys.executable, "-c", PROCESS, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            )
            for _ in range(2)
        ]
        for process in both:
            stack.callback(process.kill)
        for process in both:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in both:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        origins = [process.communicate(timeout=300)[0].split() for process in both]
    assert [sorted(pair) for pair in zip(*origins, strict=True)] == [["compiled", "loaded"]] * 2, origins


def test_a_program_that_does_not_compile_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, other = programs_in(folder), programs_in(folder)
    monkeypatch.setattr(broken.compiler, "compile", lambda key, traced: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken.get(ADMIT)
    assert not list(folder.glob("*.making"))
    other.get(ADMIT)
    assert other.counts.compilations == 1
    other.close()


def test_a_store_that_was_closed_claims_nothing(folder: Path) -> None:
    late = LateStore(ProgramStore(ExecutableStore(folder), "tiny", "a"))
    assert late.claim("x")
    late.give_up("x")
    late.give_up("x")
    assert late.claim("x")
    late.give_up("x")
