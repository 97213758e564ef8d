"""Object code is kept for this user alone, read only if it is, and never left half written."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import rekindle_kernels
from helpers.faults import full_disk
from helpers.kernel_state import store, stored
from rekindle._src.core.config import cache_folder
from rekindle_kernels.native import build, kernel_files
from rekindle_kernels.private_files import TAG, tell_once

pytestmark = pytest.mark.skipif(build.unavailable_reason() is not None, reason="no native kernels here")
NAME, CODE = "some_kernel", b"machine code" * 1000


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kernel_files, "cache_folder", tmp_path / "cache")
    tell_once.cache_clear()
    return tmp_path / "cache" / "native"


def test_it_is_read_as_it_was_written(native: Path) -> None:
    store(NAME, CODE)
    assert stored(NAME) == CODE
    (file,) = native.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    os.utime(file, (1e9, 1e9))
    assert stored(NAME) == CODE and file.stat().st_mtime > 1e9, "its use is noted"
    file.write_bytes(file.read_bytes()[:-1])
    assert stored(NAME) is None


def test_what_others_could_have_written_is_not_loaded(native: Path, caplog: pytest.LogCaptureFixture) -> None:
    store(NAME, CODE)
    (file,) = native.iterdir()
    file.chmod(0o666)
    assert stored(NAME) is None
    file.chmod(0o600)
    assert stored(NAME) == CODE
    native.chmod(0o777)
    with caplog.at_level(logging.WARNING, "rekindle.cache"):
        assert stored(NAME) is None
        store("another", CODE)
        assert stored("another") is None
    assert [file.name for file in native.iterdir()] == [file.name]
    assert len(caplog.records) == 1 and str(native) in caplog.text


def test_a_full_disk_leaves_nothing_behind(native: Path) -> None:
    store(NAME, CODE)
    before = {path.name for path in native.iterdir()}
    with full_disk("native"):
        store("another", CODE)
    assert {path.name for path in native.iterdir()} == before


def test_the_folder_of_the_environment_is_expanded(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toolkit resolves the environment's folder and hands it in, as `rekindle.open` does."""
    monkeypatch.setenv("HOME", str(native.parent.parent))
    monkeypatch.setenv("REKINDLE_CACHE", "~/cache")
    rekindle_kernels.configure(cache_folder=cache_folder())
    assert kernel_files.folder() == native
    store(NAME, CODE)
    assert (native.parent / TAG).exists()
