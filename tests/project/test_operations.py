"""The page on running it for long: its loggers, bounds, metrics, options and service unit are those of the code."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rekindle._src.capabilities.pictures import owner as pictures
from rekindle._src.cli.main import parser
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.loading import fingerprint, prepared
from rekindle._src.notebook import transcripts
from rekindle._src.programs import store
from rekindle._src.session import opening
from rekindle_kernels.private_files import KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tutorials" / "guide" / "operations.md").read_text()
SOURCES = [path.read_text() for path in (ROOT / "toolkit").rglob("*.py")]


def rows(begin: str) -> list[str]:
    """The lines of the table with this head."""
    return PAGE[PAGE.index(begin) :].split("\n\n")[0].splitlines()[2:]


def test_all_loggers_have_a_row() -> None:
    names = {name for text in SOURCES for name in re.findall(r'getLogger\("(rekindle\.[a-z]+)"\)', text)}
    listed = {name for row in rows("| logger | says |") for name in re.findall(r"`(rekindle\.[a-z]+)`", row)}
    assert listed == names


def test_bounds_and_folders_are_those_of_the_code() -> None:
    table = "\n".join(rows("| folder | holds |"))
    folders = {name for row in table.splitlines() for name in re.findall(r"`([a-z]+)`", row.split("|")[1])}
    assert folders == {*KINDS} - {"compilations"}, "that one is of backends without stored programs"
    days, disk = int(store.MAX_AGE / 86400), EngineConfig().disk_memory >> 30
    assert f"1 GiB; {days} days since" in table
    assert f"{prepared.MAX_ENTRIES} sets |" in table and f"`disk_memory`, {disk} GiB" in table
    assert f"| {transcripts.MOST} |" in table
    assert pictures.SHARE == 8 and "| an eighth of `disk_memory` |" in table
    rest = opening.OTHER_MEMORY >> 30
    assert f"and {rest} GiB\nfor the rest, {disk + rest} GiB by default" in PAGE
    assert f"more than {fingerprint.SMALL >> 20} MiB" in PAGE


def test_metrics_are_declared() -> None:
    code = "\n".join(SOURCES)
    names = re.findall(r"`rekindle_([a-z_]+)`", PAGE)
    assert len(names) > 6
    for name in names:
        assert name.removesuffix("_total") in code, name


def test_the_unit_is_one_that_systemd_reads_and_its_command_parses(tmp_path: Path) -> None:
    text = PAGE.split("```ini\n")[1].split("```")[0]
    command = re.findall("^ExecStart=(.*)$", text, re.MULTILINE)[0].split()
    arguments = parser().parse_known_args(command[1:])[0]
    assert arguments.command == "serve" and arguments.restore == "auto"
    stop = int(re.findall(r"TimeoutStopSec=(\d+)", text)[0])
    assert stop > arguments.drain, "answers may end before systemd kills the process"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / "rekindle.service"
    unit.write_text(text.replace(command[0], shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
