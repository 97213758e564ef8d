"""The progress of opening a session: weights, programs, kernels, the snapshot. `Activity` shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle._src.core.activity import State

if TYPE_CHECKING:
    from rekindle._src.models.loading.load_progress import LoadProgress
    from rekindle._src.programs.warming import Warmed


class OpeningProgress:
    """The state of one opening. The threads that work on it write; the one that draws reads."""

    def __init__(self, model: Any) -> None:
        self._name = Path(model).name if isinstance(model, str | Path) else "model"
        self.stage: str = "importing JAX"
        self.hidden: bool = False  # something else shows its own progress
        self.compiling: Callable[[], str] = str  # returns what is being compiled, in words; empty if nothing is
        self._weights: LoadProgress | None = None
        self._warmed: Warmed | None = None

    def weights(self, report: LoadProgress) -> None:
        """Record how much of the weights was read."""
        self._weights = report

    def warmed(self, report: Warmed) -> None:
        """Record that a program is ready."""
        self._warmed = report

    def look(self) -> State | None:
        """Return the state as one line; None while there is nothing to show."""
        if self.hidden:
            return None
        weights, warmed, compiling = self._weights, self._warmed, self.compiling()
        reading = weights is not None and weights.done < weights.total
        # A compilation takes a core from the reading threads, and its words take the place of a rate.
        weights_text = "" if not reading or weights is None else f"weights {weights.share if compiling else weights}"
        programs = "" if warmed is None else f"programs {warmed.done} of {warmed.total}"
        # The opening waits for the weights, which come first; programs are compiled beside them.
        words = [part for part in (weights_text, programs) if part] or [self.stage]
        words += [compiling] if compiling else []
        shares = [report.done / report.total for report in (weights if reading else None, warmed) if report]
        return State(f"opening {self._name}: {', '.join(words)}", min(shares, default=None))
