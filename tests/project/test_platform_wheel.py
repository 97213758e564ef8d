"""The wheel's name says what it carries: prebuilt kernels make it one for a platform."""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hatchling", reason="hatchling builds the wheel")
ROOT = Path(__file__).parents[2]


def initialised(root: Path, version: str = "standard") -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("platform_wheel", ROOT / ".ci" / "platform_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    data: dict[str, Any] = {"force_include": {}}
    module.PlatformWheel(str(root), {}, None, None, "", "wheel").initialize(version, data)
    return data


def test_without_kernels_it_is_pure_python(tmp_path: Path) -> None:
    assert initialised(tmp_path) == {"force_include": {}}


@pytest.mark.skipif(sys.platform != "linux", reason="its tag is Linux's")
def test_with_kernels_it_is_for_this_platform_and_carries_them(tmp_path: Path) -> None:
    folder = tmp_path / "kernels/rekindle_kernels/native/prebuilt"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"library": "kernels.so"}))
    data = initialised(tmp_path)
    assert data["tag"] == f"py3-none-manylinux_2_28_{platform.machine()}" and data["pure_python"] is False
    inside = "rekindle_kernels/native/prebuilt/"
    assert sorted(data["force_include"].values()) == [f"{inside}kernels.so", f"{inside}manifest.json"]
    assert initialised(tmp_path, "editable") == {"force_include": {}}
