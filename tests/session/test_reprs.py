"""Public objects in a notebook: one line of text, and HTML that is static, escaped and complete."""

from __future__ import annotations

import inspect
import pickle
import re
from types import SimpleNamespace

import pytest

from helpers.sessions import fake_session
from rekindle import Session
from rekindle._src.core.figures import FIGURES, EngineFigures
from rekindle._src.replicas.fleet_stats import FleetStats
from rekindle._src.session.stats import GROUPS

EVIL = "<script>alert('x')</script>"


def shown(thing: object) -> str:
    """Its HTML, after what has to hold for every object."""
    text = repr(thing)
    assert "\n" not in text
    assert len(text) < 200, text
    made = thing._repr_html_()  # type: ignore[attr-defined]
    assert "<script" not in made
    assert made.count("<div") == made.count("</div>")
    assert made.count("<table") == made.count("</table>")
    return made


def test_completions_shade_their_tokens_and_show_alternatives(session: Session) -> None:
    done = session.generate_sync("hello", max_tokens=6, logprobs=3)
    made = shown(done)
    assert made.count("<span title=") == 6
    assert "".join(done.token_texts) == done.text
    alternative = done.text_of(done.logprobs[0].top_ids[1])
    assert f"{alternative!r} 13.5%" in made.replace("&#x27;", "'").replace("&quot;", '"').replace("&amp;", "&")
    assert "cut at max_tokens" in repr(done)


def test_prompts_are_shaded_when_they_were_scored(session: Session) -> None:
    made = shown(session.generate_sync("hello", max_tokens=2, prompt_logprobs=1))
    assert made.count("<span title=") == 4, "the first token has no probability"


def test_completions_without_logprobs_show_their_text(session: Session) -> None:
    done = session.generate_sync(EVIL, max_tokens=6)
    assert "<span" not in shown(done)
    assert len(done.token_texts) == 6


def test_completions_travel_without_the_tokenizer(session: Session) -> None:
    done = session.generate_sync("hello", max_tokens=6, logprobs=1)
    again = pickle.loads(pickle.dumps(done))
    assert again == done
    assert again.token_texts[0] == f"[{done.token_ids[0]}]"
    shown(again)


def test_handles_and_batches_at_every_stage(session: Session) -> None:
    with session.paused():
        call = session.generate(EVIL, max_tokens=4)
        assert "not submitted" in shown(call)
        handle = session.submit(EVIL, max_tokens=4)
        session.step_sync()
        assert "decode" in shown(handle)
        batch = session.generate(["a", EVIL], max_tokens=4)
        assert "0 of 2" in repr(batch)
        shown(batch)
    done = handle.result_sync()
    assert done._repr_html_() in shown(handle)
    assert batch.result_sync()
    assert "2 of 2" in repr(batch)
    cancelled = session.submit("a", max_tokens=400)
    cancelled.cancel()
    with pytest.raises(Exception, match="cancelled"):
        cancelled.result_sync()
    assert "stopped after 0 tokens" in shown(cancelled)
    assert shown(session.generate_sync(["x"], max_tokens=2, n=2)[0][1])


def test_step_reports(session: Session) -> None:
    with session.paused():
        handle = session.submit("hello", max_tokens=2)
        report = session.step_sync()
        assert handle.id in shown(report)
        assert "0–4" in shown(report)
    handle.result_sync()


def test_the_session_its_figures_and_its_explanations(session: Session) -> None:
    done = session.generate_sync("hello", max_tokens=2)
    stats = session.stats()
    assert "pages total" in shown(stats)
    known = {name for group in GROUPS.values() for name in group}
    nested = {*stats.as_dict()["cache"].__dataclass_fields__} if stats.as_dict()["cache"] else set()
    assert {*stats.as_dict(), *nested} - {"model", "programs", "cache"} <= known, "a figure that nobody explains"
    assert "fake" in shown(session)
    assert "came from the cache" in shown(session.explain(done)) or "cached" in shown(session.explain(done))
    assert "0 of 0 programs" in shown(session.programs())


def test_a_figure_is_declared_once(session: Session) -> None:
    """Its property has the words, the name and the metrics; a session and a fleet have the same ones."""
    stats = session.stats()
    for name, entry in FIGURES.items():
        assert entry.words.endswith(".") and entry.words == " ".join(
            (inspect.getdoc(getattr(type(stats), name)) or "").split()
        )
    shared = {name for name, member in vars(EngineFigures).items() if isinstance(member, property)}
    assert shared <= set(FIGURES) and all(isinstance(getattr(FleetStats, name), property) for name in shared)


def test_a_session_that_did_nothing_says_how_to_begin() -> None:
    with fake_session() as fresh:
        first = shown(fresh).partition("<details")[0]
        assert "nothing has run yet" in first and "await session.generate(" in first and "data-tile" not in first
        assert ("session.view.chat()" in first) == (fresh.chat_template is not None)
        fresh.generate_sync("hello", max_tokens=2)
        first = shown(fresh).partition("<details")[0]
        assert "nothing has run yet" not in first and "data-tile" in first


def test_views_are_listed_as_they_are_called(session: Session) -> None:
    listed = shown(session.view)
    for call in ("session.watch()", "session.view.chat()", "await session.view.lens(prompt)"):
        assert f"<code>{call}</code>" in listed
    assert "Await it" not in listed


def test_a_few_figures_come_first_and_the_others_are_folded(session: Session) -> None:
    session.generate_sync(["hello"] * 3, max_tokens=2)
    for thing in (session.stats(), session):
        first, folded = shown(thing).split("<details", 1)
        assert 2 <= first.count("data-tile") <= 6
        for words in ("requests finished", "tokens generated"):
            assert words in first, words
        for words in ("running", "waiting", "were cached"):
            assert words not in first, "a zero says nothing"
    for _ in range(2):
        session.generate_sync("hello" * 8, max_tokens=2)
    assert re.search(r">\d+%<.*?>of 95 prompt tokens were cached<", shown(session))
    assert "from the cache" not in first, "a zero says nothing"
    assert re.search(r"from the cache [1-9].*prompts, computed \d+.*generated \d+", shown(session))
    assert "programs compiled" in shown(session)
    with session.paused():
        handle = session.submit("hello", max_tokens=2)
        session.step_sync()
        assert ">request running<" in shown(session.stats()).partition("<details")[0]
    handle.result_sync()
    for thing in (session.stats(), session):
        first, folded = shown(thing).split("<details", 1)
        assert "pages total" in folded
        assert folded.count("</details>") == (2 if thing is session else 1)


def test_what_is_paused_or_stalled_is_not_folded(session: Session) -> None:
    with session.paused():
        assert ">paused<" in shown(session.stats()).split("<details")[0]


def test_one_is_singular(session: Session) -> None:
    with session.paused():
        handle = session.submit("hello", max_tokens=2)
        session.step_sync()
        assert repr(session.stats()).endswith("1 running, 0 waiting, 1 step>")
    handle.result_sync()
    view = session.watch()
    for made, words in ((0, "0 compilations"), (1, "1 compilation<"), (2, "2 compilations")):
        figures = {"model": "fake", "compilations": made}
        view._session = SimpleNamespace(
            stats=lambda f=figures: SimpleNamespace(as_dict=lambda: f), cache=session.cache, closed=False
        )  # type: ignore[assignment]
        assert words in view.draw()
    view._session = session
    view.stop()
    view.join(60)


def test_a_closed_session() -> None:
    with fake_session() as session:
        pass
    assert "closed" in shown(session)
