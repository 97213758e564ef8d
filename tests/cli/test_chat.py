"""`rekindle chat`: a conversation survives a full context, an interrupt and the commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rekindle
from helpers import picture_models
from helpers.chatting import saying
from helpers.fakes import EchoModel
from helpers.sessions import CONFIG, byte_tokenizer, change_front, parts
from rekindle import Session, tiny
from rekindle._src.calls.conversation import Turn
from rekindle._src.cli import chat
from rekindle._src.cli.main import main
from rekindle._src.text.chat import ChatTemplate
from rekindle.errors import StepFailed


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """What the command opens; closed by the command."""
    scheduler, runner = parts()
    made = Session(scheduler, runner, byte_tokenizer(), CONFIG, chat=ChatTemplate.load(tiny.folder()))
    monkeypatch.setattr(chat, "open_sync", lambda model, **options: made)
    yield made
    made.close()


def said(monkeypatch: pytest.MonkeyPatch, *lines: str) -> list[str]:
    """Answers the prompts with these lines, then ends the input; gives the prompts that were shown."""
    waiting, prompts = [*lines], []

    def read(prompt: str) -> str:
        prompts.append(prompt)
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    monkeypatch.setattr("builtins.input", read)
    return prompts


def conversations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    real = Session.conversation

    def conversation(self: Session, **options: Any) -> Any:
        made.append(real(self, **options))
        return made[-1]

    monkeypatch.setattr(Session, "conversation", conversation)
    return made


def users(conversation: Any) -> list[str]:
    return [message["content"] for message in conversation.messages if message["role"] == "user"]


def test_a_full_context_offers_to_drop_the_oldest_turn(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, long = conversations(monkeypatch), "b" * 300
    prompts = said(monkeypatch, "a" * 200, "short", long, "", "/stats", "/nonsense", "/quit")
    assert main(["chat", "--max-tokens", "4", "--overflow", "refuse"]) == 0
    assert prompts[3] == "Drop the oldest of 2 turns? [Y/n] "
    assert users(made[0]) == ["short", long]
    assert "leaves no room for a new token" in capsys.readouterr().err


def test_a_full_context_goes_on_without_the_oldest_turns_and_says_so(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = conversations(monkeypatch)
    prompts = said(monkeypatch, "a" * 200, "short", "b" * 300, "c" * 600, "d")
    assert main(["chat", "--max-tokens", "4"]) == 0
    assert set(prompts) == {"> "}, "there is nothing to ask"
    assert users(made[0]) == ["a" * 200, "short", "b" * 300, "d"], "the conversation has all turns"
    notes = capsys.readouterr().err
    assert "without the oldest turn: the context is full" in notes or "without the oldest 2 turns" in notes
    assert notes.count("leaves no room for a new token") == 1, "of the message that alone is too long"


def test_the_conversation_is_kept_when_nothing_may_be_dropped(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = conversations(monkeypatch)
    said(monkeypatch, "a" * 200, "b" * 300, "n", "c", "d", "/undo")
    assert main(["chat", "--max-tokens", "4", "--overflow", "refuse"]) == 0
    assert users(made[0]) == ["a" * 200, "c"]
    assert "nothing was dropped" in capsys.readouterr().err


def test_a_model_that_can_not_chat_says_so_before_a_word_is_typed(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change_front(session, chat=None)
    prompts = said(monkeypatch, "hello")
    assert main(["chat"]) == 1
    assert "template" in capsys.readouterr().err
    assert prompts == []


def test_a_failed_answer_leaves_the_conversation(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, stream, failing = conversations(monkeypatch), Turn.stream_sync, ["no"]

    def fail_once(turn: Turn) -> Any:
        if failing:
            raise StepFailed(failing.pop())
        return stream(turn)

    monkeypatch.setattr(Turn, "stream_sync", fail_once)
    said(monkeypatch, "first", "second")
    assert main(["chat", "--max-tokens", "4"]) == 0
    assert "the answer failed: no" in capsys.readouterr().err
    assert users(made[0]) == ["second"]


def test_one_message_alone_is_too_long(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = conversations(monkeypatch)
    said(monkeypatch, "a" * 600, "/undo", "b", "/reset", "c")
    assert main(["chat", "--max-tokens", "4", "--system", "Be brief."]) == 0
    assert "no older turn to drop" in capsys.readouterr().err
    assert [users(one) for one in made] == [["b"], ["c"]]


def test_an_answer_that_fills_the_context_says_so(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = conversations(monkeypatch)
    said(monkeypatch, "a" * 380, "y")
    assert main(["chat", "--max-tokens", "1000", "--overflow", "refuse"]) == 0
    assert "the context is full, so the answer ends here" in capsys.readouterr().err
    assert users(made[0]) == []


def test_an_answer_that_repeats_itself_is_named_with_what_helps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, runner = parts(model=EchoModel(surprises=0.0))
    made = Session(scheduler, runner, byte_tokenizer(), CONFIG, chat=ChatTemplate.load(tiny.folder()))
    monkeypatch.setattr(chat, "open_sync", lambda model, **options: made)
    said(monkeypatch, "again and again and again and again and ")
    assert main(["chat", "--max-tokens", "200"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "· repeats itself: the same 5 tokens" in told and "/settings lively draws another" in told


def test_the_formats_of_the_weights_are_named_and_not_the_dtype_alone(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of four bits was "bfloat16"."""
    monkeypatch.setattr(Session, "weights", "4 bits 66 MB, float32 1 MB (in the groups of the checkpoint)")
    said(monkeypatch, "/stats")
    assert main(["chat"]) == 0
    told = capsys.readouterr().err
    assert told.count("4 bits 66 MB, float32 1 MB") == 2 and "groups" not in told and "float32 ·" not in told


