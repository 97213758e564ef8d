"""Programs on demand: the one that is being made, whether a step still wants it or not."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle._src.programs.buckets import Bucket, Key, ProgramVariant, StepSize, StepSpan
from rekindle._src.programs.demand import PAYS, STORED_PAYS, Demand, Need, ProgramRequest, StepPrograms
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


def step_programs(*, stored: bool, background: bool = False) -> tuple[StepPrograms, list[Key]]:
    """The programs of steps of which none is ready, apart from those in the list."""
    ready = list[Key]()
    sizes = tuple(Bucket(rows, 0, span=StepSpan.REPEATED) for rows in (2, 8))
    programs: Any = SimpleNamespace(
        ledger=Ledger(sizes, lambda key: False), features=None, flush=lambda: None, made=lambda keys: stored,
        ready=lambda key, *, whole=False: key in ready, config=SimpleNamespace(max_requests=16),
        lattice=SimpleNamespace(repeated=sizes, ahead=()),
    )  # fmt: skip
    return StepPrograms(programs, Demand(programs), background=background), ready


def need(*, repeats: bool) -> Need:
    return Need(ProgramVariant(0), (), late=False, options=False, repeats=repeats)


@pytest.mark.parametrize(("stored", "steps"), [(True, STORED_PAYS), (False, PAYS)])
def test_a_program_that_repeats_steps_is_wanted_once_it_pays(stored: bool, steps: int) -> None:
    """One that is stored is soon loaded; another is compiled only where a session goes on for long."""
    programs, ready = step_programs(stored=stored)
    needs, size = frozenset({need(repeats=True)}), StepSize(3)
    wanted = ProgramRequest(Bucket(8, 0, span=StepSpan.REPEATED))
    for _ in range(steps - 1):
        assert programs.repeats(needs, size) == (False, ())
    assert programs.repeats(needs, size) == (False, (wanted,))
    ready.append(wanted.key)
    assert programs.repeats(needs, size) == (True, ())
    assert programs.repeats(needs | {need(repeats=False)}, size) == (False, ())
    assert programs.repeats(needs, StepSize(9)) == (False, ()), "there is none of so many rows"


def test_where_all_programs_are_made_ahead_none_that_repeats_steps_is_demanded() -> None:
    programs, _ = step_programs(stored=True, background=True)
    needs = frozenset({need(repeats=True)})
    assert {programs.repeats(needs, StepSize(1)) for _ in range(PAYS + 1)} == {(False, ())}
