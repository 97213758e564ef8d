"""What a step's collectives take alone: a line through two sizes, and what steps of each program add up to."""

from __future__ import annotations

import jax
import pytest

from helpers.small import MODEL
from rekindle._src.models.placement import placement_of
from rekindle._src.programs.collectives import CollectiveTimes, LinearCost, collective_times

TIMES = CollectiveTimes(sum=LinearCost(10.0, 1.0), gather=LinearCost(100.0, 10.0), sums=5, small_sums=2, max_requests=4)


def test_a_step_has_its_sums_and_one_gathering() -> None:
    assert LinearCost(10.0, 1.0).seconds(1) == 10.0 and LinearCost(10.0, 1.0).seconds(4) == 13.0
    assert TIMES.step("r4t0") == 5 * 13.0 + 2 * 10.0 + 130.0
    assert TIMES.step("r2t32+pooling") == 5 * 43.0 + 2 * 10.0 + (100.0 + 10.0 * (2 + 4 - 1)), "prompts have logits, too"
    assert TIMES.steps({"r4t0": 3, "r2t32+pooling": 1}) == 3 * TIMES.step("r4t0") + TIMES.step("r2t32+pooling")
    assert TIMES.steps({"gather": 7}) == 0.0


def test_one_device_has_none() -> None:
    placement = placement_of(jax.make_mesh((1,), ("model",)), MODEL.graph)
    assert collective_times(placement, 4, 64) is None


@pytest.mark.parametrize("name", ["r16t0", "r2t512+pooling", "r8t32+halves"])
def test_names_of_programs_say_their_sizes(name: str) -> None:
    assert TIMES.step(name) > TIMES.step("r1t0")
