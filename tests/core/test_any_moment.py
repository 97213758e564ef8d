"""A process may be killed, and the power may fail, at any call that changes a file: nothing saved is lost, nothing is
wrong, and nothing stands in the way of what comes next.

A power cut may leave what a kill leaves, so its cases have that of each call as well; kills show that it is so.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import store_jobs
from helpers.disk_calls import Job, kills, power_cuts
from rekindle_kernels import read_through


@pytest.fixture(autouse=True)
def _no_power_fails_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setenv("REKINDLE_TEST_MODEL", str(tmp_path / "model"))
    known = dict(read_through._backing)
    yield
    read_through._backing.clear()
    read_through._backing.update(known)


JOBS = ("PAGES", "CAPTURES", "FOLDERS", "FILES", "SHARED", "WEIGHTS")


def steps(in_ci: int, **some: int) -> Any:
    """By default some calls of these jobs, each so many after the last one; in CI more of them, of all jobs."""
    others = [pytest.param(name, in_ci, marks=pytest.mark.slow) for name in JOBS]
    return pytest.mark.parametrize(("name", "step"), [*some.items(), *others])


def job(name: str) -> tuple[str, Job]:
    one: Job = getattr(store_jobs, name)
    return f"{store_jobs.__name__}:{name}", one


@pytest.mark.filterwarnings("ignore:the laid-out weights")
@steps(6, FILES=7)
def test_a_kill_at_any_call_loses_nothing_that_was_saved(name: str, step: int, tmp_path: Path) -> None:
    count, (where, one) = 0, job(name)
    for killed in kills(where, tmp_path / "kills", step=step):
        try:
            one.check(killed.folder, killed.marks, cut=False)
        except Exception as error:
            raise AssertionError(f"killed at call {killed.call}: {error!r}") from error
        count += 1
    print(f"\n{name}: {count} kills")
    assert count > 5


@pytest.mark.filterwarnings("ignore:the laid-out weights")
@steps(6, FILES=7)
def test_a_disk_that_is_full_from_any_call_on_costs_nothing_that_was_saved(
    name: str, step: int, tmp_path: Path
) -> None:
    count, (where, one) = 0, job(name)
    for failed in kills(where, tmp_path / "failures", step=step, failure=errno.ENOSPC):
        try:
            one.check(failed.folder, failed.marks, cut=False)
        except Exception as error:
            raise AssertionError(f"full from call {failed.call} on: {error!r}") from error
        count += 1
    print(f"\n{name}: {count} full disks")
    assert count > 5


@pytest.mark.filterwarnings("ignore:the laid-out weights")
@steps(1, PAGES=31, FILES=9)
def test_a_power_cut_at_any_call_loses_nothing_that_was_saved(name: str, step: int, tmp_path: Path) -> None:
    count, (where, one) = 0, job(name)
    for cut in power_cuts(where, tmp_path / "cuts", step=step):
        try:
            one.check(cut.folder, cut.marks, cut=True)
        except Exception as error:
            raise AssertionError(f"cut {count} at call {cut.call}: {error!r}") from error
        count += 1
    print(f"\n{name}: {count} power cuts")
    assert count > 20
