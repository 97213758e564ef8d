"""What a command sees of the processor when `older_processor.py` runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle_kernels.native import cpu

sys.path.insert(0, str(Path(__file__).parent))
import older_processor

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
