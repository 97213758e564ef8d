"""Sessions that several processes share: the same tokens as on one device, and an end when one of them is gone.

A process joins others once in its life, so every check has a leader of its own, with followers of its own.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import rekindle
from helpers.small import MODEL, OPTIONS
from rekindle._src.cli.main import main
from session.process_checks import write

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "session" / "process_checks.py"


def checked(folder: Path, name: str, timeout: int = 280) -> str:
    """Run a check of `process_checks.py`; returns what it printed."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), name], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}: done" in done.stdout, done.stdout
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With checkpoints in it."""
    write(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one(folder: Path) -> None:
    checked(folder, "tokens")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "killed", "more_requests", "stopped_for_a_while", "stopped_for_good", "preemption_and_tiers", "swapped_weights",
        "structured_text", "four_processes", "other_secrets_and_weights",
    ],
)  # fmt: skip
def test_more_of_several_processes(folder: Path, name: str) -> None:
    if name == "structured_text":
        pytest.importorskip("llguidance", reason="grammars need the extra structured")
    checked(folder, name)


@pytest.mark.slow
def test_a_restart_loads_the_programs_of_each_process(folder: Path) -> None:
    for _ in range(2):
        checked(folder, "a_second_start")


@pytest.mark.slow
def test_each_process_keeps_its_parts_of_pages(folder: Path) -> None:
    for _ in range(2):
        checked(folder, "parts_of_pages")


@pytest.mark.slow
def test_followers_end_with_their_leader(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), "waits_for_its_end"], stdout=subprocess.PIPE, text=True
    ) as leader:
        assert leader.stdout is not None
        follower = next(int(line.split()[1]) for line in leader.stdout if line.startswith("serving"))
        leader.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while _runs(follower) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _runs(follower)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_what_processes_cannot_share_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_PROCESS_SECRET", "a secret of these tests")
    several = {"mesh": 4, "processes": 2, "coordinator": "127.0.0.1:1"}
    with pytest.raises(rekindle.ConfigError, match="model='LoadedModel': is in this process only"):
        rekindle.open_sync(MODEL, **{**OPTIONS, **several})
    greedy = rekindle.LogitsProcessor(lambda logits, context: logits, name="same")
    with pytest.raises(rekindle.ConfigError, match=r"processors=\['same'\]: are functions of this process"):
        rekindle.open_sync("tiny", processors=[greedy], **several)
    same = rekindle.Tap(lambda x, context: x, name="same")
    with pytest.raises(rekindle.ConfigError, match=r"taps=\['same'\]: are functions of this process"):
        rekindle.open_sync("tiny", taps=[same], **several)
    with pytest.raises(rekindle.ConfigError, match=r"steering=\['up'\]: needs a model in one process"):
        rekindle.open_sync("tiny", steering={"up": rekindle.Steer(0, scale=2.0, mode="scale")}, **several)
    jax.devices()
    with pytest.raises(rekindle.ConfigError, match=r"JAX's devices are in use in this process already"):
        rekindle.open_sync("tiny", **several)
    monkeypatch.delenv("REKINDLE_PROCESS_SECRET")
    with pytest.raises(rekindle.ConfigError, match="REKINDLE_PROCESS_SECRET='': has 0 characters"):
        rekindle.open_sync("tiny", **several)


@pytest.mark.parametrize(
    ("process", "processes", "problem"),
    [
        ("2", "2", "--process 2: is not the number of a follower. Use from 1 to 1"),
        ("0", "2", "0 is the leader"),
        ("1", "1", "can't share"),
    ],
)
def test_a_follower_without_a_place_is_told_so(
    capsys: pytest.CaptureFixture[str], process: str, processes: str, problem: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["follow", "--coordinator", "127.0.0.1:1", "--process", process, "--processes", processes])
    assert problem in capsys.readouterr().err
