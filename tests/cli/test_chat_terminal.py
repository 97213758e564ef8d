"""`rekindle chat` in a real terminal: editing, pasting, history, Ctrl-C, and words that stay whole at the margin."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.terminals import Screen
from rekindle._src.cli import lines
from rekindle._src.cli.main import main
from rekindle._src.core.activity import SPINNER

pexpect = pytest.importorskip("pexpect")
fdpexpect = pytest.importorskip("pexpect.fdpexpect")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pexpect needs a pseudo-terminal")
ROOT = Path(__file__).parents[2]
READY = "\x1b[?2004h"  # the terminal is asked to mark what is pasted: a prompt waits for input
COLUMNS = 48
# `rekindle chat`, in which the programs of steps, whole ones and those of parts, are made once a file is there: some
# machines make the first in less time than the spinner waits.
HELD = """
import pathlib, sys, time
from rekindle._src.cli.main import main
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.layered import LayeredPrograms
from rekindle._src.programs.compiling import ProgramCompiler

file = pathlib.Path(sys.argv.pop(1))

def hold(owner, name):
    made = getattr(owner, name)

    def held(self, key, *args, **options):
        while isinstance(key, Bucket) and not file.exists():
            time.sleep(0.01)
        return made(self, key, *args, **options)

    setattr(owner, name, held)

