"""Ends a process at any of its calls that change files, and rebuilds what a power cut would have left of a folder.

A library (disk_calls.c) is preloaded into a process, so that what C++ writes for Orbax counts as well. As a script it
forks for each kill once everything is imported: a kill costs hundredths of a second.

A power cut keeps what was synced: the content of a file at its last fsync, and the names in a folder at the folder's
last fsync. Of what came later any part may be there: names as far as some call, and of each file's writes none, zeros
of the same length, the first half or all.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import itertools
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import pytest

from rekindle.errors import RekindleError

SOURCE = Path(__file__).with_suffix(".c")
Mark = Callable[[str], None]
Unsynced = Literal["none", "zeros", "half", "all"]
REACHED = 3  # the status of a process in which calls have failed
_HEAD = struct.Struct("=cqIIQ")


class Job(Protocol):
    """Work in a folder, and the conditions that must hold in the folder however the work ends."""

    def load(self) -> None:
        """Import what every process would import."""

    def prepare(self, folder: Path) -> None:
        """Put the initial content into the folder."""

    def work(self, folder: Path, mark: Mark) -> None:
        """Do it. `mark` is called with what must be there from now on, for example after each save."""

    def check(self, folder: Path, marks: Sequence[str], *, cut: bool) -> None:
        """Fail unless the folder is in order after a kill, or with `cut` after a power cut."""


@functools.cache
def library() -> Path:
    """The library to preload; skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a C compiler of this system's own, on Linux, makes what sees the calls")
    built = Path(tempfile.mkdtemp(prefix="disk-calls-")) / "disk_calls.so"
    atexit.register(shutil.rmtree, built.parent, ignore_errors=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, SOURCE, "-ldl"], check=True)
    return built


def watched(*arguments: str, timeout: float = 500, **environment: str) -> str:
    """Run this script in a process that has the library, and return its output."""
    paths = os.pathsep.join(filter(None, sys.path))
    settings = {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "LD_PRELOAD": str(library())}
    done = subprocess.run(
        [sys.executable, __file__, *arguments], env={**os.environ, **settings, **environment}, capture_output=True,
        text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stderr[-4000:]}"
    return done.stdout


# Kills.


class Killed(NamedTuple):
    """A folder left by a process that was ended at its `call`-th change."""

    call: int
    folder: Path
    marks: list[str]


def kills(job: str, folder: Path, *, step: int = 1, first: int = 1, failure: int = 0) -> Iterator[Killed]:
    """Yield the folders of processes that were ended at each `step`-th call of a job; the last one was not ended.

    `job` is the name of an object with a module, such as "helpers.store_jobs:PAGES". With a `failure`, this call and
    those after it fail with that errno. The process goes on, and ends with a typed error or none.
    """
    folder.mkdir()
    watched("kills", job, str(folder), str(step), str(first), str(failure))
    for place in sorted(folder.glob("*.marks")):
        yield Killed(int(place.stem), place.with_suffix(""), place.read_text().splitlines())


# Power cuts.


class Call(NamedTuple):
    """A call that changed something."""

    kind: str  # c: create, d: mkdir, w: write, t: truncate, f: fsync, r: rename, u: unlink, l: link, !: a mark
    path: str
    second: str
    offset: int
    data: bytes


def calls_of(job: str, folder: Path) -> list[Call]:
    """Return all calls of a job that runs to its end, in `folder`."""
    log = folder.with_name(f"{folder.name}.log")
    watched("log", job, str(folder), str(log))
    content, at, calls = log.read_bytes(), 0, list[Call]()
    while at < len(content):
        kind, offset, first, second, size = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        parts = []
        for length in (first, second, size):
            parts.append(content[at : at + length])
            at += length
        calls.append(Call(kind.decode(), os.fsdecode(parts[0]), os.fsdecode(parts[1]), offset, parts[2]))
    return calls


