"""Importing rekindle is cheap and has no side effects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT / "toolkit"), str(ROOT / "kernels")])


def python(code: str, *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu", **(env or {})}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=cwd, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_leaves_the_process_as_it_was() -> None:
    seen = json.loads(
        python(
            """
import asyncio, json, os, signal, sys, threading
def state():
    return [
        [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        type(asyncio.get_event_loop_policy()).__name__,
        dict(os.environ),
        sorted(thread.name for thread in threading.enumerate()),
        len(os.listdir('/proc/self/task')) if os.path.isdir('/proc/self/task') else 0,
    ]
import asyncio.events
before = state()
import rekindle
for name in rekindle.__all__:
    getattr(rekindle, name)
after = state()
print(json.dumps([before[:4], after[:4]]))
"""
        )
    )
    assert seen[0] == seen[1]


def test_import_and_a_command_line_load_neither_jax_nor_optional_packages() -> None:
    parsing = "from rekindle._src.cli.main import parser; parser()"
    loaded = python(f"import sys, rekindle; {parsing}; print(*sys.modules)").split()
    heavy = {"numpy", "jax", "flax", "orbax", "tokenizers", "IPython", "ipywidgets", "anywidget", "matplotlib", "torch"}
    assert not heavy & set(loaded)


def test_transformers_imports_from_the_repository_root() -> None:
    """A top-level folder called `kernels` must not shadow Hugging Face's package of that name."""
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    out = python("from transformers import LlamaForCausalLM; print(LlamaForCausalLM.__name__)", cwd=ROOT)
    assert out.strip() == "LlamaForCausalLM"


def test_a_package_called_kernels_wins_over_the_container(tmp_path: Path) -> None:
    """The situation built by hand, for machines without transformers: cwd is the repository root."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("WHO = 'hugging face'")
    out = python("import kernels; print(kernels.WHO)", cwd=ROOT, env={"PYTHONPATH": f"{PATHS}{os.pathsep}{tmp_path}"})
    assert out.strip() == "hugging face"
