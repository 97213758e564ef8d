"""Drafts of the model's own head: they are those of the head over the whole text, and no token depends on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.draft_heads import assert_likeliest, chains, recorded, with_head
from helpers.plain_loop import plain_loop
from helpers.thorough import by_default
from rekindle import Session
from rekindle._src.execution.draft_model import OwnHead
from rekindle._src.programs.draft_model import DRAFTS
from rekindle._src.scheduling.drafting import models
from rekindle._src.scheduling.drafting.costs import StepCosts
from rekindle._src.scheduling.drafting.heads import HeadDrafter
from rekindle.errors import ConfigError
from session.test_drafts_of_states import FEW, REQUESTS
from session.test_state_cache import OPTIONS, tokens

pytestmark = pytest.mark.usefixtures("shared_programs")
LONG: dict[str, Any] = {"max_tokens": 70, "ignore_eos": True, "temperature": 0.0}
HEAD: dict[str, Any] = {**OPTIONS, "disk_memory": 0, "drafts": "mtp"}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts in every step, and computes every draft."""
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    monkeypatch.setattr(models, "_PLAIN", 0)


@pytest.fixture(scope="module", params=by_default(["qwen3.5", "qwen3.5-moe", "glm4-moe-lite"], 1))
def model(request: pytest.FixtureRequest) -> Any:
    raw = with_head(request.param) | {"max_position_embeddings": 512}
    return checkpoints.model(raw, checkpoints.tensors(raw))


def prompt(name: str) -> list[int]:
    place = list(REQUESTS).index(name)
    return tokens(40 + 11 * place, seed=90)


def texts(session: Session) -> dict[str, list[int]]:
    """The texts of requests, all at once, and forks of one of them."""
    handles = {name: session.submit(prompt(name), **LONG | options) for name, options in REQUESTS.items()}
    found = {name: list(handle.result_sync().token_ids) for name, handle in handles.items()}
    for place, one in enumerate(session.generate_sync(prompt("drawn"), n=3, **LONG | REQUESTS["drawn"])):
        found[f"fork {place}"] = list(one.token_ids)
    session.check_integrity()
    return found


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, list[int]]:
    with rekindle.open_sync(model, **{**HEAD, "drafts": "none"}) as session:
        return texts(session)


def test_tokens_are_those_without_drafts(model: Any, expected: dict[str, list[int]]) -> None:
    assert expected["greedy"] == plain_loop(model, prompt("greedy"), 70)
    with rekindle.open_sync(model, **HEAD) as session:
        for turn in range(2):  # the second continues pages and states that the first left
            assert texts(session) == expected, f"turn {turn}"
        stats = session.stats()
        assert 20 < stats.accepted_tokens < stats.drafted_tokens
        assert {*stats.drafters} == {"mtp"}
        handle = session.submit(prompt("repeating"), **LONG | REQUESTS["repeating"])
        handle.result_sync()
        assert "drafts of the model's own head were accepted" in str(session.explain(handle))


