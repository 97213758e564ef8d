"""Stored programs are code: whose they are is asked before they are loaded, and a passing error removes none."""

from __future__ import annotations

import json
import logging
import os
import pickle
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from helpers.faults import NAMES, PASSING, unreadable
from rekindle._src.core.atomic_checkpoint import DAMAGED, KEPT_DAMAGED
from rekindle._src.programs.store import MAX_AGE, META, PROGRAM, ExecutableStore
from rekindle.errors import StoreError
from rekindle_kernels.private_files import KEY_VARIABLE, tell_once

KEY = "a" * 32


@pytest.fixture(autouse=True)
def _nothing_was_said_yet() -> None:
    tell_once.cache_clear()


@pytest.fixture(scope="module")
def compiled() -> Any:
    return jax.jit(lambda x: x + 1).lower(jnp.ones(4)).compile()


@pytest.fixture
def folder(tmp_path: Path, compiled: Any) -> Path:
    path = tmp_path / "cache" / "programs"
    assert save(path, compiled)
    return path


def save(folder: Path, compiled: Any, key: str = KEY) -> bool:
    return ExecutableStore(folder).save(key, compiled, name="r2t0", model="llama", compile_seconds=1.5)


def loads(folder: Path) -> bool:
    try:
        return float(ExecutableStore(folder).load(KEY)(jnp.ones(4))[0]) == 2.0
    except StoreError:
        return False


def test_what_is_stored_is_for_this_user_alone(folder: Path) -> None:
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder.parent, folder, folder / KEY)} == {0o700}
    assert loads(folder)


def test_no_pickle_of_ours_is_among_it(folder: Path) -> None:
    meta = json.loads((folder / KEY / META).read_text())
    assert meta["arguments"] == ["tuple", ["tuple", "*"], ["dict", {}]] and meta["results"] == "*"


class Command:
    """A pickle that runs a command when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("where", ["owner", "folder", "file", "link"])
def test_a_poisoned_entry_of_somebody_else_is_not_run(
    folder: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rekindle._src.programs import store

    program, trace = folder / KEY / PROGRAM, tmp_path / "ran"
    program.write_bytes(pickle.dumps(Command(trace)))
    meta = json.loads((folder / KEY / META).read_text())
    del meta["checksum"]
    meta["checksum"] = store._checksum(KEY, meta, program.read_bytes())
    (folder / KEY / META).write_text(json.dumps(meta))
    match where:
        case "owner":
            uid = folder.stat().st_uid
            monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        case "folder":
            folder.parent.chmod(0o777)
        case "file":
            program.chmod(0o666)
        case "link":
            program.rename(tmp_path / "elsewhere")
            program.symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        assert not loads(folder)
    assert not trace.exists()
    assert len(caplog.records) == 1
    assert (folder / KEY).is_dir(), "it is not ours to remove"


def test_a_shared_store_loads_what_was_signed_and_nothing_else(
    folder: Path, tmp_path: Path, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        (tmp_path / f"key{number}").write_bytes(os.urandom(32))
        (tmp_path / f"key{number}").chmod(0o600)
    folder.chmod(0o777)
    assert not loads(folder)
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key0"))
    assert not loads(folder), "it is not signed"
    assert save(folder, compiled) and loads(folder)
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key1"))
    assert not loads(folder), "it is signed with another key"
    assert len([path for path in folder.iterdir() if not path.name.startswith(DAMAGED)]) == 2, "nothing was removed"


@pytest.mark.parametrize("number", PASSING, ids=NAMES)
@pytest.mark.parametrize("part", [PROGRAM, META])
def test_a_passing_error_removes_nothing(folder: Path, number: int, part: str) -> None:
    store = ExecutableStore(folder)
    with unreadable(part, number) as tried, pytest.raises(StoreError):
        store.load(KEY)
    assert tried
    assert loads(folder)
    old = time.time() - MAX_AGE / 2  # old enough for what is unfinished to go
    for path in [folder / KEY, *(folder / KEY).rglob("*")]:
        os.utime(path, (old, old))
    with unreadable(part, number):
        store.prune()
    assert loads(folder)


def test_damage_is_set_aside_and_bounded(folder: Path, compiled: Any) -> None:
    for _ in range(KEPT_DAMAGED + 2):
        (folder / KEY / PROGRAM).write_bytes(b"damaged")
        assert not loads(folder)
        assert save(folder, compiled) and loads(folder)
    aside = list(folder.glob(f"{DAMAGED}*"))
    assert len(aside) == KEPT_DAMAGED
    assert all((path / PROGRAM).read_bytes() == b"damaged" for path in aside)
    assert len(ExecutableStore(folder).stored()) == 1
