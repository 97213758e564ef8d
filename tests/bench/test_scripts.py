"""What a command sees when `older_processor.py` runs it, and what `predicted_steps.py` predicts is made of."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle_kernels.native import cpu

sys.path.insert(0, str(Path(__file__).parents[2] / "toolkit/workshop/bench"))
import older_processor
import predicted_steps as steps

ASK = """
import json
from numpy._core._multiarray_umath import __cpu_features__ as features
from rekindle_kernels.native import cpu
print(json.dumps([name for name, there in features.items() if there] + [cpu.levels()[0].name]))
"""


@pytest.mark.skipif(older_processor.reason_against() is not None, reason=str(older_processor.reason_against()))
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("level", older_processor.FLAGS)
def test_libraries_see_an_older_processor(level: str) -> None:
    if not cpu.level_called(level).features <= cpu.features():
        pytest.skip(f"this processor has less than {level}")
    command = [sys.executable, older_processor.__file__, level, sys.executable, "-c", ASK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *features, ours = json.loads(done.stdout)
    assert {"AVX2", "FMA3"} <= {*features} and not [name for name in features if "AVX512" in name]
    assert ours == level


def test_a_step_reads_its_weights_its_keys_and_values_and_the_logits() -> None:
    one, many = (steps.predicted("8b", rows, steps.Counted(15, 25, 0)) for rows in (1, 64))
    weights = 8_030_261_248 - 128256 * 4096  # all parameters but the embedding, of which a step reads a few rows
    row = 1024 * 32 * 2 * 8 * 128 * 2 + 3 * 4 * 128256
    assert one.nbytes == pytest.approx(2 * weights + row, rel=1e-3)
    assert many.nbytes - one.nbytes == pytest.approx(63 * row)
    assert one.kernels == 32 * 15 + 25


def test_a_wait_of_the_host_costs() -> None:
    graph, waits = (steps.predicted("135m", 1, steps.Counted(15, 25, syncs)) for syncs in (0, 2))
    assert waits.least - graph.least == pytest.approx(2 * steps.SYNC_SECONDS)
    assert graph.byte_seconds < graph.least <= graph.most == graph.byte_seconds + graph.kernel_seconds


def test_the_table_has_every_shape_and_batch(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["predicted_steps.py"])
    assert steps.main() == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [
        [f"| {shape}", str(rows)] for shape in ("135m", "0.6b", "8b") for rows in (1, 64, 256)
    ]
