"""A chat view without a browser: its messages and answers, forks, versions, settings, and what its buttons do."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.chatting import saying
from helpers.fakes import EchoModel
from helpers.pressing import act, hear, mark, press
from helpers.replies import tool
from helpers.sessions import eventually, opened
from rekindle import Sampling, Session
from rekindle._src.core import words
from rekindle._src.core.records import Status
from rekindle._src.notebook import ChatView, bubbles
from rekindle._src.notebook.live import Live
from rekindle.errors import InvalidRequest, QueueFull


@pytest.fixture
def slow() -> Iterator[Session]:
    with opened(step_seconds=0.01) as made:
        yield made
    eventually(lambda: not any(thread.name == "rekindle view" for thread in threading.enumerate()))


def names(view: Live) -> list[str]:
    """The controls that it has now."""
    view.refresh()
    return [control["name"] for control in view.widget.controls]


@pytest.fixture
def view(slow: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatView]:
    def chat(messages: list[dict[str, str]], *, overflow: str, **options: object) -> object:
        return slow.generate("".join(message["content"] for message in messages), **options)

    monkeypatch.setattr(slow, "chat", chat)
    view = slow.view.chat(max_tokens=20)
    yield view
    view.stop()
    view.join(60)
    view.halt()


def test_it_goes_on(view: ChatView) -> None:
    view.send("hello")
    assert view.answering
    view.handle.result_sync()
    view.send("more")
    assert [message["role"] for message in view.messages] == ["user", "assistant", "user"]
    assert len(view.messages[1]["content"]) == 20
    eventually(lambda: "more" in view.picture)


def test_stopping_keeps_what_was_said(view: ChatView) -> None:
    view.send("hello")
    eventually(lambda: len(view.handle.token_ids) > 2)
    view.halt()
    view.send("more")
    assert 2 < len(view.messages[1]["content"]) < 20


def test_an_answer_that_was_cut_says_so_and_goes_on(view: ChatView, slow: Session) -> None:
    view.send("hello")
    view.handle.result_sync()
    eventually(lambda: "cut at 20 tokens" in view.picture)
    eventually(lambda: 'data-press="continue" data-at="1"' in view.picture)
    act(view, "continue", 1)
    view.handle.result_sync()
    assert view.answer == slow.generate_sync("hello", max_tokens=40).text
    eventually(lambda: "cut at 40 tokens" in view.picture)
    view.fork(30, "XY")
    view.handle.result_sync()
    assert view.answer.startswith(slow.generate_sync("hello", max_tokens=30).text + "XY")
    view.send("more")
    assert 'data-press="continue"' not in view.draw()
    view.halt()
    eventually(lambda: "stopped after" in view.picture)
    said = view.answer
    press(view, "continue")
    view.handle.result_sync()
    assert view.answer.startswith(said)
    assert len(view.answer_ids) > len(said)


def test_an_answer_that_repeats_itself_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(model=EchoModel(surprises=0.0)) as session:
        monkeypatch.setattr(
            session,
            "chat",
            lambda messages, overflow, **options: session.generate(messages[-1]["content"], **options),
        )
        view = session.view.chat(max_tokens=200)
        try:
            view.send("again and again and again and again and ")
            view.handle.result_sync()
            eventually(lambda: ">repeats itself: the same " in view.picture)
        finally:
            view.stop()
            view.join(60)


def test_nothing_goes_on_in_a_full_context(view: ChatView, slow: Session) -> None:
    most = slow.config.max_model_len
    view.options["max_tokens"] = most
    view.send("h" * (most - 10))
    view.handle.result_sync()
    eventually(lambda: f"the context of {most:,} tokens is full" in view.picture)
    assert "Edit takes the last message back" in view.picture
    assert not view.can_continue
    assert 'data-press="continue"' not in view.picture
    press(view, "edit")
    eventually(lambda: "context" not in view.picture)


def test_settings_begin_with_what_the_checkpoint_asks_for(
    view: ChatView, slow: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(slow), "chat_sampling", Sampling(temperature=0.6, top_p=0.9))
    other = slow.view.chat(top_p=0.8)
    try:
        assert other.widget.value("temperature") == "0.6"
        assert other.widget.value("top_p") == "0.8"
    finally:
        other.stop()
        other.join(60)


def test_the_name_under_which_it_is_kept_is_seen(view: ChatView) -> None:
    view._keeps = True
    view.send("hello")
    assert f"kept as &quot;{view.name}&quot;" in view.draw()
    assert {"draw", "press", "picture"}.isdisjoint(dir(view))
    assert {"send", "continue_answer", "fork", "messages", "name", "stop"} <= set(dir(view))


def test_answering_again_and_editing(view: ChatView) -> None:
    view.send("hello")
    first = view.handle
    view.again()
    eventually(lambda: first.status is Status.ABORTED)
    assert view.handle is not first
    view.edit()
    assert view.messages == []
    assert view.widget.value("say") == "hello"


def test_the_end_of_an_answer_is_drawn_at_once(view: ChatView, monkeypatch: pytest.MonkeyPatch) -> None:
    view.stop()
    view.join(60)
    waited: list[float] = []
    monkeypatch.setattr(view._changed, "wait", waited.append)
    for answer in (lambda: view.send("hello"), view.again):
        answer()
        view.handle.result_sync()
        view.wait()
        assert waited == [], "it ended between two pictures"
        view.wait()
        assert waited == [0.5]
        waited.clear()


def test_enter_sends_and_clears_the_line(view: ChatView) -> None:
    view.widget.fill("say", "hello")
    press(view, "say:enter")
    assert view.messages == [{"role": "user", "content": "hello"}]
    assert view.widget.value("say") == ""
    press(view, "halt")
    eventually(lambda: not view.answering)


def test_a_fork_keeps_the_beginning(view: ChatView) -> None:
    view.send("hello")
    before = view.handle.result_sync()
    view.fork(5, "XY")
    view.handle.result_sync()
    assert view.answer.startswith(before.text[:5] + "XY")
    assert len(view.answer_ids) == 20, "max_tokens counts the whole answer"
    said = view.answer
    view.send("more")
    assert view.messages[1]["content"] == said


def test_a_fork_goes_on_as_the_model_would(view: ChatView, slow: Session) -> None:
    view.send("hello")
    before = view.handle.result_sync()
    view.fork(5, "XY")
    forked = view.handle.result_sync()
    alone = slow.generate_sync("hello" + before.text[:5] + "XY", max_tokens=13)
    assert forked.token_ids == alone.token_ids


def test_a_fork_of_a_fork_keeps_both_beginnings(view: ChatView) -> None:
    view.send("hello")
    before = view.handle.result_sync().text
    view.fork(5, "XY")
    view.handle.result_sync()
    after = view.answer
    view.fork(10, "Z")
    view.handle.result_sync()
    assert view.answer.startswith(after[:10] + "Z")
    view.fork(3)
    view.handle.result_sync()
    assert view.answer[:3] == before[:3]
    assert len(view.answer) == 20


@pytest.mark.parametrize("at", [-1, 21])
def test_a_fork_outside_of_the_answer_is_refused(view: ChatView, at: int) -> None:
    view.send("hello")
    said = view.handle.result_sync().text
    with pytest.raises(InvalidRequest, match=rf"at={at}: .*20 tokens.* Use 0 to 20"):
        view.fork(at, "XY")
    assert view.answer == said


def test_a_click_marks_a_token_and_the_button_forks_there(view: ChatView) -> None:
    view.send("hello")
    before = view.handle.result_sync().text
    assert 'data-token="7"' in view.draw()
    mark(view, 7)
    assert "fork" in names(view)
    assert view.draw().count("aria-current") == 1
    view.widget.fill("instead", "Q")
    press(view, "fork")
    view.handle.result_sync()
    assert view.answer.startswith(before[:7] + "Q")
    assert all(control["name"] != "fork" for control in view.widget.controls)


def test_a_mark_can_be_taken_back(view: ChatView) -> None:
    view.send("hello")
    first = view.handle
    first.result_sync()
    mark(view, 7)
    press(view, "keep")
    press(view, "fork")  # its button is gone, but its message may be on the way
    mark(view, 700)
    assert view.handle is first
    assert view.marked is None


def test_one_button_sends_or_stops(view: ChatView) -> None:
    assert names(view)[-1] == "send"
    view.send("hello")
    assert names(view)[-1] == "halt" and "send" not in names(view)
    spots = {control["spot"] for control in view.widget.controls if control["name"] == "halt"}
    press(view, "halt")
    eventually(lambda: names(view)[-1] == "send")
    assert spots == {control["spot"] for control in view.widget.controls if control["name"] == "send"}


def test_edited_messages_and_earlier_answers_stay_as_versions(view: ChatView) -> None:
    view.send("hello")
    view.handle.result_sync()
    first = view.answer
    view.send("more")
    view.handle.result_sync()
    second = view.answer
    assert "‹" not in view.draw()
    act(view, "edit", 0)
    assert view.messages == [] and view.widget.value("say") == "hello"
    assert "1 earlier version of this message" in view.draw()
    view.send("you")
    view.handle.result_sync()
    assert "<span>2/2</span>" in view.draw()
    act(view, "earlier", 0)
    assert [message["content"] for message in view.whole()] == ["hello", first, "more", second]
    assert "<span>1/2</span>" in view.draw() and view.widget.value("say") == ""
    mark(view, 3)
    assert "fork" in names(view), "its tokens are still those of its request"
    act(view, "earlier", 0)
    assert view.messages[0]["content"] == "hello", "there is none before it"
    act(view, "later", 0)
    assert view.messages[0]["content"] == "you"
    view.again(temperature=1.0)
    eventually(lambda: len(view.answer_ids) > 2)
    assert "<span>2/2</span>" in view.draw().rpartition("data-said")[2]
    act(view, "earlier", 1)
    assert view.handle.done and len(view.answer_ids) == 20
    for wrong in (("earlier", 7), ("edit", 1), ("edit", -1), ("again", 0), ("again", 9), ("nothing", 0)):
        act(view, *wrong)
    assert len(view.messages) == 1 and len(view.answer_ids) == 20


def test_an_earlier_answer_is_made_again_and_what_followed_stays(view: ChatView) -> None:
    for text in ("hello", "more"):
        view.send(text)
        view.handle.result_sync()
    before = view.whole()
    act(view, "again", 1)
    assert len(view.messages) == 1
    eventually(lambda: view.answer != "")  # an answer without text is no version
    view.fork(0, "XY")
    view.handle.result_sync()
    act(view, "earlier", 1)  # the one that the fork has left
    act(view, "earlier", 1)
    assert view.whole() == before


def test_a_fork_keeps_the_answer_that_it_leaves(view: ChatView) -> None:
    view.send("hello")
    view.handle.result_sync()
    before = view.answer
    view.fork(5, "XY")
    view.handle.result_sync()
    forked = view.answer
    act(view, "earlier", 1)
    assert view.answer == before
    act(view, "later", 1)
    assert view.answer == forked and len(view.answer_ids) == 20


def test_a_marked_token_shows_what_could_stand_there(view: ChatView, slow: Session) -> None:
    view.send("hello")
    view.handle.result_sync()
    assert view.alternatives(7) == []
    mark(view, 7)
    eventually(lambda: 'data-row="use"' in view.picture)
    found = view.alternatives(7)
    assert len(found) >= 5 and found[0].probability > found[4].probability
    act(view, "use", 1)
    assert view.widget.value("instead") == found[1].text
    act(view, "use", 99)
    press(view, "keep")
    assert 'data-row="use"' not in view.draw()


def test_an_answer_with_logprobs_knows_what_could_stand_there(slow: Session, view: ChatView) -> None:
    view.options["logprobs"] = 3
    view.send("hello")
    view.handle.result_sync()
    mark(view, 7)
    chosen = slow.tokenizer.decode([view.answer_ids[7]])
    assert view._peek is None, "nothing is asked"
    assert [one.text for one in view.alternatives(7) if one.chosen] == [chosen]
    assert view.draw().count('data-row="use"') in (3, 4)


def test_a_marked_blank_is_seen() -> None:
    pieces = [("a", 1), (" ", 1), ("\n", 1)]
    assert ">␣</span>" in bubbles.answer(pieces, marked=1, complete=True)
    assert ">⏎\n</span>" in bubbles.answer(pieces, marked=2, complete=True)
    assert [bubbles.visible(text) for text in (" a b ", "\t", "")] == ["␣a b␣", "⇥", ""]


def test_picking_opens_the_tokens() -> None:
    pieces = [("**a** b", 2)]
    assert "<details data-fold" in bubbles.answer(pieces, marked=None, complete=True)
    assert 'data-fold="tokens" open' in bubbles.answer(pieces, marked=None, complete=True, picking=True)


def test_a_quiet_line_says_who_how_fast_and_why(view: ChatView) -> None:
    view.send("hello")
    view.handle.result_sync()
    view.refresh()
    quiet = view.picture.rpartition('class="rekindle-acts"')[2]
    assert re.search(r"fake · first token after [\d.]+ m?s, then [\d,]+ tokens/s · cut at 20 tokens", quiet)
    view.send("more")
    assert "tokens/s · cut at 20 tokens" in view.draw().partition("more")[0], "it stays below that answer"
    assert ">user<" not in view.picture and ">assistant<" not in view.picture


def test_presets_move_the_sliders(view: ChatView) -> None:
    press(view, "settings")
    assert {"preset:precise", "preset:lively", "preset:as opened"} <= set(names(view))
    press(view, "preset:lively")
    assert view.moved() == {"temperature": 1.1, "top_p": 0.98}
    on = [control["name"] for control in view.widget.controls if control.get("look") == "on"]
    assert on == ["preset:lively", "settings"]
    press(view, "preset:as opened")
    assert view.moved() == {}
    press(view, "preset:nothing")
    assert view.moved() == {}


def test_suggestions_are_sent_when_they_are_pressed(view: ChatView, slow: Session) -> None:
    assert [name for name in names(view) if "suggest" in name] == ["suggest:0", "suggest:1", "suggest:2"]
    press(view, "suggest:7")
    press(view, "suggest:x")
    assert view.messages == []
    press(view, "suggest:1")
    assert view.messages[0]["content"] == view.suggestions[1]
    assert not any("suggest" in name for name in names(view))
    with pytest.raises(InvalidRequest, match="must be a list of messages"):
        slow.view.chat(suggestions="hello")


def test_what_is_saved_has_no_buttons_and_no_scripts(view: ChatView) -> None:
    view.send("hello")
    view.handle.result_sync()
    made = view.draw()
    assert 'data-press="copy"' in made and 'role="log"' in made and 'aria-label="You"' in made
    for live in ("<button", "<script", "onclick", "tabindex"):
        assert live not in made


def test_errors_are_shown(view: ChatView, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise QueueFull("no place")

    monkeypatch.setattr(view.session, "chat", refuse)
    view.widget.fill("say", "hello")
    press(view, "send")
    assert "QueueFull: no place" in view.widget.note


def test_what_the_page_sends_is_not_trusted(view: ChatView) -> None:
    for content in (None, {}, {"event": 3}, {"event": "press", "name": "draw"}, {"event": "token", "value": "x"}):
        hear(view, content)
    view.send("<script>alert(1)</script>")
    view.handle.result_sync()
    assert "<script" not in view.draw()


def test_settings_are_for_the_next_answer(view: ChatView, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    chat = view.session.chat

    def spy(messages: list[dict[str, str]], **options: object) -> object:
        asked.append(options)
        return chat(messages, **options)

    monkeypatch.setattr(view.session, "chat", spy)
    view.send("hello")
    assert asked == [{"overflow": "drop", "max_tokens": 20}], "what was not moved is the caller's"
    press(view, "settings")
    shown = {control["name"]: control for control in view.widget.controls}
    assert shown["temperature"]["kind"] == shown["top_p"]["kind"] == shown["max_tokens"]["kind"] == "slider"
    assert view.widget.value("max_tokens") == "20"
    view.widget.values = {**view.widget.values, "temperature": "0.7", "max_tokens": "5", "system": "Be kind"}
    view.send("more")
    assert asked[1] == {"overflow": "drop", "max_tokens": 5, "temperature": 0.7}
    assert view.messages[0] == {"role": "system", "content": "Be kind"}
    view.widget.fill("system", "")
    view.again()
    assert [message["role"] for message in view.messages] == ["user", "assistant", "user"]
    press(view, "settings")
    assert "temperature" not in {control["name"] for control in view.widget.controls}


@pytest.mark.parametrize("value", ["x", "", "-3", "nan"])
def test_a_page_that_sends_nonsense_settings_gets_a_note(view: ChatView, value: str) -> None:
    view.widget.fill("temperature", value)
    view.widget.fill("say", "hello")
    press(view, "send")
    assert "InvalidRequest" in view.widget.note
    assert not view.answering
    assert view.messages == []
    assert view.widget.value("say") == "hello", "it can be sent again"


def test_messages_are_bubbles_and_the_models_markdown_is_rendered(view: ChatView) -> None:
    view.messages = [
        {"role": "system", "content": "Be **kind**"},
        {"role": "user", "content": "one\n  **two** <b>"},
        {"role": "assistant", "content": "**three** <img src=x onerror=alert(1)>"},
    ]
    made = view.draw()
    assert made.count("data-said=") == 3
    assert "one\n  **two** &lt;b&gt;" in made, "what was typed stays as it was typed"
    assert "<b>three</b> &lt;img" in made
    assert "Be **kind**" in made


def test_a_message_is_rendered_once(view: ChatView, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that streams draws ten pictures a second, each with all that was said before."""
    rendered: list[str] = []
    body = bubbles.body

    def counted(role: str, content: str, *rest: Any, **options: Any) -> Any:
        rendered.append(content)
        return body(role, content, *rest, **options)

    monkeypatch.setattr(bubbles, "body", counted)
    view.messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "*two*"}]
    assert view.draw() == view.draw() and rendered == ["one", "*two*"]
    view.messages.append({"role": "user", "content": "three"})
    assert "three" in view.draw() and rendered == ["one", "*two*", "three"]
    del view.messages[1]
    assert "two" not in view.draw() and rendered[3:] == ["three"], "the index of a message is in its picture"


