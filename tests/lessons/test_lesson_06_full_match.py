"""A full-prompt match leaves at least one token to compute: its logits are needed."""

from __future__ import annotations

import pytest

from fakes import make_request
from scheduling import Loop


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17])
def test_lesson_06_a_fully_cached_prompt_computes_its_last_token(length: int) -> None:
    loop = Loop(page_size=8)
    for turn in range(3):
        request = make_request("p" * length, max_tokens=3)
        loop.submit(request)
        loop.run()
        assert loop.output(request) == loop.model.generate(request)
        assert loop.events[request.id][-1].cached_tokens == (0 if turn == 0 else (length - 1) // 8 * 8)
