"""Pictures in a chat view, without a browser: they are attached, sent, shown, kept and refused in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import seeing, sessions
from helpers.pressing import hear, press
from helpers.sessions import CONFIG, eventually
from rekindle import Session
from rekindle._src.images import decode_uri
from rekindle._src.notebook import ChatView, attachments
from rekindle._src.notebook.transcripts import Transcripts
from rekindle._src.text.chat import ChatTemplate
from rekindle.errors import InvalidRequest, StoreError

pytest.importorskip("PIL.Image")
ONE, TWO = (seeing.uri(seeing.noise(seed, 96, 64)) for seed in (1, 2))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with seeing.opened(replace(CONFIG, cache_dir=str(tmp_path))) as opened:
        yield opened


@pytest.fixture
def view(session: Session) -> Iterator[ChatView]:
    yield from shown(session)


def shown(session: Session, **options: Any) -> Iterator[ChatView]:
    view = session.view.chat(max_tokens=4, **options)
    try:
        yield view
    finally:
        view.stop()
        view.join(60)
        view.halt()


def drop(view: ChatView, *uris: Any, size: int = 100) -> None:
    """Drop files, as the page does."""
    for at, uri in enumerate(uris):
        value = {"at": at, "size": size, "uri": uri}
        hear(view, {"event": "file", "name": "", "value": value})


def names(view: ChatView) -> set[str]:
    return {control["name"] for control in view.widget.controls}


def test_a_picture_is_attached_sent_and_shown(view: ChatView, session: Session) -> None:
    assert "attach" in names(view) and "detach" not in names(view)
    assert view.widget.files == attachments.MOST_FILE
    drop(view, ONE, TWO)
    assert view.widget.note == "" and "detach" in names(view)
    assert view.picture.count("<img") == 2 and "for the next message" in view.picture
    press(view, "detach")
    assert view.picture.count("<img") == 0 and "detach" not in names(view)
    drop(view, ONE)
    view.attach(seeing.noise(2, 96, 64))
    view.widget.fill("say", "Which is it?")
    press(view, "say:enter")
    (message,) = view.messages
    first, second, text = message["content"]
    assert first == {"type": "image", "image": ONE} and text == {"type": "text", "text": "Which is it?"}
    assert decode_uri(second["image"]).decode() == decode_uri(TWO).decode(), "an array is a PNG here"
    done: Any = view.handle
    assert [(one.width, one.height) for one in done.result_sync().images] == [(96, 64)] * 2
    assert session.explain(done).notes[0].tokens == 12
    assert view.picture.count("<img") == 2 and "for the next message" not in view.picture
    view.send("And why?")
    done = view.handle
    assert len(done.result_sync().images) == 2 and view.messages[-1]["content"] == "And why?"
    press(view, "edit")
    assert view.widget.value("say") == "And why?" and "for the next message" not in view.picture
    press(view, "edit")
    assert view.widget.value("say") == "Which is it?" and view.messages == []
    assert "for the next message" in view.picture and view.picture.count("<img") == 2


def test_attached_pictures_stay_when_a_message_is_edited(view: ChatView) -> None:
    drop(view, ONE)
    view.send("What?")
    drop(view, TWO)
    view.edit()
    assert [one.uri for one in view.attachments.entries] == [ONE, TWO]
    view.switch(0)
    assert [one.uri for one in view.attachments.entries] == [TWO] and view.widget.value("say") == ""


def test_a_picture_alone_is_a_message(view: ChatView) -> None:
    view.send("")
    assert view.messages == []
    drop(view, ONE)
    press(view, "send")
    assert view.messages[0]["content"] == [{"type": "image", "image": ONE}]


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("", "sends at most 6,291,456 bytes"),
        (None, "sends at most"),
        ("data:image/svg+xml;base64,PHN2Zz48L3N2Zz4=", "picture="),
        ("data:text/plain;base64,aGVsbG8=", "is no image"),
        ("data:image/png;base64,####", "is not valid base64"),
        ("PATH", "is no image in base64"),
    ],
)
def test_what_is_no_picture_is_refused_in_words(view: ChatView, tmp_path: Path, uri: Any, problem: str) -> None:
    path = tmp_path / "plot.png"
    path.write_bytes(seeing.png(seeing.noise(1, 8, 8)))
    drop(view, str(path) if uri == "PATH" else uri, ONE, size=7 << 20)
    assert "InvalidRequest" in view.widget.note and problem in view.widget.note
    assert view.picture.count("<img") == 1, "the other one is attached"
    drop(view, TWO)
    assert view.widget.note == "" and view.picture.count("<img") == 2


def test_too_large_pictures_are_refused_before_they_are_decoded(
    view: ChatView, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(view, ONE)
    view.send("one")
    monkeypatch.setattr(attachments, "MOST_OF_CHAT", len(ONE) + len(TWO) - 1)
    drop(view, TWO)
    assert "Begin another" in view.widget.note and "for the next message" not in view.picture
    monkeypatch.setattr(attachments, "MOST_FILE", 1000)
    monkeypatch.setattr(attachments.Thumbnail, "of", lambda *_: pytest.fail("it is decoded"))
    drop(view, TWO)
    assert "at most 1,000" in view.widget.note


def test_what_the_model_refuses_stays_attached(view: ChatView) -> None:
    view.attach(seeing.noise(1, 2000, 2))
    view.widget.fill("say", "What?")
    press(view, "send")
    assert "200 times" in view.widget.note
    assert view.messages == [] and view.widget.value("say") == "What?"
    assert "for the next message" in view.draw()


def test_only_the_latest_pictures_have_thumbnails(view: ChatView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "MOST_SHOWN", 3)
    for text in ("a", "b", "c"):
        drop(view, ONE, TWO)
        view.send(text)
    assert view.picture.count("<img") == 2 and view.picture.count("2 pictures") == 2


def test_a_model_that_reads_text_alone_says_so() -> None:
    front = sessions.fake_front()._replace(chat=ChatTemplate(seeing.TEMPLATE))
    with sessions.checked(lambda: sessions.session_of(front)) as session:
        for view in shown(session):
            assert "attach" not in names(view) and view.widget.files == 0
            drop(view, "")
            assert "InvalidRequest" in view.widget.note and "fake reads text alone" in view.widget.note
            with pytest.raises(InvalidRequest, match="reads text alone"):
                view.attach(seeing.noise(1, 8, 8))


def test_pictures_are_kept_with_a_conversation(view: ChatView, session: Session, tmp_path: Path) -> None:
    drop(view, ONE)
    view.send("What?")
    handle: Any = view.handle
    handle.result_sync()
    view.keep()
    for other in shown(session, restore=view.name):
        assert other.messages[0] == view.messages[0] and other.picture.count("<img") == 1
        other.send("And why?")
        again: Any = other.handle
        assert len(again.result_sync().images) == 1


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "/etc/passwd"},
        {"type": "image", "image": ONE, "text": "a"},
        {"type": "text", "text": 1},
        {"type": "image"},
        "text",
    ],
)
def test_a_kept_conversation_names_no_file(tmp_path: Path, part: Any) -> None:
    kept = Transcripts(tmp_path)
    assert kept.save("one", "fake", [{"role": "user", "content": [part]}])
    with pytest.raises(StoreError, match="no content"):
        kept.load("one")


def test_the_view_ends_whole(session: Session) -> None:
    for view in shown(session):
        drop(view, ONE)
    eventually(lambda: view.ended)
