"""The rule of a shelf, without threads or clocks: which model is loaded, woken, put to sleep or unloaded next.

                 ┌──── load ────▶ LOADING ────▶ LOADED ──── sleep ────▶ UNLOADING ────▶ SLEEPING
    UNLOADED ────┤                   ▲            │                                         │
        ▲        └───────────────────┼────────────┼──────────────── wake ───────────────────┘
        └─────────── UNLOADING ◀─────┴── unload ──┘

Models that wait for memory take turns in the order of their first waiting request. A model in use never leaves. While
others wait, an idle one stays for as long as its loading took, up to `LONGEST_STAY`, so that requests which alternate
don't keep the process loading. A busy one takes new requests for `TURN` times as long; later ones wait for its next
turn.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable
from typing import NamedTuple

LONGEST_STAY = 5.0  # seconds that an idle model stays while others wait: a first loading may compile for a minute
TURN = 4.0  # of a model's loading time: for how long it takes new requests while others wait
LONGEST_TURN = 60.0  # seconds


class ModelState(enum.StrEnum):
    """The state of a model on a shelf, by the names of llama.cpp's router."""

    UNLOADED = "unloaded"  # nothing of it is in memory
    LOADING = "loading"  # it is being opened, or woken
    LOADED = "loaded"  # it answers requests
    UNLOADING = "unloading"  # it is being put to sleep, or closed
    SLEEPING = "sleeping"  # programs, vocabulary and host memory's pages stay; weights and pages of the device do not


TAKES_MEMORY = (ModelState.LOADING, ModelState.LOADED, ModelState.UNLOADING)


@dataclasses.dataclass(slots=True)
class ModelRow:
    """A model in the table that the rule reads."""

    name: str
    state: ModelState = ModelState.UNLOADED
    nbytes: int | None = None  # of weights and pages, on the device; None until it was planned
    busy: bool = False  # requests use it
    ended: bool = False  # its session was closed by others, or crashed: it is to be unloaded
    waiting_since: float | None = None  # when the first of the requests came that wait for it
    loaded_at: float = 0.0  # or woken
    used_at: float = 0.0  # when a request last used it
    seconds: float = 0.0  # that the last loading or waking took
    leaves_at: float | None = None  # when it is to be unloaded, once no request uses it
    shut: bool = False  # until then it takes no new requests

    @property
    def stays_until(self) -> float:
        return self.loaded_at + min(self.seconds, LONGEST_STAY)

    @property
    def turn_ends(self) -> float:
        return self.loaded_at + min(TURN * self.seconds, LONGEST_TURN)


class ShelfLimits(NamedTuple):
    """The limits of a shelf. None is no limit."""

    memory: int | None = None  # bytes of weights and pages of all models that are loaded
    max_loaded: int | None = None
    idle_unload: float | None = None  # seconds without a request after which a model is unloaded


class Transition(enum.Enum):
    """A change to one model."""

    PLAN = "plan"  # compute its bytes
    LOAD = "load"
    WAKE = "wake"
    SLEEP = "sleep"
    UNLOAD = "unload"
    REFUSE = "refuse"  # it can never fit


class NextChange(NamedTuple):
    """The next change; without one, the time to look again, or None for after the next event."""

    action: Transition | None = None
    name: str = ""
    at: float | None = None


def next_step(rows: Collection[ModelRow], limits: ShelfLimits, now: float) -> NextChange:
    """Return the next change to make. No other one is being made."""
    ended = next((row for row in rows if row.ended), None)
    if ended is not None:
        return NextChange(Transition.UNLOAD, ended.name)
    steps = [_unload(rows, limits, now)]
    head = head_of_line(rows)
    if steps[0].action is None and head is not None:
        steps.insert(0, _make_room(head, rows, limits, now))
    made = next((step for step in steps if step.action is not None), None)
    return made or NextChange(at=min((step.at for step in steps if step.at is not None), default=None))


def admits(row: ModelRow, rows: Collection[ModelRow], limits: ShelfLimits, now: float) -> bool:
    """True if a new request may use a model at once: it is loaded, and no other model's turn has come."""
    if row.state is not ModelState.LOADED or row.ended or row.shut:
        return False
    if now < row.turn_ends:
        return True
    head = head_of_line(rows)
    return head is None or row.name not in {victim.name for victim in victims(head, rows, limits)}


def head_of_line(rows: Iterable[ModelRow]) -> ModelRow | None:
    """Return the model that has waited longest to be loaded."""
    waiting = [row for row in rows if row.waiting_since is not None and row.state is not ModelState.LOADED]
    return min(waiting, key=lambda row: row.waiting_since or 0.0, default=None)


def victims(head: ModelRow, rows: Collection[ModelRow], limits: ShelfLimits) -> list[ModelRow]:
    """Return the loaded models that have to leave so that `head` fits: idle ones first, the least recently used first;
    then busy ones, the longest loaded first."""
    loaded = [row for row in rows if row.state in TAKES_MEMORY and row is not head]
    idle = sorted((row for row in loaded if not row.busy), key=lambda row: row.used_at)
    busy = sorted((row for row in loaded if row.busy), key=lambda row: row.loaded_at)
    chosen: list[ModelRow] = []
    held, count = sum(row.nbytes or 0 for row in loaded), len(loaded)
    for row in (*idle, *busy):
        if _fits(head, held, count, limits):
            break
        chosen.append(row)
        held, count = held - (row.nbytes or 0), count - 1
    return chosen


def _fits(head: ModelRow, held: int, count: int, limits: ShelfLimits) -> bool:
    few = limits.max_loaded is None or count < limits.max_loaded
    return few and (limits.memory is None or held + (head.nbytes or 0) <= limits.memory)


def _make_room(head: ModelRow, rows: Collection[ModelRow], limits: ShelfLimits, now: float) -> NextChange:
    if head.nbytes is None:
        return NextChange(Transition.PLAN, head.name)
    if limits.memory is not None and head.nbytes > limits.memory:
        return NextChange(Transition.REFUSE, head.name)
    leaving = victims(head, rows, limits)
    if not leaving:
        return NextChange(Transition.WAKE if head.state is ModelState.SLEEPING else Transition.LOAD, head.name)
    ready = [row for row in leaving if not row.busy and row.state is ModelState.LOADED]
    for row in ready:
        if row.stays_until <= now:
            return NextChange(Transition.SLEEP, row.name)
    return NextChange(at=min((row.stays_until for row in ready), default=None))


def _unload(rows: Iterable[ModelRow], limits: ShelfLimits, now: float) -> NextChange:
    """Return the next unloading that is due, or the time of the next one."""
    due: list[float] = []
    for row in rows:
        if row.busy or row.state not in (ModelState.LOADED, ModelState.SLEEPING):
            continue
        times = [] if row.leaves_at is None else [row.leaves_at]
        if limits.idle_unload is not None and row.waiting_since is None:
            times.append(row.used_at + limits.idle_unload)
        if times and min(times) <= now:
            return NextChange(Transition.UNLOAD, row.name)
        due += times
    return NextChange(at=min(due, default=None))
