"""Each way that a cached page can take to a request, made on purpose and checked in place: the plain loop's tokens.

What a killed process leaves is in test_session_cache.py and test_killed.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.tiered import ask, opened, prompt
from rekindle._src.session.session import Session

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def session(programs: Path) -> Iterator[Session]:
    """Prompt 0 was computed and saved, and is on the device."""
    with opened(programs) as session:
        session.cache.clear(tier="disk").result_sync()
        ask(session, 0)
        session.save("mine").result_sync()
        yield session
        session.check_integrity()


def places(session: Session, index: int = 0) -> tuple[int, int, int]:
    """Tokens of a prompt on the device, in host memory and on disk."""
    there = session.cache.explain(prompt(index))
    return there.device_tokens, there.host_tokens, there.disk_tokens


def leave(session: Session, *tiers: str) -> None:
    for tier in tiers:
        session.cache.clear(tier=tier).result_sync()


def test_a_device_hit_is_exact(session: Session) -> None:
    assert places(session) == (64, 0, 0)
    assert ask(session, 0) == 64


def test_a_host_hit_is_exact(session: Session, tmp_path: Path) -> None:
    session.cache.export_prefix(prompt(0), tmp_path / "prefix").result_sync()
    leave(session, "device", "disk")
    session.cache.import_prefix(tmp_path / "prefix").result_sync()
    assert places(session) == (0, 64, 0)
    assert ask(session, 0) == 64
    assert session.stats().cache.host_hit_pages == 8
    assert places(session) == (64, 0, 0)


def test_a_disk_hit_is_exact(session: Session) -> None:
    leave(session, "device", "host")
    assert places(session) == (0, 0, 64)
    assert ask(session, 0) == 64
    assert session.cache.stats().disk_hit_tokens == 64
    assert places(session) == (64, 0, 0)


def test_a_hit_on_all_three_tiers_at_once_is_exact(session: Session) -> None:
    leave(session, "device", "host")
    session.generate_sync(list(prompt(0)[:39]), max_tokens=1)  # four pages from disk
    leave(session, "device")
    session.generate_sync(list(prompt(0)[:20]), max_tokens=1)  # two of them from host memory
    assert places(session) == (16, 16, 32)
    assert ask(session, 0) == 64


def test_a_hit_beside_prompts_that_hit_other_tiers_is_exact(session: Session) -> None:
    for index in (1, 2):
        ask(session, index)
    session.save("mine").result_sync()
    leave(session, "device", "host")
    ask(session, 1)
    assert places(session, 1) == (64, 0, 0)
    assert places(session, 2) == (32, 0, 32)
    handles = [session.submit(list(prompt(index)), max_tokens=1) for index in (2, 1, 0)]
    cached = [handle.result_sync().usage.cached_tokens for handle in handles]
    assert cached == [64, 64, 64]
    assert [ask(session, index) for index in (0, 1, 2)] == [64] * 3


def test_a_partially_evicted_prefix_is_exact(programs: Path) -> None:
    with opened(programs, host_memory=0, disk_memory=0) as session:
        ask(session, 0)
        index = 0
        while (left := sum(places(session))) == 64:
            index += 1
            ask(session, index)
        assert 0 < left < 64
        assert ask(session, 0) == left
        session.check_integrity()


def test_a_prefix_of_which_host_memory_kept_a_part_is_exact(programs: Path) -> None:
    with opened(programs, disk_memory=0) as session:
        ask(session, 0)
        for index in (1, 2, 3):
            ask(session, index)  # own pages leave for host memory
        device, host, _ = places(session)
        assert device == 32 and host == 32
        size = session.cache.stats().page_bytes
        leave(session, "device")  # what both tiers had is in one now
        session.cache.prune(to=2 * size)
        left = sum(places(session))
        assert left < 64
        assert ask(session, 0) == left
        session.check_integrity()
