"""Sessions and the disk below them: a full one is a typed error, somebody else's folder means working without."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import full_disk
from helpers.sessions import eventually, writer_of
from helpers.tiered import ask, opened
from rekindle._src.dispatch import engine
from rekindle._src.kvcache import writer as cache_writer
from rekindle._src.kvcache.tiers import tiers
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle.errors import StoreError
from rekindle_kernels.private_files import tell_once

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")


def test_a_full_disk_in_save_is_a_typed_error_and_the_next_save_works(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        ask(session, 0)
        with full_disk(str(tmp_path)), pytest.raises(StoreError, match="No space left on device"):
            session.save("mine").result_sync()
        assert session.save("mine").result_sync().pages > 0
        session.check_integrity()


@pytest.mark.thorough
def test_saving_in_the_background_goes_on_when_the_disk_has_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TICK_SECONDS": 0.02, "COLD_SECONDS": 0.0, "RETRY_SECONDS": 0.05, "LONGEST_RETRY": 0.2}.items():
        monkeypatch.setattr(cache_writer, name, value)
    attempts: list[float] = []
    write = DiskTier.write

    def counted(self: DiskTier, pages: Any) -> int:
        attempts.append(time.monotonic())
        return write(self, pages)

    monkeypatch.setattr(DiskTier, "write", counted)
    with opened(tmp_path) as session, caplog.at_level(logging.INFO, "rekindle.cache"):
        with full_disk(str(tmp_path)):
            ask(session, 0)
            eventually(lambda: len(attempts) >= 5)
            assert session.cache.stats().disk.pages == 0
        eventually(lambda: session.cache.stats().disk.pages >= 8)
        said = [record.levelno for record in caplog.records if record.name == "rekindle.cache"]
        assert said.count(logging.WARNING) == 1 and "No space left on device" in caplog.text
        assert [later - earlier >= 0.15 for earlier, later in itertools.pairwise(attempts)][2:4] == [True, True]
        eventually(lambda: "succeeded after failures" in caplog.text)  # it is said after the pages are counted
        session.check_integrity()
    with opened(tmp_path, restore="auto") as session:
        assert ask(session, 0) > 0


def test_a_disk_that_hangs_while_pages_are_saved_does_not_keep_a_session_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, begun, write = threading.Event(), threading.Event(), DiskTier.write

    def hanging(self: DiskTier, pages: Any) -> int:
        begun.set()
        assert answers.wait(60), "the disk was never mended"
        return write(self, pages)

    monkeypatch.setattr(DiskTier, "write", hanging)
    monkeypatch.setattr(cache_writer, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(cache_writer, "COLD_SECONDS", 0.0)
    monkeypatch.setattr(cache_writer, "CLOSE_SECONDS", 0.1)
    session = opened(tmp_path, restore="auto")
    ask(session, 0)
    assert begun.wait(60)
    ask(session, 1)
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(60)
    closed = not closing.is_alive()
    answers.set()
    closing.join()
    assert closed


def test_a_disk_that_hangs_costs_its_pages_and_not_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as session:
        ask(session, 0)
        session.save("mine").result_sync()
    answers, load_run = threading.Event(), DiskTier.load_run

    def hanging(self: DiskTier, *arguments: Any) -> Any:
        assert answers.wait(60), "the disk was never mended"
        return load_run(self, *arguments)

    monkeypatch.setattr(DiskTier, "load_run", hanging)
    monkeypatch.setattr(tiers, "HANG_SECONDS", 1.0)
    monkeypatch.setattr(engine, "STALL_SECONDS", 0.3)
    with opened(tmp_path, restore="auto") as session:
        assert ask(session, 0) == 0, "its pages were computed"
        assert ask(session, 1) > 0, "the pages that both share were computed once"
        answers.set()
        eventually(lambda: not writer_of(session).tiers.hangs())
        session.check_integrity()
    assert caplog.text.count("has not answered for") == 1
    with opened(tmp_path, restore="auto") as session:
        assert ask(session, 0) > 0


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
