"""`rekindle cache`: what is listed is what is there, and pruning drops the oldest first."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from helpers.stored_pages import IDENTITY, chain
from rekindle._src.cli.cache import beyond, by_worth, entries
from rekindle._src.cli.main import main
from rekindle._src.core.atomic_checkpoint import PARTIAL
from rekindle._src.core.options import Size
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle.errors import ConfigError
from rekindle_kernels.private_files import TAG, TAG_TEXT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for age, name in enumerate(["programs/new", "weights/middle", "pages/old"]):
        path = tmp_path / name / "blob"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 1000)
        os.utime(path.parent, (1e9 - age * 100, 1e9 - age * 100))
    (tmp_path / TAG).write_text(TAG_TEXT)
    return tmp_path


def test_entries_are_listed_newest_first(folder: Path) -> None:
    assert [(entry.kind, entry.path.name, entry.size) for entry in entries(folder)] == [
        ("programs", "new", 1000),
        ("weights", "middle", 1000),
        ("pages", "old", 1000),
    ]
    assert entries(folder / "absent") == []


def test_pruning_drops_the_least_recently_used(folder: Path) -> None:
    assert [entry.path.name for entry in beyond(entries(folder), 2000)] == ["old"]
    os.utime(folder / "pages" / "old")
    assert [entry.path.name for entry in beyond(entries(folder), 2000)] == ["middle"]


def test_reading_or_copying_an_entry_is_no_use(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """`cp -a` reads every file: all of it was "used just now", and pruning had no order."""
    for entry in entries(folder):
        os.utime(entry.path / "blob", (time.time(), 1e9))
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("copy") / "cache")
    for place in (folder, copy):
        assert [(entry.path.name, entry.used) for entry in entries(place)] == [
            ("new", 1e9), ("middle", 1e9 - 100), ("old", 1e9 - 200),
        ]  # fmt: skip


def saved(folder: Path, name: str, model: str) -> Path:
    path = snapshot.save(folder, name, Identity(model, "float32", 4, model=model), [])
    (folder / TAG).write_text(TAG_TEXT)
    return path


def test_pruning_removes_named_snapshots_and_their_pages_last(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = DiskTier(folder, 1 << 20, IDENTITY)
    for start in (0, 50):
        disk.write(chain(start, 2))
    listed, other = sorted((folder / "pages").glob("*-*"))
    kept = snapshot.save(folder, "week3", IDENTITY, [page for page, _ in chain(0, 2)])
    for path in (listed, kept):
        os.utime(path, (1e8, 1e8))  # the oldest of all
    assert [entry.path for entry in by_worth(entries(folder))][:3] == [kept, listed, other]
    size = next(entry.size for entry in entries(folder) if entry.path == kept)
    command = ["cache", "prune", "--yes", "--cache-dir", str(folder), "--to"]
    assert main([*command, str(size)]) == 0
    assert "these stay: week3" in capsys.readouterr().out
    assert [entry.path for entry in entries(folder)] == [kept]
    assert main([*command, "0"]) == 0
    assert "named snapshots are among them: week3" in capsys.readouterr().out
    assert not entries(folder)


def test_a_snapshot_is_removed_by_the_name_that_somebody_gave_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = saved(tmp_path, "week3", "tiny")
    other = saved(tmp_path, "other", "tiny")
    cache = ["--yes", "--cache-dir", str(tmp_path)]
    assert main(["cache", "rm", "week4", *cache]) == 1
    assert "Did you mean week3?" in capsys.readouterr().err
    second = saved(tmp_path, "week3", "owner/name")
    assert main(["cache", "rm", "week3", *cache]) == 1
    said = capsys.readouterr().err
    assert "is a snapshot of several models" in said and f"{kept.name} (tiny)" in said
    assert f"{second.name} (owner/name)" in said
    assert main(["cache", "rm", second.name, *cache]) == 0
    assert main(["cache", "rm", "week3", *cache]) == 0
    assert [entry.path for entry in entries(tmp_path)] == [other]


def test_a_removal_that_fails_says_why_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("rekindle._src.cli.cache.try_remove", refuse)
    assert main(["cache", "clear", "--yes", "--cache-dir", str(folder)]) == 1
    shown = capsys.readouterr()
    assert shown.err == f"could not be removed: 3 entries of {folder}: Read-only file system\n"
    assert "dropped" not in shown.out


def test_a_folder_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for action in ("ls", "prune", "clear"):
        assert main(["cache", action, "--cache-dir", str(tmp_path / "typo")]) == 1
        said = capsys.readouterr()
        assert f"{tmp_path / 'typo'}': does not exist" in said.err and not said.out
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "typo"))
    assert main(["cache", "ls"]) == 1
    assert "REKINDLE_CACHE" in capsys.readouterr().err
    monkeypatch.delenv("REKINDLE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    monkeypatch.setattr("sys.platform", "linux")
    assert main(["cache", "ls"]) == 0, "no session was opened yet"
    assert "does not exist yet" in capsys.readouterr().out


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", "--json", "--cache-dir", str(folder)]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert main(["cache", "prune", "--to", "1kB", "--yes", "--cache-dir", str(folder)]) == 0
    assert "dropped 2 entries" in capsys.readouterr().out
    assert main(["cache", "clear", "--yes", "--cache-dir", str(folder)]) == 0
    assert entries(folder) == []


@pytest.mark.parametrize(("text", "size"), [("10", 10), ("1KiB", 1024), ("1.5 MB", 1_500_000), ("2gib", 2 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert Size()("--to", text, ConfigError) == size


def test_a_wrong_size_says_how_to_write_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="512MiB"):
        Size()("--to", "lots", ConfigError)
    with pytest.raises(SystemExit, match="2"):
        main(["cache", "prune", "--to", "lots", "--cache-dir", str(folder)])
    assert "--to" in capsys.readouterr().err


def lines(path: Path) -> str:
    return path.read_text() if path.exists() else "gone"


def test_entries_are_listed_by_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each model with its sum and its age, however many entries there are; what they share comes last."""
    for model in ("owner/name", "tiny"):
        identity = Identity(model, "float32", 16, model=model)
        for number in range(20):
            snapshot.save(tmp_path, f"{model.replace('/', '-')}-{number}", identity, [])
    (tmp_path / "native").mkdir(mode=0o700)
    (tmp_path / "native" / "gemm-0123456789abcdef.o").write_bytes(b"x" * 4096)
    assert main(["cache", "ls", "--cache-dir", str(tmp_path)]) == 0
    head, *lines, hint = capsys.readouterr().out.splitlines()
    assert "41 entries" in head and "--all" in hint
    assert [line.split()[0] for line in lines] == ["tiny", "owner/name", "(shared"], "used last first"
    assert "just now" in lines[0] and "snapshots" in lines[0] and "4 KiB" in lines[2]
    assert main(["cache", "ls", "--all", "--cache-dir", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(entries(tmp_path))


def test_a_models_entries_are_removed_by_its_name_which_every_listing_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Entries are named by digests, which nobody can tell apart."""
    for model in ("owner/name", "tiny"):
        snapshot.save(tmp_path, model.replace("/", "-"), Identity(model, "float32", 16, model=model), [])
    (tmp_path / TAG).write_text(TAG_TEXT)
    cache = ["--cache-dir", str(tmp_path)]
    assert main(["cache", "ls", "--all", *cache]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert sorted(line.split()[-2] for line in lines) == ["owner/name", "tiny"]
    assert main(["cache", "rm", "owner/nam", *cache]) == 1
    assert "Did you mean owner/name?" in capsys.readouterr().err
    assert main(["cache", "rm", "", *cache]) == 1
    assert main(["cache", "rm", "owner/name", *cache]) == 1, "nobody has confirmed it"
    assert "owner/name" in capsys.readouterr().out and len(entries(tmp_path)) == 2
    assert main(["cache", "rm", "owner/name", "--yes", *cache]) == 0
    assert [entry.model for entry in entries(tmp_path)] == ["tiny"]
    assert main(["cache", "rm", entries(tmp_path)[0].path.name, "--yes", *cache]) == 0
    assert not entries(tmp_path)
    assert main(["cache", "rm", "tiny", "--yes", *cache]) == 1
    assert "Nothing is kept there" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["prune", "clear"])
def test_a_folder_that_rekindle_did_not_make_is_left_alone(
    folder: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--cache-dir` of a home folder removed a thesis."""
    (folder / TAG).unlink()
    for name in ("documents/thesis.tex", "pages/thesis.tex"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("years")
    assert main(["cache", action, "--to", "0", "--yes", "--cache-dir", str(folder)]) == 1
    assert TAG in capsys.readouterr().err
    assert lines(folder / "documents/thesis.tex") == lines(folder / "pages/thesis.tex") == "years"
    (folder / TAG).write_text(TAG_TEXT)
    assert main(["cache", action, "--to", "0", "--yes", "--cache-dir", str(folder)]) == 0
    assert lines(folder / "documents/thesis.tex") == "years", "not one of the known folders"


def test_links_are_neither_followed_nor_removed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "photo").write_text("1998")
    (folder / "snapshots").symlink_to(elsewhere)
    (folder / "pages" / "link").symlink_to(elsewhere)
    assert main(["cache", "clear", "--yes", "--cache-dir", str(folder)]) == 0
    assert lines(elsewhere / "photo") == "1998"
    assert (folder / "snapshots").is_symlink() and (folder / "pages" / "link").is_symlink()
    assert entries(folder) == []


def test_what_is_being_written_stays(folder: Path) -> None:
    """The writer gave up for good when its unfinished folder went."""
    new, old = (folder / "pages" / f"{PARTIAL}{name}" / "deep" for name in ("new", "old"))
    for path in (new, old):
        path.mkdir(parents=True)
        (path / "file").write_text("half")
    for path in (old / "file", old, old.parent):
        os.utime(path, (1e9, 1e9))
    os.utime(new.parent, (1e9, 1e9))  # what counts is the file in it
    assert main(["cache", "clear", "--yes", "--cache-dir", str(folder)]) == 0
    assert lines(new / "file") == "half" and not old.parent.exists()


def test_it_shows_what_goes_and_asks(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["cache", "clear", "--cache-dir", str(folder)]
    assert main(command) == 1, "standard input is no terminal"
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("new", "middle", "old", "--yes")) and len(entries(folder)) == 3
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, left in (("", 3), ("n", 3), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert main(command) == (1 if left else 0)
        assert len(entries(folder)) == left
