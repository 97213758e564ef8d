"""How a step's time grows: the points of each sweep, and how they are printed."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import numpy as np
import pytest

from rekindle._src.bench.shapes import random_shape
from workshop import growth


def test_the_step_time_is_what_tokens_take_however_they_arrive() -> None:
    steady = np.arange(65) / 100
    assert growth.rate_ms(steady.tolist()) == pytest.approx(10)
    in_fours = (np.arange(65) // 4 * 4) / 100
    assert growth.rate_ms(in_fours.tolist()) == pytest.approx(10, rel=0.15)
    stalled = steady + np.where(np.arange(65) > 30, 5.0, 0.0)
    assert growth.rate_ms(stalled.tolist()) == pytest.approx(10), "one long stall is not the step time"


def test_growth_prints_each_point_beside_its_sweep_s_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [growth.Point("rows", 1, 2.0), growth.Point("rows", 8, 5.0), growth.Point("context", 128, 3.0)]

    async def measured(*given: object, **options: object) -> list[growth.Point]:
        return points

    monkeypatch.setattr(growth, "measure", measured)
    assert growth.main(["--model", "micro"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["1.00×", "2.50×", "1.00×"]
    assert growth.main(["--model", "micro", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"][1] == {"sweep": "rows", "x": 8, "step_ms": 5.0}
    pytest.importorskip("matplotlib")
    assert {file.name for file in growth.plot(points, tmp_path)} == {"rows.png", "context.png"}


@pytest.mark.slow
def test_every_sweep_of_growth_has_points(tmp_path: Path) -> None:
    async def run() -> list[growth.Point]:
        return await growth.measure(random_shape("micro"), 512, {}, scale=0.01, say=lambda text: None)

    points = anyio.run(run)
    assert {point.sweep for point in points} == {"rows", "context", "cached pages", "queued requests"}
    assert all(point.step_ms > 0 for point in points)


def test_a_range_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        growth.main(["--scale", "0"])
    assert "must be above 0" in capsys.readouterr().err
