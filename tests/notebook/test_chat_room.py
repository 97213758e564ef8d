"""A chat whose context is full goes on: refused messages leave it, and its oldest turns make room. Several sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.pressing import press
from helpers.sessions import CONFIG, byte_tokenizer, eventually, parts
from rekindle import Session, tiny
from rekindle._src.notebook.chat import ChatView
from rekindle._src.text.chat import ChatTemplate
from rekindle.errors import ConfigError, InvalidRequest

MOST = CONFIG.max_model_len
MUCH = "x" * (MOST or 0)


def opened(model: str = "fake", *, chats: bool = True) -> Session:
    scheduler, runner = parts()
    chat = ChatTemplate.load(tiny.folder()) if chats else None
    return Session(scheduler, runner, byte_tokenizer(), CONFIG, model=model, chat=chat)


@pytest.fixture
def session() -> Iterator[Session]:
    with opened() as made:
        yield made


@pytest.fixture
def view(session: Session) -> Iterator[ChatView]:
    made = session.view.chat("Be brief.", max_tokens=8, ignore_eos=True, overflow="refuse")
    yield made
    made.stop()
    made.join(10)


def say(view: Any, text: str) -> None:
    """As the page does it: type and press Enter."""
    press(view, "say:enter", say=[text, view.widget.value("say")])


def answered(view: ChatView, text: str) -> None:
    say(view, text)
    assert view.handle is not None
    view.handle.result_sync()


def names(view: Any) -> list[str]:
    return [control["name"] for control in view.widget.controls]


def roles(view: ChatView) -> list[str]:
    return [message["role"] for message in view.messages]


def test_a_refused_message_leaves_the_conversation(view: ChatView, session: Session) -> None:
    answered(view, "one")
    answered(view, "two")
    say(view, MUCH)
    eventually(lambda: "Not sent: the conversation with this message" in view.picture)
    assert "It is in the input line again" in view.picture and f"max_model_len is {MOST}" in view.picture
    assert view.widget.value("say") == MUCH, "so that it can be said in fewer words"
    assert roles(view) == ["system", "user", "assistant", "user", "assistant"]
    assert MUCH not in view.picture
    answered(view, "three")
    assert roles(view) == ["system", "user", "assistant", "user", "assistant", "user"]
    assert all(message["content"] for message in view.messages), "no empty answer is left"
    alone = session.chat(view.messages, max_tokens=8, ignore_eos=True).result_sync()
    assert view.answer == alone.text and "Not sent" not in view.draw()


def test_a_message_alone_that_is_too_long_has_no_turn_to_drop(view: ChatView) -> None:
    say(view, MUCH)
    eventually(lambda: "Not sent" in view.picture)
    assert roles(view) == ["system"] and "forget" not in names(view)
    assert view.forget() == 0 and view.widget.value("say") == MUCH


def test_a_button_drops_oldest_turns_until_the_message_has_room(view: ChatView) -> None:
    for word in ("a", "b", "c"):
        answered(view, word * 50)
    fits = "d" * 200
    say(view, fits)
    eventually(lambda: "forget" in names(view))
    label = next(control["label"] for control in view.widget.controls if control["name"] == "forget")
    assert label == "Drop the oldest turn and send"
    for _ in range(3):
        if view.refused is None:
            break
        before = len(view.messages)
        press(view, "forget")
        eventually(lambda: view.refused is not None or (view.handle is not None and view.handle.done))
        view._settle()
        assert len(view.messages) < before or view.refused is None
    assert view.handle is not None and view.answer
    assert view.messages[0] == {"role": "system", "content": "Be brief."}
    assert view.messages[-1] == {"role": "user", "content": fits}
    assert "a" * 50 not in [message["content"] for message in view.messages]
    assert view.widget.value("say") == ""
    eventually(lambda: "forget" not in names(view))


def test_a_full_chat_goes_on_without_its_oldest_turns_and_says_so(session: Session) -> None:
    view = session.view.chat("Be brief.", max_tokens=8, ignore_eos=True)
    try:
        for word in ("a", "b", "c", "d"):
            answered(view, word * 120)
        assert len(view.messages) == 8, "all of them stay in the conversation"
        eventually(lambda: "without the oldest" in view.draw())
        assert "the context is full" in view.draw() and "forget" not in names(view)
        assert view.handle is not None and view.handle.prompt is not None and "a" * 120 not in view.handle.prompt
        say(view, MUCH)
        eventually(lambda: "Not sent: the conversation with this message" in view.picture)
        assert "forget" not in names(view), "no turn to drop would make room"
        view.widget.fill("say", "")
        view.widget.values = {**view.widget.values, "max_tokens": str(MOST)}
        answered(view, "e" * 50)
        assert view.stopped.endswith("is full") and view.can_continue and "forget" not in names(view)
        before = view.answer
        view.continue_answer(max_tokens=8)
        assert view.handle is not None
        view.handle.result_sync()
        assert len(view.answer_ids) > len(before) // 4 and view.answer.startswith(before) and view.answer != before
    finally:
        view.stop()
        view.join(10)


def test_text_typed_meanwhile_stays_with_a_refused_message(view: ChatView, monkeypatch: pytest.MonkeyPatch) -> None:
    settle = view._settle
    monkeypatch.setattr(view, "_settle", lambda: None)
    say(view, MUCH)
    handle = view.handle
    assert handle is not None
    eventually(lambda: handle.done)
    view.widget.fill("say", "and this")
    settle()
    settle()
    assert view.widget.value("say") == f"{MUCH}\nand this"
    assert roles(view) == ["system"]


def test_an_answer_that_fills_the_context_goes_on_once_a_turn_is_dropped(view: ChatView) -> None:
    answered(view, "a" * 100)
    view.options["max_tokens"] = MOST
    answered(view, "b" * 60)
    eventually(lambda: f"the context of {MOST} tokens is full" in view.picture)
    assert not view.can_continue
    begun, count = view.answer, len(view.answer_ids)
    eventually(lambda: "forget" in names(view))
    press(view, "forget")
    assert view.handle is not None
    view.handle.result_sync()
    assert view.answer.startswith(begun) and len(view.answer_ids) > count
    assert [message["content"][:1] for message in view.messages] == ["B", "b"]
    prompt = view.handle.prompt
    assert prompt is not None and prompt.endswith(begun) and "aaa" not in prompt
    view.options["max_tokens"] = 8
    whole = view.answer_ids
    for earlier, at in enumerate((3, count, count + 5), 1):  # before, at and after the place where it went on
        view.fork(at, "XY", max_tokens=4)
        assert view.handle is not None
        view.handle.result_sync()
        assert view.answer_ids[:at] == whole[:at] and "XY" in view.answer
        view.switch(len(view.messages), -earlier)
        assert view.answer_ids == whole


def test_there_is_nothing_to_drop_while_the_only_turn_is_answered(view: ChatView) -> None:
    view.options["max_tokens"] = MOST
    answered(view, "b" * 60)
    eventually(lambda: "is full" in view.picture)
    assert view.forget() == 0 and "forget" not in names(view) and len(view.messages) == 2


def test_another_failure_gives_the_message_back_too(view: ChatView, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> Any:
        raise InvalidRequest("messages", "x", "is refused", "Say something else")

    monkeypatch.setattr(view.session, "chat", refused)
    say(view, "hello")
    assert "Say something else" in view.widget.note
    assert view.widget.value("say") == "hello" and roles(view) == ["system"]


def test_a_draft_stays_when_another_text_is_sent(view: ChatView) -> None:
    view.widget.fill("say", "a draft")
    press(view, "suggest:1")
    assert view.messages[-1]["content"] == view.suggestions[1] and view.widget.value("say") == "a draft"
    view.send("from a cell")
    assert view.messages[-1]["content"] == "from a cell" and view.widget.value("say") == "a draft"
    press(view, "send")
    assert view.messages[-1]["content"] == "a draft" and view.widget.value("say") == ""


def test_a_draft_stays_when_a_message_is_edited_or_its_version_changes(view: ChatView) -> None:
    answered(view, "one")
    answered(view, "two")
    view.widget.fill("say", "a draft")
    view.edit()
    assert view.widget.value("say") == "two\na draft"
    view.edit()
    assert view.widget.value("say") == "one\na draft", "the message of the first edit was not changed"
    view.switch(1)
    assert view.messages[1]["content"] == "one" and view.widget.value("say") == "a draft"
    view.edit()
    view.widget.fill("say", "one, changed")
    view.switch(1)
    assert view.messages[1]["content"] == "one" and view.widget.value("say") == "one, changed"


def test_its_title_is_its_first_message_and_the_line_under_an_answer_names_a_file_alone() -> None:
    with opened("/home/somebody/models/Qwen3-0.6B-Q4_K_M.gguf") as session:
        view = session.view.chat(max_tokens=4)
        try:
            assert "New chat" in view.picture
            answered(view, "Tell me\na story about a cat that lives in a very small house at the sea")
            eventually(lambda: "tokens/s" in view.picture)
            assert ">Tell me a story about a cat that lives" in view.picture and "at the sea</span>" not in view.picture
            assert "Qwen3-0.6B-Q4_K_M.gguf" in view.picture and "somebody" not in view.picture
        finally:
            view.stop()
            view.join(10)


def models(view: Any) -> list[str]:
    return next((control["choices"] for control in view.widget.controls if control["name"] == "model"), [])


def choose(view: Any, model: str) -> None:
    press(view, "model", model=[model, ""])


def test_the_model_of_the_next_answer_is_chosen_among_open_sessions(view: ChatView, session: Session) -> None:
    assert models(view)[:1] == [] or "other" not in models(view), "one alone is no choice"
    with opened("other") as other, opened("no chats", chats=False):
        view.refresh()
        assert {"fake", "other", "no chats"} <= set(models(view)) and view.widget.value("model") == "fake"
        answered(view, "one")
        view.widget.fill("temperature", "0.3")
        choose(view, "other")
        assert view.session is other and view.widget.value("model") == "other"
        assert view.widget.value("temperature") == "0.3", "a slider that was moved stays"
        answered(view, "two")
        assert other.stats().finished == 1 and session.stats().finished == 1
        assert roles(view) == ["system", "user", "assistant", "user"]
        choose(view, "no chats")
        assert "chat template" in view.widget.note and view.widget.value("model") == "other"
        choose(view, "nobody's")
        assert view.session is other
        choose(view, "fake")
    assert view.session is session and not view.ended
    view.refresh()
    assert "other" not in models(view)


def test_sessions_of_one_model_have_numbers(session: Session) -> None:
    with opened() as second:
        both = lambda: (session, second)  # noqa: E731
        view = ChatView(second, sessions=both, max_tokens=4)
        try:
            assert models(view) == ["fake", "fake (2)"] and view.widget.value("model") == "fake (2)"
        finally:
            view.stop()
            view.join(10)


@pytest.mark.parametrize("wrong", [1, "fake"])
def test_sessions_are_no_option_of_requests(session: Session, wrong: Any) -> None:
    with pytest.raises((TypeError, ConfigError, InvalidRequest)):
        session.view.chat(sessions=wrong)
