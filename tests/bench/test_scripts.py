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
import first_contact_report
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


def test_a_first_contact_says_what_is_below_prediction(tmp_path: Path) -> None:
    """One stream of 0.6B, once at the rate of a step of 2.2 ms and once at one of 0.8 ms, on a GPU of a known speed."""
    parts = {
        "device": (0, json.dumps({"device_kind": "NVIDIA H100 80GB HBM3"})),
        "first_text": (
            0,
            "fresh machine         median 5.10 (5.10 to 5.10) s\nsecond process        median 1.20 (1.2) s",
        ),
        "slow": (0, "limits\n" + json.dumps({"model": "0.6b", "W1": {"decode_tok_s": 1 / 2.2e-3}})),
        "fast": (0, json.dumps({"model": "0.6b", "W1": {"decode_tok_s": 1 / 0.8e-3}})),
        "kernels": (1, "1 failed"),
    }
    for number, (name, (status, log)) in enumerate(parts.items()):
        (tmp_path / f"{number:02}.part").write_text(f"{name} {status} 3")
        (tmp_path / f"{name}.log").write_text(log)
    report = first_contact_report.read(tmp_path)
    found = {(part, figure): (measured, said) for part, figure, measured, said in first_contact_report.lines(report)}
    assert (
        found["first_text", "fresh machine_s"] == ("5.10", "") and found["first_text", "second process_s"][0] == "1.20"
    )
    assert found["kernels", "exit status"][0] == "1"
    assert found["slow", "W1 decode_tok_s"][1].endswith("below prediction")
    assert "to" in found["fast", "W1 decode_tok_s"][1] and "below" not in found["fast", "W1 decode_tok_s"][1]
    assert first_contact_report.predicted_rates("Some GPU", "0.6b", None) is None


def test_the_table_has_every_shape_and_batch(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["predicted_steps.py"])
    assert steps.main() == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [
        [f"| {shape}", str(rows)] for shape in ("135m", "0.6b", "8b") for rows in (1, 64, 256)
    ]
