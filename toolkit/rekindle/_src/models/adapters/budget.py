"""The work that reading one adapter may cost. A stranger writes its config, and the work is done next to streams."""

from __future__ import annotations

import time
from collections.abc import Callable

from rekindle.errors import RequestAborted

MAX_STEPS = 1 << 22  # 560 keys over as many modules take 350,000
_STRETCH = 2048  # steps from one rest to the next: a millisecond, or two of the dearest kind
_REST = 0.001  # seconds


class TooMuchWork(ValueError):
    """The names of an adapter cost more than is spent on them."""


def _always() -> bool:
    return True


class Budget:
    """The steps that all names and expressions of one adapter may still take.

    A step is an operation on a set of positions, a character that is read, or the test of a letter: about a
    microsecond at most. Between stretches of steps it rests, so that others get the interpreter.
    """

    def __init__(self, steps: int | None = None, wanted: Callable[[], bool] = _always) -> None:
        """`steps` are `MAX_STEPS` by default; `wanted` returns False once the adapter is not waited for any longer."""
        self.left = self._most = MAX_STEPS if steps is None else steps
        self._rest_at = self.left - _STRETCH
        self._wanted = wanted

    def spend(self, steps: int = 1) -> None:
        """Take steps off, before they are made. Raise TooMuchWork if there are not so many left."""
        self.left -= steps
        if self.left <= self._rest_at:
            if self.left < 0:
                raise TooMuchWork(f"its names take more than {self._most:,} steps to match with those of this model")
            self._rest_at = self.left - _STRETCH
            self.check()
            time.sleep(_REST)

    def check(self) -> None:
        """Raise RequestAborted if nobody waits any longer."""
        if not self._wanted():
            raise RequestAborted("the adapter is not waited for any longer")
