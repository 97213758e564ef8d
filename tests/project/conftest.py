"""Tests of this folder parse hundreds of files, and have no circles to be collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def without_the_collector() -> Iterator[None]:
    """Half of the time of parsing all files went into looking through a million nodes again and again."""
    gc.disable()
    yield
    gc.enable()
