"""Eviction is by recency: a prefix that is hit again and again survives, whatever its ids are.

Upstream: https://github.com/llm-d/llm-d-inference-sim/issues/704
Among blocks of one age any was evicted, so a prompt's first could go before its last.
The form tested here, eviction in the order of ids, was read in another engine's source; no report of it is known.
"""

from __future__ import annotations

from helpers.fakes import make_request
from helpers.scheduling import Loop, LoopBuilder


def hits(loop: Loop, prompt: str) -> int:
    request = make_request(prompt, max_tokens=1)
    loop.submit(request)
    loop.run()
    return loop.events[request.id][-1].cached_tokens


def test_lesson_15_hot_prefixes_survive_and_cold_ones_go_in_order() -> None:
    loop = LoopBuilder(pages=12, page_size=8, max_requests=1).loop()
    hot = "h" * 25
    assert hits(loop, hot) == 0
    for turn in range(20):  # each of these needs four pages of the twelve
        assert hits(loop, f"{turn:02} is cold and is never seen again"[:32]) == 0
        assert hits(loop, hot) == 24, f"the hot prefix was evicted in turn {turn}"


def pages_of(loop: Loop, prompt: str) -> int:
    return loop.cache.probe(loop.cache.keys(make_request(prompt).prefix(8)))


def test_lesson_15_the_order_of_eviction_is_the_order_of_use() -> None:
    loop = LoopBuilder(pages=8, page_size=8, max_requests=1).loop()
    prompts = [letter * 17 for letter in "abcd"]
    for prompt in prompts:
        hits(loop, prompt)
    cached = {prompt[0] for prompt in prompts if pages_of(loop, prompt) == 2}
    assert cached == {"b", "c", "d"}
    hits(loop, prompts[1])
    hits(loop, "e" * 17)
    cached = {prompt[0] for prompt in prompts if pages_of(loop, prompt) == 2}
    assert cached == {"b", "d"}
