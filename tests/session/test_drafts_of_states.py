"""Drafts for models whose layers have states: no token depends on them, however many were taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rekindle
from helpers import checkpoints
from helpers.plain_loop import plain_loop
from helpers.thorough import by_default
from rekindle import Session
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import ALONE
from rekindle._src.programs.layered import LayeredStep
from rekindle._src.programs.side_caches import RecurrentStates
from rekindle._src.scheduling.drafting.costs import StepCosts
from session.test_state_cache import EDGE, OPTIONS, of_context, tokens

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
OTHERS = (
    "lfm2", "falcon-h1", "granite4", "granite4-experts", "nemotron-h", "nemotron-h-experts-in-groups", "lfm3",
    "qwen3.5-tied-biases", "qwen3.5-moe",
)  # fmt: skip
FEW = dict.fromkeys((20, 21, 22), 60.0)
LONG: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True, "temperature": 0.0}  # beyond an edge of its own text
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repeating": {"logit_bias": FEW},
    "drawn": {"logit_bias": FEW, "temperature": 2.0, "seed": 4},
    "free": {"temperature": 1.0, "seed": 9},
    "penalised": {"logit_bias": FEW, "frequency_penalty": 0.3, "presence_penalty": 1.0},
    "stopped": {"logit_bias": FEW, "stop_token_ids": [21], "min_tokens": 20, "temperature": 3.0, "seed": 7},
}  # fmt: skip
SIZES: dict[str, Any] = {"max_requests": 4, "page_size": 16, "device_pages": 40, "max_model_len": 512}
KINDS: dict[str, dict[str, Any]] = {"lookup": {"prompt_lookup": 3}, "suffix": {"drafts": "suffix"}}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes every draft that there is room for."""
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))


def prompt(name: str) -> list[int]:
    place = list(REQUESTS).index(name)
    period = tokens(7, seed=100 + place)
    return [*tokens(70 + 11 * place, seed=90), *period * 3]


def texts(session: Session, names: list[str]) -> dict[str, list[int]]:
    """The texts of requests, all at once, and forks of one of them."""
    handles = [session.submit(prompt(name), **LONG | REQUESTS[name]) for name in names]
    found = {name: list(handle.result_sync().token_ids) for name, handle in zip(names, handles, strict=True)}
    forks = session.generate_sync(prompt("drawn"), n=3, **LONG | REQUESTS["drawn"])
    for place, one in enumerate(forks):
        found[f"fork {place}"] = list(one.token_ids)
    session.check_integrity()
    return found


MODELS = [
    *by_default(["qwen3.5", *OTHERS[:2]], 1),
    *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS[2:]),
]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return of_context(request.param, 512)


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, list[int]]:
    with rekindle.open_sync(model, **OPTIONS, disk_memory=0, drafts="none") as session:
        return texts(session, list(REQUESTS))


@pytest.mark.thorough  # by default: test_draft_heads.py, of a model with states
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_drafts(model: Any, expected: dict[str, list[int]], kind: str) -> None:
    assert expected["greedy"] == plain_loop(model, prompt("greedy"), 90)
    with rekindle.open_sync(model, **OPTIONS, disk_memory=0, **KINDS[kind]) as session:
        for turn in range(2):  # the second continues states that the first left
            assert texts(session, list(REQUESTS)) == expected, f"turn {turn}"
        alone = session.generate_sync(prompt("repeating"), **LONG | REQUESTS["repeating"])
        assert list(alone.token_ids) == expected["repeating"]
        assert alone.usage.cached_tokens >= EDGE
        # A turn that continues a state which was left while drafts were computed.
        chat = [*prompt("greedy"), *expected["greedy"]]
        done = session.generate_sync([*chat, 5, 6, 7], **LONG)
        assert list(done.token_ids) == plain_loop(model, [*chat, 5, 6, 7], 90)
        assert done.usage.cached_tokens == (len(chat) - 1) // EDGE * EDGE
        stats = session.stats()
        assert 50 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.thorough
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_preempted_and_cancelled_requests(model: Any, expected: dict[str, list[int]], options: dict[str, Any]) -> None:
    few = {**OPTIONS, "disk_memory": 0, "device_pages": 24, "host_memory": 64 << 20}
    with rekindle.open_sync(model, **few, **options) as session:
        cancelled = [session.submit(prompt(name), **LONG | REQUESTS[name]) for name in REQUESTS]
        for handle in cancelled[::2]:
            handle.cancel()
        for name, handle in list(zip(REQUESTS, cancelled, strict=True))[1::2]:
            assert list(handle.result_sync().token_ids) == expected[name]
        assert texts(session, list(REQUESTS)) == expected
        assert session.stats().preemptions > 0, "there was room for all of them"
        assert session.stats().accepted_tokens > 50


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"prefix_cache": False}, {"max_requests": 1}, {"max_requests": 9}])
def test_other_numbers_of_slots(model: Any, expected: dict[str, list[int]], options: dict[str, Any]) -> None:
    changed = {**OPTIONS, "max_tokens_per_step": 80, **options}
    with rekindle.open_sync(model, **changed, disk_memory=0, drafts="suffix") as session:
        assert texts(session, list(REQUESTS)) == expected
        assert session.stats().accepted_tokens > 10


