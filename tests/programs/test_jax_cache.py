"""Programs that JAX's own compilation cache gives back run, and are not stored again: that would break them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from helpers.driving import tiny_config, tiny_model
from helpers.fakes import DictStore
from helpers.thorough import by_default
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.ledger import Form
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.store import KEPT_THERE

MODEL = tiny_model()
OPTIONS = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture
def _cache(tmp_path: Path) -> Iterator[None]:
    """What a user has who sets `JAX_COMPILATION_CACHE_DIR`, so that every program is kept there."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    for name, value in {**OPTIONS, "jax_compilation_cache_dir": str(tmp_path)}.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("parts", by_default([False, True]), ids=["whole", "parts"])
def test_what_came_from_that_cache_is_not_stored(parts: bool) -> None:
    decode = Bucket(2, 0)

    def made() -> tuple[Programs, DictStore]:
        store = DictStore()
        programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config(), store=store)
        if parts:
            programs.settle_for(Form.PARTS)
        programs.get(decode)
        programs.flush()
        return programs, store

    _, fresh = made()
    assert fresh.kept
    again, cached = made()
    assert again.counts.traces and not cached.kept
    assert parts or again.manifest()[0].why == KEPT_THERE
