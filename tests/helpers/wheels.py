"""Wheels with native kernels of another platform, built as a release builds them."""

from __future__ import annotations

import importlib.util
import json
import lzma
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _command() -> Any:
    """Return `.ci/wheels.py`, which is in no package, as a module."""
    spec = importlib.util.spec_from_file_location("release_wheels", ROOT / ".ci" / "wheels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a NamedTuple looks its types up there
    spec.loader.exec_module(module)
    return module


COMMAND = _command()


def unpack(folder: Path) -> None:
    """Put a packed library into its folder as the system loads it, and say so in the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    packed = folder / manifest["library"]
    packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
    packed.unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"library": packed.stem}))


def contents(library: Path, folder: Path, tag: str) -> dict[str, bytes]:
    """Build the wheel of the kernels in `library`, check its tag and size, and return its files of kernels by name."""
    if find_spec("hatchling") is None:
        pytest.skip("hatchling builds the wheel")
    wheel = COMMAND.built(folder, REKINDLE_WHEEL_LIBRARY=str(library))
    assert wheel.name.endswith(f"-py3-none-{tag}.whl") and wheel.stat().st_size <= COMMAND.LARGEST
    inside = f"{COMMAND.INSIDE}/"
    with zipfile.ZipFile(wheel) as packed:
        return {name.removeprefix(inside): packed.read(name) for name in packed.namelist() if name.startswith(inside)}
