"""A training in a notebook: its curve, the texts of its probe, and the button that ends it."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from rekindle._src.capabilities.tuning.run import TuningProbe, TuningStep
from rekindle._src.notebook.training import TrainingView
from rekindle._src.views.tuning import averaged, sparkline, tuning


@dataclasses.dataclass
class Run:
    """A training, as a view reads it."""

    history: tuple[TuningStep, ...] = ()
    probes: tuple[TuningProbe, ...] = ()
    name: str = "<b>mine</b>"
    steps: int = 20
    state: str = "running"
    done: bool = False

    def cancel(self) -> None:
        self.state, self.done = "cancelled", True


def steps(losses: list[float], **more: Any) -> tuple[TuningStep, ...]:
    return tuple(TuningStep(index + 1, loss, 1e-3, 100, 0.5, 1.0, **more) for index, loss in enumerate(losses))


def test_a_training_has_a_curve_of_all_its_steps() -> None:
    """The curve ends with the last step, and leaves out steps with a loss that is not finite."""
    run = Run(steps([4.0, math.nan, 2.0, 1.0]), (TuningProbe(4, "<script>alert('x')</script>"),))
    shown = str(tuning(run))
    assert "<script" not in shown and "<b>mine" not in shown and "alert(" in shown
    assert 'aria-label="loss from 4 to 1 in 4 steps"' in shown and "20 steps" in shown
    (places,) = (re.findall(r"([\d.]+),([\d.]+)", line) for line in re.findall(r'points="([^"]+)"', shown)[1:])
    across, down = ([float(place[axis]) for place in places] for axis in (0, 1))
    assert len(across) == 3 and across == sorted(across) and across[-1] < 46 + 474 * 4 / 20
    assert down == sorted(down), "the loss falls, and the page's axis points down"
    assert "200" in shown and "8 s" in shown, "tokens a second, and the time that is left"
    assert "<svg" not in str(tuning(Run())), "there is nothing to draw yet"
    rewarded = str(tuning(Run(steps([0.1, 0.2], reward=0.5))))
    assert 'aria-label="reward from 0.5 to 0.5' in rewarded


def test_a_terminal_has_a_line() -> None:
    assert sparkline([4.0, 2.5, 1.0]) == "█▅▁"
    assert sparkline([]) == "" and len(sparkline([float(n) for n in range(1000)])) == 40
    assert averaged([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]


def test_the_button_ends_it() -> None:
    run = Run(steps([2.0, 1.0]))
    view = TrainingView(run)
    assert "running" in view.draw() and not view.ended
    view.press("cancel")
    assert run.done and view.ended and "cancelled" in view.draw()
    view.widget.close()
