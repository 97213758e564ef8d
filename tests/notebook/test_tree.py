"""The prefix cache as an icicle: what a bar's place and size say, what pressing it does, and how much is drawn."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from helpers.bounds import Within
from helpers.pressing import mark, press
from helpers.sessions import CONFIG, engine_of, opened
from rekindle import NodeView, Session
from rekindle._src.core.prefix import Prefix
from rekindle._src.views.icicle import ago, icicle, rows, strength, text_lines
from rekindle.errors import InvalidRequest

SIZE = CONFIG.page_size
SHARED, LEFT, RIGHT = "a" * 2 * SIZE, "b" * 2 * SIZE, "c" * SIZE


@pytest.fixture
def session() -> Iterator[Session]:
    with opened() as made:
        for prompt in (SHARED + LEFT, SHARED + RIGHT, SHARED + LEFT):
            made.generate_sync(prompt + "x", max_tokens=1)
        yield made


def bar(view: Any, text: str) -> int:
    return next(index for index, node in enumerate(view.nodes) if node.text.startswith(text))


def node(text: str = "x", *, depth: int = 0, start: int = 0, tokens: int = 8, **more: Any) -> NodeView:
    facts = {"pages": 1, "tier": "device", "visits": 0, "age": 1.0, "pinned": False, **more}
    return NodeView(depth=depth, text=text, start=start, tokens=tokens, **facts)


def places(picture: str) -> list[list[float]]:
    """x, y, width and height of the bars."""
    found = re.findall(r'<rect [^>]*rx="2"[^>]*>', picture)
    return [
        [float(re.search(rf' {name}="([\d.]+)"', one)[1]) for name in ("x", "y", "width", "height")] for one in found
    ]  # type: ignore[index]


def test_a_bar_is_as_wide_as_its_tokens_and_as_tall_as_all_that_share_it() -> None:
    nodes = [
        node("both", tokens=30),
        node("first", depth=1, start=30, tokens=10),
        node("second", depth=1, start=30, tokens=20),
        node("alone", tokens=50),
    ]
    both, first, second, alone = places(icicle(nodes))
    assert both[2] == pytest.approx(3 * first[2], abs=3) and alone[2] == pytest.approx(620, abs=2)
    assert first[0] == second[0] == pytest.approx(both[0] + both[2], abs=2)
    assert both[3] == pytest.approx(2 * first[3], abs=2)
    assert both[1] == first[1] < second[1] < alone[1]


def test_tier_age_hits_and_pins_are_seen() -> None:
    nodes = [
        node("new", visits=3, pinned=True, tokens=60),
        node("old", age=4000.0, tier="host", tokens=60),
        node("lost", tier="gone", tokens=60),
    ]
    made = icicle(nodes)
    assert (
        "pinned, 3 hits" in made
        and "paler: not used" in made
        and "dashed: its payload is gone" in made
        and "stroke-dasharray" in made
    )
    assert "not hit yet, 67 min ago" in made
    assert [strength(age) for age in (1, 100, 1000, 1e6)] == sorted([1.0, 0.7, 0.45, 0.25], reverse=True)
    assert [ago(age) for age in (4.2, 120.0, 7200.0)] == ["4 s", "2 min", "2 h"]
    assert "token 0" in made
    assert icicle([]) == rows([]) == ""
    alone = icicle([node("new", tokens=60)])
    assert "paler" not in alone and ">■</span> host" not in alone, "the legend has what is there"


def test_a_tall_bar_has_more_of_its_text() -> None:
    """Lines end at spaces, and how often it was hit has its place at the end of the last one."""
    story = "Once upon a time there was a small green dragon called Zoe. " * 3
    below = [node(f"after {at}", depth=1, start=30, tokens=60) for at in range(4)]
    lines = re.findall(r"<text[^>]*pointer-events[^>]*>([^<]*)", icicle([node(story, tokens=30, visits=2), *below]))
    own = [line for line in lines if not line.startswith("after")]
    assert own[-1] == "2 hits" and len(own) == 7
    assert story.startswith(" ".join(own[:-2])) and own[-2].endswith("…")
    assert max(map(len, own)) * 6.5 < 620 / 3
    assert "Onceupon" in icicle([node("Onceupon" * 20, tokens=30), *below]), "a text without spaces"


@pytest.mark.parametrize("room", [5, 6, 9, 14, 30])
def test_lines_of_a_bar_do_not_break_words(room: int) -> None:
    story = "Once upon a time there was an extraordinary dragon"
    words = story.split()
    for lines in (1, 2, 4, 12):
        pieces = text_lines(story, room, lines, room)
        assert len(pieces) <= lines and all(0 < len(piece) <= room for piece in pieces)
        shown = [word for piece in pieces for word in piece.split()]
        for word, whole in zip(shown, words, strict=False):
            assert word in (whole, f"{whole}…") or (len(whole) > room and word == f"{whole[: room - 1]}…"), pieces
    assert " ".join(text_lines(story, 14, 12, 14)) == story
    assert text_lines("あ" * 60, 14, 3, 14) == ["あ" * 14, "あ" * 14, "あ" * 13 + "…"], (
        "a text without spaces ends anywhere"
    )


def test_a_strangers_text_is_text() -> None:
    evil = '"><script>alert(1)</script>\u202e\n'
    made = icicle([node(evil, tokens=90)], pressed=True) + rows([node(evil)])
    assert "<script" not in made and "\u202e" not in made
    assert "&lt;script&gt;" in made


def test_pressing_a_bar_shows_its_text_and_what_can_be_done(session: Session) -> None:
    view = session.view.tree()
    assert view.picture.count('data-token="') == 3
    mark(view, bar(view, "bb"))
    assert LEFT in view.picture
    assert {"pin", "drop", "back"} <= {control["name"] for control in view.widget.controls}
    press(view, "pin")
    assert "32 tokens stay on the device" in view.widget.note
    assert all(node.pinned for node in session.cache.tree().nodes if node.text[0] in "ab")
    assert "unpin" in {control["name"] for control in view.widget.controls}
    assert next(control for control in view.widget.controls if control["name"] == "drop")["disabled"]
    press(view, "unpin")
    assert not any(node.pinned for node in session.cache.tree().nodes)
    press(view, "drop")
    assert "2 pages left the device" in view.widget.note
    assert [node.text[0] for node in session.cache.tree().nodes] == ["a", "c"]
    assert "pin" not in {control["name"] for control in view.widget.controls}
    session.check_integrity()
    for value in (99, -1, "0", None):
        mark(view, value)
    press(view, "drop")
    assert len(session.cache.tree().nodes) == 2, "nothing is marked"


def test_the_tree_says_how_much_was_saved_and_how_to_fill_an_empty_cache(session: Session) -> None:
    view = session.view.tree()
    saved = session.cache.stats().saved_tokens
    assert saved > 2 * SIZE and "prompt tokens found here, not computed again" in view.picture
    assert f">{saved}</div>" in view.picture
    assert "what begins alike shares a bar" in view.picture
    with opened() as fresh:
        fresh.generate_sync(SHARED + "x", max_tokens=1)
        assert "no prompt has found a whole page here yet" in fresh.view.tree().picture
    session.cache.clear().result_sync()
    press(view, "refresh")
    assert f"Nothing is cached now. What requests compute stays here, in whole pages of {SIZE} tokens" in view.picture
    assert "shares a bar" not in view.picture


def test_the_cache_begins_with_what_it_keeps_and_what_was_found(session: Session) -> None:
    """Its figures come before its picture, and its table, whose rows may all be 0, is folded."""
    stats = session.cache.stats()
    shown, alone = session.cache._repr_html_(), stats._repr_html_()
    for one in (shown, alone):
        assert one.index("tokens on the device") < one.index("not computed again") < one.index("<details")
        assert f">{stats.hits} of {stats.lookups}</div>" in one and "<table" not in one[: one.index("<details")]
        assert "in host memory" not in one[: one.index("<details")], "nothing is there"
    assert shown.index("shares a bar") < shown.index("<svg") < shown.index("bytes and hits by tier")
    session.cache.clear().result_sync()
    assert "Nothing is cached now." in session.cache._repr_html_() and "<svg" not in session.cache._repr_html_()


def test_what_a_typed_prompt_would_hit_is_marked(session: Session) -> None:
    view = session.view.tree()
    assert "the typed prompt" not in view.picture
    half = SHARED + LEFT[:SIZE]
    press(view, "prompt:enter")
    view.widget.values = {"prompt": half + "x"}
    assert f"the typed prompt hits {2 * SIZE} tokens here" in view.picture
    assert f"the typed prompt hits {SIZE} tokens here" in view.picture, "a part of the next bar"
    assert view.picture.count("the typed prompt hits") == 2 and f"{3 * SIZE} of " in view.widget.note
    assert view.hits() == {bar(view, "aa"): 2 * SIZE, bar(view, "bb"): SIZE}
    view.widget.values = {"prompt": "zzz"}
    assert "the typed prompt" not in view.picture
    hit = session.cache.explain(half + "x")
    assert len(hit.keys) == 3 and hit.keys[0] == session.cache.tree().nodes[bar(view, "aa")].first_key


def test_a_bar_that_has_left_the_cache_says_so(session: Session) -> None:
    view = session.view.tree()
    session.cache.clear().result_sync()
    mark(view, 0)
    assert "is no longer in the cache" in view.widget.note
    press(view, "refresh")
    assert "Nothing is cached now." in view.picture


def test_a_node_is_read_pinned_and_dropped_by_code(session: Session) -> None:
    cache = session.cache
    shared, left, right = cache.tree().nodes
    assert (cache.text(shared), cache.text(left), cache.text(right, limit=3)) == (SHARED, LEFT, "ccc")
    assert (shared.below, left.below, shared.left_out) == (3, 0, 0)
    assert cache.pin(right) == 3 * SIZE
    assert cache.drop(shared) == 2, "what is pinned stays, with all before it"
    assert [node.text[0] for node in cache.tree().nodes] == ["a", "c"]
    assert cache.unpin(right) == 3 * SIZE
    assert cache.drop(cache.tree().nodes[0]) == 3
    assert cache.tree().nodes == ()
    with pytest.raises(InvalidRequest, match="is no longer in the cache"):
        cache.text(shared)
    session.check_integrity()


def test_pages_in_use_stay(session: Session) -> None:
    with opened(step_seconds=0.01) as slow:
        handle = slow.submit(SHARED + LEFT, max_tokens=60)
        while not slow.cache.tree().nodes:
            time.sleep(0.01)
        slow.cache.drop(slow.cache.tree().nodes[0])
        assert len(handle.result_sync().token_ids) == 60
        slow.check_integrity()


def test_a_salts_node_is_not_pinned_by_its_text_alone(session: Session) -> None:
    session.generate_sync("d" * 2 * SIZE + "x", max_tokens=1, salt="tenant")
    theirs = next(node for node in session.cache.tree().nodes if node.text.startswith("d"))
    assert session.cache.text(theirs) == "d" * 2 * SIZE
    with pytest.raises(InvalidRequest, match="belongs to requests with a salt or an adapter"):
        session.cache.pin(theirs)
    assert session.cache.drop(theirs) == 2


def grown(session: Session, texts: int, pages: int) -> None:
    cache: Any = engine_of(session).scheduler.cache
    random = np.random.default_rng(0)
    for index in range(texts):
        shared = np.full(SIZE, index % 10, np.int32)
        known = cache.find(Prefix(shared))
        after = known[-1] if known else cache.root
        tokens = random.integers(97, 122, (pages - bool(known)) * SIZE).astype(np.int32)
        cache.graft(tokens if known else np.concatenate([shared, tokens[SIZE:]]), after=after)


def test_ten_thousand_pages_are_drawn_in_parts_and_counted(session: Session, within: Within) -> None:
    grown(session, 1000, 10)
    tree = session.cache.tree(restored=True)
    assert len(tree.nodes) == 200
    assert 0 <= tree.total_pages - tree.shown_pages - sum(_left_out(tree.nodes)) <= 5 and tree.total_pages > 9000
    assert len({node.text[0] for node in tree.nodes if not node.depth}) >= 10, "each beginning has some of the bars"
    assert "more pages" in str(tree)
    made = icicle(tree.nodes)
    assert len(made) < 200_000
    assert "more pages in branches after this one" in made
    with within(2):  # half of it when quiet; the session's loop waits meanwhile
        for _ in range(4):
            session.cache.tree(restored=True)


def _left_out(nodes: Sequence[NodeView]) -> list[int]:
    return [node.left_out for node in nodes]