@pytest.mark.thorough
def test_a_chat_goes_on_after_a_restart_and_sleep(model: Any, tmp_path: Path) -> None:
    options, chat = {**OPTIONS, "cache_dir": str(tmp_path), "drafts": "suffix"}, prompt("repeating")
    with rekindle.open_sync(model, **options) as session:
        chat += session.generate_sync(chat, **LONG | REQUESTS["repeating"]).token_ids
        session.sleep().result_sync()
        session.wake().result_sync()
        done = session.generate_sync(chat, **LONG)
        assert list(done.token_ids) == plain_loop(model, chat, 90)
        session.save("chat").result_sync()
        session.check_integrity()
    with rekindle.open_sync(model, **options, restore="chat") as session:
        chat += done.token_ids
        after = session.generate_sync(chat, **LONG)
        assert list(after.token_ids) == plain_loop(model, chat, 90)
        assert after.usage.cached_tokens == (len(chat) - 1) // EDGE * EDGE
        session.check_integrity()


@pytest.mark.thorough
def test_programs_made_ahead_and_of_parts_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, call = [], LayeredStep.__call__
    monkeypatch.setattr(LayeredStep, "__call__", lambda self, *inputs: steps.append(1) or call(self, *inputs))
    raw = {**checkpoints.CASES["qwen3.5"], "num_hidden_layers": 8}
    model = checkpoints.model(raw, checkpoints.tensors(raw))
    options: dict[str, Any] = {**OPTIONS, "disk_memory": 0, "max_model_len": 256, "drafts": "suffix"}
    names = ["greedy", "repeating", "drawn"]
    with rekindle.open_sync(model, **{**options, "drafts": "none"}) as session:
        wanted = texts(session, names)
    for precompile in ("lazy", "all"):
        with rekindle.open_sync(model, **{**options, "precompile": precompile, "cache_dir": str(tmp_path)}) as session:
            before = session.stats()
            assert texts(session, names) == wanted, precompile
            stats = session.stats()
            assert stats.accepted_tokens > 10
            if precompile == "all":
                assert (stats.traces, stats.compilations) == (before.traces, before.compilations)
    assert steps, "no step was made of parts"


@pytest.mark.parametrize(
    ("options", "slots"),
    [({}, (13, 5, 0)), ({"drafts": "none"}, (13, 5, 0)), ({"drafts": "suffix"}, (17, 9, 4)),
     ({"prompt_lookup": 2}, (17, 9, 4)), ({"prompt_lookup": 2, "prefix_cache": False}, (9, 9, 4))],
)  # fmt: skip
def test_only_sessions_with_drafts_have_slots_for_them(options: dict[str, Any], slots: tuple[int, ...]) -> None:
    config = EngineConfig(**{**SIZES, **options})
    plan = RecurrentStates.of(of_context("qwen3.5", 512).config, config, ALONE)
    assert plan is not None
    assert (plan.slots, plan.first, plan.spare) == slots
