"""Memory of the automata that grammars become while texts follow them, within one bound for a session.

llguidance makes the states of a grammar's regexes when a text first needs them. It keeps them as long as the compiled
grammar, for all sequences that follow it, and tells no size. A state takes 0.2 to 11 kB, so counting states bounds
nothing. The report of an error says what is proportional: the work that made them, and the items of a text's rows.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

MOST_BYTES = 256 << 20  # of all automata and rows of a session
MOST_BYTES_A_REQUEST = 4 << 20  # times max_requests, where that is more: real schemas take 0.1 to 2 MB
# Of one grammar, which is not kept for later requests any more. All the states that it may have are more: those of the
# cheapest regexes take 17 units of work each.
LARGE = 16 << 20
# Resident memory grew by 3 to 44 bytes for a unit of work: the dearest have many terminals, or letters that all differ.
_BYTES_OF_WORK, _BYTES_OF_ITEM = 48, 8
PACE, SHARE = 0.02, 10  # seconds of a processor between two measurements, and how many times one's own seconds
_UNDONE = 1 << 30  # tokens that no text has, so a copy that is to take them back reports an error
_REPORTED = re.compile(r'^  "(lexer_cost|all_items)": (\d{1,18}),?$', re.MULTILINE)


class Automaton:
    """The memory of an automaton, or of the rows of one text."""

    __slots__ = ("__weakref__", "due", "nbytes", "problem", "since")

    def __init__(self) -> None:
        self.nbytes = 0
        self.problem = ""  # the reason why texts that follow it fail
        self.since = 0.0  # seconds of a processor since the last measurement
        self.due = PACE


class Automata:
    """The ledger of a session's automata. If all of them take too much, texts of the largest one fail."""

    def __init__(self, most: int, forget: Callable[[Automaton | None], bool]) -> None:
        """Set up; `forget` drops the kept grammar of an automaton, or the least recently used one, if there is one."""
        self.most, self.forget = most, forget
        self._lock = threading.RLock()
        self._all = weakref.WeakSet[Automaton]()

    @property
    def nbytes(self) -> int:
        """The bytes of all automata and rows. One does not count if its texts fail next."""
        with self._lock:
            return sum(automaton.nbytes for automaton in self._all if not automaton.problem)

    def open(self, matcher: Any) -> Automaton:
        """Begin to count the automaton of a compiled grammar."""
        automaton = Automaton()
        self.measure(matcher, automaton, None)
        return automaton

    def measure(self, matcher: Any, automaton: Automaton, rows: Automaton | None) -> None:
        """Measure an automaton, and the rows of the text at which a matcher is."""
        start = time.thread_time()
        work, items = _measured(matcher)
        self._update(automaton, max(automaton.nbytes, _BYTES_OF_WORK * work))
        if rows is not None:
            self._update(rows, _BYTES_OF_ITEM * items)
        seconds = time.thread_time() - start
        for one in (automaton, rows):
            if one is not None:
                one.since, one.due = 0.0, max(PACE, SHARE * seconds)
        self._settle(automaton)

    def _update(self, automaton: Automaton, nbytes: int) -> None:
        with self._lock:
            automaton.nbytes = nbytes
            self._all.add(automaton)

    def _settle(self, automaton: Automaton) -> None:
        """Forget a large automaton; where all take too much, kept ones; then let texts of the largest one fail."""
        if automaton.nbytes > LARGE:
            self.forget(automaton)
        while self.nbytes > self.most and self.forget(None):
            pass
        with self._lock:
            automata = [*self._all]
            if self.nbytes > self.most:
                largest = max((one for one in automata if not one.problem), key=lambda one: one.nbytes)
            elif sum(one.nbytes for one in automata) > 2 * self.most:  # texts that fail next may have to be read first
                largest = automaton
            else:
                return
            largest.problem = (
                f"following it takes about {largest.nbytes >> 20:,} MiB, and the grammars of all running requests may "
                f"take {self.most >> 20:,} MiB. Use shorter repetitions and fewer alternatives in its regexes"
            )
        self.forget(largest)


def _measured(matcher: Any) -> tuple[int, int]:
    """Return the work of a matcher's automaton and the items of its text's rows, from the report of a copy's error."""
    copy = matcher.deep_copy()  # which shares the automaton
    copy.rollback(_UNDONE)
    report: dict[str, int] = {}
    for match in _REPORTED.finditer(copy.get_error()):
        report.setdefault(match[1], int(match[2]))
    return report.get("lexer_cost", 0), report.get("all_items", 0)
