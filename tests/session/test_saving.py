"""`session.save`: the list of pages comes first, then the programs that a restart needs for them."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import rekindle
from helpers.sessions import eventually
from helpers.small import MODEL, OPTIONS, prompt
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.writer import CacheWriter
from rekindle.errors import SessionClosed

pytestmark = pytest.mark.usefixtures("shared_programs")


def opened(folder: Path, **options: Any) -> rekindle.Session:
    return rekindle.open_sync(
        MODEL, **{**OPTIONS, "precompile": "lazy", "cache_dir": folder, "disk_memory": 1 << 28} | options
    )


def test_the_list_is_written_before_programs_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def look(self: CacheWriter) -> None:
        found.append(len(snapshot.find(tmp_path, "mine").records))

    monkeypatch.setattr(CacheWriter, "prepare_restart", look)
    with opened(tmp_path) as session:
        assert session.save("empty").result_sync().pages == 0
        assert not found, "nothing restores what has no pages"
        session.generate_sync(prompt(0, 40), max_tokens=1)
        assert found == [] and [session.save("mine").result_sync().pages] == found != [0]


@pytest.mark.anyio
async def test_a_save_that_is_asked_for_as_the_session_closes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is open when the save begins, and the writer's thread has ended when its job comes."""
    submit = CacheWriter.submit

    def late(self: CacheWriter, job: Callable[[], Any]) -> Any:
        monkeypatch.setattr(CacheWriter, "submit", submit)
        closing = threading.Thread(target=session.close)
        closing.start()
        closing.join(60)
        eventually(lambda: self._thread is not None and not self._thread.is_alive())
        return submit(self, job)

    with opened(tmp_path) as session:
        monkeypatch.setattr(CacheWriter, "submit", late)
        with anyio.fail_after(60), pytest.raises(SessionClosed):
            await session.save("mine")


def test_pages_of_a_snapshot_that_are_gone_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as session:
        session.generate_sync(prompt(0, 40), max_tokens=1)
        pages = session.save("mine").result_sync().pages
    with caplog.at_level(logging.WARNING, "rekindle.cache"), opened(tmp_path, restore="mine") as session:
        assert not caplog.records, "all of them are there"
    shutil.rmtree(tmp_path / "pages")
    with caplog.at_level(logging.WARNING, "rekindle.cache"), opened(tmp_path, restore="mine") as session:
        assert f"snapshot 'mine': {pages} of its {pages} pages are no longer kept" in caplog.text
        assert session.generate_sync(prompt(0, 40), max_tokens=1).usage.cached_tokens == 0
