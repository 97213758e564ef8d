"""The host pays the same for a step's call with a model of one layer as with one of four: leaves are not looked at.

Upstream: https://github.com/vllm-project/tpu-inference/issues/2607
Thousands of leaves were flattened for every decode step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rekindle
from helpers.counting import Calls, listening
from helpers.driving import TINY
from helpers.small import OPTIONS, prompt
from rekindle import Session
from rekindle._src.models.base import LoadedModel, random_model
from rekindle._src.models.registry import config_from_hf

LAYERS = (1, 4)
# One pair of programs: what a prompt of a few tokens and a row that decodes need.
SMALL: dict[str, Any] = {**OPTIONS, "precompile": "lazy", "max_requests": 2, "host_memory": 0, "prefix_cache": False}


def model(layers: int) -> LoadedModel:
    return random_model(config_from_hf({**TINY, "num_hidden_layers": layers}), seed=0)


def per_step(session: Session, calls: Calls) -> float:
    """Calls of the session's threads for each step that decodes."""
    best = float("inf")
    for turn in range(5):  # threads wake each other more or less often, hence the least of several
        steps = session.stats().steps
        with calls.counted() as counted:
            session.generate_sync(prompt(turn, 3), max_tokens=40, ignore_eos=True)
        best = min(best, counted[0] / (session.stats().steps - steps))
    return best


@pytest.mark.slow
def test_lesson_30_calls_per_step_do_not_grow_with_the_leaves(tmp_path: Path) -> None:
    costs: dict[tuple[str, int], float] = {}
    for origin in ("compiled", "loaded"):
        for layers in LAYERS:
            with listening() as calls, rekindle.open_sync(model(layers), cache_dir=str(tmp_path), **SMALL) as session:
                session.generate_sync(prompt(0, 3), max_tokens=3)
                assert {program.origin for program in session.programs()} == {origin}
                costs[origin, layers] = per_step(session, calls)
    assert max(costs.values()) < 1.1 * min(costs.values()), f"calls per step by layers: {costs}"
