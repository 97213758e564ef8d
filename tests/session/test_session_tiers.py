"""Every way that a cached page can take gives the plain loop's tokens: device, host memory, disk, a mixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tiered import ask, opened


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_pages_that_left_for_host_memory_come_back_exact(programs: Path) -> None:
    with opened(programs) as session:
        assert ask(session, 0) == 0
        assert ask(session, 0) == 64  # from the device
        for index in range(1, 5):
            ask(session, index)  # needs every page of the pool
        statistics = session.stats().cache
        assert statistics.offloaded_pages > 0
        assert ask(session, 0) == 64
        assert session.stats().cache.host_hit_pages > statistics.host_hit_pages
        session.check_integrity()


def test_without_room_in_host_memory_pages_are_computed_again(programs: Path) -> None:
    with opened(programs, host_memory=0) as session:
        for index in (0, 1, 2, 3, 4, 0):
            ask(session, index)
        assert session.stats().cache.host_hit_pages == session.stats().cache.offloaded_pages == 0
        session.check_integrity()


def test_a_small_host_memory_is_never_exceeded_and_stays_exact(programs: Path) -> None:
    with opened(programs, host_memory=6 * 6144) as session:
        tiers = session._engine.scheduler.cache.host_tier
        for index in (0, 1, 2, 3, 0, 4, 1, 2, 0):
            ask(session, index)
            assert tiers.host.statistics().bytes <= 6 * 6144
        assert tiers.host.statistics().dropped > 0
        assert tiers.host.statistics().held == 0
        session.check_integrity()
