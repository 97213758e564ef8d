"""The contributor's shell: workflows run what they claim to, decisions have their form, lessons name their source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import rekindle

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LESSONS = sorted((ROOT / "tests" / "lessons").glob("test_lesson_*.py"))
DECISIONS = sorted((GITHUB / "decisions").glob("*.md"))
REPORT = re.compile(r"^Upstream: https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+$", re.MULTILINE)


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((GITHUB / "workflows" / name).read_text())


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_ci_runs_what_a_contributor_runs() -> None:
    jobs = workflow("ci.yml")["jobs"]
    assert "bash .ci/run" in commands(jobs["all"])
    assert ".ci/deep --for origin/main" in commands(jobs["deep"])
    for marker in re.findall(r"<!-- ci: (\w+) -->", (ROOT / "README.md").read_text()):
        assert f".ci/readme_command {marker}" in commands(jobs["readme"])


def test_ci_builds_the_documentation_strictly() -> None:
    """With --quiet mkdocs counts no warnings, and strict mode passes whatever is wrong."""
    build = re.search(r"^.*mkdocs build.*$", (ROOT / ".ci" / "sections.toml").read_text(), re.MULTILINE)
    assert build and "--strict" in build[0] and "--quiet" not in build[0]


def test_ci_covers_every_python_that_the_package_claims() -> None:
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    matrix = workflow("ci.yml")["jobs"]["readme"]["strategy"]["matrix"]
    assert matrix["python"] == claimed
    assert matrix["jax"] == ["oldest", "newest"]


def test_the_oldest_jax_is_the_lower_bound() -> None:
    out = subprocess.run(
        [sys.executable, ".ci/oldest_jax"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    version = out.split()[0].removeprefix("jax==")
    assert any(one.startswith(f"jax>={version},") for one in PROJECT["dependencies"])


def test_the_changelog_has_this_version() -> None:
    text = (GITHUB / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[?([\w.]+)", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert rekindle.__version__ in versions
    assert f"\nversion: {rekindle.__version__}\n" in (GITHUB / "CITATION.cff").read_text()
    kinds = set(re.findall(r"^### (\w+)", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_a_release_stores_no_token() -> None:
    jobs = workflow("release.yml")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text()
    assert "python3 -m build" in commands(jobs["build"])


@pytest.mark.parametrize("path", sorted(GITHUB.rglob("*.yml")), ids=lambda path: path.name)
def test_yaml_reads(path: Path) -> None:
    class Loader(yaml.SafeLoader):
        """Accepts the environment variables of mkdocs."""

    Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node))
    assert isinstance(yaml.load(path.read_text(), Loader), dict)


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_its_three_parts(path: Path) -> None:
    text = path.read_text()
    assert int(path.name[:4]) == DECISIONS.index(path) + 1
    assert text.startswith(f"# {int(path.name[:4])}. ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_names_its_source(path: Path) -> None:
    words = ast.get_docstring(ast.parse(path.read_text())) or ""
    first, _, rest = words.partition("\n")
    assert first.endswith("."), "the first line says what must hold"
    assert REPORT.search(rest) or "no report of it is known" in rest, "link the report, or say that none is known"
    assert words.count("Upstream:") == len(REPORT.findall(words)), "a link has another form"
