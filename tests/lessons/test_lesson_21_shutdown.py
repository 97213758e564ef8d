"""Closing never dead-locks, from whichever thread or task it is called and whatever the session is doing.

Upstream: https://github.com/vllm-project/vllm/issues/1908
There was no way to end an engine and get its memory back.
Upstream: https://github.com/vllm-project/vllm/pull/38779
The interpreter hung while it shut down.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from helpers.bounds import Within
from helpers.sessions import eventually, fake_session, threads


@pytest.mark.parametrize("work", ["idle", "busy", "paused", "flooded"])
def test_lesson_21_closing_from_many_threads_at_once_is_bounded(work: str, within: Within) -> None:
    before = threads()
    session = fake_session(step_seconds=0.01)
    handles = [session.submit(f"{i}", max_tokens=300) for i in range({"idle": 0, "flooded": 200}.get(work, 3))]
    if work == "paused":
        session.paused().__enter__()
    time.sleep(0.05)
    with within(5):
        closers = [threading.Thread(target=session.close) for _ in range(4)]
        closers += [threading.Thread(target=lambda: asyncio.run(session.aclose())) for _ in range(4)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(60)
    assert not any(closer.is_alive() for closer in closers), "closing hangs"
    assert all(handle.done for handle in handles)
    eventually(lambda: threads() <= before)


def test_lesson_21_submitting_while_closing_ends_every_request_one_way() -> None:
    from rekindle.errors import RekindleError

    for _ in range(4):
        session = fake_session(step_seconds=0.001)
        ends: list[str] = []

        def submit(session=session, ends=ends) -> None:  # type: ignore[no-untyped-def]
            for i in range(200):
                try:
                    session.generate_sync(f"{i}", max_tokens=2)
                    ends.append("done")
                except RekindleError as error:
                    ends.append(type(error).__name__)

        submitters = [threading.Thread(target=submit) for _ in range(3)]
        for submitter in submitters:
            submitter.start()
        time.sleep(0.02)
        session.close()
        for submitter in submitters:
            submitter.join(60)
        assert not any(submitter.is_alive() for submitter in submitters), "a request was forgotten"
        assert len(ends) == 600 and set(ends) <= {"done", "SessionClosed"}
