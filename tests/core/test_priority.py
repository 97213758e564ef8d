"""Work that runs while other threads serve hands the interpreter's lock over sooner, and leaves Python as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from rekindle._src.core.priority import INTERVAL, handing_over


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_the_interval_is_short_until_the_last_one_leaves() -> None:
    sys.setswitchinterval(0.004)
    first, second = handing_over(), handing_over()
    with first:
        second.__enter__()
        assert sys.getswitchinterval() == pytest.approx(INTERVAL)
    assert sys.getswitchinterval() == pytest.approx(INTERVAL), "one still works"
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_a_shorter_interval_stays() -> None:
    sys.setswitchinterval(1e-5)
    with handing_over():
        assert sys.getswitchinterval() == pytest.approx(1e-5)


def test_an_error_leaves_it_as_it_was() -> None:
    sys.setswitchinterval(0.004)
    with pytest.raises(ValueError, match="inside"), handing_over():
        raise ValueError("inside")
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_an_interval_set_meanwhile_stays() -> None:
    sys.setswitchinterval(0.004)
    with handing_over():
        sys.setswitchinterval(0.02)
    assert sys.getswitchinterval() == pytest.approx(0.02)
