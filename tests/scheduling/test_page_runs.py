"""Entries that are pages of a window, with a fake model that checks the window of each row: which are kept and lost."""

from __future__ import annotations

from typing import Unpack

import pytest

from helpers.fakes import DictTier, make_request
from helpers.scheduling import Loop, LoopBuilder, Sizes, answered, cached, exact, prefix_of, text
from rekindle._src.core.prefix import Prefix
from rekindle._src.core.records import FinishReason, PageMove
from rekindle._src.kvcache import SidePages
from rekindle.errors import StoreError

PAGE, WINDOW, SPAN = 4, 11, 3


def with_window(**sizes: Unpack[Sizes]) -> LoopBuilder:
    return LoopBuilder(pages=128, page_size=PAGE, max_tokens_per_step=16).sizes(**sizes).window(positions=WINDOW)


def windows(loop: Loop) -> SidePages:
    (side,) = loop.sides
    assert isinstance(side, SidePages)
    return side


def test_a_running_sequence_holds_its_window_and_its_steps() -> None:
    model, most = with_window().loop(), 0
    request = make_request(text(200), max_tokens=40)
    model.submit(request)
    while model.step():
        held = [len(holding.pages) for sequence in model.scheduler.running_set.holders for holding in sequence.sides]
        most = max([most, *held])
    assert most <= SPAN + 2 + 2 * 16 // PAGE
    assert model.output(request) == model.model.generate(request)
    assert not windows(model)._holds


def test_the_next_turn_and_the_prompt_again_hit_fully_when_all_else_has_left() -> None:
    model = with_window(pages=512).loop()
    (first,) = answered(model, text(100), max_tokens=60)
    for start in range(3):  # what is in the middle of other prompts leaves before
        answered(model, [(start + 50 + 3 * position) % 89 for position in range(150)])
    turn = [*first.token_ids.tolist(), *model.output(first), 1, 2, 3]
    (second,) = answered(model, turn)
    assert cached(model, second) == 156
    assert windows(model).evicted, "there was room for all of them"
    (third,) = answered(model, text(100))
    assert cached(model, third) == 99


def test_a_branch_computes_again_once_and_is_kept_then() -> None:
    model = with_window(pages=512).loop()
    answered(model, text(160))
    answered(model, [(50 + 3 * position) % 89 for position in range(150)])
    (second,) = answered(model, text(80, 91, 92, 93, 94, 95))
    assert cached(model, second) == 0
    explanation = model.scheduler.explain(second.id)
    assert explanation is not None
    assert "pages of 80 more were there, but no window before them" in explanation.text
    (third,) = answered(model, text(80, 95, 96, 97, 98, 99))
    assert cached(model, third) == 80


def test_requests_at_once_share_pages() -> None:
    model = with_window().loop()
    requests = answered(model, *(text(60, *([suffix] * 5)) for suffix in range(91, 94)))
    assert [cached(model, request) for request in requests] == [0, 60, 60]


def test_a_pinned_prefix_keeps_its_window() -> None:
    model = with_window(pages=512).window(pages=8).loop()
    answered(model, text(80))
    assert model.scheduler.pin(Prefix(prefix_of(model.cache, max(model.cache, key=lambda node: node.depth))[:80])) == 80
    for start in range(4):
        answered(model, [(start + 50 + 3 * position) % 89 for position in range(200)])
    (again,) = answered(model, text(80, 91, 92, 93, 94, 95))
    assert cached(model, again) == 80
    model.scheduler.unpin(Prefix(again.token_ids[:80]))
    assert not windows(model)._pinned


def test_pinned_pages_that_a_request_holds_are_not_room_that_it_lacks() -> None:
    """A request that came back to its pinned prompt waited forever for pages that were free."""
    builder = with_window(pages=4, max_requests=2, max_tokens_per_step=8, max_prefill_rows=1)
    model = builder.window(positions=8).cache(least_copied=0).loop()
    prompt = text(9)
    requests = [make_request(prompt, max_tokens=5, seed=seed, temperature=1.0) for seed in range(2)]
    for request in requests:
        model.submit(request)
    model.dispatch(1)
    model.commit()
    model.dispatch(1)
    assert model.scheduler.pin(Prefix(requests[0].token_ids[:8])) == 8
    model.run()
    assert model.scheduler.statistics().preemptions, "there were pages for both"
    exact(model, *requests)


def test_pages_come_back_from_host_memory_with_their_window() -> None:
    model = with_window(pages=40).cache(host_tier=DictTier(1000)).states(tier=DictTier(1000)).loop()
    (first,) = answered(model, text(90))
    answered(model, [(50 + 3 * position) % 89 for position in range(140)])
    (again,) = answered(model, text(90, 91))
    assert cached(model, again) == 88
    assert windows(model).restored
    explanation = model.scheduler.explain(again.id)
    assert explanation is not None
    assert "the window before their end was in host memory" in explanation.text
    assert first.id != again.id


@pytest.mark.parametrize("what", ["lose", "lose_entry"])
def test_what_can_not_be_filled_fails_its_request_alone(what: str) -> None:
    model = with_window(pages=40).cache(host_tier=DictTier(1000)).states(tier=DictTier(1000)).loop()
    answered(model, text(90))
    answered(model, [(50 + 3 * position) % 89 for position in range(140)])

    def lost(move: PageMove) -> Exception | None:
        return StoreError("it is gone")

    setattr(model.runner, what, lost)
    failing, other = make_request(text(90, 91), max_tokens=6), make_request([5, 6, 7], max_tokens=6)
    for request in (failing, other):
        model.submit(request)
    model.run()
    assert model.reason(failing) is FinishReason.FAILED
    assert model.output(other) == model.model.generate(other)
    setattr(model.runner, what, lambda move: None)
    (again,) = answered(model, text(90, 91))
    assert cached(model, again) < 88
    assert not windows(model)._holds


def test_all_pages_can_be_taken_after_a_restore_has_failed_while_a_step_was_in_flight() -> None:
    """A sequence that ends later holds pages whose children have left the device: they are offered for eviction."""
    model = with_window(pages=40).cache(host_tier=DictTier(1000)).states(tier=DictTier(1000)).loop()
    answered(model, text(90))
    answered(model, [(50 + 3 * position) % 89 for position in range(140)])
    model.runner.lose = lambda move: StoreError("it is gone")
    failing = make_request(text(90, 91), max_tokens=6)
    model.submit(failing)
    model.dispatch(2)
    model.run()
    model.runner.lose = lambda move: None
    answered(model, [(30 + 3 * position) % 89 for position in range(150)])
