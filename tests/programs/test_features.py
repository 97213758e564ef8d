"""A feature that is not in the source reaches rows, layers, programs and results through its two halves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from helpers.driving import Driver, plain_tokens, tiny_config, tiny_model
from rekindle._src.capabilities.guides.step import Guides
from rekindle._src.capabilities.pooling.step import PooledRows, Pooling
from rekindle._src.core.records import IntArray, Request, Row
from rekindle._src.core.report import Report
from rekindle._src.core.sampling import Sampling
from rekindle._src.execution.runner import Runner
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.features import Features, features_of
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.row_option import Columns, FeatureRead, RowOption, RowReports
from rekindle._src.programs.step_part import Hooks, StepInputs, StepPart

MODEL = tiny_model()
VECTORS = np.zeros((3, MODEL.config.hidden_size), np.float32)
VECTORS[2] = np.random.default_rng(0).standard_normal(VECTORS.shape[1]) * 40
PROMPTS = [[5, 9, 7, 11], [21, 4, 60], [8, 8, 30, 2, 90]]


class VectorOption(RowOption):
    """A request names its vector by its priority and its scale in a float; each row says where it begins."""

    option, bits = "sampling.priority", 1 << 28
    ints, row_ints, neutral = 1, 1, (0.5,)

    def flags(self, request: Request) -> int:
        return self.bits

    def constants(self, request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return (request.sampling.priority,), (1.0,)

    def write_row(self, row: Row, out: IntArray) -> None:
        out[0] = row.start

    def unpack(self, columns: Columns) -> Any:
        return columns.ints[:, 0], columns.floats[:, 0], columns.row_ints[:, 0]

    def read(self, read: FeatureRead, reports: RowReports) -> None:
        assert read.output is not None
        for row, place, own in zip(read.plan.rows, read.places, reports, strict=True):
            if row.request.sampling.priority:
                STATES.put(own, read.output[place])


class Steering(StepPart):
    """Adds a vector to the residual after the first layer, and returns the residual of each row's last token."""

    variant, inside, has_output = ProgramVariant.STEERING, True, True

    def __init__(self) -> None:
        self.operands = VECTORS

    def hooks(self, inputs: StepInputs, own: Any, operands: Any) -> Hooks:
        kept: list[Array] = []
        vectors, scales, starts = own

        def after(x: Array) -> Array:
            added = operands[vectors] * scales[:, None]
            x = x.at[inputs.last].add(added)
            kept.append(jnp.concatenate([x[inputs.last], starts[:, None].astype(x.dtype)], axis=1))
            return x

        return Hooks(lambda site, layer: after if (site, layer) == ("residual", 0) else None, kept=kept)

    def output(self, model: Any, hidden: Array, inputs: StepInputs, own: Any, kept: Any) -> Array:
        return jnp.stack(kept)[0]


STATES: Report[Any] = Report("states")  # its own
STEERING = Steering()


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    features = Features(
        (*features_of().entries, Feature(PooledRows(), Pooling()), Feature(VectorOption(), STEERING)), Guides()
    )
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config(), features=features)
    runner = Runner(MODEL, programs.config, programs=programs)
    yield Driver(runner)
    runner.close()


@pytest.mark.thorough
def test_rows_with_a_new_feature_run_beside_others_that_notice_nothing(driver: Driver) -> None:
    samplings = [Sampling(max_tokens=5), Sampling(max_tokens=5, priority=1), Sampling(max_tokens=5, priority=2)]
    lives = [driver.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, samplings, strict=True)]
    driver.finish(lives, chunk=2)
    plain = [plain_tokens(MODEL, prompt, 5)[0] for prompt in PROMPTS]
    assert [live.outputs for live in lives[:2]] == plain[:2], "one of them adds a vector of zeros"
    assert lives[2].outputs != plain[2]
    for live in lives:
        driver.remove(live)
    assert {name for name in driver.runner.statistics().programs if "steering" in name}


def test_what_it_reads_inside_the_layers_arrives_with_its_row_alone(driver: Driver) -> None:
    same = [driver.add(PROMPTS[0], Sampling(max_tokens=2, priority=priority)) for priority in (2, 0, 1)]
    for start in (0, len(PROMPTS[0])):  # a prompt, and a token after it
        rows = {row.request_id: STATES.of(row) for row in driver.step([(live, None) for live in same]).rows}
        (steered,), none, (zero,) = (rows[live.request.id] for live in same)
        assert not none
        assert steered[-1] == zero[-1] == start
        if not start:
            np.testing.assert_allclose((steered - zero)[:-1], VECTORS[2], atol=1e-3)
            assert np.abs(zero).max() > 0
    for live in same:
        driver.remove(live)


def test_other_operands_take_the_place_of_its_first_ones_without_compiling(driver: Driver) -> None:
    first = driver.solo(PROMPTS[1], Sampling(max_tokens=4, priority=2)).outputs
    compiled = driver.runner.programs.counts.compilations
    STEERING.operands = np.zeros_like(VECTORS)
    try:
        plain = driver.solo(PROMPTS[1], Sampling(max_tokens=4, priority=2)).outputs
    finally:
        STEERING.operands = VECTORS
    assert plain == plain_tokens(MODEL, PROMPTS[1], 4)[0] != first
    assert driver.runner.programs.counts.compilations == compiled


def test_its_programs_are_a_variant_that_is_compiled_as_needed(driver: Driver) -> None:
    programs = driver.runner.programs
    names = {key.name for key in programs.ledger.entries}
    assert {
        "r2t0+steering",
        "r2t32+steering",
        "r2t32+pooling+steering",
    } <= names and "r2t0+pooling+steering" not in names
    assert not names & {key.name for key in programs.keys} & {"r2t0+steering", "r2t32+steering", "r4t0+steering"}


def test_a_feature_with_hooks_is_in_no_program_made_of_parts() -> None:
    class Loose(Steering):
        inside = False

    with pytest.raises(AssertionError, match="set `inside`"):
        Features((Feature(part=Loose()),), Guides())
