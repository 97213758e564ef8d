"""Whole turns leave a prompt, the oldest first, and the cut stays in the same place for many turns."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle._src.capabilities.overflow.turns import (
    characters_of,
    cuts_of,
    search,
    size_of,
    turns_of,
    unpinned,
    without_turns,
)
from rekindle.errors import InvalidRequest

ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.lists(
    st.builds(
        lambda role, length, pinned: {"role": role, "content": "x" * length, **({"pinned": True} if pinned else {})},
        ROLES, st.integers(0, 60), st.sampled_from([False, False, False, True]),
    ),
    max_size=24,
)  # fmt: skip


def chat(turns: int, length: int = 100) -> list[dict[str, Any]]:
    said = [{"role": role, "content": "y" * length} for _ in range(turns) for role in ("user", "assistant")]
    return [{"role": "system", "content": "s" * 50}, *said, {"role": "user", "content": "and now?"}]


def test_a_call_and_its_result_are_in_one_turn() -> None:
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "developer", "user"]
    messages = [{"role": role, "content": str(at)} for at, role in enumerate(roles)]
    assert turns_of(messages) == [range(1, 5), range(5, 8), range(8, 9)]
    assert [one["content"] for one in without_turns(messages, 1)] == ["0", "5", "6", "7", "8"]
    assert [one["content"] for one in without_turns(messages, 2)] == ["0", "7", "8"], "a late instruction stays"
    messages[2]["pinned"] = "yes"
    assert [one["content"] for one in without_turns(messages, 2)] == ["0", "1", "2", "3", "4", "7", "8"]


@given(MESSAGES, st.integers(1, 400), st.integers(0, 300))
def test_turns_are_whole_and_the_last_one_stays(messages: list[dict[str, Any]], room: int, extra: int) -> None:
    turns = turns_of(messages)
    assert [at for turn in turns for at in turn] == list(range(turns[0].start if turns else 0, len(messages)))[
        : None if turns else 0
    ]
    cuts = cuts_of(messages, room, extra)
    assert list(cuts.turns) == sorted({*cuts.turns}) and cuts.turns[0] == 0 and 0 <= cuts.guess < len(cuts.turns)
    assert cuts.turns[-1] == max(0, len(turns) - 1)
    for cut in cuts.turns:
        kept = {id(message) for message in without_turns(messages, cut)}
        for number, turn in enumerate(turns):
            members = [messages[at] for at in turn if messages[at]["role"] != "system"]
            stay = number >= cut or any(messages[at].get("pinned") for at in turn)
            assert all((id(member) in kept) == stay for member in members)
        assert all(id(message) in kept for message in messages if message["role"] == "system")


def test_a_growing_chat_is_cut_in_the_same_place_for_many_turns() -> None:
    """Each place is one that later turns find again, so that what is dropped once stays dropped."""
    room = 2_000
    used = [chat(turns) for turns in range(10, 200)]
    places = [cuts.turns[cuts.guess] for cuts in (cuts_of(messages, room) for messages in used)]
    assert places == sorted(places), "turns never come back"
    changes = sum(first != second for first, second in itertools.pairwise(places))
    per_turn = 2 * size_of({"content": "y" * 100})
    assert changes <= math.ceil(190 * per_turn / ((room - 200) / 2)) + 1
    for messages, cut in zip(used, places, strict=True):
        size = sum(map(size_of, without_turns(messages, cut)))
        assert size <= room and (cut == 0 or size > 0.35 * room), "half of the room stays in use, about"


@given(st.integers(1, 300), st.integers(0, 400), st.integers(0, 400))
def test_the_search_finds_the_first_that_fits_in_few_steps(count: int, first: int, guess: int) -> None:
    tried = list[int]()

    def walk() -> Generator[int, bool, None]:
        found.append((yield from search(count, guess)))

    found, steps = list[int](), walk()
    place = next(steps, None)
    while place is not None:
        tried.append(place)
        try:
            place = steps.send(place >= first)
        except StopIteration:
            break
    assert found == [min(first, count - 1)]
    assert len(set(tried)) == len(tried) <= 2 * math.log2(count + 1) + 2
    if guess == first < count - 1:
        assert len(tried) <= 2


def test_pins_are_no_matter_of_templates() -> None:
    messages = chat(1)
    assert unpinned(messages) is messages
    pinned = [{**messages[0], "pinned": True}, *messages[1:]]
    assert unpinned(pinned) == messages
    with pytest.raises(InvalidRequest, match=r"messages\[0\].pinned='yes': must be True or False"):
        unpinned([{**messages[0], "pinned": "yes"}])


class Unwritten(str):
    """A text that is not written as Python or JSON writes it."""

    def __repr__(self) -> str:
        raise AssertionError("writing 32 MB of unprintable characters held all threads for 0.8 s")


def test_calls_are_measured_without_writing_them() -> None:
    calls = [{"id": "c1", "function": {"name": "look", "arguments": {"at": ["here", 3, None], "long": "x" * 500}}}]
    assert characters_of(calls) == pytest.approx(len(json.dumps(calls)), rel=0.1)
    whole = size_of({"role": "assistant", "tool_calls": calls})
    assert whole > characters_of(calls) > size_of({"role": "assistant"})
    assert characters_of([{"arguments": Unwritten("x" * 500)}]) == characters_of([{"arguments": "x" * 500}])
    around: list[Any] = ["x" * 100]
    around.append(around)
    assert 100 < characters_of(around) < 150
