"""Hatch's build hook: a wheel that carries prebuilt native kernels is one for this platform.

`python -m rekindle_kernels.native.build_library` makes them, before the wheel is built; without them it is pure Python.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PREBUILT = Path("kernels/rekindle_kernels/native/prebuilt")
LINUX = os.environ.get("REKINDLE_WHEEL_LINUX", "manylinux_2_28")  # the C library that the kernels were linked with
MACOS = "macosx_11_0"


class PlatformWheel(BuildHookInterface):
    """Adds the library and its manifest to the wheel, and the platform to the wheel's name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / PREBUILT
        if version == "editable" or not (folder / "manifest.json").exists():
            return
        manifest = json.loads((folder / "manifest.json").read_text())
        for name in ("manifest.json", manifest["library"]):
            build_data["force_include"][str(folder / name)] = f"rekindle_kernels/native/prebuilt/{name}"
        system = LINUX if sys.platform == "linux" else MACOS
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{system}_{platform.machine()}"
