"""Finds the repository's address in the workflow's environment or the clone's remote, so that a fork has its own.

`pyproject.toml` takes its links from here when a wheel is built, and the site those of its pages. Without an address
neither has any.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_REMOTE = re.compile(r"(?:https://|ssh://git@|git@)([\w.-]+)[/:]([\w.-]+/[\w.-]+?)(?:\.git)?/?")


def address(root: Path) -> str | None:
    """Return the https address of the repository that `root` is a clone of; None for a folder without one."""
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and name:
        return f"{server}/{name}"
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "remote", "get-url", "origin"]
        remote = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    found = _REMOTE.fullmatch(remote)
    return f"https://{found[1]}/{found[2]}" if found else None


def urls(root: Path) -> dict[str, str]:
    """Return the links of the package's metadata."""
    place = address(root)
    if place is None:
        return {}
    pages = {"Course": "tutorials/README.md", "Guide": "tutorials/guide", "Changelog": ".github/CHANGELOG.md"}
    return {"Repository": place, **{name: f"{place}/blob/HEAD/{path}" for name, path in pages.items()}}


if __name__ == "__main__":
    print(address(Path(__file__).parents[1]) or sys.exit("this clone has no address"))
