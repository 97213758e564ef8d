"""The gate is the same for every change, and whatever it leaves out is a section of `.ci/deep`."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads((ROOT / ".ci/sections.toml").read_text())
GATE = (ROOT / ".ci/run").read_text()
# Sections that no path asks for: they run all tests again, or take hours.
ON_DEMAND = {"flaky", "soak_long", "weekly"}
# Default tests that read a clock, and why none of them fails on a busy machine.
CLOCKS = {
    "core/test_claims.py": "a hang's bound",
    "cli/test_importing.py": "a hang's bound",
    "dispatch/test_engine.py": "a clock that the test moves",
    "dispatch/test_step_watchdog.py": "whole seconds that nobody waited for are no idle time",
    "execution/test_late_steps.py": "a hang's bound",
    "execution/test_runner.py": "a part is at most the whole",
    "images/test_hostile.py": "a hang's bound",
    "kernels/test_system.py": "a hang's bound",
    "kvcache/tiers/test_tiers.py": "a hang's bound",
    "models/loading/test_hostile_folders.py": "a hang's bound",
    "models/loading/test_prepared.py": "a hang's bound",
    "notebook/test_views.py": "a rate, over the seconds that passed",
    "notebook/test_views_chat.py": "a rate, over the seconds that passed",
    "programs/test_late_store.py": "a hang's bound",
    "programs/test_layered.py": "a part is at most the whole",
    "scheduling/test_timeline.py": "moments that are compared with each other",
    "session/test_closing.py": "at least so long",
    "session/test_kernels.py": "a hang's bound",
    "session/test_leaving.py": "a hang's bound",
    "session/test_row_mapping.py": "a hang's bound",
    "text/test_template_limits.py": "a hang's bound",
}
DEEP_MARKS = {"clock", "slow", "thorough", "soak", "browser", "accelerator"}
READS = {"monotonic", "perf_counter", "process_time", "thread_time"}


def deep() -> ModuleType:
    """Import the command `.ci/deep`."""
    loader = SourceFileLoader("deep_sections", str(ROOT / ".ci/deep"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_folder_has_a_row_and_every_row_is_there() -> None:
    rows = TABLE["paths"]
    packages = [ROOT / "toolkit/rekindle/_src", ROOT / "kernels/rekindle_kernels", ROOT / "tests"]
    folders = [folder for package in packages for folder in package.iterdir() if any(folder.glob("*.py"))]
    names = {folder.relative_to(ROOT).as_posix() for folder in folders}
    names |= {"toolkit/rekindle", "toolkit/workshop", "kernels/kernel_workshop", "tutorials", ".ci", ".github"}
    assert sorted(names - rows.keys()) == [], "a folder without a row in sections.toml"
    assert [row for row in rows if not (ROOT / row).exists()] == []


def test_every_section_is_asked_for_by_a_path_or_is_the_gates() -> None:
    asked_for = {name for names in TABLE["paths"].values() for name in names}
    assert asked_for <= TABLE["section"].keys()
    assert TABLE["section"].keys() - asked_for - {*TABLE["gate"]} == ON_DEMAND
    assert not asked_for & {*TABLE["gate"]}, "the gate runs anyway"


def test_the_gate_runs_its_sections_and_draws_nothing() -> None:
    calls = re.findall(r"^python3 \.ci/deep --python \S+ --places \d (.*)$", GATE, re.MULTILINE)
    assert [name for call in calls for name in call.split()] == TABLE["gate"]
    assert not re.search(r"RANDOM|sha\d+sum|HEAD", GATE)


@pytest.mark.parametrize("name", TABLE["section"])
def test_a_section_names_what_is_there(name: str) -> None:
    """pytest runs nothing at all if one of its paths is gone."""
    section = TABLE["section"][name]
    assert section.keys() <= {"about", "run", "extras", "packages", "tools"}
    assert {*section.get("tools", ())} <= TABLE["tool"].keys()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*section.get("extras", ())} <= extras.keys()
    subprocess.run(["bash", "-n", "-c", section["run"]], check=True)
    named = [path for word in re.findall(r"tests[/\w.{},-]*", section["run"]) for path in _expanded(word)]
    assert [path for path in named if not (ROOT / path).exists()] == []


def _expanded(name: str) -> list[str]:
    """Return the words that a shell makes of braces."""
    braces = re.search(r"\{([^{}]*)\}", name)
    if braces is None:
        return [name]
    return [one for choice in braces[1].split(",") for one in _expanded(name.replace(braces[0], choice, 1))]


def test_changed_paths_ask_for_the_row_with_the_longest_beginning() -> None:
    asked_for = deep().asked_for
    assert asked_for(["README.md"]) == []
    assert asked_for(["tutorials/source/01_first_tokens.py"]) == ["tutorials"]
    adapters = asked_for(["toolkit/rekindle/_src/models/adapters/peft.py"])
    assert adapters == ["thorough_models", "clocks", "peers"], "in the table's order"
    assert asked_for(["toolkit/rekindle/_src/models/adapters_of.py"]) == asked_for(
        ["toolkit/rekindle/_src/models/x.py"]
    )


def test_the_command_lists_sections_and_refuses_unknown_ones() -> None:
    command = [sys.executable, ".ci/deep"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == [*TABLE["section"]]
    refused = subprocess.run([*command, "soap"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "no section is called soap. There are: lint, types" in refused.stderr


@pytest.mark.parametrize(
    ("run", "word"),
    [
        ("echo '= 3 passed, 1 skipped in 0.20s ='", "passed"),
        ("echo '= 4 skipped in 0.02s ='", "skipped"),
        ("echo '= 4 skipped in 0.02s ='; echo '= 2 skipped, 7 passed in 81.10s (0:01:21) ='", "passed"),
        ("echo '4 skipped, 9 deselected in 0.02s'", "skipped"),
        ("mypy() { :; }; mypy", "passed"),
        ("echo '= 1 passed in 0.20s ='; false", "FAILED"),
    ],
)
def test_a_section_that_ran_no_test_is_not_called_passed(
    run: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = deep()
    monkeypatch.setattr(module, "WORK", tmp_path)
    monkeypatch.setattr(module, "SECTIONS", {"soap": {"about": "nothing", "run": run}})
    assert module.run(Path(sys.executable), "soap", kept=True).word == word


def test_no_default_test_reads_a_clock_that_may_refuse_a_change() -> None:
    """Bounds in seconds are marked `clock`, or use `within`: see tests/README.md."""
    reading = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if not any(f"{name}()" in text for name in READS):
            continue
        for node in ast.parse(text).body:
            marks = {name.attr for part in _marks(node) for name in ast.walk(part) if isinstance(name, ast.Attribute)}
            if isinstance(node, ast.Assign) and marks & DEEP_MARKS:
                break  # all tests of the file
            if not marks & DEEP_MARKS and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                reads = any(isinstance(call, ast.Call) and _reads_a_clock(call) for call in ast.walk(node))
                if reads and (node.name.startswith(("test_", "Test"))):
                    reading.add(path.relative_to(ROOT / "tests").as_posix())
    assert reading <= CLOCKS.keys(), "mark it `clock`, use `within`, or bound a hang and add it to the list"


def _marks(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        named = any(isinstance(name, ast.Name) and name.id == "pytestmark" for name in node.targets)
        return [node.value] if named else []
    return getattr(node, "decorator_list", [])


def _reads_a_clock(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in READS
        and isinstance(function.value, ast.Name)
        and function.value.id == "time"
    )


@pytest.mark.skipif(os.name != "posix", reason="processes are ended by their number")
@pytest.mark.parametrize("kept", [False, True])
def test_a_section_ends_with_its_shell_whatever_runs_in_the_background(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    module = deep()
    monkeypatch.setattr(module, "WORK", tmp_path)
    run = "tail -f /dev/null & echo left $!; echo '= 1 passed in 0.20s ='"
    monkeypatch.setattr(module, "SECTIONS", {"soap": {"about": "nothing", "run": run}})
    assert module.run(Path(sys.executable), "soap", kept=kept).word == "passed"
    printed = (tmp_path / "soap.txt").read_text()
    os.kill(int(printed.split()[1]), signal.SIGKILL)
    assert printed.encode() in capfdbinary.readouterr().out
