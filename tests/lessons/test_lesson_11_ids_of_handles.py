"""Ids are opaque, unique and returned at submit; aborting one never touches another whose id begins with it.

Upstream: https://github.com/sgl-project/sglang/pull/31685
An abort matched every request whose id begins with the one that was given.
"""

from __future__ import annotations

import pytest

from helpers.sessions import fake_session, opened
from rekindle.errors import RequestAborted


def test_lesson_11_ids_are_unique_over_all_sessions_and_known_at_submit() -> None:
    with opened() as one, fake_session() as two:
        handles = [session.submit("same", max_tokens=2) for session in (one, two) for _ in range(30)]
        assert len({handle.id for handle in handles}) == 60
        assert [handle.result_sync().id for handle in handles] == [handle.id for handle in handles]


def test_lesson_11_an_abort_ends_exactly_one_request() -> None:
    with opened(step_seconds=0.001) as session:
        handles = [session.submit("same", max_tokens=60, n=2 if i == 3 else 1) for i in range(12)]
        # r1 is a prefix of r10, r11, and an n-sequence's ids begin with its handle's.
        victims = [handle for handle in handles if any(other.id.startswith(handle.id) for other in handles)][:3]
        for handle in victims:
            handle.cancel()
        for handle in handles:
            if handle in victims:
                with pytest.raises(RequestAborted):
                    handle.result_sync()
            else:
                results = handle.result_sync()
                assert all(len(done.token_ids) == 60 for done in (results if isinstance(results, list) else [results]))