hold(ProgramCompiler, "compile")
hold(LayeredPrograms, "make")
sys.exit(main(sys.argv[1:]))
"""


class Chat:
    """A running `rekindle chat`, in a terminal of its own that Ctrl-C goes through."""

    def __init__(self, cache: Path) -> None:
        paths = os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels"))
        environment = {
            **os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "REKINDLE_CACHE": str(cache),
            "REKINDLE_NATIVE": "0", "TERM": "xterm-256color",
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody here answers where the cursor is
        }  # fmt: skip
        environment["COLUMNS"] = "200"  # exported by another window: what counts is how wide this one is
        self.may_compile = cache / "may-compile"
        command = [
            sys.executable,
            "-c",
            HELD,
            str(self.may_compile),
            "chat",
            "--max-tokens",
            "24",
            "--temperature",
            "0",
        ]
        self.running, master = in_terminal(command, environment)
        self.terminal = fdpexpect.fdspawn(master, encoding="utf-8", timeout=120)

    def shown_until(self, text: str) -> str:
        self.terminal.expect_exact(text)
        return str(self.terminal.before)

    def send(self, keys: str) -> None:
        self.terminal.send(keys)

    def say(self, keys: str) -> str:
        """Type this and press Enter; what is shown until the next prompt."""
        self.may_compile.touch()  # where this is not the first test that runs
        self.send(keys + "\r")
        return self.shown_until(READY)

    def reply_to(self, command: str) -> str:
        """The words that a command answers with."""
        return " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.say(command)).split())

    def close(self) -> None:
        self.running.kill()
        self.running.wait()
        self.terminal.close()


def in_terminal(command: list[str], environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """A process that a new terminal controls, and the other end of it.

    The process takes the terminal itself: pexpect.spawn forks, which a process with JAX's threads must not do.
    """
    import fcntl
    import termios

    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    takes = (
        "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGINT, signal.SIG_DFL); "  # which a shell's background jobs, such as these tests, ignore
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    running = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", takes, *command],
        stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    return running, master


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    chat = Chat(tmp_path_factory.mktemp("cache"))
    try:
        start = " ".join(chat.shown_until(READY).split())
        assert "tiny" in start and "1,024 tokens" in start, "the model is named"
        yield chat
    finally:
        chat.close()


def saved(chat: Chat, path: Path) -> list[dict[str, Any]]:
    chat.say(f"/save {path}")
    messages: list[dict[str, Any]] = json.loads(path.read_text())["messages"]
    return messages


def test_ctrl_c_while_a_program_compiles_gives_the_prompt_back_and_keeps_what_was_typed(chat: Chat) -> None:
    """The first answer waits for its program. The spinner once drew over the prompt, and over what was typed."""
    chat.send("Tell me a story about a dog.\r")
    chat.shown_until("compiling")
    chat.send("/stats\r")
    time.sleep(0.3)
    chat.send("\x03")
    assert "/stats" not in chat.shown_until("stopped; /continue goes on"), "the answer and the spinner are drawn there"
    chat.may_compile.touch()
    chat.shown_until(READY)
    prompt = chat.shown_until("\x1b[?2004l")
    assert "/stats" in prompt, "the line that was typed ahead is lost"
    answer = chat.shown_until(READY)
    assert "room for 1,024 tokens" in " ".join(answer.split())
    time.sleep(1.0)
    chat.send("/quiet\r")
    prompt = chat.shown_until("\x1b[?2004l")
    assert not set(SPINNER) & set(prompt) and "compiling" not in prompt, "something is drawn over what is typed"
    chat.shown_until(READY)


@pytest.mark.thorough
def test_lines_are_edited_and_pasted_text_is_one_message(chat: Chat, tmp_path: Path) -> None:
    chat.say("/reset")
    shown = chat.say("Who are yu?\x1b[D\x1b[Do")
    messages = saved(chat, tmp_path / "chat.json")
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[0]["content"] == "Who are you?"
    answer = Screen(COLUMNS).feed(shown[shown.rindex("\x1b[?2004l") :])
    words = messages[1]["content"].split()
    assert " ".join(answer).split()[: len(words)] == words, "a word is broken at the margin"
    chat.say("\x1b[200~one\ntwo\nthree\x1b[201~")
    assert saved(chat, tmp_path / "pasted.json")[2]["content"] == "one\ntwo\nthree"


@pytest.mark.thorough
def test_ctrl_r_finds_an_earlier_message_and_history_lasts(chat: Chat, tmp_path: Path) -> None:
    chat.say("What is your name?")
    chat.say("/reset")
    chat.say("\x12What is\r")  # the first Enter takes what was found, the second sends it
    assert saved(chat, tmp_path / "again.json")[0]["content"] == "What is your name?"


def test_commands(chat: Chat) -> None:
    assert "Did you mean /stats?" in chat.reply_to("/stast")
    chat.say("/reset")
    assert "0 turns, room for 1,024 tokens" in chat.reply_to("/stats")
    chat.say("Who are you?")
    figures = chat.reply_to("/stats")
    assert "of 1,024 tokens of context" in figures and "tokens/s" in figures and "step_sizes" not in figures
    assert "takes the last turn back" in chat.reply_to("/help")
    assert "took back" in chat.reply_to("/undo")


def test_answers_have_versions_and_the_last_message_is_edited(chat: Chat, tmp_path: Path) -> None:
    """Typed, as somebody would: again, fork with a choice, edit in the line, and back."""
    chat.say("/reset")
    assert "ended by the model" in chat.reply_to("Who are you?")
    assert "the same answer once more" in chat.reply_to("/again")
    assert "2 ·Ember" in chat.reply_to("/fork")
    assert "\u2588" in chat.reply_to("/fork 2") and "instead of it" in chat.reply_to(" Tom,")
    forked = saved(chat, tmp_path / "forked.json")[-1]["content"]
    assert forked.startswith("I am Tom,")
    assert "‹ 1/2 ›" in chat.reply_to("/earlier")
    assert saved(chat, tmp_path / "first.json")[-1]["content"].startswith("I am Ember")
    assert "Write the message anew" in chat.reply_to("/edit")
    chat.say("\x7f now?")  # the message stands in the line
    assert saved(chat, tmp_path / "edited.json")[0]["content"] == "Who are you now?"
    assert "> Who are you? ‹ 1/2 ›" in chat.reply_to("/earlier")


def test_a_preset_is_chosen_and_completed_by_tab(chat: Chat) -> None:
    chat.send("/settings li\t")
    chat.shown_until("vely")  # completions come from a thread
    assert "● lively" in chat.reply_to("")
    assert "● as opened" in chat.reply_to("/settings as opened")


def test_an_answer_that_was_cut_goes_on(chat: Chat, tmp_path: Path) -> None:
    assert "cut at 24 tokens; /continue goes on" in chat.reply_to("Tell me a story about a dog.")
    cut = saved(chat, tmp_path / "cut.json")[-1]["content"]
    chat.say("/continue")
    whole = saved(chat, tmp_path / "whole.json")[-1]["content"]
    assert whole.startswith(cut) and len(whole) > len(cut)
    assert "has no answer that could go on" in chat.reply_to("/reset") + chat.reply_to("/continue")


@pytest.mark.thorough
def test_ctrl_c_keeps_the_conversation_and_twice_leaves(chat: Chat, tmp_path: Path) -> None:
    before = saved(chat, tmp_path / "before.json")
    chat.send("half a message\x03")
    chat.shown_until("Ctrl-C again leaves")
    chat.shown_until(READY)
    assert saved(chat, tmp_path / "after.json") == before
    chat.send("\x03")
    chat.shown_until("Ctrl-C again leaves")
    chat.shown_until(READY)
    for _ in range(10):  # the second comes too late where a machine is slow
        chat.send("\x03")
        if chat.terminal.expect_exact([pexpect.EOF, "Ctrl-C again leaves"]) == 0:
            break
        chat.shown_until(READY)
    assert chat.running.wait(300) == 0


def test_typed_messages_are_kept_for_this_user_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines.kept_history(tmp_path / "chats").append_string("a secret")
    (file,) = (tmp_path / "chats").iterdir()
    assert "a secret" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0 and file.parent.stat().st_mode & 0o077 == 0
    assert main(["cache", "clear", "--yes", "--cache-dir", str(tmp_path)]) == 0
    assert not file.exists()
