"""Live views without a browser: what their widgets hold, what remains of them, and what their buttons do."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import pytest

from helpers.fakes import EchoModel
from helpers.pressing import act, press
from helpers.sessions import CONFIG, eventually, front_of, opened
from rekindle import Session
from rekindle._src.core.records import Status
from rekindle._src.notebook import Dashboard, StreamView
from rekindle._src.notebook.dashboard import StepRecord, TimelinePicture
from rekindle._src.notebook.live import Live
from rekindle.errors import InvalidRequest, RequestAborted


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
    view.join(60)
    assert done._repr_html_() in view.picture
    bundle, _ = view._repr_mimebundle_()
    assert "text/html" in bundle
    assert not any("widget" in kind for kind in bundle), "a dead widget would be all that is left"


def test_a_stream_has_its_prompt_before_the_text_and_a_stop_that_acts(slow: Session) -> None:
    view = slow.view.stream("hello <b>", max_tokens=400)
    assert "waits for its first token" in view.draw() or "so far" in view.draw()
    eventually(lambda: len(view.handle.token_ids) > 3)
    picture = view.draw()
    assert picture.index("hello &lt;b&gt;") < picture.index('data-press="stop"') < picture.index('role="log"')
    assert picture.index('role="log"') < picture.index("tokens so far")
    for name in ("copy", "stop"):
        assert not view.handle.done
        act(view, name, 0)
    view.join(60)
    assert view.handle.status is Status.ABORTED
    assert view.picture.index("hello &lt;b&gt;") < view.picture.index("stopped after")
    assert "data-press" not in view.picture, "nothing is left that could be stopped"


def test_a_chat_refuses_wrong_options_at_once(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="Did you mean 'max_tokens'"):
        session.view.chat(max_token=4)


def test_the_stop_button_frees_the_slot(slow: Session) -> None:
    view = slow.view.stream("hello", max_tokens=400)
    assert any("widget" in kind for kind in view._repr_mimebundle_()[0])
    eventually(lambda: len(view.handle.token_ids) > 3)
    press(view, "stop")
    with pytest.raises(RequestAborted):
        view.handle.result_sync()
    view.join(60)
    assert view.handle.status is Status.ABORTED
    assert "RequestAborted" not in view.picture, "that reads like an error"
    assert f"stopped after {len(view.handle.token_ids)} tokens" in view.picture
    eventually(lambda: slow.stats().running == 0)


@pytest.mark.parametrize("shown", [False, True])
def test_a_view_that_nothing_shows_is_forgotten_when_it_ends(slow: Session, shown: bool) -> None:
    """ipywidgets keeps each widget until it is closed, and this one knows its view and all tokens of its request."""
    view = slow.view.stream("hello", max_tokens=400)
    if shown:
        view._repr_mimebundle_()
    view.stop()
    view.join(60)
    assert (view.widget.comm is None) is not shown
    assert "stopped" in view.widget.html and "stopped" in view._repr_mimebundle_()[0]["text/html"]


def test_pictures_are_coalesced() -> None:
    with opened(step_seconds=0.002) as session:
        view = session.view.stream("hello", max_tokens=300)
        done = view.handle.result_sync()
        view.join(60)
        assert len(view.handle.deltas) == 300
        assert view.pictures <= 4 + 10 * done.timings.total, "more than 10 a second"


def test_drawing_takes_a_fifth_of_the_time_however_much_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(Live):
        def draw(self) -> str:
            time.sleep(0.03)
            if self.pictures == 3:
                self.stop()
            return f"picture {self.pictures}"

    view, pauses = Large(), list[float]()
    monkeypatch.setattr(view, "interval", 0.0)
    monkeypatch.setattr(view._stopped, "wait", pauses.append)
    view.start()
    view.join(60)
    assert len(pauses) >= 2 and min(pauses) >= 4 * 0.03


def test_a_dashboard_sees_every_step_and_lets_go(session: Session) -> None:
    view = session.watch()
    assert isinstance(view, Dashboard)
    session.generate_sync(["hello", "you"], max_tokens=12)
    eventually(lambda: "<rect" in view.picture)
    rows = [row for seen in view.recorder.steps for row in seen.rows]
    assert {kind for _, _, kind in rows} == {"prefill", "decode"}
    assert sum(seen.sampled for seen in view.recorder.steps) >= 24
    view.stop()
    view.join(60)
    before = len(view.recorder.steps)
    session.generate_sync("hello", max_tokens=4)
    assert len(view.recorder.steps) == before
    assert "held" in view._repr_mimebundle_()[0]["text/html"]


def test_a_dashboard_shows_what_each_drafter_has_brought() -> None:
    config = dataclasses.replace(CONFIG, drafts="suffix")
    with opened(config, model=EchoModel(alphabet=tuple(range(97, 123)), surprises=0.0)) as session:
        before = session.watch().draw()
        session.generate_sync("again and again and ", max_tokens=40)
        counts = session.stats().drafters["suffix"]
        after = session.watch().draw()
    assert "suffix" not in before
    assert f"suffix: {counts.accepted} of {counts.drafted} accepted" in after


def test_a_dashboard_ends_with_its_session() -> None:
    with opened() as session:
        view = session.watch()
        session.generate_sync("hello", max_tokens=4)
    view.join(60)
    assert view.ended
    assert view.picture


def seen(step: int, *rows: tuple[int, str, str], moved: int = 0, at: float | None = None) -> StepRecord:
    return StepRecord(float(step) if at is None else at, step, rows, 1, 1, moved, 0.5, 1.0)


def test_the_timeline_joins_steps_of_one_request() -> None:
    timeline = TimelinePicture(2)
    assert "Nothing has run since this was opened" in timeline.draw()
    for step in (
        seen(0, (0, "a", "prefill")),
        seen(1, (0, "a", "decode"), (1, "<b>", "prefill")),
        seen(2, (0, "a", "decode"), moved=3),
        seen(3, (0, "c", "decode")),
    ):
        timeline.add(step)
    made = timeline.draw().partition("</svg>")[0]
    assert made.count('fill="#') == 5, "a's prefill, a's decode, b, c, and the mark of the moved pages"
    assert 'x="1.00000" y="8" width="2.00000"' in made, "two steps of a, of a second each"
    assert made.count("<title>") == made.count("transparent") == 4, "each step is explained"
    assert "step 1 at 2.00 s: 1 s, 500 ms on the device" in made
    assert "3 pages moved" in made
    assert "prefill: &lt;b&gt;" in made and "<b>" not in made


def test_the_timeline_forgets_what_has_left_the_picture() -> None:
    timeline = TimelinePicture(1, steps=60)
    for step in range(1000):
        timeline.add(seen(step, (0, f"r{step // 2}", "decode"), moved=step % 2))
    made = timeline.draw()
    assert made.partition("</svg>")[0].count('fill="#') == 60, "30 requests and 30 marks"
    assert "steps 940–999" in made and "960 s" in made, "seconds count from the first step"
    assert "r469" not in made and "decode: r470" in made
    left = float(made.partition('viewBox="')[2].split()[0])
    assert left < 600, "numbers stay small: a browser's are exact to seven digits"


def test_a_pause_without_steps_takes_little_room_and_is_told() -> None:
    timeline = TimelinePicture(1)
    timeline.add(seen(0, (0, "a", "decode"), at=0.0))
    timeline.add(seen(1, (0, "a", "decode"), at=3600.0))
    made = timeline.draw()
    assert 'viewBox="0.00000 0 10.00000 ' in made, "two seconds of work, and the first eight of the pause"
    assert "3.59e+03 s without a step" in made
    assert "the time axis is folded at the mark, where 3.59e+03 s had no step" in made


def test_a_crowd_of_requests_is_named_in_part() -> None:
    timeline = TimelinePicture(32)
    timeline.add(seen(0, *((slot, f"r{slot}", "decode") for slot in range(32))))
    assert "decode: r0, r1, r2, r3 and 28 more" in timeline.draw()


def test_the_dashboard_says_who_waits_and_why() -> None:
    with opened(dataclasses.replace(CONFIG, max_requests=1), step_seconds=0.01) as session:
        view = session.watch()
        handles = [session.submit("hello", max_tokens=1_000) for _ in range(9)]
        eventually(lambda: (stats := session.stats()).running == 1 and stats.waiting == 8)
        made = view.draw()
        for handle in handles[1:7]:
            assert handle.id in made
        assert "finds all slots taken (1)" in made and "and 2 more" in made
        for handle in handles:
            handle.cancel()
        eventually(lambda: session.stats().waiting == 0)
        assert "because it" not in view.draw()
        assert "memory" in view.draw() and "free" in view.draw()
        view.stop()
        view.join(60)


def test_the_dashboard_costs_little(session: Session) -> None:
    view = session.watch()
    handle = session.submit("hello", max_tokens=300)
    handle.result_sync()
    seconds = handle.completion().timings.total
    assert view.pictures <= 3 + 2 * seconds
    view.stop()
    view.join(60)


def test_a_chat_without_a_template_is_refused_before_somebody_types(session: Session) -> None:
    assert front_of(session).chat is None
    for make in (session.view.chat, session.conversation):
        with pytest.raises(InvalidRequest, match=r"model='fake': has no chat template.*generate\(prompt\).*template="):
            make()
    said = session.conversation(template="{{ messages[-1].content }}").say("hello", max_tokens=3).result_sync()
    assert said.prompt == "hello"


def test_the_dashboard_at_rest_says_what_was_done(session: Session) -> None:
    view = session.watch()
    assert "at rest · 0 requests finished · 0 tokens" in view.draw()
    session.generate_sync("hello", max_tokens=1)
    eventually(lambda: "at rest · 1 request finished · 1 token" in view.draw())
    assert "tokens/s" not in view.draw()
    assert 'title="A page has the keys' in view.draw()
    view.stop()
    view.join(60)


def test_the_tree_is_drawn_and_answers(tmp_path: object) -> None:
    import rekindle
    from helpers import checkpoints

    options = {"page_size": 8, "max_requests": 2, "max_tokens_per_step": 32, "max_model_len": 64, "dtype": "float32"}
    model = checkpoints.case("llama")
    with rekindle.open_sync(model, **options, precompile="lazy", cache_dir=str(tmp_path)) as session:
        base = list(range(10, 26))
        for tail in (3, 4):
            session.generate_sync([*base, *[tail] * 9], max_tokens=1)
        view = session.view.tree()
        made = view.picture
        assert made.count("<details") == made.count("</details>") == 1, "the table"
        assert made.count('data-token="') == 3
        assert "device" in made
        assert "widget" in " ".join(view._repr_mimebundle_()[0])
        for thing in (session.cache, session.cache.tree(), session.cache.stats()):
            assert "<table" in thing._repr_html_()
            assert "\n" not in repr(thing)
