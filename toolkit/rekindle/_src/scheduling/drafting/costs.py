"""The costs of drafts: times of steps by their rows, measured while they run, and the drafts that pay.

The result of a step with drafts is needed to plan the next one. So that one waits for the host, which works alongside
the device otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from rekindle._src.core.records import StepResult

# Cost of the wait as a share of a step, before it was measured: 0.14 with 135M parameters on two cores, a whole step
# with 4M. Drafts have to gain that much for each row of the step.
WAIT_COST = 1.0
_LEAST = 0.03  # share of a step's time that drafts have to gain beyond what they cost
_LATEST = 1 / 16  # weight of the latest step in a usual time
_FIRST = 4  # steps whose quickest counts, and that decide nothing: a program may be compiled in one of them
_SPIKE = 2.0  # of the usual time, beyond which a step was held up by something else
_OUTDATED, _LOOKED_AT = 2048, 256  # steps after which a time says nothing any more, and after which that is seen
# While the wait is unknown, drafts are tried that are likely to bring so many tokens, in one of so many steps.
_TRY_FOR, _TRY_EVERY = 0.5, 16


class TimesByRows:
    """Usual times of steps without prompts, by their rows."""

    def __init__(self) -> None:
        self._usual: dict[int, tuple[float, int, int]] = {}  # with how many steps it is of, and the latest of them
        self._sure: dict[int, float] = {}  # of those that are of several steps

    def add(self, rows: int, seconds: float, step: int) -> None:
        """Add a step."""
        usual, seen, _ = self._usual.get(rows, (seconds, 0, step))
        if seen < _FIRST:
            usual = min(usual, seconds)
        else:
            weight = max(_LATEST, 1.0 / (seen - _FIRST + 2))  # the quickest of the first may have been a chance
            usual += weight * (min(seconds, _SPIKE * usual) - usual)
        self._usual[rows] = usual, seen + 1, step
        if seen + 1 >= _FIRST:
            self._sure[rows] = usual
        if step % _LOOKED_AT == 0:
            for size in [size for size, (*_, latest) in self._usual.items() if step - latest > _OUTDATED]:
                del self._usual[size]
                self._sure.pop(size, None)

    def get(self, rows: int) -> float | None:
        """Return the usual time of a step with so many rows; None if no step with as many or more is known.

        Between two sizes that are known it is taken to grow evenly.
        """
        known = self._sure
        if rows in known:
            return known[rows]
        larger = min((size for size in known if size > rows), default=None)
        if larger is None:
            return None
        smaller = max((size for size in known if size < rows), default=None)
        if smaller is None:
            return known[larger]
        share = (rows - smaller) / (larger - smaller)
        return known[smaller] + share * max(0.0, known[larger] - known[smaller])

    def most(self) -> float | None:
        """Return the usual time of the largest step that is known."""
        return self._sure[max(self._sure)] if self._sure else None


class StepCosts:
    """Decides how many drafts a step gets, by the times of steps that wait for the one before and of others."""

    def __init__(self) -> None:
        self._running = TimesByRows()  # of steps that were planned while another one ran
        self._waiting = TimesByRows()  # of those whose plan waited for drafts
        self._wait: float | None = None  # seconds by which these take longer
        self._measured = -_OUTDATED  # the step by which that was measured last
        self._step = self._tried = 0

    def learn(self, rows: int, result: StepResult, *, waited: bool) -> None:
        """Add the time of a committed step without prefill rows, from the end of the step before to its own end."""
        self._step += 1
        seconds = result.device_seconds + result.idle_seconds
        if seconds <= 0:
            return
        (self._waiting if waited else self._running).add(rows, seconds, self._step)
        if not waited:
            return
        # Where no step with so many rows or more ran otherwise, the wait includes what the further rows take.
        plain = self._running.get(rows) or self._running.most()
        usual = self._waiting.get(rows)
        if plain is not None and usual is not None:
            wait = max(0.0, usual - plain)
            outdated = self._wait is None or self._step - self._measured > _OUTDATED
            self._wait = wait if outdated or self._wait is None else self._wait + 0.25 * (wait - self._wait)
            self._measured = self._step

    def best(self, rows: int, gains: Items[float], free: int, *, measured: bool = True) -> int:
        """Return how many drafts pay in a step of `rows` others; `gains` are the chances of each, the likeliest first.

        The program has room for `free` rows more. Without `measured`, no such steps are: those with prompts take long,
        so that a wait is a small part. There drafts have to bring each row half a token.
        """
        plain = self._running.get(rows) if measured else None
        if plain is None:
            count = min(len(gains), free)
            return count if sum(gains[:count]) >= _TRY_FOR * rows else 0
        known = self._wait is not None and self._step - self._measured <= _OUTDATED
        wait = self._wait if known and self._wait is not None else WAIT_COST * plain
        if known and (rows + sum(gains)) * plain < rows * ((1.0 + _LEAST) * plain + wait):
            return 0  # as in most steps: a step with drafts takes as long as one without, and waits
        best, most, expected = 0, rows / plain, 0.0
        for count, gain in enumerate(gains, start=1):
            expected += gain
            if (value := (rows + expected) / self._seconds(rows, count, plain, wait, free)) >= most:
                best, most = count, value
        if not best and not known and expected >= _TRY_FOR and self._step - self._tried >= _TRY_EVERY:
            self._tried = self._step
            return min(len(gains), max(1, free))
        return best

    def _seconds(self, rows: int, count: int, plain: float, wait: float, free: int) -> float:
        """Return the seconds that a step with `count` drafts is likely to take, plus the gain that is due."""
        seconds = self._waiting.get(rows + count)
        if seconds is None:
            # Without a measurement, rows up to the size of the program cost nothing, and others as much as any.
            size = plain if count <= free else plain * (rows + count) / (rows + free)
            seconds = (self._running.get(rows + count) or size) + wait
        return seconds + _LEAST * plain
