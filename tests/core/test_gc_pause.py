"""Keeping the search for garbage off: by several threads, nested, through errors, and where it was off before."""

from __future__ import annotations

import gc
import threading

import pytest

from rekindle._src.core import gc_pause
from rekindle._src.core.gc_pause import gc_paused


@pytest.fixture(autouse=True)
def _nothing_is_frozen() -> None:
    """What other modules left is, see `tests/conftest.py`."""
    gc.unfreeze()


def test_it_is_off_until_the_last_thread_is_done() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with gc_paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with gc_paused():
        thread.start()
        assert inside.wait(10)
        with gc_paused():
            assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_an_error_turns_it_on_again() -> None:
    with pytest.raises(ValueError, match="so"), gc_paused():
        raise ValueError("so")
    assert gc.isenabled()


def test_who_turned_it_off_before_finds_it_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("stays", [False, True])
def test_what_stays_is_not_looked_through_next(stays: bool) -> None:
    before = gc.get_threshold()
    gc.set_threshold(1 << 30)
    try:
        with gc_paused(stays=stays):
            made = [[]]
        young = {id(one) for one in gc.get_objects(generation=0)}
    finally:
        gc.set_threshold(*before)
    assert (id(made) in young) is not stays


def test_what_somebody_froze_stays_frozen() -> None:
    kept: list[list[int]] = [[]]
    gc.freeze()
    try:
        with gc_paused(stays=True):
            pass
        assert id(kept) not in map(id, gc.get_objects()), "it is in a generation again"
    finally:
        gc.unfreeze()


def test_in_a_process_of_its_own_what_stays_is_frozen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line froze its imports; those of JAX come later, in another thread."""
    monkeypatch.setattr(gc_pause, "own_process", True)
    gc.freeze()
    try:
        with gc_paused(stays=True):
            made: list[list[int]] = [[]]
        assert id(made) not in map(id, gc.get_objects())
    finally:
        gc.unfreeze()
