"""The public door as pyright sees it: results are concrete, misspellings are errors, no public type is unknown."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")


def pyright(*arguments: str, cwd: Path = ROOT) -> dict[str, Any]:
    """Its report on files or a package, with this environment's packages and this checkout's sources."""
    paths = os.pathsep.join([str(ROOT / "toolkit"), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *arguments],
        capture_output=True, text=True, timeout=300, cwd=cwd, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def messages(report: dict[str, Any], severity: str) -> list[str]:
    return [found["message"] for found in report["generalDiagnostics"] if found["severity"] == severity]


@pytest.mark.slow  # CI runs pyright over the same file
def test_what_the_door_promises() -> None:
    """The file holds assert_type for results, and ignore comments for mistakes, which have to be needed."""
    report = pyright(str(Path(__file__).with_name("typed_door.py")))
    assert report["summary"]["filesAnalyzed"] == 1
    assert messages(report, "error") == []


@pytest.mark.thorough
def test_misspelled_options_are_errors_and_results_have_types(tmp_path: Path) -> None:
    code = """
        import rekindle

        async def cell() -> None:
            session = await rekindle.open("tiny", max_reqests=4)
            session = await rekindle.open("tiny")
            await session.generate("x", temprature=0.8)
            reveal_type(await session.generate("x"))
            reveal_type(await session.generate(["x", "y"]))
    """
    (tmp_path / "cell.py").write_text("\n".join(line[8:] for line in code.splitlines()))
    report = pyright("cell.py", cwd=tmp_path)
    lines = (tmp_path / "cell.py").read_text().splitlines()
    wrong = [found for found in report["generalDiagnostics"] if found["severity"] == "error"]
    assert [lines[found["range"]["start"]["line"]] for found in wrong] == [
        '    session = await rekindle.open("tiny", max_reqests=4)',
        '    await session.generate("x", temprature=0.8)',
    ]
    types = [text.rpartition(" is ")[2] for text in messages(report, "information")]
    assert types == ['"Completion"', '"list[Completion]"']


@pytest.mark.slow  # so does CI
def test_every_public_symbol_has_a_known_type() -> None:
    report = pyright("--verifytypes", "rekindle", "--ignoreexternal")["typeCompleteness"]
    vague = [symbol["name"] for symbol in report["symbols"] if symbol["isExported"] and not symbol["isTypeKnown"]]
    assert report["completenessScore"] == 1.0, vague
    assert {"rekindle.open", "rekindle.models.load"} <= {symbol["name"] for symbol in report["symbols"]}
