"""A request to open a model: the arguments of `rekindle.open`, and the line that shows how far it is. Needs no JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle._src.capabilities import checked
from rekindle._src.capabilities.additions import Additions, CheckedAdditions
from rekindle._src.core.activity import State, in_notebook
from rekindle._src.core.config import EngineConfig
from rekindle._src.dispatch.threads import Contexts
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.models.base import LoadedModel
    from rekindle._src.models.loading.kept_weights import MappedWeights
    from rekindle._src.models.loading.load_progress import LoadProgress, Report
    from rekindle._src.opening.head_start import HeadStart
    from rekindle._src.programs.user_functions import LogitsProcessor
    from rekindle._src.programs.warming import WarmingProgress


class OpeningProgress:
    """The state of one opening. The threads that work on it write; the one that draws reads."""

    def __init__(self, model: object) -> None:
        self._name = Path(model).name if isinstance(model, str | Path) else "model"
        self._stage = "importing JAX"
        self._seconds: dict[str, float] = {}  # of the stages that are over
        self._since = time.monotonic()  # when this one began
        self.hidden: bool = False  # something else shows its own progress
        self.compiling: Callable[[], str] = str  # returns the current compilations, in words; empty if there are none
        self._weights: LoadProgress | None = None
        self._warmed: WarmingProgress | None = None
        self._warming = 0.0  # time.monotonic() when the first program was ready

    @property
    def stage(self) -> str:
        """The stage that the opening is at, in words."""
        return self._stage

    @stage.setter
    def stage(self, name: str) -> None:
        now = time.monotonic()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = name, now

    def times(self) -> str:
        """Return how long it has taken, and each of its stages, as one line."""
        latest = self._seconds.get(self._stage, 0.0) + time.monotonic() - self._since
        stages = {**self._seconds, self._stage: latest}
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in stages.items())
        return f"{self._name} in {sum(stages.values()):.2f} s: {parts}"

    def weights(self, report: LoadProgress) -> None:
        """Record how much of the weights was read."""
        self._weights = report

    def warmed(self, report: WarmingProgress) -> None:
        """Record that a program is ready."""
        self._warming = self._warming or time.monotonic()
        self._warmed = report

    def look(self) -> State | None:
        """Return the state as one line; None while there is nothing to show."""
        if self.hidden:
            return None
        weights, warmed, compiling = self._weights, self._warmed, self.compiling()
        reading = weights is not None and weights.done < weights.total
        # A compilation takes a core from the reading threads, and its words take the place of a rate.
        weights_text = "" if not reading or weights is None else f"weights {weights.share if compiling else weights}"
        programs = "" if warmed is None else f"programs {warmed.done} of {warmed.total}{self._left(warmed)}"
        # The opening waits for the weights, which come first; programs are compiled while they are read.
        words = [part for part in (weights_text, programs) if part] or [self.stage]
        words += [compiling] if compiling else []
        shares = [report.done / report.total for report in (weights if reading else None, warmed) if report]
        return State(f"opening {self._name}: {', '.join(words)}", min(shares, default=None))

    def _left(self, warmed: WarmingProgress) -> str:
        """Return how long the other programs may take, at the pace since the first one."""
        made, left = warmed.done - 1, warmed.total - warmed.done
        return f", {(time.monotonic() - self._warming) / made * left:.0f} s left" if made > 0 and left else ""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenRequest:
    """The arguments of `open`, checked."""

    model: str | Path | LoadedModel
    config: EngineConfig
    processors: Sequence[LogitsProcessor] = ()
    additions: CheckedAdditions = dataclasses.field(default_factory=CheckedAdditions)  # of capabilities
    progress: Report | None = None
    contexts: Contexts = contextlib.nullcontext
    given_up: Callable[[], bool] = lambda: False  # True when the caller no longer waits for the session
    shown: OpeningProgress = dataclasses.field(default_factory=lambda: OpeningProgress("model"))
    ahead: HeadStart | None = None

    @classmethod
    def of(
        cls,
        model: str | Path | LoadedModel,
        config: EngineConfig,
        *,
        processors: object,
        additions: Additions,
        progress: Report | None,
        given_up: Callable[[], bool],
    ) -> OpenRequest:
        """Return the request of a caller. Raise ConfigError for arguments of the wrong kind."""
        return cls(
            model,
            config,
            _listed(processors),
            checked(additions),
            progress,
            given_up=given_up,
            shown=OpeningProgress(model),
        )

    def show(self, stage: str) -> None:
        """Show the current stage of the opening."""
        self.shown.stage = stage

    def brought(self, kept: Path) -> MappedWeights | None:
        """Return weights that are kept in the cache, if they were brought into memory before."""
        return None if self.ahead is None else self.ahead.weights(kept)

    def report(self, progress: LoadProgress) -> None:
        """Show how much of the weights was read, and tell the caller."""
        self.shown.weights(progress)
        if self.progress is not None:
            self.progress(progress)


def precompiles(option: str) -> str:
    """Resolve the option `precompile` for this process: "auto" is "background" in notebooks and "lazy" elsewhere."""
    if option != "auto":
        return option
    return "background" if in_notebook() else "lazy"


def _listed(processors: object) -> tuple[Any, ...]:
    if processors is None:
        return ()
    if not isinstance(processors, Iterable):
        fix = "Pass a list of rekindle.LogitsProcessor(function, name='…')"
        raise ConfigError("processors", processors, "is not a list", fix)
    return tuple(processors)
