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


def test_a_budget_compiles_nothing_of_its_own() -> None:
    """Its steps are those of grammars."""
    options: dict[str, Any] = {**TINY, "max_requests": 2, "max_model_len": 64, "precompile": "all", "drafts": "none"}
    with rekindle.open_sync("tiny", **options) as session:
        session.generate_sync(["a b", "b"], max_tokens=6, choice=["a b", "c"])
        before = session.stats()
        asked: dict[str, Any] = {"template": TEMPLATE, "max_tokens": 24, "temperature": 0}
        handles = [session.chat("a b", reasoning_budget=budget, **asked) for budget in (0, 3, 9)]
        assert [handle.result_sync().usage.reasoning_tokens for handle in handles[:2]] == [0, 3]
        several = session.chat("a b", reasoning_budget=3, n=2, **asked).result_sync()
        assert {one.usage.reasoning_tokens for one in several} == {3}
        whole = handles[2].result_sync()
        assert session.fork(handles[2], at=2).result_sync().token_ids == whole.token_ids[2:]
        after = session.stats()
        assert (after.traces, after.compilations) == (before.traces, before.compilations)
