"""Every way that a cached page can take gives the plain loop's tokens: device, host memory, disk, a mixture."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
import rekindle
from rekindle.reference import generate
from rekindle.session import Session

MODEL = checkpoints.case("llama")
LENGTH, NEW = 70, 6


@functools.cache
def prompt(index: int) -> tuple[int, ...]:
    """Eight pages of 8 tokens, the first four the same in all of them."""
    shared = np.random.default_rng(0).integers(3, 160, 32)
    own = np.random.default_rng(100 + index).integers(3, 160, LENGTH - 32)
    return tuple(int(token) for token in (*shared, *own))


@functools.cache
def plain(index: int) -> tuple[int, ...]:
    return tuple(generate(MODEL, prompt(index), NEW))


def opened(folder: Path, **options: Any) -> Session:
    settings: dict[str, Any] = {
        "dtype": "float32", "page_size": 8, "device_pages": 17, "max_requests": 2, "max_tokens_per_step": 32,
        "max_model_len": 128, "cache_dir": str(folder), "precompile": "lazy",
    }  # fmt: skip
    session = rekindle.open_sync(MODEL, **settings | options)
    session._engine.scheduler.cache.host_tier.costs.mode = "always"
    return session


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def ask(session: Session, index: int) -> int:
    """Generate and compare; how many prompt tokens came from the cache."""
    done = session.generate_sync(list(prompt(index)), max_tokens=NEW, ignore_eos=True)
    assert done.token_ids == plain(index), f"prompt {index}"
    return done.usage.cached_tokens


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
