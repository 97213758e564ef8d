"""Texts, files and notebooks with older releases of the tokenizers library: the oldest allowed, and one that prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TESTS = Path(__file__).parents[1]
PROJECT = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
OLDEST = next(re.findall(r">=([\d.]+)", need)[0] for need in PROJECT["dependencies"] if need.startswith("tokenizers"))
ASKED = (
    "text/test_descriptors.py", "text/test_tokenizer.py", "text/test_tokenizer_limits.py", "text/test_detokenizer.py",
    "text/gguf/test_tokenizers.py", "structured/test_grammars.py",
)  # fmt: skip


@pytest.mark.parametrize("version", [f"{OLDEST}.0", "0.22.2"])
def test_everything_that_uses_it_works(version: str, tmp_path: Path) -> None:
    target = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    done = subprocess.run([*pip, f"tokenizers=={version}"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the package index gave no tokenizers {version}: {done.stderr.strip()[-200:]}")
    (target / "transformers.py").write_text("raise ModuleNotFoundError('its releases ask for a newer library')\n")
    paths = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    code = "import tokenizers; print(tokenizers.__version__)"
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == version
    for asked in (ASKED, ("session/test_kernels.py", "-k", "long_prompt")):
        files = [str(TESTS / one) if one.endswith(".py") else one for one in asked]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        done = subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
