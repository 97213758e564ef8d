"""`rekindle cache`: what is listed is what is there, and pruning drops the oldest first."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rekindle._src.cli.cache import entries, parse_size, prune
from rekindle._src.cli.main import main
from rekindle.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for age, name in enumerate(["programs/new", "weights/middle", "pages/old"]):
        path = tmp_path / name / "blob"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 1000)
        os.utime(path, (1e9 - age * 100, 1e9 - age * 100))
    return tmp_path


def test_entries_are_listed_newest_first(folder: Path) -> None:
    assert [(entry.kind, entry.path.name, entry.size) for entry in entries(folder)] == [
        ("programs", "new", 1000),
        ("weights", "middle", 1000),
        ("pages", "old", 1000),
    ]
    assert entries(folder / "absent") == []


def test_pruning_drops_the_least_recently_used(folder: Path) -> None:
    assert [entry.path.name for entry in prune(entries(folder), 2000)] == ["old"]
    assert [entry.path.name for entry in entries(folder)] == ["new", "middle"]


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", "--json", "--cache-dir", str(folder)]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert main(["cache", "prune", "--to", "1kB", "--cache-dir", str(folder)]) == 0
    assert "dropped 2 entries" in capsys.readouterr().out
    assert main(["cache", "clear", "--cache-dir", str(folder)]) == 0
    assert entries(folder) == []


@pytest.mark.parametrize(("text", "size"), [("10", 10), ("1KiB", 1024), ("1.5 MB", 1_500_000), ("2gib", 2 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_wrong_size_says_how_to_write_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="512MiB"):
        parse_size("lots")
    assert main(["cache", "prune", "--to", "lots", "--cache-dir", str(folder)]) == 1
    assert "--to" in capsys.readouterr().err
