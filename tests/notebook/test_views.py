"""Live views without a browser: what their widgets hold, what they leave behind, and what their buttons do."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rekindle import Session
from rekindle.errors import RequestAborted
from rekindle.notebook import ChatView, Dashboard, StreamView
from rekindle.notebook.dashboard import timeline
from rekindle.notebook.recorder import Seen
from rekindle.records import Status
from sessions import eventually, opened


@pytest.fixture
def session() -> Iterator[Session]:
    with opened() as made:
        yield made
    eventually(lambda: not any(thread.name == "rekindle view" for thread in threading.enumerate()))


@pytest.fixture
def slow() -> Iterator[Session]:
    with opened(step_seconds=0.01) as made:
        yield made
    eventually(lambda: not any(thread.name == "rekindle view" for thread in threading.enumerate()))


def test_a_stream_shows_the_text_and_then_the_completion(session: Session) -> None:
    view = session.view.stream("hello", max_tokens=30)
    assert isinstance(view, StreamView)
    done = view.handle.result_sync()
    view.join(10)
    assert done._repr_html_() in view._picture.value
    assert "text/html" in view._repr_mimebundle_()
    assert not any("widget" in kind for kind in view._repr_mimebundle_()), "a dead widget would be all that is left"


def test_the_stop_button_frees_the_slot(slow: Session) -> None:
    view = slow.view.stream("hello", max_tokens=400)
    assert any("widget" in kind for kind in view._repr_mimebundle_())
    eventually(lambda: len(view.handle.token_ids) > 3)
    view._stop_button.click()
    with pytest.raises(RequestAborted):
        view.handle.result_sync()
    view.join(10)
    assert view.handle.status is Status.ABORTED
    assert "RequestAborted" in view._picture.value
    eventually(lambda: slow.stats().running == 0)


def test_pictures_are_coalesced() -> None:
    with opened(step_seconds=0.002) as session:
        view = session.view.stream("hello", max_tokens=300)
        done = view.handle.result_sync()
        view.join(10)
        assert len(view.handle.deltas) == 300
        assert view.pictures <= 4 + 20 * done.timings.total, "more than 20 a second"


def test_a_dashboard_sees_every_step_and_lets_go(session: Session) -> None:
    view = session.watch()
    assert isinstance(view, Dashboard)
    session.generate_sync(["hello", "you"], max_tokens=12)
    eventually(lambda: "<rect" in view._picture.value)
    rows = [row for seen in view._recorder.steps for row in seen.rows]
    assert {kind for _, _, kind in rows} == {"prefill", "decode"}
    assert sum(seen.made for seen in view._recorder.steps) >= 24
    view.stop()
    view.join(10)
    before = len(view._recorder.steps)
    session.generate_sync("hello", max_tokens=4)
    assert len(view._recorder.steps) == before
    assert "held" in view._repr_mimebundle_()["text/html"]


def test_a_dashboard_ends_with_its_session() -> None:
    with opened() as session:
        view = session.watch()
        session.generate_sync("hello", max_tokens=4)
    view.join(10)
    assert view.ended
    assert view._picture.value


def test_the_timeline_joins_steps_of_one_request() -> None:
    def seen(step: int, *rows: tuple[int, str, str], moved: int = 0) -> Seen:
        return Seen(float(step), step, rows, 1, 1, moved, 0.0)

    steps = (
        seen(0, (0, "a", "prefill")),
        seen(1, (0, "a", "decode"), (1, "<b>", "prefill")),
        seen(2, (0, "a", "decode"), moved=3),
        seen(3, (0, "c", "decode")),
    )
    made = timeline(steps, 2)
    assert made.count("<rect") == 5, "a's prefill, a's decode, b, c, and the mark of the moved pages"
    assert "a decode, 2 steps" in made
    assert "3 pages moved" in made
    assert "<b>" not in made


def test_the_dashboard_costs_little(session: Session) -> None:
    view = session.watch()
    handle = session.submit("hello", max_tokens=300)
    handle.result_sync()
    seconds = handle.completion().timings.total
    assert view.pictures <= 3 + 5 * seconds
    view.stop()
    view.join(10)


class TestChat:
    @pytest.fixture
    def view(self, slow: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatView]:
        def chat(messages: list[dict[str, str]], **options: object) -> object:
            return slow.generate("".join(message["content"] for message in messages), **options)

        monkeypatch.setattr(slow, "chat", chat)
        view = slow.view.chat(max_tokens=20)
        yield view
        view.stop()
        view.join(10)
        view.halt()

    def test_it_goes_on(self, view: ChatView) -> None:
        view.send("hello")
        assert view.answering
        view._handle.result_sync()
        view.send("more")
        assert [message["role"] for message in view.messages] == ["user", "assistant", "user"]
        assert len(view.messages[1]["content"]) == 20
        eventually(lambda: "more" in view._picture.value)

    def test_stopping_keeps_what_was_said(self, view: ChatView) -> None:
        view.send("hello")
        eventually(lambda: len(view._handle.token_ids) > 2)
        view.halt()
        view.send("more")
        assert 2 < len(view.messages[1]["content"]) < 20

    def test_answering_again_and_editing(self, view: ChatView) -> None:
        view.send("hello")
        first = view._handle
        view.again()
        eventually(lambda: first.status is Status.ABORTED)
        assert view._handle is not first
        view.edit()
        assert view.messages == []
        assert view._input.value == "hello"

    def test_a_fork_keeps_the_beginning(self, view: ChatView) -> None:
        view.send("hello")
        before = view._handle.result_sync()
        view.fork(5, "XY")
        view._handle.result_sync()
        view.send("more")
        said = view.messages[1]["content"]
        assert said.startswith(before.text[:5] + "XY")


def test_the_tree_folds_and_answers(tmp_path: object) -> None:
    import checkpoints
    import rekindle

    options = {"page_size": 8, "max_requests": 2, "max_tokens_per_step": 32, "max_model_len": 64, "dtype": "float32"}
    model = checkpoints.case("llama")
    with rekindle.open_sync(model, **options, precompile="lazy", cache_dir=str(tmp_path)) as session:
        base = list(range(10, 26))
        for tail in (3, 4):
            session.generate_sync([*base, *[tail] * 9], max_tokens=1)
        view = session.cache.view()
        made = view._picture.value
        assert made.count("<details") == made.count("</details>") == 1
        assert made.count("<code") == 3
        assert "device" in made
        assert "widget" in " ".join(view._repr_mimebundle_())
        for thing in (session.cache, session.cache.tree(), session.cache.stats()):
            assert "<table" in thing._repr_html_()
            assert "\n" not in repr(thing)
