"""A checkpoint that can't be written raises the disk's own error, leaves none of its files and says nothing else."""

from __future__ import annotations

import errno
import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from rekindle._src.core import atomic_checkpoint
from rekindle._src.core.atomic_checkpoint import ITEM, PARTIAL, write_checkpoint


def write(folder: Path) -> None:
    (folder / "file").write_text("content")


@pytest.mark.parametrize("failing", ["mkdir", "replace"])
def test_no_coroutine_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    plain = getattr(os, failing)

    def full(path: Any, *arguments: Any, **options: Any) -> Any:
        if PARTIAL in os.fspath(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(path, *arguments, **options)

    write_checkpoint(tmp_path / "pages" / "earlier", write)
    monkeypatch.setattr(os, failing, full)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(OSError, match="No space left"):
            write_checkpoint(tmp_path / "pages" / "one", write)
        gc.collect()
    assert not [str(one.message) for one in seen if "never awaited" in str(one.message)]
    assert [path.name for path in (tmp_path / "pages").iterdir()] == ["earlier"]
    monkeypatch.undo()
    write_checkpoint(tmp_path / "pages" / "one", write)
    assert (tmp_path / "pages" / "one").is_dir()


def test_one_of_several_processes_writes_without_orbax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax would wait until all of them save."""

    def waits() -> Any:
        raise AssertionError("it would wait for ever")

    monkeypatch.setattr(atomic_checkpoint, "several_processes", lambda: True)
    monkeypatch.setattr(atomic_checkpoint, "orbax", waits)
    write_checkpoint(tmp_path / "pages" / "one", write)
    assert (tmp_path / "pages" / "one" / ITEM / "file").read_text() == "content"
    assert [path.name for path in (tmp_path / "pages").iterdir()] == ["one"]

    def fails(folder: Path) -> None:
        write(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path / "pages" / "two", fails)
    assert [path.name for path in (tmp_path / "pages").iterdir()] == ["one"]
