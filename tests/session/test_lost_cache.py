"""A cache folder that goes, or can't be written any more, while a session uses it; clocks that jump; little memory."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path

import pytest

from helpers.tiered import ask, opened
from rekindle.errors import StoreError

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.mark.parametrize("part", [".", "pages", "snapshots"])
def test_what_is_saved_after_the_folder_was_deleted_is_whole(
    part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    with opened(cache) as session, caplog.at_level(logging.WARNING, "rekindle"):
        assert ask(session, 0) == 0
        session.save("mine").result_sync()
        shutil.rmtree(cache / part)
        assert ask(session, 1) == 32, "what is on the device is used"
        report = session.save("mine").result_sync()
        session.check_integrity()
        assert len(caplog.records) <= 1
    with opened(cache, restore="mine") as session:
        assert session.stats().cache.nodes == report.pages > 8
        assert [ask(session, index) for index in range(2)] == [64, 64]
