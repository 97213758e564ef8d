"""`rekindle generate` and `rekindle` alone: what is written where."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from helpers.fakes import EchoModel
from helpers.sessions import fake_session
from rekindle import Session
from rekindle._src.cli.controls import without_controls
from rekindle._src.cli.main import main
from rekindle._src.session import opening


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """What the command opens; closed by the command."""
    made = fake_session()
    monkeypatch.setattr(opening, "open_sync", lambda model, **options: made)
    yield made
    made.close()


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "-"]])
def test_a_piped_prompt_is_not_written_again(
    session: Session, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = session.generate_sync("Once upon", max_tokens=5).text
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon"))
    assert main([*arguments, "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == f"{text}\n"


def test_an_empty_pipe_is_told_how_to_give_a_prompt_and_opens_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(opening, "open_sync", lambda model, **options: pytest.fail("it opened a model"))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate"]) == 1
    printed = capsys.readouterr()
    assert 'Pass one: rekindle generate "Once upon a time"' in printed.err and not printed.out


def test_a_prompt_of_the_command_line_begins_the_text(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    text = session.generate_sync("Once upon", max_tokens=5).text
    assert main(["generate", "Once upon", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == f"Once upon{text}\n"


def test_a_text_that_repeats_itself_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(opening, "open_sync", lambda model, **options: fake_session(model=EchoModel(surprises=0.0)))
    assert main(["generate", "again and again and again and again and ", "--max-tokens", "200"]) == 0
    assert "[the text repeats itself: the same " in capsys.readouterr().err


def test_the_program_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr()
    assert "usage: rekindle" in printed.out and "chat with a model" in printed.out and not printed.err


def test_a_text_can_not_steer_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model can write any bytes: OSC 52 sets the clipboard, others the title, the cursor and colours."""
    prompt = "\x1b\x07 " * 12
    for terminal in (False, True):
        made = fake_session(model=EchoModel(surprises=0.0))
        text = made.generate_sync(prompt, max_tokens=40).text
        assert "\x1b" in text and "\x07" in text
        monkeypatch.setattr(opening, "open_sync", lambda model, made=made, **options: made)
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr("sys.stdin", io.StringIO(prompt))
        assert main(["generate", "--max-tokens", "40"]) == 0
        written = capsys.readouterr().out
        assert written == (f"{without_controls(text)}\n" if terminal else f"{text}\n")
        assert terminal == ("\x1b" not in written) == ("\u241b" in written)
