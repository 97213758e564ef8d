"""Hatch's build hook: native kernels are compiled when rekindle is installed, for the processor it is installed on.

A wheel carries them and is then one for this platform; an editable installation finds them in the clone, in a folder
that git ignores. What `python -m rekindle_kernels.native.build_library` made before for these sources, as for the
wheels of a release, is taken as it is. `REKINDLE_BUILD_KERNELS=0` makes none: the wheel is pure Python, and XLA does
their work.

`REKINDLE_WHEEL_LIBRARY` names a folder with a library for another platform, which `build_library` made by `--system` or
`--levels` and `--linker`: the wheel carries it and is one for that platform.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PREBUILT = Path("kernels/rekindle_kernels/native/prebuilt")
PLATFORMS = {"linux": "manylinux_2_28_{}", "darwin": "macosx_11_0_{}", "win32": "win_{}"}  # in the names of wheels
ARCHITECTURES = {("darwin", "aarch64"): "arm64", ("win32", "x86_64"): "amd64"}  # where they are not Linux's
LIMIT = 180  # seconds of each core, after which no further kernel is begun: models that need it are slower then
# Seconds by the clock, which an installation waits where other programs have the cores. Without kernels it would
# stay slow until it is installed again, which is what five minutes did on two cores that twenty programs shared.
BEGIN, LONGEST = 900, 1200


class PlatformWheel(BuildHookInterface):
    """Makes the library, adds it and its manifest to the wheel, and the platform to the wheel's name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            add_course(Path(self.root), build_data)
        if version != "editable" and (commit := commit_of(Path(self.root))):
            file = Path(tempfile.mkdtemp(prefix="rekindle-commit-")) / "commit.txt"  # until the wheel is written
            file.write_text(f"{commit}\n")
            build_data["force_include"][str(file)] = "rekindle/commit.txt"  # for `rekindle doctor`
        other = os.environ.get("REKINDLE_WHEEL_LIBRARY")
        if other and version != "editable":
            add_library(Path(other), build_data, checked=Path(self.root))
            return
        folder = Path(self.root) / PREBUILT
        if os.environ.get("REKINDLE_BUILD_KERNELS", "1") == "0":
            return
        if not os.access(self.root, os.W_OK):
            folder = Path(tempfile.mkdtemp(prefix="rekindle-kernels-"))  # until the wheel is written
        made = compiled(Path(self.root), folder)
        if version == "editable" or not made:
            return
        add_library(folder, build_data)


def add_course(root: Path, build_data: dict[str, Any]) -> None:
    """Add the course's pages without outputs, and their pictures, for `rekindle learn`."""
    folder = Path(tempfile.mkdtemp(prefix="rekindle-course-"))  # until the wheel is written
    for page in sorted((root / "tutorials/course").glob("[0-9][0-9]_*.ipynb")):
        notebook = json.loads(page.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell.update(outputs=[], execution_count=None)
        (folder / page.name).write_text(json.dumps(notebook, ensure_ascii=False), encoding="utf-8")
        build_data["force_include"][str(folder / page.name)] = f"rekindle/course/{page.name}"
    for file in (root / "tutorials/course").glob("*.py"):  # that a page links to
        build_data["force_include"][str(file)] = f"rekindle/course/{file.name}"
    for picture in sorted((root / "tutorials/source/pictures").glob("[0-9][0-9]_*")):  # and sliders
        build_data["force_include"][str(picture)] = f"rekindle/course/pictures/{picture.name}"


def add_library(folder: Path, build_data: dict[str, Any], checked: Path | None = None) -> None:
    """Add a library and its manifest to the wheel, which is then one for the library's platform.

    With `checked`, a clone, raise RuntimeError if the library was made from other sources than the clone's.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    if checked is not None and (own := digest_of(checked)) != manifest["sources"]:
        raise RuntimeError(
            f"{folder} has kernels of other sources ({manifest['sources']}, and these are {own}): make it again"
        )
    for name in ("manifest.json", manifest["library"]):
        build_data["force_include"][str(folder / name)] = f"rekindle_kernels/native/prebuilt/{name}"
    system, _, machine = manifest["platform"].partition("-")
    build_data["pure_python"] = False
    build_data["tag"] = f"py3-none-{PLATFORMS[system].format(ARCHITECTURES.get((system, machine), machine))}"


def digest_of(root: Path) -> str:
    """Return the digest of the kernels' sources in a clone."""
    code = "from rekindle_kernels.native import library; print(library.source_digest())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root / "kernels", capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit_of(root: Path) -> str:
    """Return the short commit hash of a clone, and whether files have changed since; empty for any other folder."""
    if not (root / ".git").exists():
        return ""
    git = ["git", "-c", "core.fsmonitor=false", "-C", str(root)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    words = []
    for arguments in (("rev-parse", "--short=8", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            done = subprocess.run([*git, *arguments], env=plain, capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        words.append(done.stdout.strip())
    return f"{words[0]} with changes" if words[1] else words[0]


def compiled(root: Path, folder: Path) -> bool:
    """True if `folder` holds kernels for this processor, compiled now if need be. One line says how that went."""
    if sys.platform == "win32":
        return False
    started = time.perf_counter()
    sources = root / "kernels"
    path = os.pathsep.join([str(sources), *sys.path])
    command = [sys.executable, "-m", "rekindle_kernels.native.build_library", "--here"]
    command += ["--limit", str(LIMIT), "--longest", str(BEGIN), "--out", str(folder)]
    say("compiling native kernels for this processor: about a minute on two cores, up to 20 if others keep them busy")
    try:
        environment = {**os.environ, "PYTHONPATH": path}
        # In that folder: pip takes off the path what an earlier editable installation of this clone put there.
        done = subprocess.run(
            command, cwd=sources, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        say(f"native kernels were not compiled within {LONGEST} s; XLA does their work, more slowly")
        return False
    said = done.stderr.strip().splitlines()
    if done.returncode:
        reason = said[-1] if said else f"status {done.returncode}"
        say(f"native kernels can't be compiled here ({reason}); XLA does their work, more slowly")
        return False
    say(
        f"native kernels are there after {time.perf_counter() - started:.0f} s"
        + "".join(f"\n  {line}" for line in said)
    )
    return True


def say(line: str) -> None:
    """Print it where it is seen: pip keeps what a build prints to itself, unless it is asked for with -v."""
    print(f"rekindle: {line}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        print(f"\nrekindle: {line}", file=terminal, flush=True)
