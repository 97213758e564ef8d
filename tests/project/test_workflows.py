"""Workflows for hosted runners, which none has run yet: what can be read of them is right.

Commands are README's, platforms are those of a release's wheels, and no job may do more than it has to.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers import wheels

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]
MAJOR = re.compile(r"[\w-]+/[\w-]+@(release/)?v\d+")
README = re.findall(r"<!-- ci: (\w+) -->\s*```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
# How labels of hosted runners begin and end.
RUNNERS = {
    "linux-x86_64": r"ubuntu-[\d.]+",
    "linux-aarch64": r"ubuntu-[\d.]+-arm",
    "macos-arm64": r"macos-\d+",
    "macos-x86_64": r"macos-\d+-intel",
    "windows-x86_64": r"windows-\d+",
}


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job.get("steps", ()))


@pytest.mark.parametrize(("name", "job"), JOBS, ids=lambda value: value.removesuffix(".yml"))
def test_a_job_may_read_ends_in_time_and_names_versions_of_actions(name: str, job: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    found = workflow["jobs"][job]
    publishing = {("release.yml", "publish"): {"id-token": "write"}}
    publishing["site.yml", "publish"] = {"id-token": "write", "pages": "write"}
    assert found.get("permissions", {}) == publishing.get((name, job), {})
    if "uses" in found:  # another workflow, which is looked at by itself
        assert found.keys() == {"name", "uses"} and found["uses"].removeprefix("./.github/workflows/") in WORKFLOWS
        return
    assert found["timeout-minutes"] <= 180
    for step in found["steps"]:
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or MAJOR.fullmatch(step["uses"]), step
    assert "${{ github.event" not in commands(found), "what a stranger writes would be a part of a command"


@pytest.mark.parametrize(("marker", "command"), README, ids=[marker for marker, _ in README])
def test_a_runner_of_each_platform_runs_readmes_commands(marker: str, command: str) -> None:
    job = WORKFLOWS["platforms.yml"]["jobs"]["readme"]
    assert f'bash -euo pipefail -c "$(python3 .ci/readme_command {marker})"' in commands(job)
    told = subprocess.run([sys.executable, ".ci/readme_command", marker], cwd=ROOT, capture_output=True, check=True)
    assert told.stdout.decode() == f"{command.strip()}\n", "with no other ends of lines on any system"


@pytest.mark.parametrize(("name", "job"), [("platforms.yml", "readme"), ("release.yml", "try")])
def test_all_platforms_with_wheels_have_a_runner(name: str, job: str) -> None:
    found = WORKFLOWS[name]["jobs"][job]
    matrix = {entry["platform"]: entry for entry in found["strategy"]["matrix"]["include"]}
    assert matrix.keys() == wheels.COMMAND.PLATFORMS.keys() == RUNNERS.keys()
    for platform, entry in matrix.items():
        assert re.fullmatch(RUNNERS[platform], entry["runner"])
        assert entry.get("tag", wheels.COMMAND.PLATFORMS[platform].tag) == wheels.COMMAND.PLATFORMS[platform].tag
    assert found["defaults"] == {"run": {"shell": "bash"}}, "on Windows, too"
    assert found["strategy"]["fail-fast"] is False


def test_a_release_makes_checks_and_tries_its_wheels() -> None:
    jobs = WORKFLOWS["release.yml"]["jobs"]
    made = commands(jobs["build"])
    steps = ["python3 .ci/wheels.py --out dist", "tests/project/test_wheels.py", "python3 -m build"]
    assert sorted(map(made.index, steps)) == list(map(made.index, steps))
    assert "python3 .ci/wheels.py --load" in commands(jobs["try"])
    assert set(jobs["publish"]["needs"]) == jobs.keys() - {"publish"}
