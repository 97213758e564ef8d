"""How much memory it takes to load a GGUF file: little more than the leaves, whatever it unpacks to on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import checkpoints
from helpers.python import run_python
from rekindle._src.opening.exporting import export
from rekindle_kernels import unavailable_reason

RAW = checkpoints.CASES["qwen3"]


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of resident memory from /proc")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("q4_0", "auto"), *(pytest.param("q8_0", dtype, marks=pytest.mark.slow) for dtype in ("auto", "float32"))],
)
def test_peak_memory_is_the_leaves_and_a_bounded_rest(kind: str, dtype: str, tmp_path: Path) -> None:
    program = """if True:
        import sys
        import jax
        from rekindle._src.models.loading import checkpoint
        def peak():
            line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        jax.devices()
        checkpoint.describe(sys.argv[1], checkpoint.WeightForm.of(sys.argv[2]))  # imports the family
        before = peak()
        model = checkpoint.load(sys.argv[1], dtype=sys.argv[2])
        print(model.nbytes, peak() - before)
    """
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 128, "vocab_size": 8000}
    file = export(checkpoints.write(tmp_path / "folder", {**RAW, **sizes}), tmp_path / "model.gguf", type=kind)
    leaves, grown = map(int, run_python("-c", program, str(file), dtype).split())
    assert grown < 1.05 * leaves + (80 << 20), f"{grown >> 20} MiB for leaves of {leaves >> 20}"
    assert grown < leaves + file.stat().st_size + (300 << 20)
    if dtype == "auto" and unavailable_reason("cpu") is None:  # as it is stored
        assert leaves <= file.stat().st_size + (1 << 20)
        assert grown < file.stat().st_size + (300 << 20)
