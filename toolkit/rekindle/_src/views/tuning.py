"""A training in a notebook: the curve of its loss, its figures, and the texts of its probe."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

from rekindle._src.core import words
from rekindle._src.views import html, style, svg

_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE = 520, 160, 46, 20, 10
_POINTS = 400  # of the curve; of longer trainings, each is the mean of several steps
_BARS = "▁▂▃▄▅▆▇█"
_PROBES = 8  # that are shown, the latest


class StepLike(Protocol):
    """A step of a training."""

    @property
    def loss(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def reward(self) -> float | None: ...


class ProbeLike(Protocol):
    """A text of the probe."""

    @property
    def step(self) -> int: ...
    @property
    def text(self) -> str: ...


class TuningLike(Protocol):
    """A training, as it is drawn."""

    @property
    def name(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def history(self) -> Sequence[StepLike]: ...
    @property
    def probes(self) -> Sequence[ProbeLike]: ...
    @property
    def state(self) -> str: ...


def tuning(run: TuningLike) -> html.Markup:
    """Draw a training."""
    history = list(run.history)
    figures: dict[str, object] = {"step": f"{len(history)} of {run.steps}"}
    if history:
        seconds = sum(step.seconds for step in history)
        figures["loss"] = f"{history[-1].loss:.3f}"
        if history[-1].reward is not None:
            figures["reward"] = f"{history[-1].reward:.3f}"
        figures["tokens a second"] = round(sum(step.tokens for step in history) / max(1e-9, seconds))
        if len(history) < run.steps and run.state == "running":
            figures["left"] = words.seconds((run.steps - len(history)) * seconds / len(history))
    parts = [html.tiles(figures)]
    curves = [("loss", [step.loss for step in history], style.BLUE)]
    rewards = [step.reward for step in history if step.reward is not None]
    if rewards:
        curves.append(("reward", rewards, style.ORANGE))
    parts += [curve(name, values, run.steps, colour) for name, values, colour in curves if len(values) > 1]
    if run.probes:
        rows = [(probe.step, html.text(probe.text)) for probe in run.probes[-_PROBES:]]
        parts.append(html.table(["step", "the probe"], rows))
    return html.block(*parts, title=f"tuning {run.name}: {run.state}")


def curve(name: str, values: Sequence[float], steps: int, colour: str) -> html.Markup:
    """Draw figures of steps on a scale from the least to the largest, and of all steps that there will be."""
    shown = averaged(values, _POINTS)
    finite = [value for value in shown if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    width, height = _WIDTH - _LEFT, _HEIGHT - _ABOVE - _BELOW

    def place(index: int, value: float) -> tuple[float, float]:
        step = (index + 0.5) * len(values) / len(shown)
        return _LEFT + width * step / max(1, steps), _ABOVE + height * (1 - (value - low) / span)

    points = [place(index, value) for index, value in enumerate(shown) if math.isfinite(value)]
    floor = _ABOVE + height
    parts = [
        svg.stroke([(_LEFT, _ABOVE), (_LEFT, floor), (_WIDTH, floor)], style.HAIR, width=1),
        svg.stroke(points, colour),
        svg.words(_LEFT - 6, _ABOVE + 8, f"{high:.3g}", anchor="end"),
        svg.words(_LEFT - 6, floor, f"{low:.3g}", anchor="end"),
        svg.words(_LEFT, _HEIGHT - 5, name),
        svg.words(_WIDTH, _HEIGHT - 5, words.count(steps, "step"), anchor="end"),
    ]
    label = f"{name} from {values[0]:.3g} to {values[-1]:.3g} in {words.count(len(values), 'step')}"
    return svg.picture(_WIDTH, _HEIGHT, parts, label=label)


def averaged(values: Sequence[float], most: int) -> list[float]:
    """Return at most so many values: means of neighbours, if there are more."""
    if len(values) <= most:
        return list(values)
    ends = [len(values) * index // most for index in range(most + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(ends)]


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return figures as a line of text, for a terminal."""
    shown = [value for value in averaged(values, width) if math.isfinite(value)]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / ((high - low) or 1.0) * top)] for value in shown)
