"""Programs on demand: the one that is being made, whether a step still wants it or not."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle._src.programs.buckets import Bucket, Key
from rekindle._src.programs.demand import Demand, ProgramRequest
from rekindle._src.programs.ledger import Ledger

SMALL, LARGE = Bucket(2, 0), Bucket(2, 32)


def test_a_program_in_the_making_is_avoided_by_steps_even_if_none_wants_it_any_more() -> None:
    """A step took it for one that it had to make itself, and all of its rows waited for seconds."""
    begun, on = threading.Event(), threading.Event()
    ledger = Ledger((SMALL, LARGE), lambda key: False)
    made = list[Key]()

    def get(key: Key) -> None:
        begun.set()
        assert on.wait(60)
        made.append(key)

    programs: Any = SimpleNamespace(
        ledger=ledger, get=get, flush=lambda: None, ready=lambda key, *, whole=False: key in made
    )
    demand = Demand(programs)
    demand.want((ProgramRequest(SMALL),))
    assert begun.wait(60)
    demand.want(())  # the row that needed it has left
    assert ledger.soon(SMALL) and not ledger.soon(LARGE)
    thread = demand._thread
    on.set()
    assert thread is not None
    thread.join(60)
    assert made == [SMALL] and not ledger.soon(SMALL)
    demand.stop()


def test_a_program_is_avoided_from_the_moment_that_the_thread_has_chosen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that needed it left just after the choice: until the mark was set, a step took the program as its own."""
    ledger = Ledger((SMALL, LARGE), lambda key: False)
    made, soon = list[Key](), list[bool]()
    programs: Any = SimpleNamespace(
        ledger=ledger, get=made.append, flush=lambda: None, ready=lambda key, *, whole=False: key in made
    )
    demand = Demand(programs)

    class Lock:
        """The thread is held up as soon as it has let go of the lock, and the loop runs."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            if threading.current_thread().name == "rekindle demand" and not soon:
                soon.append(False)  # once
                demand.want(())
                soon[:] = [ledger.soon(SMALL)]

    monkeypatch.setattr(demand, "_lock", Lock())
    demand.want((ProgramRequest(SMALL),))
    if (thread := demand._thread) is not None:
        thread.join(60)
    assert soon == [True] and made == [SMALL] and not ledger.soon(SMALL)