def test_an_answer_with_markdown_folds_its_tokens() -> None:
    pieces = [("**a", 1), ("** b", 2)]
    running = bubbles.answer(pieces, marked=None, complete=False)
    assert "<b>" not in running
    assert 'data-token="1"' in running
    done = bubbles.answer(pieces, marked=None, complete=True)
    assert "<b>a</b> b" in done
    assert done.index("<details") < done.index('data-token="0"')
    assert "<details" not in bubbles.answer([("plain", 1)], marked=None, complete=True)


def test_reasoning_is_folded_and_calls_are_shown_as_calls() -> None:
    said = (
        "<think>They ask **why**</think>Let me *look*."
        '<tool_call>{"name": "weather", "arguments": {"city": "<Paris>"}}</tool_call>'
    )
    with saying(said) as session:
        view = session.view.chat(max_tokens=400, tools=[tool("weather", city="string")])
        try:
            view.send("What is the weather?")
            view.handle.result_sync()
            made = view.draw()
            for raw in ("&lt;tool_call", "&lt;think"):  # in the tokens that can be clicked, and nowhere else
                assert raw not in made.partition("tokens: click one")[0]
            assert 'data-token="0"' in made.partition("tokens: click one")[2]
            assert made.index("<details") < made.index("They ask **why**") < made.index("<i>look</i>")
            assert 'aria-label="Call of weather"' in made and "&lt;Paris&gt;</code>" in made
            completion = view.handle.so_far()
            assert completion.usage.reasoning_tokens == len("They ask **why**")
            assert f"reasoning, {words.seconds(completion.timings.reasoning)}, 16 tokens" in made
            view.send("And now?")
            made = view.draw()
            assert view.messages[1]["content"] == said, "the model reads what it wrote"
            assert 'aria-label="Call of weather"' in made.partition("And now?")[0]
            assert "16 tokens" in made.partition("And now?")[0]
            assert "&lt;tool_call" not in made.partition("And now?")[0]
            view.handle.result_sync()
            view.fork(3, "x")
            view.handle.result_sync()
            assert "data-token" in view.draw(), "a fork shows its text"
        finally:
            view.stop()
            view.join(60)


