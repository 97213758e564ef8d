"""A budget of reasoning gives the same tokens with drafts as without: rejected ones leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

import rekindle
from helpers.small import TINY

pytestmark = pytest.mark.usefixtures("large_steps")
TEMPLATE = "{% if false %}<think></think>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}<think>"
QUESTIONS = [
    "Once upon a time there was a fire. Once upon a time there was",
    "Who are you? Who are you? Who",
    "a b a b a",
]


def replies(budget: int, **options: Any) -> list[tuple[int, ...]]:
    """The tokens of several chats at once, in a session with these options."""
    with rekindle.open_sync("tiny", **{**TINY, **options}) as session:
        asked: dict[str, Any] = {"template": TEMPLATE, "reasoning_budget": budget, "max_tokens": 40, "temperature": 0}
        handles = [session.chat(question, **asked) for question in QUESTIONS]
        handles += [session.chat(QUESTIONS[0], seed=number, **{**asked, "temperature": 0.9}) for number in range(2)]
        done = [handle.result_sync() for handle in handles]
        for one in done:
            assert "</think>" in one.text or len(one.token_ids) <= budget, one.text
            assert one.usage.reasoning_tokens <= budget
        stats = session.stats()
        assert (stats.accepted_tokens > 0) == (options["drafts"] != "none")
        return [one.token_ids for one in done]


@pytest.mark.parametrize("budget", [0, 7])
def test_drafts_change_no_token(budget: int) -> None:
    alone = replies(budget, drafts="none")
    assert replies(budget, drafts="suffix") == alone
