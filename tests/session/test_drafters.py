"""No token depends on drafts, whatever they come from, and whatever a request asks for: a real model in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.small import LEAST, opening, prompt
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.scheduling.drafting.costs import StepCosts
from rekindle.errors import ConfigError

anyio_test = pytest.mark.anyio
FEW = dict.fromkeys((20, 21, 22), 60.0)
BASE: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True, "logprobs": 1}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"logit_bias": FEW, "temperature": 2.0, "seed": 4},
    "repetition": {"logit_bias": FEW, "repetition_penalty": 1.2},
    "frequency": {"logit_bias": FEW, "frequency_penalty": 0.4, "temperature": 1.0, "seed": 5},
    "presence": {"logit_bias": FEW, "presence_penalty": 2.0, "frequency_penalty": -0.2},
    "processor": {"processors": [LEAST.name], "logit_bias": dict.fromkeys(FEW, -60.0), "seed": 6},
    "both": {"processors": [LEAST.name], "frequency_penalty": 0.3, "logit_bias": FEW},
    "stop": {"stop_token_ids": [21], "min_tokens": 20, "logit_bias": FEW, "temperature": 3.0, "seed": 7},
    "adversary": {"logit_bias": FEW, "frequency_penalty": 1.5, "temperature": 5.0, "seed": 8},
}  # fmt: skip


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes every draft that there is room for: steps of this model take less time than the wait after them."""
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))


async def texts(session: Session) -> dict[str, Any]:
    """The tokens of each kind of request: alone, two together, and forked."""
    found: dict[str, Any] = {}
    names = list(REQUESTS)
    for size in (1, 2):
        for together in (names[at : at + size] for at in range(0, len(names), size)):
            handles = [session.submit(prompt(names.index(one), 6), **BASE | REQUESTS[one]) for one in together]
            for name, handle in zip(together, handles, strict=True):
                done = await handle
                found[f"{name} of {len(together)}"] = done.token_ids, [one.token_id for one in done.logprobs]
    several = await session.generate(prompt(1, 6), n=3, **BASE | REQUESTS["frequency"])
    found["forks"] = [done.token_ids for done in several]
    return found


@pytest.mark.thorough
@anyio_test
async def test_tokens_are_those_without_drafts() -> None:
    everything = []
    kinds: list[dict[str, Any]] = [{"drafts": "none"}, {"prompt_lookup": 3}, {"drafts": "suffix"}]
    for options in kinds:
        async with opening(processors=[LEAST], **options) as session:
            before = session.stats()
            everything.append(await texts(session))
            stats = session.stats()
            assert (stats.traces, stats.compilations) == (before.traces, before.compilations)
            session.check_integrity()
            counts = stats.scheduler.drafters
            assert set(counts) == {"none": set(), "suffix": {"suffix"}}.get(options.get("drafts", ""), {"lookup"})
            assert sum(each.drafted for each in counts.values()) == stats.drafted_tokens
            assert sum(each.accepted for each in counts.values()) == stats.accepted_tokens
            assert not counts or 20 < stats.accepted_tokens < stats.drafted_tokens, f"{options}: {counts}"
    none, lookup, suffix = everything
    assert lookup == none
    assert suffix == none


@pytest.mark.thorough
@anyio_test
async def test_penalised_requests_have_drafts() -> None:
    """What reads earlier tokens sees the drafts before it, and counts those that are accepted."""
    async with opening(drafts="suffix") as session:
        for _ in range(3):
            await session.generate(prompt(3, 6), **BASE | REQUESTS["presence"])
        stats = session.stats()
    assert stats.accepted_tokens > 20


@anyio_test
async def test_no_drafts_and_some_are_a_contradiction() -> None:
    with pytest.raises(ConfigError, match='drafts="none" for none') as caught:
        await opening(drafts="none", prompt_lookup=2)
    assert caught.value.field == "prompt_lookup"


@pytest.mark.thorough
@anyio_test
@pytest.mark.parametrize("salt", [None, "a tenant"])
async def test_a_restored_session_drafts_from_the_texts_of_the_one_before(tmp_path: Path, salt: str | None) -> None:
    """Its prefix tree has their tokens; those of salts are left out, since only digests of them are kept."""
    options: dict[str, Any] = {"cache_dir": tmp_path, "disk_memory": 1 << 26, "drafts": "suffix"}
    found, drafted = [], []
    for restore in (None, "texts", None):
        async with opening(restore=restore, **options) as session:
            done = await session.generate(prompt(11, 6), max_tokens=40, ignore_eos=True, salt=salt)
            found.append(done.token_ids)
            drafted.append(session.stats().accepted_tokens)
            await session.save("texts")
    assert found[0] == found[1] == found[2]
    assert drafted[0] == drafted[2]
    assert (drafted[1] > drafted[0] + 15) == (salt is None)
