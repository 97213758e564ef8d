"""An abort that races an overlapped step frees pages once, whatever stage the request is in.

Upstream: https://github.com/sgl-project/mini-sglang/pull/111
A request aborted while it finished in an overlapped step was freed twice.
"""

from __future__ import annotations

import random

import pytest

from helpers.sessions import CONFIG, expected, opened
from rekindle.errors import RequestAborted


@pytest.mark.parametrize("at", range(7))
def test_lesson_13_an_abort_at_each_stage_of_a_request(at: int) -> None:
    """Queued, prefilling in three chunks, first token, decoding, and together with its last token."""
    with opened() as session:
        with session.paused():
            victim = session.submit("v" * 130, max_tokens=3)
            other = session.submit("o" * 20, max_tokens=8)
            for _ in range(at):
                session.step_sync()
            victim.cancel()
            session.step_sync()
            session.check_integrity()
        assert list(other.result_sync().token_ids) == expected("o" * 20, max_tokens=8)
        if at < 5:
            with pytest.raises(RequestAborted):
                victim.result_sync()


def test_lesson_13_aborts_race_steps_in_flight_and_new_occupants_are_untouched() -> None:
    dice = random.Random(5)
    with opened(CONFIG, step_seconds=0.0005, num_pages=80) as session:
        for round_ in range(12):
            handles = [session.submit(f"{round_} {i}", max_tokens=20) for i in range(24)]
            victims = dice.sample(range(24), 12)
            for victim in victims:
                handles[victim].cancel()
            for i, handle in enumerate(handles):
                if i not in victims:
                    assert list(handle.result_sync().token_ids) == expected(f"{round_} {i}", max_tokens=20)