@pytest.mark.thorough
def test_drafts_are_those_of_the_head(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several: in prompts that are cut, after cached pages, and after drafts of which some are right."""
    first = tokens(150, seed=5)
    text = [*first, *plain_loop(model, first, 40)]
    again = [*text, *tokens(9, seed=6)]  # a next turn, of which pages and a state are there
    whole = [*again, *plain_loop(model, again, 40)]
    seen = recorded(monkeypatch, OwnHead, whole)
    with rekindle.open_sync(model, **HEAD) as session:
        handles = [session.submit(first, **LONG | {"max_tokens": 40})]
        handles[0].result_sync()
        handles.append(session.submit(again, **LONG | {"max_tokens": 40}))
        done = [handle.result_sync() for handle in handles]
        stats = session.stats()
    assert [list(one.token_ids) for one in done] == [text[150:], whole[len(again) :]]
    assert done[1].usage.cached_tokens >= 128
    assert stats.accepted_tokens > 40
    assert len(seen) > 12
    assert_likeliest(seen, chains(model, whole, [place for place, _ in seen], DRAFTS))


@pytest.mark.thorough
def test_a_head_that_rested_drafts_as_if_it_had_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a head that rests are those without one, and what it missed is made up for before it drafts again, or
    when there is little room for more of it. The head's attention is made so strong that each entry counts."""
    raw = with_head("qwen3.5") | {"max_position_embeddings": 512}
    state = checkpoints.tensors(raw)
    for name in ("mtp.layers.0.self_attn.v_proj.weight", "mtp.layers.0.self_attn.o_proj.weight"):
        state[name] = 20.0 * state[name]
    model = checkpoints.model(raw, state)
    first = tokens(40, seed=8)
    whole = [*first, *plain_loop(model, first, 200)]
    seen = recorded(monkeypatch, OwnHead, whole)
    steps: list[int] = []
    planned = HeadDrafter.planned
    monkeypatch.setattr(HeadDrafter, "planned", lambda self, step: (steps.append(step), planned(self, step))[1])
    monkeypatch.setattr(HeadDrafter, "awake", property(lambda self: steps[-1:] > [80] and steps[-1] % 45 > 40))
    with rekindle.open_sync(model, **HEAD) as session:
        assert [*first, *session.generate_sync(first, **LONG | {"max_tokens": 200}).token_ids] == whole
        ran = session.stats().programs
    assert 2 < len(seen) < 20
    assert_likeliest(seen, chains(model, whole, [place for place, _ in seen], DRAFTS))
    plain, others = ran["r1t0"], sum(count for name, count in ran.items() if name.endswith("+drafts"))
    assert plain > 90 > others > 0


@pytest.mark.parametrize("drafts_pay", by_default([False, True]))
def test_a_head_rests_where_drafts_do_not_pay_or_have_no_room(
    model: Any, monkeypatch: pytest.MonkeyPatch, drafts_pay: bool
) -> None:
    """Of as many requests as there are rows, no step has room for a draft, but before the last one came or once one
    has ended: how many steps that is depends on when they come, of some 180 that all would draft."""
    if not drafts_pay:
        monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: 0)
    with rekindle.open_sync(model, **HEAD) as session:
        session.generate_sync(
            [tokens(20, seed=place) for place in range(4 if drafts_pay else 3)], **LONG | {"max_tokens": 180}
        )
        stats = session.stats()
    assert stats.drafted_tokens <= (90 if drafts_pay else 0)
    drafting = sum(count for name, count in stats.programs.items() if name.endswith("t0+drafts"))
    assert drafting > 2, "or they never try again"
    assert drafting < (90 if drafts_pay else 20)
    assert max(stats.programs, key=stats.programs.__getitem__).endswith("t0")


def test_models_without_a_head_are_refused(tmp_path: Path) -> None:
    for name in ("qwen3.5", "llama"):
        folder = checkpoints.write(tmp_path / name, checkpoints.CASES[name])
        with pytest.raises(ConfigError, match="needs a head that drafts tokens, and this"):
            rekindle.open_sync(str(folder), **{**HEAD, "max_model_len": 256})


@pytest.mark.thorough
def test_a_folder_is_opened_with_its_head(tmp_path: Path) -> None:
    raw = with_head("qwen3.5")
    state = checkpoints.tensors(raw)
    folder = checkpoints.write(tmp_path, checkpoints.CASES["qwen3.5"], state)
    with rekindle.open_sync(str(folder), **{**HEAD, "max_model_len": 256}) as session:
        ids = tokens(20, seed=3)
        found = session.generate_sync(ids, max_tokens=12, temperature=0.0, ignore_eos=True, logit_bias=FEW)
        assert session.stats().drafted_tokens > 3
    assert np.isin(found.token_ids, [*FEW]).all()


@pytest.mark.thorough
def test_preempted_and_cancelled_requests(model: Any, expected: dict[str, list[int]]) -> None:
    few, more = {**HEAD, "device_pages": 34, "host_memory": 64 << 20}, LONG | {"max_tokens": 200}
    with rekindle.open_sync(model, **few) as session:
        handles = {name: session.submit(prompt(name), **more | options) for name, options in REQUESTS.items()}
        handles["free"].cancel()
        for name, handle in handles.items():
            assert name == "free" or list(handle.result_sync().token_ids)[:70] == expected[name]
        assert texts(session) == expected
        assert session.stats().preemptions > 0, "there was room for all of them"
        assert session.stats().accepted_tokens > 10


@pytest.mark.thorough
def test_after_a_restart_and_sleep(model: Any, expected: dict[str, list[int]], tmp_path: Path) -> None:
    options = {**OPTIONS, "cache_dir": str(tmp_path), "drafts": "mtp"}
    with rekindle.open_sync(model, **options) as session:
        assert texts(session) == expected
        session.sleep().result_sync()
        session.wake().result_sync()
        assert texts(session) == expected
        session.save("texts").result_sync()
    with rekindle.open_sync(model, **options, restore="texts") as session:
        before = session.stats()
        assert texts(session) == expected
        assert session.stats().accepted_tokens > before.accepted_tokens


@pytest.mark.thorough
def test_programs_made_ahead_are_enough(model: Any, expected: dict[str, list[int]], tmp_path: Path) -> None:
    options = {**OPTIONS, "cache_dir": str(tmp_path), "drafts": "mtp", "precompile": "all"}
    with rekindle.open_sync(model, **options) as session:
        before = session.stats()
        assert texts(session) == expected
        stats = session.stats()
        assert (stats.traces, stats.compilations) == (before.traces, before.compilations)
        assert stats.accepted_tokens > 10
