"""Sessions over fakes for the tests of this folder; each has to be whole again afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.sessions import opened
from rekindle import Session


@pytest.fixture
def session() -> Iterator[Session]:
    with opened() as made:
        yield made


@pytest.fixture
def slow() -> Iterator[Session]:
    """Ten milliseconds a step, so that things can happen in between."""
    with opened(step_seconds=0.01) as made:
        yield made
