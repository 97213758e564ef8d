"""What opening a session is busy with: weights, programs, kernels, the snapshot. `Activity` shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle._src.core.activity import State

if TYPE_CHECKING:
    from rekindle._src.models.loading.load_progress import LoadProgress
    from rekindle._src.programs.warming import Warmed


class OpeningProgress:
    """The state of one opening; the threads that work on it write, the one that draws reads."""

    def __init__(self, model: Any) -> None:
        self._name = Path(model).name if isinstance(model, str | Path) else "model"
        self.stage: str = "importing JAX"
        self.hidden: bool = False  # something else shows its own progress
        self.compiling: Callable[[], str] = str  # what is being compiled now, in words; empty if nothing is
        self._weights: LoadProgress | None = None
        self._warmed: Warmed | None = None

    def weights(self, report: LoadProgress) -> None:
        """Weights were read."""
        self._weights = report

    def warmed(self, report: Warmed) -> None:
        """A program is ready."""
        self._warmed = report

    def look(self) -> State | None:
        """All of it as one line; None while there is nothing to show."""
        if self.hidden:
            return None
        weights, warmed, compiling = self._weights, self._warmed, self.compiling()
        reading = weights is not None and weights.done < weights.total
        # What is compiled takes a core from the reading threads, and its words take the place of a rate.
        read = "" if not reading or weights is None else f"weights {weights.share if compiling else weights}"
        programs = "" if warmed is None else f"programs {warmed.done} of {warmed.total}"
        # Programs are compiled beside what the opening waits for, which comes first.
        shown = [part for part in (read, programs) if part] or [self.stage]
        shown += [compiling] if compiling else []
        shares = [report.done / report.total for report in (weights if reading else None, warmed) if report]
        return State(f"opening {self._name}: {', '.join(shown)}", min(shares, default=None))
