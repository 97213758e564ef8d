"""A training as a live view: the curve of its loss and the texts of its probe, while it learns."""

from __future__ import annotations

from typing import Protocol

from rekindle._src.notebook.live import Live, button
from rekindle._src.views.tuning import TuningLike, tuning


class TrainingLike(TuningLike, Protocol):
    """A training that can be cancelled."""

    @property
    def done(self) -> bool: ...
    def cancel(self) -> None: ...


class TrainingView(Live):
    """The loss of a training and the texts of its probe. "stop" ends the training and keeps its last whole step."""

    interval: float = 0.5

    def __init__(self, run: TrainingLike) -> None:
        super().__init__(button("cancel", "stop", title="End the training: its last whole step stays loaded."))
        self._training = run

    def draw(self) -> str:
        return str(tuning(self._training))

    def press(self, name: str) -> None:
        if name == "cancel":
            self._training.cancel()
        else:
            super().press(name)

    @property
    def ended(self) -> bool:
        return super().ended or self._training.done

    def __repr__(self) -> str:
        return repr(self._training)
