"""Opening and using sessions changes nothing in the process, and two sessions do not affect each other.

Upstream: https://github.com/sgl-project/sglang/issues/2536
An engine set signal handlers and could not be started outside the main thread.
Upstream: https://github.com/vllm-project/vllm/issues/13806
The same in vLLM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

from helpers.sessions import expected, fake_session


def state() -> list[object]:
    return [
        [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        dict(os.environ),
        type(asyncio.get_event_loop_policy()),
        sys.excepthook,
        threading.excepthook,
        sys.getswitchinterval(),
    ]


def test_lesson_22_opening_using_and_closing_leave_the_process_as_it_was() -> None:
    before = state()
    with fake_session() as session:
        session.generate_sync("x", max_tokens=3)
        assert state() == before
    assert state() == before


def test_lesson_22_two_sessions_live_side_by_side() -> None:
    with fake_session() as one, fake_session() as two:
        handles = [session.submit("x", max_tokens=50) for session in (one, two) for _ in range(10)]
        assert all(list(handle.result_sync().token_ids) == expected("x", max_tokens=50) for handle in handles)
        one.close()
        assert two.generate_sync("x", max_tokens=1).text