def test_what_begins_as_a_call_and_is_none_is_marked() -> None:
    said = 'Let me see.<tool_call>{"name": "weather", "arguments": {"city": <Paris>}}</tool_call>\n\nDone.'
    with saying(said) as session:
        view = session.view.chat(max_tokens=400, tools=[tool("weather", city="string")])
        try:
            view.send("What is the weather?")
            view.handle.result_sync()
            made = view.draw().partition("tokens: click one")[0]
            mark = made.index('aria-label="not read as a call"')
            assert made.index("Let me see.") < mark < made.index("&lt;tool_call&gt;") < made.index("Done.")
            assert "Call of" not in made and made.count("not read as a call") == 2
            reply = view.last_answer.reply
            assert reply.unread == (said[11 : said.index("\n\n")],) and reply.content == said
        finally:
            view.stop()
            view.join(60)


def test_messages_with_calls_show_them_with_their_results(view: ChatView) -> None:
    call = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": {"days": [1, "x"]}}}
    view.messages = [
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "I ask the *tool*.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1", "content": "sunny <b>"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    made = view.draw()
    card = made.index('aria-label="Call of weather"')
    assert made.index("reasoning, 4 words") < card < made.index("[1, &quot;x&quot;]") < made.index("sunny &lt;b&gt;")
    view.messages[2] = {**view.messages[2], "content": "rain"}
    assert (
        "rain" in view.draw().partition("It is sunny.")[0].partition("Call of weather")[2].partition("</div></div>")[0]
    )


def test_it_sleeps_while_nobody_speaks(view: ChatView) -> None:
    before, began = view.pictures, time.monotonic()
    time.sleep(1.0)
    assert view.pictures - before <= 2 + 2 * (time.monotonic() - began), "twice a second"


def test_reasoning_stays_reasoning_when_an_answer_goes_on() -> None:
    text = "<think>so it is</think>It is"
    with saying(lambda prompt: text[max(at for at in range(len(text)) if prompt.endswith(text[:at])) :]) as session:
        view = session.view.chat(max_tokens=text.index("it"))
        try:
            view.send("x")
            view.handle.result_sync()
            assert view.stopped == f"cut at {text.index('it')} tokens"
            view.continue_answer(max_tokens=100)
            view.handle.result_sync()
            reply = view.last_answer.reply
            assert reply is not None
            assert (reply.reasoning, reply.content, view.answer) == ("so it is", "It is", text)
            assert "&lt;think" not in view.draw().partition("tokens: click one")[0]
            view.fork(text.index("is"), "is")
            view.handle.result_sync()
            assert view.answer == text
        finally:
            view.stop()
            view.join(60)