def test_the_share_of_the_prefix_cache_is_said_in_plain_words() -> None:
    """It said that "0 of 41 prompt tokens were not computed again"."""
    assert chat.from_cache(41, 0) == "none of 41 prompt tokens came from it (0%)"
    assert chat.from_cache(4_100, 1_025) == "1,025 of 4,100 prompt tokens came from it (25%)"
    assert chat.from_cache(1, 1) == "1 of 1 prompt token came from it (100%)"
    assert chat.from_cache(0, 0) == "no prompt was sent yet"


def test_versions_are_made_and_gone_through_in_a_pipe_too(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = conversations(monkeypatch)
    said(monkeypatch, "first", "/edit second", "/earlier", "/later", "/fork 2 XYZ", "/earlier", "/again", "/fork 99")
    assert main(["chat", "--max-tokens", "6"]) == 0
    told = capsys.readouterr().err
    assert "> first  ‹ 1/2 ›" in told and "> second  ‹ 2/2 ›" in told
    assert "‹ 2/2 ›  6 tokens" not in told and "‹ 2/2 ›" in told
    assert "'99' is not the number of a token in the answer. Use 0 to 5" in told
    assert len(made) == 1


def test_a_fork_keeps_what_comes_before_it(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = said(monkeypatch, "first", "/fork", "/fork 2", "XYZ", f"/save {tmp_path / 'chat.json'}")
    assert main(["chat", "--max-tokens", "6"]) == 0
    assert prompts[3] == "instead of it (empty for another draw): "
    out, err = capsys.readouterr()
    first, forked = out.split("\n", 1)
    forked = forked.removesuffix("\n\n")
    assert forked.startswith(first[:2] + "XYZ") and len(forked) > 5
    assert json.loads((tmp_path / "chat.json").read_text())["messages"][-1]["content"] == forked
    assert "0\u00a0" in err and "goes on from token 12" in err


def test_a_saved_conversation_is_taken_up(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, made = tmp_path / "chat.json", conversations(monkeypatch)
    lines = ["first", "second", f"/save {file}", "/settings system Be long.", "/reset", "other", "/load"]
    lines += [f"/load {tmp_path / 'nothing.json'}", f"/load {file}", "/fork", "/undo", "third", "/reset", "fourth"]
    said(monkeypatch, *lines)
    assert main(["chat", "--max-tokens", "6", "--system", "Be brief."]) == 0
    out, err = capsys.readouterr()
    assert "Name a file: /load chat.json" in err and "nothing.json can't be read (No such file" in err
    assert "goes on after 2 turns. The last one:" in err and "> second" in err
    assert "no answer can be forked: there is none yet, or it was loaded without its tokens" in err
    assert "took back 'second'; 1 turn left" in err
    answers = out.split("\n")
    assert answers[3] == answers[1] != answers[2], "the last answer is shown again"
    _, other, restored, last = made  # nothing of the file that is not there
    assert [users(one) for one in (other, restored, last)] == [["other"], ["first", "third"], ["fourth"]]
    assert [one.system for one in (other, restored, last)] == ["Be long.", "Be brief.", "Be brief."]


def test_calls_and_reasoning_of_a_saved_conversation_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "days": 3}}}
    messages = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "", "reasoning_content": "They ask.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny " * 60},
        {"role": "assistant", "content": "It is sunny."},
    ]
    file = tmp_path / "chat.json"
    with saying("Yes <tool_call>no") as talking:
        talk = talking.conversation()
        talk._messages += messages
        talk.save(file)
        monkeypatch.setattr(chat, "open_sync", lambda model, **options: contextlib.nullcontext(talking))
        said(monkeypatch, f"/load {file}", "And now?")
        assert main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert "reasoning, 2 words" in err and "calls weather(city='Paris', days=3)" in err
    (result,) = [line for line in err.splitlines() if "result: sunny" in line]
    assert len(result) < 200
    assert "It is sunny.\n" in out and "Yes <tool_call>no\n" in out


