"""What a first text compiles is written when it is there, and always before anything relies on it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.driving import tiny_config, tiny_model
from helpers.fakes import DictStore
from helpers.thorough import by_default
from rekindle._src.programs import store as program_store
from rekindle._src.programs.buckets import ADMIT, Bucket
from rekindle._src.programs.ledger import Form
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.store import LateStore

MODEL = tiny_model()


class Recorded(DictStore):
    def __init__(self) -> None:
        super().__init__()
        self.writers: list[str] = []

    def save(self, name: str, compiled: object, compile_seconds: float) -> bool:
        self.writers.append(threading.current_thread().name)
        self.kept[name] = compiled
        return True


def test_it_writes_at_once_unless_it_is_late() -> None:
    kept = Recorded()
    store = LateStore(kept)
    assert store.save("a", 1, 0.0) and kept.kept == {"a": 1}
    store.late = True
    assert store.save("b", 2, 0.0) and "b" not in kept.kept
    store.flush()
    assert kept.kept == {"a": 1, "b": 2}


def test_what_nothing_flushes_is_written_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_store, "DELAY", 0.05)
    kept = Recorded()
    store = LateStore(kept)
    store.late = True
    for round_ in range(2):  # each time with a thread of its own
        store.save(f"a{round_}", 1, 0.0)
        store.save(f"b{round_}", 2, 0.0)
        deadline = time.monotonic() + 60
        while len(kept.kept) < 2 * (round_ + 1) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [*kept.kept][-2:] == [f"a{round_}", f"b{round_}"]
    assert {*kept.writers} == {"rekindle store"}


def test_flush_returns_when_what_a_thread_writes_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_store, "DELAY", 0.0)
    began, go = threading.Event(), threading.Event()

    class Slow(Recorded):
        def save(self, name: str, compiled: object, compile_seconds: float) -> bool:
            began.set()
            go.wait(60)
            return super().save(name, compiled, compile_seconds)

    kept = Slow()
    store = LateStore(kept)
    store.late = True
    store.save("a", 1, 0.0)
    assert began.wait(60)
    flushing = threading.Thread(target=store.flush)
    flushing.start()
    flushing.join(0.1)
    assert flushing.is_alive() and not kept.kept
    go.set()
    flushing.join(60)
    assert not flushing.is_alive() and kept.kept == {"a": 1}


@pytest.mark.parametrize("end", by_default(["whole", "close", "flush"], 2))
def test_programs_write_late_while_they_are_made_of_parts(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_store, "DELAY", 600)
    kept = DictStore()
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config(), store=kept)
    programs.settle_for(Form.PARTS)
    programs.get(Bucket(2, 0))
    assert not kept.kept
    match end:
        case "close":
            programs.close()
        case "flush":
            programs.flush()
        case "whole":
            programs.replace_parts(lambda: True)
            assert len(kept.kept) == 3, "written after the last whole program"
            programs.get(ADMIT)
            assert "admit" not in kept.kept, "a step waits for this program, and not for the store"
            programs.flush()
            del kept.kept["admit"]
    assert len(kept.kept) == 3
    assert programs.counts.compilations == 3 + (end == "whole")


def test_nothing_is_written_while_more_programs_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one begins the delay anew, up to a limit: writing takes processor time that steps and compilers want."""
    monkeypatch.setattr(program_store, "DELAY", 600)
    monkeypatch.setattr(program_store, "LONGEST", 1.0)
    kept = Recorded()
    store = LateStore(kept)
    store.late = True
    store.save("a", 1, 0.0)
    store.save("b", 2, 0.0)
    assert not kept.kept
    deadline = time.monotonic() + 60
    while len(kept.kept) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [*kept.kept] == ["a", "b"]


@pytest.mark.slow
def test_a_process_that_ends_at_once_has_written(tmp_path: Path) -> None:
    """Without closing its session: the end of the interpreter writes what waits."""
    program = """if True:
        import sys, rekindle
        from rekindle._src.programs import layered, warming

        layered.MANY_LAYERS, layered.ALIKE, warming.seconds_of_parts = 1, 1, lambda *_: 60
        session = rekindle.open_sync("tiny", cache_dir=sys.argv[1], quiet=True, max_model_len=64, precompile="lazy")
        session.generate_sync([3, 4, 5], max_tokens=1, ignore_eos=True)
    """
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=300)
    names = [path.read_text() for path in (tmp_path / "programs").glob("*/rekindle/meta.json")]
    assert any('"r2t32 parts layer 0"' in name for name in names) and any('"memory"' in name for name in names)
