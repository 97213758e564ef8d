"""Preempted requests, and those whose pages were offloaded and brought back, produce the tokens of a quiet run.

Upstream: https://github.com/vllm-project/vllm/issues/16832
The output of a request that was preempted and recomputed was incomplete.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tiered import NEW, ask, opened, plain, prompt

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")


@pytest.mark.thorough
def test_lesson_07_preempted_and_offloaded_requests_are_exact(tmp_path: Path) -> None:
    with opened(tmp_path, device_pages=13, max_requests=4, disk_memory=0) as session:
        handles = [session.submit(list(prompt(index)), max_tokens=NEW + 26, ignore_eos=True) for index in (0, 1, 2, 3)]
        for index, handle in enumerate(handles):
            assert handle.result_sync().token_ids[:NEW] == plain(index)
        stats = session.stats()
        assert stats.cache.offloaded_pages > 0
        assert [ask(session, index) > 0 for index in (0, 1, 2, 3)] == [True] * 4
        assert session.stats().cache.host_hit_pages > 0
        session.check_integrity()
