"""Hatch's metadata hook: the package's links, from `.ci/address.py`."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Links(MetadataHookInterface):
    """Adds `[project.urls]`."""

    def update(self, metadata: dict[str, Any]) -> None:
        found = runpy.run_path(str(Path(self.root) / ".ci/address.py"))["urls"](Path(self.root))
        if found:
            metadata["urls"] = found
