"""Weights in their final form survive a restart, and never stand in the way of the checkpoint.

Passing errors remove none, others' are not used, and cutting the file off does not end the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from helpers import checkpoints
from helpers.faults import NAMES, PASSING, unreadable
from helpers.thorough import by_default
from rekindle._src.core import store
from rekindle._src.core.atomic_checkpoint import DAMAGED, write_checkpoint
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.loading import checkpoint, kept_weights, mmap_weights, prepared, tensor_files
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


def load(folder: Path, cache: Path, quantize: str | None = "int8", **options: object) -> LoadedModel:
    loaded = checkpoint.load(folder, quantize=quantize, cache_dir=cache, **options)
    assert prepared.wait(60)
    return loaded


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "weights").iterdir()) if (cache / "weights").exists() else []


def status_of(program: str, folder: Path, cache: Path) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(folder), str(cache)]
    return subprocess.run(command, env=environment, timeout=300, check=False).returncode


def assert_same(a: LoadedModel, b: LoadedModel) -> None:
    assert (a.fingerprint, a.graph, a.config, a.folder) == (b.fingerprint, b.graph, b.config, b.folder)
    checkpoints.assert_same(a, b)


def break_the_checkpoint(folder: Path) -> None:
    """Its header stays, its content goes, its times are restored: only what was kept can still be right."""
    file = folder / "model.safetensors"
    times = file.stat()
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.seek(size - 4096 * 8)
        opened.write(b"\xff" * 64)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("quantize", ["int8", None])
def test_the_second_start_reads_what_the_first_kept(
    folder: Path, cache: Path, quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(folder, cache, quantize)
    assert len(kept(cache)) == 1
    seen = checkpoint.look(folder)
    break_the_checkpoint(folder)
    monkeypatch.setattr(checkpoint, "look", lambda *_, **__: seen)
    reports: list[object] = []
    assert_same(load(folder, cache, quantize, progress=reports.append), first)
    assert reports[-1].done == reports[-1].total == first.nbytes


def test_other_precisions_and_other_weights_have_their_own(folder: Path, cache: Path) -> None:
    for options in (
        {},
        {"quantize": "int8-weight"},
        {"quantize": None},
        {"quantize": None, "dtype": "float16"},
        {"quantize_embeddings": False},
    ):
        before = len(kept(cache))
        load(folder, cache, **options)
        assert len(kept(cache)) == min(prepared.MAX_ENTRIES, before + 1), options
    first = {path.name for path in kept(cache)}
    load(checkpoints.write(folder, RAW, seed=1), cache)
    assert {path.name for path in kept(cache)} - first


def test_a_small_checkpoint_and_a_large_plain_copy_are_not_kept(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = checkpoint.inspect(folder).nbytes
    monkeypatch.setattr(prepared, "MAX_COPY", size - 1)
    load(folder, cache, None, dtype="float32")
    assert kept(cache) == []
    monkeypatch.setattr(prepared, "MIN_BYTES", 1 << 20)
    load(folder, cache)
    assert kept(cache) == []


def test_a_plain_copy_is_kept_where_it_can_be_mapped(folder: Path, cache: Path) -> None:
    load(folder, cache, None, dtype="float32", place=lambda path, array: jax.device_put(array))
    assert kept(cache) == []
    load(folder, cache, None, dtype="float32")
    assert len(kept(cache)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells where a file is mapped")
@pytest.mark.parametrize(("quantize", "dtype"), [("int8", "bfloat16"), (None, "bfloat16"), (None, "float32")])
def test_kept_weights_are_used_where_they_are_mapped(
    folder: Path, cache: Path, quantize: str | None, dtype: str
) -> None:
    load(folder, cache, quantize, dtype=dtype)
    again = load(folder, cache, quantize, dtype=dtype)
    file = str(only_file(cache, "weights.safetensors"))
    spans = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(file)
    ]
    lie = {
        path: any(start <= leaf.unsafe_buffer_pointer() < stop for start, stop in spans)
        for path, leaf in zip(again.graph.paths, again.leaves, strict=True)
    }
    sizes = {path: leaf.nbytes for path, leaf in zip(again.graph.paths, again.leaves, strict=True)}
    assert {path for path, there in lie.items() if not there} <= {path for path in sizes if sizes[path] % 64}


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they stay where they are mapped")
def test_kept_weights_move_to_huge_pages(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap_weights, "DELAY", 0.0)
    monkeypatch.setattr(mmap_weights, "worthwhile", lambda size: True)
    first = load(folder, cache)
    again = load(folder, cache)
    for thread in threading.enumerate():
        if thread.name == "rekindle huge pages":
            thread.join(60)
    assert str(only_file(cache, "weights.safetensors")) not in Path("/proc/self/maps").read_text()
    assert_same(again, first)


def test_leaves_of_odd_sizes_do_not_shift_others(tmp_path: Path) -> None:
    sizes = {"a": 100, "b": 256, "c": 3, "d": 64}
    prepared.write_item(b"", {name: np.zeros(size, np.int8) for name, size in sizes.items()}, tmp_path)
    offsets = {entry.name: entry.offset for entry in tensor_files.read_header(tmp_path / "weights.safetensors").entries}
    assert [name for name, at in offsets.items() if at % 64 == 0] == ["b", "d", "a"]


def test_a_slot_is_for_one_checkpoint_asked_for_in_one_way_on_one_platform(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slots() -> set[Path]:
        return {prepared.slot(cache, "f", "bfloat16", None), prepared.slot(cache, "f", "float32", None)}

    found = slots() | {prepared.slot(cache, "g", "bfloat16", None)}
    for where, name, value in (
        (prepared, "unavailable_reason", lambda platform: "none here"),
        (prepared.jax, "default_backend", lambda: "tpu"),
        (kept_weights, "sources", lambda: "other"),
        (kept_weights, "_flax", lambda: "0"),
    ):
        with monkeypatch.context() as other:
            other.setattr(where, name, value)
            found |= slots()
    assert len(found) == 11


def test_the_first_answer_is_not_disturbed_by_writing(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = threading.Event()
    monkeypatch.setattr(prepared, "write_once", lambda *_: writes.set())
    monkeypatch.setattr(prepared, "DELAY", 60.0)
    checkpoint.load(folder, quantize="int8", cache_dir=cache)
    assert not writes.wait(0.3)
    assert prepared.wait(60)
    assert writes.is_set()


@pytest.mark.parametrize("on_host", [True, False])
def test_steps_beside_writing_have_pauses_until_the_end(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, on_host: bool
) -> None:
    pauses: list[float] = []

    class Hurry(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return super().wait(timeout)

    monkeypatch.setattr(prepared, "is_on_host", lambda leaf: on_host)
    monkeypatch.setattr(prepared, "hurry", Hurry())
    monkeypatch.setattr(prepared, "DELAY", 0.0)
    monkeypatch.setattr(prepared, "PIECE", 1 << 10)
    monkeypatch.setattr(prepared, "IN_ALL", 1e-3)
    before = checkpoint.load(folder, quantize="int8", cache_dir=cache)
    assert prepared.wait(60)
    assert len(pauses) > sum(leaf.nbytes for leaf in before.leaves) >> 10, "one after each piece"
    assert sum(pauses) < 1.1e-3, "others wait for the cache meanwhile"
    assert any(pauses) is on_host, "leaves of an accelerator are gone when the session is"
    after = checkpoint.load(folder, quantize="int8", cache_dir=cache)
    checkpoints.assert_same(before, after)


def test_leaves_of_an_accelerator_are_written_at_once(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "is_on_host", lambda leaf: False)
    writes = threading.Event()
    monkeypatch.setattr(prepared, "write_once", lambda *_: writes.set())
    monkeypatch.setattr(prepared, "DELAY", 60.0)
    checkpoint.load(folder, quantize="int8", cache_dir=cache)
    assert writes.wait(60)  # they are gone when the session is
    assert prepared.wait(60)


@pytest.mark.thorough
def test_what_is_written_too_slowly_at_the_end_is_not_left(folder: Path, cache: Path) -> None:
    program = """if True:
        import sys, time
        from rekindle._src.models.loading import checkpoint, prepared, tensor_files
        prepared.MIN_BYTES, prepared.AT_EXIT = 0, 1.5
        write = tensor_files.write_data
        def slow(file, data):
            write(file, data[:1000])
            time.sleep(30)
        tensor_files.write_data = slow
        checkpoint.load(sys.argv[1], quantize="int8", cache_dir=sys.argv[2])
    """
    assert status_of(program, folder, cache) == 0
    assert kept(cache) == []


def test_a_full_memory_is_no_damage(folder: Path, cache: Path) -> None:
    load(folder, cache)

    def full(path: str, array: object) -> jax.Array:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        load(folder, cache, place=full)
    assert len(kept(cache)) == 1


def test_a_cache_that_can_only_be_read_is_used(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(folder, cache)
    monkeypatch.setattr(os, "utime", lambda *_: (_ for _ in ()).throw(PermissionError(13, "denied")))
    assert_same(load(folder, cache), first)


def test_where_files_can_not_be_mapped_they_are_read(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        raise OSError(19, "No such device", str(path))

    first = load(folder, cache)
    monkeypatch.setattr(mmap_weights, "view", fails)
    assert_same(load(folder, cache), first)


def only_file(cache: Path, name: str) -> Path:
    (found,) = kept(cache)[0].rglob(name)
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated": lambda cache: os.truncate(only_file(cache, "weights.safetensors"), 5000),
    "a flipped bit": lambda cache: flip(only_file(cache, "weights.safetensors"), -100),
    "a header of another": lambda cache: flip(only_file(cache, "weights.safetensors"), 20),
    "a flipped bit of the model": lambda cache: flip(only_file(cache, "model.json"), 100),
    "no model": lambda cache: only_file(cache, "model.json").write_bytes(b""),
    "no checksums": lambda cache: only_file(cache, "checksums.json").unlink(),
    "no weights": lambda cache: only_file(cache, "weights.safetensors").unlink(),
    "an empty folder": lambda cache: [path.unlink() for path in kept(cache)[0].rglob("*") if path.is_file()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_means_one_warning_and_the_checkpoint_again(folder: Path, cache: Path, damage: str) -> None:
    first = load(folder, cache)
    DAMAGE[damage](cache)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert_same(load(folder, cache), first)
    texts = [str(w.message) for w in said]
    assert len(texts) == 1 and "damaged" in texts[0], texts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(load(folder, cache), first)  # and it was kept again


@pytest.mark.thorough
def test_a_process_that_dies_while_keeping_leaves_nothing_to_trust(folder: Path, cache: Path) -> None:
    program = """if True:
        import os, sys
        from rekindle._src.models.loading import checkpoint, prepared, tensor_files
        prepared.MIN_BYTES = 0
        write = tensor_files.write_data
        def dies(file, data):
            write(file, data[: len(data) // 2])
            os._exit(7)
        tensor_files.write_data = dies
        checkpoint.load(sys.argv[1], quantize="int8", cache_dir=sys.argv[2])
        prepared.wait()
    """
    assert status_of(program, folder, cache) == 7
    left = kept(cache)
    assert left, "it had begun to write"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load(folder, cache)
    assert_same(loaded, checkpoint.load(folder, quantize="int8"))
    for path in left:  # an hour later the remains are swept
        for written in (*path.rglob("*"), path) if path.exists() else ():
            os.utime(written, (0, 0))
    load(folder, cache, "int8-weight")
    assert not [path for path in kept(cache) if path in left and path.name.startswith("partial-")]


@pytest.mark.thorough
@pytest.mark.skipif(
    sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)),
    reason="these start no threads any more while others still run at the interpreter's end (CPython's gh-113964)",
)
def test_a_script_that_ends_at_once_keeps_them_first(folder: Path, cache: Path) -> None:
    program = """if True:
        import sys
        from rekindle._src.models.loading import checkpoint, prepared
        prepared.MIN_BYTES = 0
        checkpoint.load(sys.argv[1], quantize="int8", cache_dir=sys.argv[2])
    """
    assert status_of(program, folder, cache) == 0
    assert only_file(cache, "weights.safetensors")


@pytest.mark.thorough
def test_a_python_without_the_private_hook_leaves_nothing_half_written(folder: Path, cache: Path) -> None:
    program = """if True:
        import sys, threading
        from rekindle._src.models.loading import checkpoint, prepared
        prepared.MIN_BYTES = 0
        import concurrent.futures.thread, orbax.checkpoint  # the standard library uses the hook as well
        del threading._register_atexit
        checkpoint.load(sys.argv[1], quantize="int8", cache_dir=sys.argv[2])
    """
    assert status_of(program, folder, cache) == 0
    assert not [path for path in kept(cache) if path.name.startswith("partial-")]


def test_the_least_recently_used_leaves_first(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MAX_ENTRIES", 2)
    load(folder, cache, "int8")
    (int8,) = kept(cache)
    load(folder, cache, "int8-weight")
    (other,) = set(kept(cache)) - {int8}
    os.utime(int8, (1, 1))
    os.utime(other, (2, 2))
    load(folder, cache, "int8")  # used again
    load(folder, cache, None)
    assert int8 in kept(cache) and other not in kept(cache)


def test_a_full_or_unwritable_disk_only_costs_the_next_start(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder should be")
    load(folder, cache)
    assert "the cache is not used" in caplog.text
    cache.unlink()
    monkeypatch.setattr(prepared.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10))
    load(folder, cache)
    assert kept(cache) == []


def test_works_inside_a_running_event_loop(folder: Path, cache: Path) -> None:
    async def start() -> LoadedModel:
        return load(folder, cache)

    first = asyncio.run(start())
    assert len(kept(cache)) == 1
    assert_same(asyncio.run(start()), first)


def test_the_model_may_be_deleted_while_it_is_kept(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, written = threading.Event(), prepared.save_weights
    monkeypatch.setattr(prepared, "save_weights", lambda *args: (begin.wait(60), written(*args)))
    loaded = checkpoint.load(folder, quantize="int8", cache_dir=cache)
    for leaf in loaded.leaves:
        leaf.delete()
    assert not prepared.wait(0.01)
    begin.set()
    assert prepared.wait(60)
    assert len(kept(cache)) == 1
    assert_same(load(folder, cache), checkpoint.load(folder, quantize="int8"))


def test_two_at_once_keep_one_and_both_are_right(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = list[object]()
    monkeypatch.setattr(store, "write_checkpoint", lambda *args: (writes.append(args), write_checkpoint(*args)))
    with ThreadPoolExecutor(2) as pool:
        a, b = pool.map(lambda _: checkpoint.load(folder, quantize="int8", cache_dir=cache), range(2))
    assert prepared.wait(60)
    assert len(writes) == 1
    assert_same(a, b)
    assert_same(load(folder, cache), a)
    assert len([path for path in kept(cache) if not path.name.startswith("partial-")]) == 1


def test_checksums_tell_flipped_zeroed_and_exchanged_content() -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (1 << 20) + 5, np.uint8)
    good = kept_weights.checksum_of(data)
    assert good == kept_weights.checksum_of(data.copy().reshape(1, -1))
    for at in (0, 300_000, data.size - 1):
        flipped = data.copy()
        flipped[at] ^= 1
        assert kept_weights.checksum_of(flipped) != good
    zeroed = data.copy()
    zeroed[4096:8192] = 0
    exchanged = np.concatenate([data[1 << 19 : 1 << 20], data[: 1 << 19], data[1 << 20 :]])
    others = [kept_weights.checksum_of(changed) for changed in (zeroed, exchanged, data[:-1])]
    assert len({good, *others}) == 4


@pytest.mark.parametrize("number", by_default(PASSING, 2), ids=NAMES)
@pytest.mark.parametrize("part", ["weights.safetensors", "checksums.json", prepared.MODEL])
def test_a_passing_error_removes_nothing(folder: Path, cache: Path, number: int, part: str) -> None:
    first = load(folder, cache)
    before = kept(cache)
    # Of the weights only those that are kept: the checkpoint's own file has another name.
    with unreadable(f"{before[0].name}/rekindle/{part}", number), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert_same(load(folder, cache), first)
    assert all("can't be read now" in str(one.message) for one in said) and said
    assert kept(cache) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(load(folder, cache), first)


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
        assert_same(load(folder, cache), first)
    assert caplog.text.count("the cache is not used") == 1
    assert kept(cache) == before
    assert {path.stat().st_mode & 0o077 for path in before[0].rglob("*")} == {0}


TRUNCATED = """if True:
    import sys, time
    import numpy as np
    from rekindle._src.models.loading import checkpoint, mmap_weights, prepared
    prepared.MIN_BYTES = 0
    mmap_weights.worthwhile = lambda size: False  # as on a system without huge pages: it stays mapped
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
    file = only_file(cache, "weights.safetensors")
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
    file = only_file(cache, "weights.safetensors")
    viewed: list[Path] = []
    monkeypatch.setattr(mmap_weights, "view", viewed.append)
    with file.open("r+b"):
        assert_same(load(folder, cache), first)
    assert not viewed


@pytest.mark.skipif(sys.platform != "linux", reason="leases are of Linux")
def test_no_descriptor_or_thread_stays(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap_weights, "WATCH", 0.01)
    monkeypatch.setattr(mmap_weights, "DELAY", 0.0)
    monkeypatch.setattr(mmap_weights, "worthwhile", lambda size: False)
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
