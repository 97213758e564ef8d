"""Kept weights: passing errors remove none, others' are not used, and cutting the file off does not end the process."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from helpers import checkpoints
from helpers.faults import NAMES, PASSING, unreadable
from rekindle._src.core.atomic_checkpoint import DAMAGED
from rekindle._src.models import LoadedModel
from rekindle._src.models.loading import checkpoint, mmap_weights, prepared
from rekindle_kernels.private_files import tell_once

RAW = checkpoints.CASES["llama"]


@pytest.fixture(autouse=True)
def _keep_tiny_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MIN_BYTES", 0)
    tell_once.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "model", RAW)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(folder: Path, cache: Path) -> LoadedModel:
    loaded = checkpoint.load(folder, quantize="int8", cache_dir=cache)
    assert prepared.wait(60)
    return loaded


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "weights").iterdir()) if (cache / "weights").exists() else []


def same(a: LoadedModel, b: LoadedModel) -> bool:
    return all((np.asarray(x) == np.asarray(y)).all() for x, y in zip(a.leaves, b.leaves, strict=True))


@pytest.mark.parametrize("number", PASSING, ids=NAMES)
@pytest.mark.parametrize("part", ["weights.safetensors", "checksums.json", prepared._MODEL])
def test_a_passing_error_removes_nothing(folder: Path, cache: Path, number: int, part: str) -> None:
    first = load(folder, cache)
    before = kept(cache)
    # Of the weights only those that are kept: the checkpoint's own file has another name.
    with unreadable(f"{before[0].name}/rekindle/{part}", number), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert same(load(folder, cache), first), "the checkpoint is read again"
    assert all("can't be read now" in str(one.message) for one in said) and said
    assert kept(cache) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(load(folder, cache), first)


def test_damage_is_set_aside_and_one_is_kept(folder: Path, cache: Path) -> None:
    load(folder, cache)
    for _ in range(3):
        (whole,) = (path for path in kept(cache) if not path.name.startswith(DAMAGED))
        os.truncate(whole / "rekindle" / "weights.safetensors", 5000)
        with pytest.warns(UserWarning, match="were set aside"):
            load(folder, cache)
    assert len([path for path in kept(cache) if path.name.startswith(DAMAGED)]) == 1


def test_weights_of_somebody_else_are_not_used(folder: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = load(folder, cache)
    before = kept(cache)
    cache.chmod(0o777)
    for _ in range(2):
        assert same(load(folder, cache), first)
    assert caplog.text.count("the cache is not used") == 1
    assert kept(cache) == before
    assert {path.stat().st_mode & 0o077 for path in before[0].rglob("*")} == {0}


TRUNCATED = """if True:
    import sys, time
    import numpy as np
    from rekindle._src.models.loading import checkpoint, mmap_weights, prepared
    prepared.MIN_BYTES = 0
    mmap_weights._worthwhile = lambda size: False  # as on a system without huge pages: it stays mapped
    loaded = checkpoint.load(sys.argv[1], quantize="int8", cache_dir=sys.argv[2])
    assert "weights.safetensors" in open("/proc/self/maps").read()
    print("mapped", flush=True)
    sys.stdin.readline()
    print(sum(float(np.asarray(leaf).astype(np.float64).sum()) for leaf in loaded.leaves), flush=True)
"""


def leases(folder: Path) -> bool:
    file = folder / "leased"
    file.write_bytes(b"x")
    lease = mmap_weights.take_lease(file)
    if lease is not None:
        lease.release()
    return lease is not None


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="leases are of Linux")
def test_cutting_off_a_mapped_file_does_not_end_the_process(folder: Path, cache: Path) -> None:
    if not leases(folder):
        pytest.skip("this file system has no leases")
    first = load(folder, cache)
    expected = sum(float(np.asarray(leaf).astype(np.float64).sum()) for leaf in first.leaves)
    (file,) = cache.rglob("weights.safetensors")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TRUNCATED, str(folder), str(cache)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        start = time.monotonic()
        os.truncate(file, 4096)
        assert time.monotonic() - start < 30, "the holder did not let go by itself"
        answer, _ = process.communicate("go\n", timeout=60)
    assert process.returncode == 0, "it died of SIGBUS" if process.returncode == -7 else answer
    assert float(answer) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="leases are of Linux")
def test_a_file_that_is_open_for_writing_is_read_and_not_mapped(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not leases(folder):
        pytest.skip("this file system has no leases")
    first = load(folder, cache)
    (file,) = cache.rglob("weights.safetensors")
    viewed: list[Path] = []
    monkeypatch.setattr(mmap_weights, "view", viewed.append)
    with file.open("r+b"):
        assert same(load(folder, cache), first)
    assert not viewed


@pytest.mark.skipif(sys.platform != "linux", reason="leases are of Linux")
def test_no_descriptor_or_thread_stays(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap_weights, "WATCH", 0.01)
    monkeypatch.setattr(mmap_weights, "DELAY", 0.0)
    monkeypatch.setattr(mmap_weights, "_worthwhile", lambda size: False)
    load(folder, cache)

    def held() -> list[str]:
        links = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/self/fd/{number}"))
        threads = [thread.name for thread in threading.enumerate() if thread.name == "rekindle huge pages"]
        return threads + [link for link in links if link.startswith(str(cache))]

    for _ in range(3):
        loaded = load(folder, cache)
        assert held()
        for leaf in loaded.leaves:
            leaf.delete()
        del leaf, loaded
    end = time.monotonic() + 30
    while held() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert held() == []
