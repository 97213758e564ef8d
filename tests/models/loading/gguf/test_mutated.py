"""Headers of two trained models' files, mutated: each opens, or is refused by a typed error, in little memory and time.

REKINDLE_HEADER_MUTATIONS=5000 REKINDLE_REAL_CHECKPOINTS=FOLDER pytest -m slow -s FILE
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import header_fuzz, real_checkpoints

MUTATIONS = int(os.environ.get("REKINDLE_HEADER_MUTATIONS", "300"))  # of each file
SECONDS = 20.0  # of a processor; the files themselves take less than three
RESIDENT = 1 << 30  # bytes, with the weights of a small model


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", list(real_checkpoints.REAL))
def test_a_mutated_header_opens_or_is_refused_by_a_typed_error(name: str, tmp_path: Path) -> None:
    path = real_checkpoints.path_or_reason(name)
    if isinstance(path, str):
        pytest.skip(path)
    results: dict[int, dict[str, Any]] = {}
    bad: list[str] = []
    while len(results) < MUTATIONS:
        first = len(results)
        command = [sys.executable, header_fuzz.__file__, str(path), str(first), str(MUTATIONS - first), str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            begun = -1
            for line in child.stdout:
                if not line.startswith("{"):
                    continue
                said = json.loads(line)
                begun = said.get("begun", begun)
                if "number" in said:
                    results[said["number"]] = said
        if child.returncode or len(results) < MUTATIONS:
            assert begun >= first, f"the process did not begin: {child.returncode}"
            bad.append(f"{begun}: the process ended with {child.returncode}")
            results[begun] = {"result": "ended", "seconds": 0.0, "resident": 0}
    kinds = collections.Counter(one["result"].partition(":")[0] for one in results.values())
    slowest = max(results.items(), key=lambda item: item[1]["seconds"])
    largest = max(one["resident"] for one in results.values())
    print(f"{name}: {dict(kinds)}, slowest {slowest[1]['seconds']:.2f} s, resident {largest >> 20} MiB at most")
    bad += [
        f"{number}: {one['result']}" for number, one in results.items() if one["result"][:7] not in ("loads", "refused")
    ]
    bad += [f"{number}: {one['seconds']:.1f} s" for number, one in results.items() if one["seconds"] > SECONDS]
    assert not bad, "\n".join(bad[:40])
    assert largest < RESIDENT
    assert kinds["loads"] > MUTATIONS // 50 and kinds["refused"] > MUTATIONS // 4, "the mutations miss the point"
