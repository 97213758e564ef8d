"""A checkpoint that can't be written raises the disk's own error, leaves nothing behind and says nothing else."""

from __future__ import annotations

import errno
import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from rekindle._src.core.atomic_checkpoint import PARTIAL, write_checkpoint


def write(folder: Path) -> None:
    (folder / "file").write_text("content")


@pytest.mark.parametrize("failing", ["mkdir", "rename"])
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
