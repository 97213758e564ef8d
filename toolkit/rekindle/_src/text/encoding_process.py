"""Encodes texts in a guard, for tokenizers with regexes that could run for hours or with growing texts.

The guard is started for the first text, keeps the tokenizer, and is started again after it was ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle._src.core.guard import START_SECONDS, Cause, GuardEnded, GuardLimits, GuardProcess
from rekindle._src.text import encoding_jobs

SECONDS, CHARACTERS_PER_SECOND = 5.0, 20_000  # per text; tokenizers in use encode fifty times as fast
MEMORY = 2 << 30  # bytes of addresses in addition to the tokenizer's own, where that can be limited
TOKENS = 64, 1024  # most tokens of a text: for each character, and in addition
_BYTES = 12  # of a token in an answer
_SHORTER = "This model's tokenizer is not bounded by the length of a text; pass a shorter one, or token ids"
_AGAIN = "The machine may be busy; send the request again, or pass token ids"


def limit(text: str) -> float:
    """Return the seconds that a text may take."""
    return SECONDS + len(text) / CHARACTERS_PER_SECOND


class EncodingFailed(Exception):
    """A text could not be encoded. The message says why, and `fix` is the remedy."""

    def __init__(self, problem: str, fix: str = _SHORTER) -> None:
        super().__init__(problem)
        self.fix = fix


class EncodingProcess:
    """A tokenizer in a process of its own. It encodes one text at a time; other threads wait."""

    def __init__(self, definition: Callable[[], bytes]) -> None:
        """Keep the function that returns the tokenizer.json to make the process's tokenizer from."""
        self._definition = definition
        self._guard: GuardProcess | None = None
        self._lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text. Raises `EncodingFailed` if it took too long or too much memory."""
        seconds, (each, extra) = limit(text), TOKENS
        job = {"text": text, "special": add_special_tokens}
        with self._lock:
            try:
                guard, most = self._running(), _BYTES * (each * len(text) + extra)
                match guard.ask(job, seconds=seconds, processor=2 * seconds, most=most):
                    case {"ids": list(ids)} if _are_ids(ids):
                        return ids
                    case {"failed": str(problem)}:
                        raise EncodingFailed(problem[:300])
                raise guard.refuse_answer()
            except GuardEnded as end:
                raise _end_error(end, seconds) from None

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            if self._guard is not None:
                self._guard.end()

    def _running(self) -> GuardProcess:
        if self._guard is None or not self._guard.usable:
            settings = {"tokenizer": self._definition().decode()}
            self._guard = GuardProcess(
                Path(encoding_jobs.__file__), settings, GuardLimits(MEMORY), modules=("tokenizers",)
            )
        return self._guard


def _are_ids(values: list[Any]) -> bool:
    """True if all values of a guard's answer are integers that can be token ids."""
    if not set(map(type, values)) <= {int}:
        return False
    return not values or (min(values) >= 0 and max(values) < 1 << 31)


def _end_error(end: GuardEnded, seconds: float) -> EncodingFailed:
    """Return the error of a text that had so many `seconds`, and its guard ended."""
    match end.cause:
        case Cause.START:
            return EncodingFailed(f"the process for it did not start within {START_SECONDS:g} s", _AGAIN)
        case Cause.LATE:
            return EncodingFailed(f"it took over {seconds:.0f} s")
        case _:
            return EncodingFailed("it took too much memory, or ended its process")
