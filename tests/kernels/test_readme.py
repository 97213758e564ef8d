"""The package's README and the page about writing kernels: their examples run, and the table names implementations."""

from __future__ import annotations

import re
import shutil
from importlib import util
from pathlib import Path

import pytest

import rekindle_kernels
from helpers.python import run_python

README = (Path(rekindle_kernels.__file__).parent / "README.md").read_text()


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert getattr(names["out"], "shape", None) == (1, 4, 64)


def test_the_table_names_every_implementation_in_order() -> None:
    lines = {line.split("|")[2]: line.split("|")[3] for line in README.splitlines() if line.count("|") == 4}
    for operation in rekindle_kernels.OPERATIONS:
        (found,) = (text for call, text in lines.items() if re.search(rf"`{_called(operation.operation)}\(", call))
        told = re.findall(r"`(\w+)`", found)
        assert told == [entry.name for entry in operation.entries if entry.platforms], operation.operation


def _called(operation: str) -> str:
    return {
        "attention": "paged_attention",
        "convolution": "causal_convolution",
        "adapters": "add_adapters",
    }.get(operation, operation)


def test_links_lead_somewhere() -> None:
    folder = Path(rekindle_kernels.__file__).parent
    assert [link for link in re.findall(r"\]\(([^)#:]+)\)", README) if not (folder / link).exists()] == []


@pytest.mark.thorough
@pytest.mark.skipif(util.find_spec("numba") is None, reason="numba is not installed")
def test_the_kernel_that_the_page_writes_runs_as_it_is_written(tmp_path: Path) -> None:
    package = Path(rekindle_kernels.__file__).parent
    page = package.parents[1] / ".github" / "docs" / "pages" / "cpu-kernels.md"
    copy = tmp_path / "rekindle_kernels"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("prebuilt", "__pycache__"))
    blocks = re.findall(r"```(diff|python)\n(.*?)```", page.read_text(), re.DOTALL)
    changed = [copy / "native/kernel_table.py"] * 2 + [copy / "native/compiling.py"] * 2
    for path, diff in zip(changed, (block for kind, block in blocks if kind == "diff"), strict=True):
        before, after = (
            "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in side) for side in (" -", " +")
        )
        assert path.read_text().count(before) == 1, before
        path.write_text(path.read_text().replace(before, after))
    kernel, script = (block for kind, block in blocks if kind == "python")
    (copy / "native/kernels/relu_squared.py").write_text(kernel)
    printed = run_python("-c", script, PYTHONPATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert printed == "as XLA says, NaN included\n"