@pytest.mark.thorough
def test_a_saved_conversation_with_a_picture_is_taken_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("PIL.Image")
    model = picture_models.written("qwen3-vl", tmp_path / "model")
    sizes: dict[str, Any] = {"max_requests": 4, "max_tokens_per_step": 48, "max_model_len": 256, "device_pages": 80}
    opened = rekindle.open_sync(model, **sizes, dtype="float32", precompile="lazy", cache_dir=str(tmp_path), quiet=True)
    monkeypatch.setattr(chat, "open_sync", lambda model, **options: opened)
    talk, file = opened.conversation(max_tokens=4, ignore_eos=True), tmp_path / "chat.json"
    talk.say("What is it?", images=picture_models.picture(1, 96, 96)).result_sync()
    talk.save(file)
    made = conversations(monkeypatch)
    said(monkeypatch, f"/load {file}", "/again", "And why?", "/undo", "/edit What was it?", "/undo")
    assert main(["chat", "--max-tokens", "4"]) == 0
    err = capsys.readouterr().err
    assert "goes on after 1 turn. The last one:" in err and "> [picture] What is it?" in err
    assert "took back 'And why?'; 1 turn left" in err and "which a terminal can't write anew: load it in Python" in err
    assert "can't answer again: load it in Python" in err and "took back '[picture] What is it?'; 0 turns left" in err
    *_, last = made
    assert not last.messages


def test_settings_hold_for_the_next_answers(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = conversations(monkeypatch)
    lines = ["first", "/settings max_tokens 3", "second", "/settings lively", "/settings top_p 7", "/settings topp 1"]
    said(monkeypatch, *lines, "/settings system Be brief.", "third", "/settings as opened", "/settings temperature x")
    assert main(["chat", "--max-tokens", "6"]) == 0
    told = capsys.readouterr().err
    assert "6 tokens" in told and "cut at 3 tokens" in told
    assert "● lively" in told and "○ as opened" in told and "● as opened" in told
    assert "top_p" in told and "Did you mean top_p?" in told and "'x' is no number" in told
    assert made[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert len(made[0].messages) == 7
