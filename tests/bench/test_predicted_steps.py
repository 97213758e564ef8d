"""Predicted steps are made of what a step reads and starts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def steps() -> Any:
    spec = importlib.util.spec_from_file_location("predicted_steps", Path(__file__).parent / "predicted_steps.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_step_reads_its_weights_its_keys_and_values_and_the_logits(steps: Any) -> None:
    one, many = (steps.predicted("8b", rows, steps.Counted(15, 25, 0)) for rows in (1, 64))
    weights = 8_030_261_248 - 128256 * 4096  # all parameters but the embedding, of which a step reads a few rows
    row = 1024 * 32 * 2 * 8 * 128 * 2 + 3 * 4 * 128256
    assert one.nbytes == pytest.approx(2 * weights + row, rel=1e-3)
    assert many.nbytes - one.nbytes == pytest.approx(63 * row)
    assert one.kernels == 32 * 15 + 25


def test_a_wait_of_the_host_costs(steps: Any) -> None:
    graph, waits = (steps.predicted("135m", 1, steps.Counted(15, 25, syncs)) for syncs in (0, 2))
    assert waits.least - graph.least == pytest.approx(2 * steps.SYNC_SECONDS)
    assert graph.byte_seconds < graph.least <= graph.most == graph.byte_seconds + graph.kernel_seconds


def test_the_table_has_every_shape_and_batch(steps: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["predicted_steps.py"])
    assert steps.main() == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [
        [f"| {shape}", str(rows)] for shape in ("135m", "0.6b", "8b") for rows in (1, 64, 256)
    ]