@dataclass(eq=False)
class _File:
    now: bytes = b""
    synced: bytes = b""

    def content(self, kind: Unsynced) -> bytes:
        if kind == "all" or self.now == self.synced:
            return self.now
        if kind == "none":
            return self.synced
        keeps = len(self.synced) if self.now.startswith(self.synced) else 0
        if kind == "half":
            return self.now[: (keeps + len(self.now)) // 2]
        return self.now[:keeps] + bytes(len(self.now) - keeps)


@dataclass(eq=False)
class _Folder:
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    since: list[tuple[str, _File | _Folder | None]] = field(default_factory=list)  # names set, or removed

    @property
    def now(self) -> dict[str, _File | _Folder]:
        return self.after(len(self.since))

    def after(self, count: int) -> dict[str, _File | _Folder]:
        names = dict(self.synced)
        for name, one in self.since[:count]:
            if one is None:
                names.pop(name, None)
            else:
                names[name] = one
        return names

    def sync(self) -> None:
        self.synced, self.since = self.now, []


def _synced(tree: Tree) -> _Folder:
    return _Folder(
        {name: _synced(entry) if isinstance(entry, dict) else _File(entry, entry) for name, entry in tree.items()}
    )


class Disk:
    """A folder as the calls of a log made it, with what of it is synced."""

    def __init__(self, root: Path, before: Tree) -> None:
        """`before` is there and synced when the log begins."""
        self.root, self.top, self.marks = str(root), _synced(before), list[str]()

    def apply(self, call: Call) -> None:
        if call.kind == "!":
            self.marks.append(call.path)
            return
        if call.path == self.root:
            if call.kind == "f":
                self.top.sync()
            return
        if "r" in call.kind or "l" in call.kind:
            one = self._find(call.path)
            assert one is not None, call.path
            self._set(call.second, one)
            if call.kind == "r":
                self._set(call.path, None)
        elif call.kind in "cd":
            self._set(call.path, _File() if call.kind == "c" else _Folder())
        elif call.kind == "u":
            self._set(call.path, None)
        else:
            found = self._find(call.path)
            if isinstance(found, _Folder):
                assert call.kind == "f", call
                found.sync()
            elif found is not None:  # else it has no name any more
                self._change(found, call)

    def _change(self, file: _File, call: Call) -> None:
        if call.kind == "f":
            file.synced = file.now
        elif call.kind == "t":
            file.now = file.now[: call.offset].ljust(call.offset, b"\0")
        else:
            end = call.offset + len(call.data)
            file.now = file.now[: call.offset].ljust(call.offset, b"\0") + call.data + file.now[end:]

    def _find(self, path: str) -> _File | _Folder | None:
        at: _File | _Folder | None = self.top
        for name in Path(path).relative_to(self.root).parts:
            at = at.now.get(name) if isinstance(at, _Folder) else None
        return at

    def _set(self, path: str, one: _File | _Folder | None) -> None:
        folder, _, name = path.rpartition("/")
        parent = self.top if folder == self.root else self._find(folder)
        assert isinstance(parent, _Folder), path
        parent.since.append((name, one))

    def tree(self, names: Callable[[int], int], content: Callable[[], Unsynced]) -> Tree:
        """Return a possible remainder of the folder. Given the number of a folder's unsynced names, `names` returns how
        many exist; `content` chooses the remainder of a file's unsynced writes.
        """

        def of(one: _Folder) -> Tree:
            kept = one.after(names(len(one.since)))
            return {
                name: of(entry) if isinstance(entry, _Folder) else entry.content(content())
                for name, entry in sorted(kept.items())
            }

        return of(self.top)

    def trees(self, draw: random.Random) -> Iterator[Tree]:
        """Yield folders that a power cut may leave now."""
        kinds: tuple[Unsynced, ...] = ("none", "zeros", "half", "all")
        yield self.tree(lambda count: 0, lambda: "none")
        for kind in kinds:
            yield self.tree(lambda count: count, lambda kind=kind: kind)  # type: ignore[misc]
        for _ in range(2):
            yield self.tree(lambda count: draw.randint(0, count), lambda: draw.choice(kinds))


Tree = dict[str, Any]  # bytes of files, and trees of folders, by name


def build(tree: Tree, folder: Path) -> None:
    """Make a folder with this content."""
    folder.mkdir(mode=0o700)
    for name, entry in tree.items():
        if isinstance(entry, dict):
            build(entry, folder / name)
        else:
            (folder / name).touch(0o600)
            (folder / name).write_bytes(entry)


def tree_of(folder: Path) -> Tree:
    """Return the content of a folder."""
    return {
        entry.name: tree_of(entry) if entry.is_dir() else entry.read_bytes()
        for entry in sorted(folder.iterdir())
        if not entry.is_symlink()
    }


class Cut(NamedTuple):
    """A folder as a power cut after `call` calls may leave it."""

    call: int
    folder: Path
    marks: list[str]


def power_cuts(job: str, folder: Path, *, step: int = 1, seed: int = 0) -> Iterator[Cut]:
    """Yield the folders that power cuts after each `step`-th call may leave, each once."""
    folder.mkdir()
    calls = calls_of(job, folder / "whole")
    (folder / "before").mkdir(mode=0o700)
    job_of(job).prepare(folder / "before")
    disk, draw, seen = Disk(folder / "whole", tree_of(folder / "before")), random.Random(seed), set[int]()
    number = 0
    for count in itertools.count():
        if count % step == 0 or count == len(calls):
            for tree in disk.trees(draw):
                known = hash((repr(tree), len(disk.marks)))
                if known in seen:
                    continue
                seen.add(known)
                number += 1
                place = folder / f"{number:05d}"
                build(tree, place)
                yield Cut(count, place, list(disk.marks))
                shutil.rmtree(place, ignore_errors=True)
        if count == len(calls):
            break
        disk.apply(calls[count])
    everything = disk.tree(lambda count: count, lambda: "all")
    assert everything == tree_of(folder / "whole"), "the log lacks calls"


def job_of(name: str) -> Job:
    module, _, attribute = name.partition(":")
    job: Job = getattr(importlib.import_module(module), attribute)
    return job


# The script.


def main(what: str, name: str, place: str, *others: str) -> None:
    job = job_of(name)
    calls = ctypes.CDLL(None)
    calls.disk_calls_watch.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    job.load()
    if what == "log":
        log = os.open(others[0], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.mkdir(place, 0o700)
        job.prepare(Path(place))
        calls.disk_calls_watch(place.encode(), log, 0, 0, 0)
        job.work(Path(place), lambda text: calls.disk_calls_mark(text.encode()))
        calls.disk_calls_watch(b"", -1, 0, 0, 0)
        return
    step, first, failure = map(int, others)
    gc.freeze()  # a collection would copy what the processes share
    gc.disable()
    for call in itertools.count(first, step):
        folder = f"{place}/{call:05d}"
        os.mkdir(folder, 0o700)
        job.prepare(Path(folder))
        marks = os.open(f"{folder}.marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        process = os.fork()
        if not process:
            calls.disk_calls_watch(folder.encode(), -1, call, call // step % 2, failure)
            _end(job, Path(folder), marks, failure, lambda: calls.disk_calls_count() >= call)  # noqa: B023  ends here
        os.close(marks)
        _, status = os.waitpid(process, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) in (0, REACHED), f"the job failed at call {call}"
            if os.WEXITSTATUS(status) == 0:
                return
            continue
        assert os.WTERMSIG(status) == signal.SIGKILL, f"the job ended by signal {os.WTERMSIG(status)} at call {call}"


def _end(job: Job, folder: Path, marks: int, failure: int, reached: Callable[[], bool]) -> None:
    """Do the job in a forked process, and end it: with 0 only if no call was reached that should have failed."""
    status = 1

    def mark(text: str) -> None:
        os.write(marks, text.encode() + b"\n")

    try:
        job.work(folder, mark)
        status = REACHED if failure and reached() else 0
    except (RekindleError, OSError) as error:
        status = REACHED if failure else 1
        print(f"{folder}: {error!r}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
