"""Tab in a shell: subcommands, options, their values, and the names of models; in bash, zsh and fish themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import checkpoints, gguf_files, tool_homes
from rekindle._src.cli.commands import completion
from rekindle._src.cli.main import main, parser
from rekindle._src.models.loading.stores import known


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tool_homes.empty(tmp_path / "home", monkeypatch)
    folder = checkpoints.write(tmp_path / "hf", checkpoints.CASES["qwen3"])
    store = home / ".ollama" / "models"
    model = gguf_files.convert(folder, tmp_path / "m.gguf").read_bytes()
    for tag in ("0.6b", "1.7b"):
        tool_homes.ollama(store, f"library/qwen3/{tag}", tool_homes.manifest(store, model=model))
    tool_homes.lm_studio(home / ".lmstudio" / "models", "owner/name", {"m.gguf": model})
    return home


LINES = {
    "rekindle comp": ["completion"],
    "rekindle --ver": ["--version"],
    "rekindle chat --mod": ["--model"],
    "rekindle chat --model olla": ["ollama:qwen3:0.6b", "ollama:qwen3:1.7b"],
    "rekindle chat --model ollama:qwen3:0": ["ollama:qwen3:0.6b"],
    "rekindle chat --model ": ["lmstudio:owner/name", "ollama:qwen3:0.6b", "ollama:qwen3:1.7b", "tiny", "tiny-vision"],
    "rekindle chat --policy l": ["lof", "lpm"],
    "rekindle serve t": ["tiny", "tiny-vision"],
    "rekindle rm lm": ["lmstudio:owner/name"],
    "rekindle cache p": ["prune"],
    "rekindle pull o": [],
    "rekindle nonsense x": [],
    "rekindle generate 'half a": [],
    "": [],
}


@pytest.mark.parametrize("line", LINES)
def test_words_that_may_follow(home: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    if line:
        assert completion.following(parser(), line) == LINES[line]
    assert main(["completion", "words", "--line", line]) == 0
    if LINES[line]:
        assert capsys.readouterr().out.split() == LINES[line]


@pytest.mark.parametrize("file", ["a$(touch x)", "a`id`", "a;id", "a&b", "a b", "a*", "a'b", "a|b", "a>b", "a#b"])
def test_names_that_a_shell_would_run_are_not_offered(home: Path, file: str) -> None:
    """Files in one folder are offered by name, and their authors chose the names: some are not safe in a shell."""
    folder = home / ".lmstudio" / "models" / "owner" / "name"
    (folder / f"{file}.gguf").write_bytes(b"")
    assert any(file in name for name in known.names())
    assert completion.following(parser(), "rekindle chat --model lm") == ["lmstudio:owner/name/m.gguf"]


SHELLS = {
    "bash": """
source /dev/stdin <<< "$(rekindle completion bash)"
COMP_LINE='rekindle chat --model ollama:qwen3:0' COMP_POINT=${#COMP_LINE}
COMP_POINT=${#COMP_LINE}
_rekindle
echo "${COMPREPLY[@]}"
""",
    "zsh": """
compdef() { :; }
compadd() { shift; print -r -- "$@"; }
eval "$(rekindle completion zsh)"
words=(rekindle chat --model ollama:qwen3:0) CURRENT=4 PREFIX=ollama:qwen3:0
_rekindle
""",
    "fish": """
rekindle completion fish | source
complete -C 'rekindle chat --model ollama:qwen3:0'
""",
}
ANSWERS = {"bash": "0.6b", "zsh": "ollama:qwen3:0.6b", "fish": "ollama:qwen3:0.6b"}  # bash takes it from its colon on


@pytest.mark.parametrize("shell", SHELLS)
def test_in_a_shell(home: Path, shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    command = tmp_path / "bin" / "rekindle"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m rekindle "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [program, "-c", SHELLS[shell]], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == [ANSWERS[shell]], done.stderr
