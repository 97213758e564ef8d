"""Sessions and the disk below them: a full one is a typed error, somebody else's folder means working without."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from helpers.faults import full_disk
from helpers.tiered import ask, opened
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle.errors import StoreError
from rekindle_kernels.private_files import tell_once

pytestmark = pytest.mark.usefixtures("shared_programs")


def test_a_full_disk_in_save_is_a_typed_error_and_the_next_save_works(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        ask(session, 0)
        with full_disk(str(tmp_path)), pytest.raises(StoreError, match="No space left on device"):
            session.save("mine").result_sync()
        assert session.save("mine").result_sync().pages > 0
        session.check_integrity()


@pytest.mark.thorough
def test_a_session_works_without_a_cache_that_others_can_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "cache") as session:
        ask(session, 0)
        session.save("mine").result_sync()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    (tmp_path / "cache").chmod(0o777)
    tell_once.cache_clear()
    with caplog.at_level(logging.WARNING), opened(tmp_path / "cache", restore="auto") as session:
        assert ask(session, 0) == 0, "nothing was restored"
        assert ask(session, 0) > 0, "the session's own cache works"
        with pytest.raises(StoreError, match="chmod go-w"):
            session.save("mine").result_sync()
        session.check_integrity()
    assert caplog.text.count("can be written by others") == 1, "said once, by whichever part was first"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()} == before


def test_an_error_of_the_disk_that_nothing_else_translates_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: DiskTier, *, reserve: int = 0) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with opened(tmp_path) as session:
        ask(session, 0)
        with monkeypatch.context() as patched:
            patched.setattr(DiskTier, "collect", failing)
            with pytest.raises(StoreError, match="Input/output error") as caught:
                session.save("mine").result_sync()
        assert isinstance(caught.value.__cause__, OSError)
        assert session.save("mine").result_sync().pages > 0
