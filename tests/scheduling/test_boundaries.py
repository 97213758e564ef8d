"""Entries for all tokens before a node, with a fake model that checks the state of each row: where they are left."""

from __future__ import annotations

from typing import Unpack

import pytest

from helpers.fakes import DictTier, EchoModel, make_request
from helpers.scheduling import DraftOptions, Loop, LoopBuilder, Sizes, answered, cached, prefix_of, text
from rekindle._src.core.records import FinishReason
from rekindle.errors import StoreError

PAGE = 4


def with_states(**sizes: Unpack[Sizes]) -> LoopBuilder:
    """States at every other page of 4 tokens, chunks at multiples of 8."""
    return LoopBuilder(pages=64, page_size=PAGE).sizes(**sizes).states(slots=4, step=2, edge=8)


def positions(loop: Loop) -> set[int]:
    return {node.depth * PAGE for node in loop.sides[0]}


def test_states_are_left_at_the_edges_of_prompt_and_turn() -> None:
    model = with_states().loop()
    (first,) = answered(model, text(21), max_tokens=14)
    assert positions(model) == {16, 32}, "of the prompt, and of the last edge of the text; not 24"
    turn = [*first.token_ids.tolist(), *model.output(first), 1, 2, 3]
    (second,) = answered(model, turn)
    assert cached(model, second) == 32


def test_a_longer_match_of_pages_leaves_a_state_where_it_ends() -> None:
    model = with_states().loop()
    answered(model, text(30))
    (second,) = answered(model, text(18, 91, 92, 93, 94, 95, 91, 92, 93, 94, 95))
    assert cached(model, second) == 0
    assert 16 in positions(model)
    explanation = model.scheduler.explain(second.id)
    assert explanation is not None
    assert "pages of 16 more were there, but no state after them" in explanation.text
    (third,) = answered(model, text(18, 94, 95, 96, 97, 98, 99))
    assert cached(model, third) == 16


def test_requests_at_once_share_a_state() -> None:
    model = with_states(max_tokens_per_step=16).loop()
    requests = answered(model, *(text(40, *([suffix] * 5)) for suffix in range(91, 94)))
    assert [cached(model, request) for request in requests] == [0, 40, 40]


def test_the_state_that_was_not_used_for_longest_leaves_first() -> None:
    model = with_states().states(slots=2).loop()
    answered(model, text(12), max_tokens=2)
    answered(model, [*range(50, 62)], max_tokens=2)
    answered(model, text(12, 91), max_tokens=2)  # uses the first
    answered(model, [*range(60, 72)], max_tokens=2)
    kept = {int(prefix_of(model.cache, node)[0]) for node in model.sides[0]}
    assert kept == {0, 60}
    assert model.cache.statistics().states_evicted == 1


def test_a_hit_keeps_the_state_that_it_reads_and_none_before_it() -> None:
    """A path whose states were all kept by a hit at its end would push out states that other prompts still read."""
    model = with_states().states(slots=3).loop()
    answered(model, text(12), max_tokens=2)
    answered(model, [*range(50, 62)], max_tokens=2)
    answered(model, text(28), max_tokens=2)  # leaves a second state on the first path
    answered(model, [*range(50, 62), 91], max_tokens=2)
    (last,) = answered(model, text(28, 91), max_tokens=2)
    assert cached(model, last) == 24 and model.cache.statistics().states_evicted == 0
    answered(model, [*range(70, 82)], max_tokens=2)
    kept = {(int(prefix_of(model.cache, node)[0]), node.depth * PAGE) for node in model.sides[0]}
    assert kept == {(0, 24), (50, 8), (70, 8)}


def test_evicting_pages_evicts_their_state_and_not_the_other_way_round() -> None:
    tier, states = DictTier(), DictTier()
    model = with_states(pages=8, max_model_len=30).cache(host_tier=tier).states(tier=states).loop()
    answered(model, text(20), max_tokens=2)
    answered(model, [*range(50, 75)], max_tokens=2)
    assert all(node.page for node in model.sides[0])
    assert states.payloads, "the first state left with its pages"
    (again,) = answered(model, text(20), max_tokens=2)
    assert cached(model, again) == 16
    explanation = model.scheduler.explain(again.id)
    assert explanation is not None
    assert "the state after them was in host memory" in explanation.text
    assert model.cache.statistics().states_restored == 1
    small = with_states().states(slots=1).loop()
    answered(small, text(20), max_tokens=2)
    answered(small, [*range(50, 70)], max_tokens=2)
    assert sum(bool(node.page) for node in small.cache) == 10, "states left, pages stayed"


def test_a_state_that_is_lost_fails_its_request_and_is_computed_by_the_next() -> None:
    states = DictTier()
    model = with_states(pages=8, max_model_len=30).cache(host_tier=DictTier()).states(tier=states).loop()
    answered(model, text(20), max_tokens=2)
    answered(model, [*range(50, 75)], max_tokens=2)
    model.runner.lose_entry = lambda move: StoreError("the state is gone")
    request = make_request(text(20), max_tokens=2)
    model.submit(request)
    model.run()
    assert model.reason(request) is FinishReason.FAILED
    model.runner.lose_entry = lambda move: None
    (again,) = answered(model, text(20), max_tokens=2)
    assert cached(model, again) == 0


def test_chunks_end_at_edges() -> None:
    model = with_states(max_tokens_per_step=20, max_requests=2).loop()
    answered(model, text(61), [*range(100, 150)], max_tokens=12)
    ends = {row.start + row.length for plan in model.runner.plans for row in plan.prefill}
    assert {end for end in ends if end % 8} <= {61, 50}, "the prompts' own ends"


@pytest.mark.parametrize("drafts", [{"lookup": 4}, {"source": "suffix"}], ids=["lookup", "suffix"])
def test_drafts_leave_the_states_that_tokens_leave(drafts: DraftOptions) -> None:
    """A draft that ends at an edge leaves a state there once it is accepted, and none if it was wrong."""
    echo = EchoModel(period=3, surprises=0.4, alphabet=tuple(range(4)))
    model = with_states(model=echo, max_requests=3).drafts(**drafts).loop()
    for length in range(9, 30, 2):
        (first,) = answered(model, text(length), max_tokens=40)
        turn = [*first.token_ids.tolist(), *model.output(first)]
        assert (len(turn) - 1) // 8 * 8 in positions(model)
        (second,) = answered(model, [*turn, 1, 2, 3], max_tokens=20)
        assert cached(model, second) == (len(turn) - 1) // 8 * 8
    answered(model, text(12), text(15, 1), text(17, 2), text(19, 3), max_tokens=30)
    counts = model.scheduler.statistics()
    assert 40 < counts.accepted_tokens < counts.drafted_tokens


def test_a_model_with_states_has_no_drafts_without_slots_for_them() -> None:
    model = with_states(model=EchoModel(period=3, surprises=0.2, alphabet=tuple(range(4)))).loop()
    (rule,) = model.scheduler._sides._rules
    assert not rule.drafts
    assert rule.draft_room() == 0
