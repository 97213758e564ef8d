"""An idle session, whether paused, waited for or forgotten, uses less than one per cent of a core.

Upstream: https://github.com/sgl-project/sglang/issues/1730
The scheduler kept a core at 100 % while idle.
"""

from __future__ import annotations

import time

import pytest

from helpers.sessions import opened

pytestmark = pytest.mark.clock


def sleeps(seconds: float = 0.4, looks: int = 5) -> bool:
    """Return whether this process gets below one per cent of a core; threads of other tests may take a while to end."""

    def busy() -> float:
        start = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - start) / seconds

    return any(busy() < 0.01 for _ in range(looks))


def test_lesson_17_an_idle_session_sleeps() -> None:
    with opened() as session:
        session.generate_sync("x", max_tokens=4)
        assert sleeps()


def test_lesson_17_a_paused_session_with_work_sleeps() -> None:
    with opened() as session:
        with session.paused():
            handle = session.submit("x", max_tokens=4)
            session.step_sync()
            assert sleeps()
        handle.result_sync()
