"""Programs on demand: the one that is being made, whether a step still wants it or not."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

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
