"""Pages on their way from disk to host memory: read in runs, and together for all requests that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.stored_pages import IDENTITY, Pair, chain, same
from rekindle._src.kvcache import CostModel, HostTier, Tiers
from rekindle._src.kvcache.tiers.disk import DiskTier, Run


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    """Nine pages of two prompts that share four."""
    disk = DiskTier(tmp_path, 1 << 20, IDENTITY)
    disk.write(chain(0, 6))
    disk.write(branch())
    tiers = Tiers(HostTier(1 << 20), CostModel(IDENTITY.page_size), disk)
    yield tiers
    tiers.close()


def branch() -> list[Pair]:
    return chain(50, 3, after=chain(0, 4)[-1][0].digest)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_fetched_pages_are_as_they_were_written(tiers: Tiers) -> None:
    pairs = chain(0, 6)
    fetch = tiers.fetch([page.digest for page, _ in pairs], 0)
    assert fetch is not None
    until(lambda: fetch.finished)
    assert all(same(tiers.get(page.digest), payload) for page, payload in pairs)
    assert tiers.disk_hits == 6
    assert tiers.costs.rates.load_page is not None


def test_neighbours_on_disk_are_one_read(tiers: Tiers) -> None:
    assert tiers.disk is not None
    wanted = [page.digest for page, _ in [*chain(0, 6), *branch()]]
    assert [len(run.digests) for run in tiers.disk.runs(reversed(wanted))] == [6, 3]
    assert [len(run.digests) for run in tiers.disk.runs(wanted[:2] + wanted[3:5])] == [2, 2]
    assert tiers.disk.runs([b"nowhere"]) == []


def test_what_is_missing_or_damaged_leaves_the_others_alone(tiers: Tiers, tmp_path: Path) -> None:
    pairs = chain(0, 6)
    (file,) = (path for path in (tmp_path / "pages").rglob("pages") if path.stat().st_size == 6 * 76)
    data = bytearray(file.read_bytes())
    data[2 * 76] ^= 1
    file.write_bytes(data[: 5 * 76 + 10])
    fetch = tiers.fetch([b"nowhere", *(page.digest for page, _ in pairs)], 0)
    assert fetch is not None
    until(lambda: fetch.finished)
    there = [page.digest in tiers for page, _ in pairs]
    assert there == [True, True, False, True, True, False]
    assert tiers.disk is not None and tiers.disk.damaged == 2
    assert [page.digest in tiers.disk for page, _ in pairs] == there


def read_after(tiers: Tiers, monkeypatch: pytest.MonkeyPatch, wait: Callable[[], bool]) -> None:
    """Let each read of the disk begin when `wait` has returned."""
    assert tiers.disk is not None
    load_run = tiers.disk.load_run

    def waiting(run: Run, memory: Callable[..., object]) -> object:
        assert wait()
        return load_run(run, memory)  # type: ignore[arg-type]

    monkeypatch.setattr(tiers.disk, "load_run", waiting)


def test_requests_that_wait_at_the_same_time_are_ready_together(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiers.disk is not None
    second_is_queued = threading.Event()
    read_after(tiers, monkeypatch, lambda: second_is_queued.wait(60))
    monkeypatch.setattr("rekindle._src.kvcache.tiers.tiers.TOGETHER_SECONDS", 1e9)
    first = tiers.fetch([page.digest for page, _ in chain(0, 6)], 0)
    second = tiers.fetch([page.digest for page, _ in [*chain(0, 4), *branch()]], 0)
    assert first is not None and second is not None
    assert not first.finished
    second_is_queued.set()
    until(lambda: first.finished)
    assert second.finished
    assert tiers.disk.read == 9, "what both need is read once"


def test_a_slow_disk_lets_nobody_wait_for_the_others(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Semaphore(0)
    read_after(tiers, monkeypatch, lambda: gate.acquire(timeout=60))
    monkeypatch.setattr("rekindle._src.kvcache.tiers.tiers.TOGETHER_SECONDS", 0.0)
    first = tiers.fetch([page.digest for page, _ in chain(0, 6)], 0)
    second = tiers.fetch([page.digest for page, _ in branch()], 0)
    assert first is not None and second is not None
    gate.release()
    until(lambda: first.finished)
    assert not second.finished
    gate.release()
    until(lambda: second.finished)


def test_a_disk_that_hangs_is_waited_for_no_longer_until_it_answers(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    read_after(tiers, monkeypatch, lambda: answers.wait(60))
    monkeypatch.setattr("rekindle._src.kvcache.tiers.tiers.HANG_SECONDS", 0.1)
    first = tiers.fetch([page.digest for page, _ in chain(0, 6)], 0)
    assert first is not None and not first.over
    until(lambda: first.over)
    assert not first.finished
    assert all(tiers.fetch([page.digest for page, _ in branch()], 0) is None for _ in range(3))
    assert len(caplog.records) == 1 and "has not answered" in caplog.text
    answers.set()
    until(lambda: first.finished and not tiers.hangs())
    again = tiers.fetch([page.digest for page, _ in branch()], 0)
    assert again is not None
    until(lambda: again.finished)
    assert all(same(tiers.get(page.digest), payload) for page, payload in [*chain(0, 6), *branch()])


def test_closing_ends_the_threads_whatever_waits(tiers: Tiers) -> None:
    before = set(threading.enumerate())
    for start in range(3):
        tiers.fetch([page.digest for page, _ in chain(start, 3)], 0)
    tiers.read_ahead(page.digest for page, _ in chain(0, 6))
    assert set(threading.enumerate()) - before
    tiers.close()
    until(lambda: set(threading.enumerate()) <= before)


def ahead(tiers: Tiers, pairs: list[Pair]) -> list[bool]:
    tiers.read_ahead(page.digest for page, _ in pairs)
    until(lambda: not tiers._ahead)
    fetch = tiers.fetch([b"nowhere"], 0)  # comes after what is being read
    assert fetch is not None
    until(lambda: fetch.finished)
    return [page.digest in tiers for page, _ in pairs]


def test_pages_are_read_ahead_up_to_the_budget(tiers: Tiers) -> None:
    tiers.host.budget = 4 * 76 + 75
    assert ahead(tiers, chain(0, 6)) == [True] * 4 + [False] * 2
    assert tiers.host.trim(2 * 76) == 2
    assert [page.digest in tiers for page, _ in chain(0, 4)] == [True, True, False, False], "the likeliest stay longest"
    assert tiers.disk_hits == 0
    tiers.get(chain(0, 1)[0][0].digest)
    tiers.get(chain(0, 1)[0][0].digest)
    assert tiers.disk_hits == 1


def test_a_page_taken_at_once_counts_as_read_from_disk(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    put = tiers.host.put

    def put_and_take(digest: bytes, *args: Any, **options: Any) -> None:
        put(digest, *args, **options)
        tiers.get(digest)

    monkeypatch.setattr(tiers.host, "put", put_and_take)
    assert ahead(tiers, chain(0, 6)) == [True] * 6
    assert tiers.disk_hits == 6


def test_what_is_used_stays_longer_than_what_was_read_ahead(tiers: Tiers) -> None:
    used, payload = chain(70, 1)[0]
    tiers.put(used.digest, payload)
    ahead(tiers, chain(0, 6))
    tiers.host.trim(76)
    assert used.digest in tiers


def test_nothing_is_read_ahead_while_requests_run(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr("rekindle._src.kvcache.tiers.tiers.PAUSE_SECONDS", 0.001)

    def busy() -> bool:
        asked.set()
        return True

    tiers.busy = busy
    tiers.read_ahead(page.digest for page, _ in chain(0, 6))
    wanted = branch()[0][0].digest
    fetch = tiers.fetch([wanted], 0)
    assert fetch is not None
    until(lambda: fetch.finished)  # requests are served meanwhile
    asked.clear()
    assert asked.wait(60)
    assert len(tiers.host) == 1 and wanted in tiers
    tiers.busy = lambda: False
    until(lambda: len(tiers.host) == 7)
