"""A session may be killed, and the power or the disk may fail, at any call that changes a file of its cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from helpers.disk_calls import kills, power_cuts
from session.session_job import SERVING

pytestmark = pytest.mark.slow
JOB = "session.session_job:SERVING"
Expected = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    programs = tmp_path_factory.mktemp("cache") / "programs"
    os.environ["REKINDLE_TEST_PROGRAMS"] = str(programs)
    return SERVING.expected(programs)


def test_the_next_session_has_what_a_killed_one_saved(expected: Expected, tmp_path: Path) -> None:
    count = 0
    for killed in kills(JOB, tmp_path / "kills", step=23):
        SERVING.check(killed.folder, killed.marks, cut=False, expected=expected)
        count += 1
    print(f"\nsessions: {count} kills")
    assert count > 4


def test_the_next_session_has_what_was_saved_before_the_power_failed(
    expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    count = 0
    for cut in power_cuts(JOB, tmp_path / "cuts", step=83):
        SERVING.check(cut.folder, cut.marks, cut=True, expected=expected)
        count += 1
    print(f"\nsessions: {count} power cuts")
    assert count > 4


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_a_session_goes_on_when_its_disk_takes_nothing_more(expected: Expected, failure: int, tmp_path: Path) -> None:
    count = 0
    for failed in kills(JOB, tmp_path / "failures", step=61, failure=failure):
        SERVING.check(failed.folder, failed.marks, cut=False, expected=expected)
        count += 1
    print(f"\nsessions: {count} disks that fail")
    assert count > 1
