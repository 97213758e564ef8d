"""What operating systems do differently has one place, and both forms of it promise the same."""

from __future__ import annotations

import ast
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import rekindle_kernels
from helpers import windows_forms
from rekindle_kernels import system

if sys.platform == "win32":
    pytest.skip("the stand-ins are POSIX's functions", allow_module_level=True)

from rekindle_kernels.system import posix

HERE = Path(rekindle_kernels.__file__).parent
PACKAGES = (HERE, HERE.parents[1] / "toolkit" / "rekindle")
WINDOWS = windows_forms.forms()
FORMS = pytest.mark.parametrize("form", [posix, WINDOWS], ids=["posix", "windows"])
TESTS = HERE.parents[1] / "tests"


def functions(name: str) -> dict[str, tuple[str, bool]]:
    """The public functions of a form: their arguments and result, and whether they have a docstring."""
    body = ast.parse((HERE / "system" / f"{name}.py").read_text(encoding="utf-8")).body
    return {
        node.name: (
            f"{ast.unparse(node.args)} -> {node.returns and ast.unparse(node.returns)}",
            bool(ast.get_docstring(node)),
        )
        for node in body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def test_both_forms_have_the_same_functions() -> None:
    assert functions("posix") == functions("windows")
    assert sorted(functions("posix")) == system.__all__
    assert all(documented for _, documented in functions("posix").values())


def test_no_other_module_asks_for_what_one_system_lacks() -> None:
    """Linux's own files and calls, which a guard keeps from other systems, are another matter."""
    lacking = {"fcntl", "grp", "msvcrt", "pwd", "resource", "termios", "winreg"}
    # Whether a limit of Linux would leave a hole in what is mapped; which signals Python's child processes end with.
    allowed = {("toolkit", "mmap_weights.py", "resource")}
    found = set()
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            if path.parent.name == "system":
                continue
            text = path.read_text(encoding="utf-8")
            if not any(name in text for name in lacking):
                continue
            for node in ast.walk(ast.parse(text)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                found |= {(package.parent.name, path.name, name) for name in names if name in lacking}
    assert found == allowed


@FORMS
def test_a_file_is_opened_through_no_link_and_made_once(tmp_path: Path, form: Any) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    descriptor = form.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(descriptor, b"one\r\ntwo\n")
    os.close(descriptor)
    with pytest.raises(FileExistsError):
        form.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with pytest.raises(FileNotFoundError):
        form.open_file(tmp_path / "absent", os.O_RDONLY)
    link.symlink_to(path)
    with pytest.raises(OSError) as caught:
        form.open_file(link, os.O_RDONLY)
    assert caught.value.errno == errno.ELOOP
    descriptor = form.open_file(path, os.O_RDONLY)
    assert not os.get_inheritable(descriptor) and os.read(descriptor, 100) == b"one\r\ntwo\n"
    os.close(descriptor)
    os.close(form.open_file(path, os.O_RDWR | os.O_CREAT))
    assert path.stat().st_size == 9, "a file that is there keeps its content"


@FORMS
def test_reading_goes_on_where_it_is_told_to(tmp_path: Path, form: Any) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    descriptor = form.open_file(path, os.O_RDONLY)
    first, second = bytearray(10), bytearray(20)
    assert form.read_at(descriptor, [memoryview(first), memoryview(second)], 50) == 30
    assert bytes(first + second) == bytes(range(50, 80))
    assert form.read_at(descriptor, [memoryview(first), memoryview(second)], 95) == 5
    assert first[:5] == bytes(range(95, 100))
    assert form.read_at(descriptor, [memoryview(first)], 100) == 0
    os.close(descriptor)


@FORMS
def test_a_lock_is_one_descriptors_until_it_is_closed(tmp_path: Path, form: Any) -> None:
    path = tmp_path / "lock"
    first, second = (form.open_file(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    os.write(first, b"held")
    assert form.try_lock(first) and not form.try_lock(second)
    assert os.read(second, 10) == b"held", "what is written there can be read all the same"
    os.close(first)
    assert form.try_lock(second)
    os.close(second)


def test_windows_replaces_a_file_once_another_program_lets_go_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    target.write_text("old")
    plain, refused = os.replace, [PermissionError(errno.EACCES, "it is open")] * 3

    def replace(*paths: Any) -> None:
        if refused:
            raise refused.pop()
        plain(*paths)

    monkeypatch.setattr(os, "replace", replace)
    WINDOWS.replace(source, target)
    assert target.read_text() == "new" and not source.exists()
    refused += [PermissionError(errno.EACCES, "it is open")] * 1_000
    monkeypatch.setattr(WINDOWS, "PATIENCE", 0.05)
    source.write_text("newer")
    with pytest.raises(PermissionError):
        WINDOWS.replace(source, target)


@FORMS
def test_files_and_folders_are_synced(tmp_path: Path, form: Any) -> None:
    (tmp_path / "file").write_text("content")
    form.sync(tmp_path / "file")
    form.sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        form.sync(tmp_path / "absent")


def test_memory_is_zeros_and_machine_code_runs_in_it() -> None:
    memory = system.anonymous_memory(1 << 20)
    assert memory[:] == bytes(1 << 20)
    code = system.code_memory(10)
    assert len(code) % 4096 == 0 and code[:10] == bytes(10)
    code[:2] = b"\x90\xc3"
    system.make_executable(code)


@FORMS
def test_figures_of_memory(form: Any) -> None:
    assert form.total_memory() == system.total_memory() > 0
    assert form.peak_memory() > 0
    assert form.free_memory() is None or 0 < form.free_memory() < form.total_memory()
    assert form.owner() == ((os.getuid(), os.getgid()) if form is posix else None)


def test_windows_limits_a_process_by_a_job() -> None:
    WINDOWS.limit_memory(1 << 30)
    limits = WINDOWS._kernel32().limits
    assert (limits.flags, limits.process_memory) == (0x100, (1 << 30) + (1 << 20))


@FORMS
def test_a_process_ends_when_its_time_is_over(form: Any) -> None:
    path = [str(HERE.parent), str(TESTS)]
    start = f"import sys, time; sys.path[:0] = {path!r}; "
    if form is posix:
        start += "from rekindle_kernels.system import posix as form; "
    else:
        start += "from helpers import windows_forms; form = windows_forms.forms(); "
    done = subprocess.run(
        [sys.executable, "-c", f"{start}form.end_after(60); form.end_after(0.1); time.sleep(60)"], timeout=50
    )
    assert done.returncode
    subprocess.run(
        [sys.executable, "-c", f"{start}form.end_after(0.3); form.end_after(0); time.sleep(0.6)"], check=True
    )


@FORMS
def test_views_are_sent_and_received(form: Any) -> None:
    left, right = socket.socketpair()
    with left, right:
        views = [memoryview(b"first"), memoryview(b"second")]
        assert form.send_views(left, views) in (5, 11)
        into = [memoryview(bytearray(3)), memoryview(bytearray(20))]
        count = form.receive_into(right, into)
        assert count >= 3 and bytes(into[0]) == b"fir"
        left.close()
        while count:
            count = form.receive_into(right, into)


@FORMS
def test_a_group_of_its_own_is_an_option_of_popen(form: Any) -> None:
    options = form.own_group()
    assert options == ({"process_group": 0} if form is posix else {"creationflags": subprocess_flag()})


def subprocess_flag() -> int:
    """CREATE_NEW_PROCESS_GROUP, which Python's subprocess names on Windows alone."""
    return 0x200


@FORMS
def test_a_process_is_ended_from_outside(form: Any) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    form.kill(process.pid)
    assert process.wait(60)


def test_locks_end_waiting_in_another_thread(tmp_path: Path) -> None:
    """As two processes use them: one waits by asking again."""
    first, second = (WINDOWS.open_file(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert WINDOWS.try_lock(first)
    threading.Timer(0.05, os.close, [first]).start()
    end = time.monotonic() + 30
    while not WINDOWS.try_lock(second):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.close(second)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sessions_keep_and_find_pages_without_posixs_functions(tmp_path: Path) -> None:
    """Tests of locks, tiers, snapshots, sessions and their helper processes, with Windows's forms of all calls."""
    files = [
        "core/test_claims.py", "core/test_atomic_checkpoint.py", "kvcache", "session/test_session_cache.py",
        "session/test_tier_paths.py", "channels/test_bulk.py", "models/loading/test_hugepages.py",
    ]  # fmt: skip
    modes = "not others_can_write and not only_this_user"  # of files, which Windows does not have
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "helpers.windows_forms"]
    command += ["-o", "timeout_method=thread", "-k", modes, *files]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])}
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
