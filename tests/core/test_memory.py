"""What is left of memory: of the machine's, and of a container's."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle._src.core import memory

MB = 1 << 20


def tell(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    tell(tmp_path, {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {8000 << 10} kB", "proc/self/cgroup": "0::/a/b"})
    return tmp_path


def test_without_limits_it_is_the_machines(root: Path) -> None:
    assert memory.available() == 8000 * MB
    tell(root, {"sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/a/memory.current": 5})
    assert memory.available() == 8000 * MB


@pytest.mark.parametrize("group", ["", "a/", "a/b/"])
def test_a_group_of_version_2_limits_it_and_files_do_not_count(root: Path, group: str) -> None:
    folder = f"sys/fs/cgroup/{group}"
    stat = f"anon 1\nactive_file {100 * MB}\ninactive_file {200 * MB}"
    tell(root, {f"{folder}memory.max": 2000 * MB, f"{folder}memory.current": 900 * MB, f"{folder}memory.stat": stat})
    assert memory.available() == 1400 * MB


def test_a_group_of_version_1_does_so_too(root: Path) -> None:
    tell(root, {"proc/self/cgroup": "3:cpu:/x\n2:memory:/docker/1"})
    folder = "sys/fs/cgroup/memory/"  # as a container sees it
    stat = f"cache 7\ntotal_active_file 0\ntotal_inactive_file {50 * MB}"
    limits = {"memory.limit_in_bytes": 500 * MB, "memory.usage_in_bytes": 300 * MB, "memory.stat": stat}
    tell(root, {folder + name: value for name, value in limits.items()})
    assert memory.available() == 250 * MB


def test_where_nobody_tells_it_is_unknown(root: Path) -> None:
    (root / "proc/meminfo").unlink()
    assert memory.available() is None
