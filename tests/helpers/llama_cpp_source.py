"""llama.cpp's source, which the package index carries in `llama-cpp-python`, fetched into $REKINDLE_LLAMA_CPP."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

FOLDER, PACKAGE = "REKINDLE_LLAMA_CPP", "llama-cpp-python==0.3.36"
KEPT = ("models/", "conversion/", "gguf-py/", "convert_lora_to_gguf.py")


def llama_cpp_source() -> Path:
    """The folder of the source, fetched first if need be; skips the test where there is none."""
    name = os.environ.get(FOLDER)
    if not name:
        pytest.skip(f"${FOLDER} names no folder for the files")
    folder = Path(name)
    if not any(folder.glob("*/vendor/llama.cpp")):
        with tempfile.TemporaryDirectory() as downloads:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", downloads]
            done = subprocess.run([*pip, PACKAGE], capture_output=True, text=True, check=False)
            sources = list(Path(downloads).glob("*.tar.gz"))
            if not sources:
                pytest.skip(f"the package index gave no {PACKAGE}: {(done.stderr.strip() or 'pip failed')[-200:]}")
            with tarfile.open(sources[0]) as archive:
                parts = tuple(f"/vendor/llama.cpp/{part}" for part in KEPT)
                members = [member for member in archive.getmembers() if any(part in member.name for part in parts)]
                archive.extractall(folder, members, filter="data")
    return next(folder.glob("*/vendor/llama.cpp"))
