"""Programs without native kernels serve while those are compiled, and are replaced between two steps."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from helpers.dict_store import DictStore
from helpers.driving import TINY, tiny_config
from helpers.small import opening, plain, prompt
from rekindle._src.models.base import abstract_model
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs import warming
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.helpers import ADMIT
from rekindle._src.programs.keys import Key
from rekindle._src.programs.layered import Layered
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.warming import Warming
from rekindle.errors import CompileError
from rekindle_kernels import unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason("cpu") is not None, reason="no native kernels here")
CONFIG = config_from_hf(TINY)
GRAPH, LEAVES = abstract_model(CONFIG)
ONE, TWO = Bucket(1, 0), Bucket(2, 0)


def programs_of(store: DictStore | None = None) -> Programs:
    return Programs(CONFIG, GRAPH, LEAVES, tiny_config(), store=store)


def native(program: Any) -> bool:
    return 'custom_call_target="rekindle_' in program.as_text()


def test_kernels_take_over_and_each_kind_is_stored_under_a_name_of_its_own() -> None:
    store = DictStore()
    programs = programs_of(store)
    programs.begin_plain()
    assert ONE not in programs.lattice and TWO in programs.lattice, "XLA is slow at a single row"
    provisional = programs.get(TWO)
    programs.get(ADMIT)
    assert not native(provisional)
    parts = ["r2t0 plain greedy closing", "r2t0 plain layer 0", "r2t0 plain opening"]
    assert sorted(store.kept) == ["admit", *parts]
    programs.end_plain()
    assert native(programs.get(TWO)) and native(programs.get(ONE)), "one row is ready before it is chosen"
    assert ONE in programs.lattice
    assert sorted(store.kept) == ["admit", "r1t0", "r2t0", *parts]
    assert [record.name for record in programs.manifest()] == ["r1t0", "r2t0", "admit"]
    assert provisional in programs._replaced, "a step may still run in it"
    again = programs_of(store)
    again.begin_plain()
    assert not native(again.get(TWO))
    again.end_plain()
    assert native(again.get(TWO)) and again.compilations == 0


@pytest.mark.parametrize("mode", ["lazy", "background"])
def test_a_process_that_ended_too_early_leaves_programs_to_begin_with(mode: str) -> None:
    """The kernels are there by now, and programs that call them are not stored yet."""
    store = DictStore()
    short_lived = programs_of(store)
    short_lived.begin_plain()
    for key in (Bucket(2, 32), TWO):
        short_lived.get(key)
    programs = programs_of(store)
    seen: list[str] = []
    store.load = lambda name: seen.append(name) or DictStore.load(store, name)  # type: ignore[method-assign]
    warming = Warming(programs, mode)
    warming._thread.join()
    asked = [name for name in seen if name.endswith("opening")]
    assert asked == ["r2t32 plain opening", "r2t0 plain opening"]
    assert {"r2t32", "r1t0"} <= {*store.kept}
    assert native(programs.get(ONE)) and not programs._provisional and programs.lattice == programs._lattice


def test_a_session_that_is_open_at_once_begins_with_what_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the program of its prompt; it would have waited for whole ones, since its thread came too late."""
    load = Warming._load

    def late(self: Warming, *arguments: Any) -> bool:
        assert self._opened.wait(60)
        return load(self, *arguments)

    monkeypatch.setattr(Warming, "_load", late)
    monkeypatch.setattr(warming, "SETTLING", 60.0)
    store = DictStore()
    short_lived = programs_of(store)
    short_lived.begin_plain()
    short_lived.get(Bucket(2, 32))
    programs = programs_of(store)
    going = Warming(programs, "lazy")
    going.opened()
    assert not native(programs.get(Bucket(2, 32))) and not native(programs.get(TWO))
    assert not {"r2t32", "r2t0", "r1t0"} & {*store.kept}
    going.stop(60)
    assert {"r2t32", "r2t0", "r1t0"} & {*store.kept} == {"r1t0"}, "the next process has one more"


def test_steps_of_one_row_go_on_in_the_larger_program_until_theirs_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store = DictStore()
    short_lived = programs_of(store)
    short_lived.begin_plain()
    short_lived.get(Bucket(2, 32))
    short_lived.end_plain()
    short_lived.get(TWO)
    compiled: list[tuple[str, bool]] = []
    compile_one = Programs.compile

    def seen(self: Programs, key: Key) -> Any:
        compiled.append((key.name, ONE in self.lattice))
        return compile_one(self, key)

    monkeypatch.setattr(Programs, "compile", seen)
    programs = programs_of(store)
    going = Warming(programs, "lazy")
    going._thread.join()
    assert native(programs.get(TWO)) and ONE in programs.lattice
    assert compiled == [("r1t0", False)]


def test_one_that_is_being_made_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = programs_of()
    begun, go = threading.Event(), threading.Event()
    make_one = Layered.make

    def slowly(self: Layered, key: Bucket) -> Any:
        begun.set()
        assert go.wait(60)
        return make_one(self, key)

    monkeypatch.setattr(Layered, "make", slowly)
    programs.begin_plain()
    making = threading.Thread(target=programs.get, args=[TWO])
    making.start()
    assert begun.wait(60)
    replacing = threading.Thread(target=programs.end_plain)
    replacing.start()
    go.set()
    making.join()
    replacing.join()
    assert native(programs.get(TWO)) and ONE in programs.lattice


def test_one_whose_successor_does_not_compile_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    programs = programs_of()
    programs.begin_plain()
    provisional = programs.get(TWO)

    def fail(self: Programs, key: Key) -> Any:
        raise CompileError("no")

    monkeypatch.setattr(Programs, "compile", fail)
    with caplog.at_level(logging.WARNING, "rekindle.engine"):
        programs.end_plain()
    assert "r2t0 goes on without native kernels: no" in caplog.text
    assert programs.get(TWO) is provisional and ONE not in programs.lattice


@pytest.mark.anyio
async def test_a_text_goes_on_where_it_was_when_its_program_is_replaced() -> None:
    """Float32 tokens are the plain loop's, before and after, alone and in a batch."""
    async with opening(precompile="lazy", cache_dir=None, disk_memory=0) as session:
        programs: Any = session._engine.runner.programs  # type: ignore[attr-defined]
        programs.begin_plain()
        handles = [session.submit(prompt(seed, 9), max_tokens=40, ignore_eos=True) for seed in range(3)]
        replacing = None
        async for _ in handles[0]:
            if replacing is None:
                replacing = threading.Thread(target=programs.end_plain)
                replacing.start()
        assert replacing is not None
        replacing.join()
        for seed, handle in enumerate(handles):
            assert (await handle).token_ids == plain(prompt(seed, 9), 40)
        assert (await session.generate(prompt(5, 9), max_tokens=40)).token_ids == plain(prompt(5, 9), 40)
        assert not programs._provisional
        session.check_integrity()
