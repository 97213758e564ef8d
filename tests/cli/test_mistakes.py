"""Typical mistakes on the command line: at most two lines that name the fix, before JAX is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What is written, and words that the answer has to hold.
MISTAKES = {
    "nothing to remove": (["cache", "rm"], "Write rekindle cache rm NAME"),
    "a name for another action": (["cache", "prune", "tiny"], "Write rekindle cache rm tiny"),
    "an option like none": (["cache", "ls", "--helq", "x"], "unknown option --helq\n"),
    "a command with a slip": (["generates", "x"], "Did you mean generate?"),
    "an option with a slip": (["generate", "x", "--temprature", "1"], "Did you mean --temperature?"),
    "a model with a slip": (["generate", "x", "--model", "tinny"], "Did you mean 'tiny'?"),
    "a folder that is not there": (["chat", "--model", "./no/such"], "no/such does not exist"),
    "a prompt without quotes": (["generate", "Once", "upon", "a"], "Put text with spaces in quotes"),
    "a model where no text is taken": (["chat", "owner/name"], "A model is passed as --model owner/name"),
    "an embedded model before a prompt": (["generate", "tiny", "Once"], "unexpected 'Once'"),
    "an embedded model after a prompt": (["generate", "Once", "tiny-vision"], "passed as --model tiny-vision"),
    "a prompt with a dash and no quotes": (["generate", "Once", "-", "upon"], "Put text with spaces in quotes"),
    "a prompt with a negative number": (["generate", "it", "was", "-5"], "Put text with spaces in quotes"),
    "an unknown short option": (["run-batch", "in.jsonl", "-o", "out.jsonl"], "unknown option -o"),
    "a model by itself": (["doctor", __file__], f"A model is passed as --model {__file__}"),
    "an empty prompt": (["generate", ""], "Write at least one character"),
    "a negative temperature": (["generate", "x", "--temperature", "-1"], "--temperature -1.0: must be at least 0"),
    "a share above one": (["chat", "--top-p", "2"], "--top-p 2.0"),
    "a word for a number": (["generate", "x", "--max-tokens", "many"], "--max-tokens: invalid int value: 'many'"),
    "a dtype that there is not": (["generate", "x", "--dtype", "float64"], "Use one of 'auto', 'float32'"),
    "eight bits as a dtype": (["generate", "x", "--dtype", "int8"], "quantize='int8'"),
    "bits that there are not": (["chat", "--quantize", "int5"], "'int4'"),
    "no room for tokens": (["chat", "--max-model-len", "0"], "--max-model-len 0: must be at least 2"),
    "a workload that there is not": (["bench", "--workloads", "W1,W9"], "Use some of W1, W2"),
    "no repetition": (["bench", "--repeat", "0"], "--repeat 0"),
    "a shape with a slip": (["bench", "--model", "135"], "135 does not exist"),
    "a port that there is not": (["serve", "--port", "99999"], "--port 99999"),
    "an adapter called as its model": (
        ["serve", "tiny", "--port", "0", "--adapter", "tiny=folder"],
        "--adapter tiny: is the name of a model, which requests with this name get. Choose another name",
    ),
    "the same model twice": (["serve", "tiny", "tiny"], "Give each a name of its own"),
    "half a division": (["serve", "--prefill", "1"], "Pass --decode 1, too"),
    "a division into nothing": (["serve", "--prefill", "0", "--decode", "0"], "--prefill 0: is not"),
    "a policy of another engine": (["serve", "--policy", "fifo"], "fcfs"),
    "a size in words": (["cache", "prune", "--to", "lots"], "Write 512MiB"),
    "an action with a slip": (["cache", "lst"], "Did you mean ls?"),
    "a file that is there": (["export", "tiny", os.devnull], "exists already"),
    "requests that are not there": (["run-batch", "no.jsonl", "out.jsonl"], "no.jsonl: is no file"),
    "an address without a port": (
        ["follow", "--coordinator", "here", "--process", "1", "--processes", "2"], '"host:port"'),
    "a follower that leads": (
        ["follow", "--coordinator", "a:1", "--process", "0", "--processes", "2"], "0 is the leader"),
}  # fmt: skip
# All of them in one process, which says what it has imported in the end.
DRIVER = """
import contextlib, io, json, sys
from rekindle._src.cli.main import main
answers = []
for command in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        try:
            status = main(command)
        except SystemExit as end:
            status = end.code
    answers.append((status, shown.getvalue()))
print(json.dumps({"answers": answers, "jax": "jax" in sys.modules}))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, str]]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels"))
    commands = json.dumps([command for command, _ in MISTAKES.values()])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], input=commands, capture_output=True, text=True, timeout=300, check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert not found["jax"], "something was imported before the options were checked"
    return dict(zip(MISTAKES, map(tuple, found["answers"]), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_at_once(answers: dict[str, tuple[int, str]], mistake: str) -> None:
    status, shown = answers[mistake]
    assert status == 2
    assert MISTAKES[mistake][1] in shown
    lines = shown.splitlines()
    assert len(lines) <= 2, shown
    assert lines[0].startswith("rekindle") and "--help` lists" in lines[1]
