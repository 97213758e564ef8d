"""Pages of earlier sessions without a restore: what waits is written when a session closes, and notebooks find it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from helpers.sessions import client_of, engine_of, writer_of
from helpers.small import PAGE, opening
from helpers.small import prompt as small_prompt
from helpers.thorough import by_default
from helpers.tiered import ask, opened, prompt
from rekindle import Session
from rekindle._src.core.records import PageMove
from rekindle._src.kvcache import writer
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.kvcache.tiers.tiers import Tiers
from rekindle._src.opening.programs import SessionPrograms
from rekindle._src.programs.programs import Programs
from rekindle.errors import ConfigError

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions are opened as in a kernel, and nothing is saved before they close."""
    monkeypatch.setattr("rekindle._src.opening.cache.in_notebook", lambda: True)


@pytest.fixture(autouse=True)
def at_the_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.CacheWriter, "tick", lambda self: None)


def waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle._src.opening.cache.LOOK_SECONDS", 600.0)


def places(session: Session, index: int, **options: Any) -> tuple[int, int]:
    """Tokens of a prompt in memory and on disk."""
    there = session.cache.explain(prompt(index), **options)
    return there.device_tokens + there.host_tokens, there.disk_tokens


def test_a_script_that_closes_after_its_text_keeps_the_pages(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        ask(session, 0)
    with opened(tmp_path) as session:
        assert places(session, 0) == (0, 0), "no notebook, and nothing to restore"
        ask(session, 1)
    with opened(tmp_path, restore="auto") as session:
        assert [sum(places(session, index)) for index in (0, 1, 2)] == [64, 64, 32]
        assert [ask(session, index) for index in (0, 1)] == [64, 64]
        session.check_integrity()


def test_a_notebook_finds_them_by_itself(tmp_path: Path, notebook: None, monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for(monkeypatch)
    read: list[bytes] = []
    load = DiskTier.load_run
    monkeypatch.setattr(
        DiskTier, "load_run", lambda self, run, memory: read.extend(run.digests) or load(self, run, memory)
    )
    with opened(tmp_path) as session:
        assert ask(session, 0) == 0
        session.generate_sync(list(prompt(1)), max_tokens=2, ignore_eos=True, salt="mine")
    with opened(tmp_path) as session:
        assert session.cache.tree(restored=True).total_pages == 0 and not read, "only an index was read"
        assert (places(session, 0), places(session, 2)) == ((0, 64), (0, 32))
        assert (places(session, 1), places(session, 1, salt="mine")) == ((0, 32), (0, 64)), "salts stay apart"
        assert ask(session, 0) == 64 and len(read) == 8, "the pages are read when a prompt hits them"
        assert ask(session, 2) == 32 and len(read) == 8
        assert session.cache.stats().disk_hit_tokens == 64
        assert ask(session, 3) == 32 and ask(session, 0) == 64
        session.check_integrity()
    with opened(tmp_path, restore="none") as session:
        assert places(session, 0) == (0, 0) and ask(session, 0) == 0
    with pytest.raises(ConfigError, match="neither 'auto' nor 'none'"), opened(tmp_path) as session:
        session.save("none").result_sync()


def test_no_first_text_waits_for_a_program(tmp_path: Path, notebook: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program has to bring pages back and was never stored, a prompt is computed as without them."""
    waited_for(monkeypatch)
    monkeypatch.setattr(SessionPrograms, "fillable", lambda self: False)
    with opened(tmp_path) as session:
        ask(session, 0)
    with opened(tmp_path) as session:
        told = session.cache.explain(prompt(0))
        assert (told.disk_tokens, told.reused_tokens) == (64, 0)
        assert ask(session, 0) == 0
        assert not [one for one in session.programs().programs if one.name.startswith("scatter")]
        session.check_integrity()


@pytest.mark.parametrize("on_one_cpu", [False, True])
def test_pages_are_found_where_no_program_has_to_be_compiled_for_them(
    tmp_path: Path, notebook: None, on_one_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Programs, "moved_by_host", lambda self, keys: on_one_cpu)
    monkeypatch.setattr(Programs, "stored", lambda self, key: False)
    with opened(tmp_path) as session:
        tiers: Any = writer_of(session).tiers
        programs: Programs = tiers.fillable.__self__.all
        assert tiers.fillable() == on_one_cpu
        for key in programs.lattice.fills:
            programs.get(key)
        assert tiers.fillable()


def test_an_index_that_takes_long_holds_no_opening(
    tmp_path: Path, notebook: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as session:
        ask(session, 0)
    answer, scan = threading.Event(), DiskTier.scan
    monkeypatch.setattr(DiskTier, "scan", lambda self: answer.wait(600) and scan(self))
    monkeypatch.setattr("rekindle._src.opening.cache.LOOK_SECONDS", 0.01)
    session = opened(tmp_path)
    try:
        assert places(session, 0) == (0, 0) and ask(session, 0) == 0
        answer.set()
        monkeypatch.setattr(DiskTier, "scan", scan)
        tiers: Any = writer_of(session).tiers
        while not tiers.has_disk_pages:
            time.sleep(0.01)
        session.cache.clear(tier="memory").result_sync()
        assert ask(session, 0) == 64, "later prompts find what is there"
    finally:
        answer.set()
        session.close()


@pytest.mark.parametrize("hangs", ["write", "scan"])
def test_a_disk_that_hangs_holds_a_closing_for_no_longer_than_its_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    answer = threading.Event()
    before: Callable[..., Any] = getattr(DiskTier, hangs)
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(DiskTier, hangs, lambda self, *rest: answer.wait(600) and before(self, *rest))
    session = opened(tmp_path)
    ask(session, 0)
    session.close()  # returns, although the disk does not answer
    assert not answer.is_set()
    answer.set()
    monkeypatch.undo()
    with opened(tmp_path, restore="auto") as session:
        assert ask(session, 0) in (0, 64), "what was written late is whole or absent"
        session.check_integrity()


def test_closing_writes_in_small_parts_until_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = DiskTier.write

    def counted(self: DiskTier, pages: Any) -> int:
        count = write(self, pages)
        written.append(count)
        if len(written) == 2:
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 10)
        return count

    clock = time.monotonic
    monkeypatch.setattr(writer, "LAST_BYTES", 1)  # a page in each part, once its size is known
    monkeypatch.setattr(DiskTier, "write", counted)
    with opened(tmp_path, device_pages=40) as session:
        for index in range(3):
            ask(session, index)
    monkeypatch.setattr(time, "monotonic", clock)
    assert len(written) == 2 and all(count == 1 for count in written), written


def test_a_session_closes_whatever_becomes_of_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: DiskTier, pages: Any) -> int:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(DiskTier, "write", broken)
    session = opened(tmp_path)
    ask(session, 0)
    session.close()
    assert session.closed and "not everything was saved at the end of a session: a defect" in caplog.text


def test_nothing_waits_where_all_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as session:
        assert writer_of(session).finish() is None, "nothing was computed"
        ask(session, 0)
        job = writer_of(session).finish()
        assert job is not None and job.result(600) is None
        assert writer_of(session).finish() is None
    with opened(tmp_path, disk_memory=0) as session:
        ask(session, 0)
        assert writer_of(session).finish() is None


@pytest.mark.parametrize("kv_dtype", by_default(["int8-int4", "int8", "float32", "bfloat16"]))
def test_the_host_moves_pages_as_programs_do(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def pages() -> None:
        async with opening(kv_dtype=kv_dtype, disk_memory="8MiB", precompile="lazy") as session:
            await session.generate(small_prompt(3, 5 * PAGE), max_tokens=4, ignore_eos=True)
            runner: Any = engine_of(session).runner
            numbers, others = [2, 1, 5, 3], [8, 11, 9, 14]
            moves = [PageMove(page, bytes([page])) for page in others]
            store = dict.fromkeys((move.digest for move in moves), ())

            def moved(by_host: bool) -> list[list[Any]]:
                monkeypatch.setattr(Programs, "moved_by_host", lambda self, keys: by_host)
                payloads = runner.read_pages(numbers)
                store.update(zip(store, payloads, strict=True))
                assert not runner.fill(moves)
                return [payloads, runner.read_pages(others)]

            monkeypatch.setattr(
                runner._transfers, "_host_tier", SimpleNamespace(get=store.__getitem__, record_copy=lambda *_: None)
            )
            results = [
                [
                    [np.asarray(leaf) for payload in payloads for leaf in payload]
                    for payloads in await client_of(session).exclusive(partial(moved, by_host), lambda _: None)
                ]
                for by_host in (False, True)
            ]
            (read, filled), (read_by_host, filled_by_host) = results
            for leaves in zip(read, read_by_host, filled, filled_by_host, strict=True):
                assert len({(leaf.shape, leaf.dtype) for leaf in leaves}) == 1
                for leaf in leaves[1:]:
                    np.testing.assert_array_equal(leaf.view(np.uint8), leaves[0].view(np.uint8))
            again = await session.generate(small_prompt(3, 5 * PAGE), max_tokens=4, ignore_eos=True)
            assert again.usage.cached_tokens == 5 * PAGE - 1
            session.check_integrity()

    assert jax.default_backend() == "cpu"
    asyncio.run(pages())


def test_only_sessions_that_find_pages_look_for_them(tmp_path: Path, notebook: None) -> None:
    with opened(tmp_path) as session, opened(tmp_path / "other", restore="auto") as other:
        for one, finds in ((session, True), (other, False)):
            tiers = writer_of(one).tiers
            assert isinstance(tiers, Tiers) and tiers.finds_stored == finds
