"""The very first restart after the very first save finds all that its first request needs, and compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys, time
from pathlib import Path
from helpers.compiling import compiled_by_jax, counts
from helpers.tiered import opened, prompt
mode, folder, role, saving = sys.argv[1:]
# Chunks of 64: the first process computes the prompt by the larger program alone, and what restores pages is not used.
options = {"precompile": mode, "max_tokens_per_step": 64, "device_pages": 40}
ids = [token for index in range(2) for token in prompt(index)][:118]
with compiled_by_jax() as events, opened(Path(folder), restore="auto" if role == "second" else None, **options) as s:
    done = s.generate_sync(ids, max_tokens=2, ignore_eos=True)
    report = {"compiled": counts(s), "events": len(events), "cached": done.usage.cached_tokens, "ids": done.token_ids,
              "programs": {program.name: program.origin for program in s.programs()}}
    if role == "first" and saving == "save":
        s.save("mine").result_sync()
    elif role == "first":
        stored = Path(folder) / "programs"
        names = lambda: {json.loads(one.read_text())["name"] for one in stored.glob("*/rekindle/meta.json")}
        while s.cache.stats().disk.pages < 14 or not {"scatter", "r2t32"} <= names():
            time.sleep(0.1)
print(json.dumps(report))
"""


def run(mode: str, folder: Path, role: str, saving: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, mode, str(folder), role, saving]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("mode", "saving"),
    [
        ("lazy", "save"),
        pytest.param("lazy", "background", marks=pytest.mark.slow),
        pytest.param("all", "save", marks=pytest.mark.slow),
        pytest.param("background", "save", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_for_the_first_restored_prompt(mode: str, saving: str, tmp_path: Path) -> None:
    first = run(mode, tmp_path, "first", saving)
    second = run(mode, tmp_path, "second", saving)
    assert (first["cached"], second["cached"]) == (0, 112)
    assert second["ids"] == first["ids"]
    needed = {"scatter", "r2t32", "memory"}
    assert {name: second["programs"].get(name) for name in needed} == dict.fromkeys(needed, "loaded")
    if (mode, saving) == ("lazy", "save"):
        assert not {"scatter", "r2t32"} & {*first["programs"]}, "this would be no test"
    if mode != "background":  # there the others compile meanwhile
        assert (second["compiled"], second["events"]) == ([0, 0], 0)
