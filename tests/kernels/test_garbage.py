"""Keeping the search for garbage off: by several threads, nested, through errors, and where it was off before."""

from __future__ import annotations

import gc
import threading

import pytest

from rekindle_kernels.garbage import no_search


def test_it_is_off_until_the_last_thread_is_done() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with no_search():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with no_search():
        thread.start()
        assert inside.wait(10)
        with no_search():
            assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_an_error_turns_it_on_again() -> None:
    with pytest.raises(ValueError, match="so"), no_search():
        raise ValueError("so")
    assert gc.isenabled()


def test_who_turned_it_off_before_finds_it_off() -> None:
    gc.disable()
    try:
        with no_search():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
