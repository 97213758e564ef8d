"""`rekindle generate` and `rekindle` alone: what is written where."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from helpers.fakes import EchoModel
from helpers.sessions import fake_session
from rekindle import Session
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
