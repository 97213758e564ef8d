"""Guided steps on the device: masks decide exactly what may come, and rows without guides notice nothing.

A step is one program that waits for its masks, or two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from helpers.driving import Driver, Live, plain_tokens, tiny_config, tiny_model
from helpers.fakes import DictStore, extended
from helpers.guides import RuleGuide
from helpers.programs import session_features
from helpers.thorough import by_default
from rekindle import LogitsProcessor, Sampling
from rekindle._src.capabilities.guides.guidance import GUIDED, Guidance
from rekindle._src.execution import device_calls
from rekindle._src.execution.runner import Runner
from rekindle._src.models.base import ALONE
from rekindle._src.programs.programs import Programs
from rekindle.errors import InvalidRequest, RequestFailed

MODEL = tiny_model(seed=3)
CONFIG = tiny_config(max_requests=2)
STORE = DictStore()  # of what both kinds of steps need
LEAST = LogitsProcessor(lambda logits, context: -logits, "least")


def rule(position: int, last: int) -> tuple[int, ...]:
    """Return multiples of 7 at even positions; at odd ones the number after the last token, and two more."""
    return tuple(range(7, 320, 7)) if position % 2 == 0 else (last + 1, 300, 319)


def over_the_store() -> Runner:
    features = session_features(MODEL.config, MODEL.graph, CONFIG, ALONE, processors=[LEAST])
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, CONFIG, features=features, store=STORE)
    return Runner(MODEL, CONFIG, programs=programs)


@pytest.fixture(scope="module", params=by_default([1, 2]), ids=["one program", "two programs"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    made = over_the_store()
    made.programs.lattice.gated = made.programs.lattice.gated and request.param == 1
    if request.param == 1 and not made.programs.lattice.gated:
        made.close()
        pytest.skip("numba is not installed: no program can wait")
    yield made
    made.close()


@pytest.fixture
def one(runner: Runner) -> Runner:
    """A runner whose guided steps are one program."""
    if not runner.programs.lattice.gated:
        pytest.skip("of steps that are one program")
    return runner


@pytest.fixture
def not_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step never seems to have ended when the next one is dispatched."""
    monkeypatch.setattr(device_calls, "_has_ended", lambda output: False)


def add(driver: Driver, prompt: list[int], sampling: Sampling, guide: RuleGuide | None = None) -> Live:
    live = driver.add(prompt, sampling)
    if guide is not None:
        live.request = extended(live.request, Guidance(guide))
    return live


def wanted(prompt: list[int], count: int, *, sign: float = 1.0, bias: dict[int, float] | None = None) -> list[int]:
    """The plain loop's choice among what the rule allows."""

    def choose(logits: np.ndarray, output: list[int]) -> int:
        scores = np.full(320, -np.inf)
        allowed = list(rule(len(output), output[-1] if output else -1))
        scores[allowed] = sign * logits[allowed]
        for token, value in (bias or {}).items():
            scores[token] += value
        return int(np.argmax(scores))

    return plain_tokens(MODEL, prompt, count, choose)[0]


def test_guided_rows_choose_among_what_is_allowed_and_others_are_exact(runner: Runner) -> None:
    driver = Driver(runner)
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    plain = driver.solo(prompts[1], Sampling(max_tokens=14)).outputs
    for prompt in (prompts[0], prompts[2]):
        guided = add(driver, prompt, Sampling(max_tokens=14), RuleGuide(rule))
        free = add(driver, prompts[1], Sampling(max_tokens=14))
        driver.finish([guided, free])
        assert free.outputs == plain
        assert guided.outputs == wanted(prompt, 14)
        assert guided.request.extensions[Guidance].guide.history == guided.outputs  # type: ignore[attr-defined]
        for live in (guided, free):
            driver.remove(live)


def test_programs_without_masks_refuse_a_guided_request() -> None:
    """Programs that were made by hand, without a plan, ran it as if it had no guide."""
    runner = Runner(MODEL, CONFIG)
    try:
        driver = Driver(runner)
        guided = add(driver, [5, 6, 7, 8], Sampling(max_tokens=4), RuleGuide(rule))
        (row,) = runner.fetch(runner.dispatch(driver.plan([(guided, None)]))).rows
        assert isinstance(row.error, InvalidRequest) and row.token_id is None
        assert "its Guidance needs late masks, and these programs have none" in str(row.error)
    finally:
        runner.close()


@pytest.mark.thorough
def test_masks_come_after_processors_and_bias(runner: Runner) -> None:
    driver = Driver(runner)
    prompt = [5, 6, 7, 8]
    processed = add(driver, prompt, Sampling(max_tokens=9, processors=("least",)), RuleGuide(rule))
    biased = add(driver, prompt, Sampling(max_tokens=9, logit_bias={3: 1e9, 319: 90.0}), RuleGuide(rule))
    driver.finish([processed, biased])
    assert processed.outputs == wanted(prompt, 9, sign=-1.0)
    assert biased.outputs == wanted(prompt, 9, bias={319: 90.0}), "a bias never lifts what the mask forbids"
    for live in (processed, biased):
        driver.remove(live)


def test_draws_stay_inside_the_mask(runner: Runner) -> None:
    driver, texts = Driver(runner), set()
    for seeds in ((0, 1), (2, 3)):
        lives = [
            add(driver, [5, 6, 7], Sampling(max_tokens=16, temperature=5.0, seed=seed), RuleGuide(rule))
            for seed in seeds
        ]
        driver.finish(lives)
        for live in lives:
            last = -1
            for position, token in enumerate(live.outputs):
                assert token in rule(position, last)
                last = token
            driver.remove(live)
        texts |= {tuple(live.outputs) for live in lives}
    assert len(texts) > 1


def test_no_token_left_is_an_error_of_its_row_alone(runner: Runner) -> None:
    driver = Driver(runner)
    bias = dict.fromkeys(range(7, 320, 7), float("-inf"))
    stuck = add(driver, [5, 6, 7], Sampling(max_tokens=4, logit_bias=bias), RuleGuide(rule))
    other = add(driver, [5, 6, 7], Sampling(max_tokens=4), RuleGuide(rule))
    result = driver.runner.fetch(driver.runner.dispatch(driver.plan([(stuck, None), (other, None)])))
    by_id = {row.request_id: row for row in result.rows}
    error = by_id[stuck.request.id].error
    assert isinstance(error, RequestFailed) and "logit_bias" in str(error)
    assert by_id[other.request.id].token_id == wanted([5, 6, 7], 1)[0]
    assert GUIDED.of(by_id[other.request.id])


def two_rows(runner: Runner) -> tuple[Driver, list[tuple[Live, None]]]:
    """Return a driver with a guided and a free row that are past their prompts."""
    driver = Driver(runner)
    guided = add(driver, [5, 6, 7], Sampling(max_tokens=9), RuleGuide(rule))
    rows: list[tuple[Live, None]] = [(guided, None), (add(driver, [9, 10, 11], Sampling(max_tokens=9)), None)]
    driver.step(rows)
    return driver, rows


@pytest.mark.usefixtures("not_yet")
def test_a_step_runs_its_model_and_waits_for_its_masks(one: Runner) -> None:
    driver, rows = two_rows(one)
    first = one.dispatch(driver.plan(rows))
    second = one.dispatch(driver.plan(rows))
    assert second.output is not None and second.choice is not None
    np.asarray(first.output.rows)  # type: ignore[union-attr]
    time.sleep(0.1)
    assert not second.output.rows.is_ready()  # type: ignore[attr-defined]
    results = [one.fetch(first), one.fetch(second)]
    assert second.choice is None
    tokens = [[row.token_id for row in result.rows] for result in results]
    assert [pair[0] for pair in tokens] == wanted([5, 6, 7], 3)[1:]
    assert [pair[1] for pair in tokens] == plain_tokens(MODEL, [9, 10, 11], 3)[0][1:]


def test_a_step_that_has_ended_is_read_before_the_next_one_is_dispatched(one: Runner) -> None:
    driver, rows = two_rows(one)
    first = one.dispatch(driver.plan(rows))
    np.asarray(first.output.rows)  # type: ignore[union-attr]
    second = one.dispatch(driver.plan(rows))
    assert first.results is not None and second.choice is None, "nothing waits"
    results = [one.fetch(first), one.fetch(second)]
    assert [result.rows[0].token_id for result in results] == wanted([5, 6, 7], 3)[1:]


def test_an_error_of_reading_early_is_of_the_step_that_is_read(one: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, rows = two_rows(one)
    first = one.dispatch(driver.plan(rows))
    np.asarray(first.output.rows)  # type: ignore[union-attr]
    with monkeypatch.context() as broken:
        broken.setattr("rekindle._src.execution.runner.row_results", lambda *parts: 1 / 0)
        second = one.dispatch(driver.plan(rows))
    with pytest.raises(ZeroDivisionError):
        one.fetch(first)
    assert [row.token_id is not None for row in one.fetch(second).rows] == [True, True]


@pytest.mark.usefixtures("not_yet")
@pytest.mark.parametrize("end", by_default(["close", "reset", "recover"]))
def test_nothing_waits_for_a_step_whose_masks_nobody_will_fill(end: str) -> None:
    runner = over_the_store()
    if not runner.programs.lattice.gated:
        runner.close()
        pytest.skip("numba is not installed: no program can wait")
    driver, rows = two_rows(runner)
    runner.dispatch(driver.plan(rows))
    assert runner.dispatch(driver.plan(rows)).choice is not None
    start = time.perf_counter()
    getattr(runner, end)()
    runner.close()
    assert time.perf_counter() - start < 55, "a program gives up after a minute"


@pytest.mark.usefixtures("not_yet")
def test_a_step_that_went_on_without_its_masks_fails(one: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, rows = two_rows(one)
    first = one.dispatch(driver.plan(rows))
    second = one.dispatch(driver.plan(rows))
    one.fetch(first)
    assert second.operand is not None
    monkeypatch.setattr(type(second.operand), "missed", True)
    with pytest.raises(RuntimeError, match="did not get its masks in time"):
        one.fetch(second)


@pytest.mark.usefixtures("not_yet")
def test_a_step_that_waits_for_a_failed_one_still_runs(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(runner)
    guided = add(driver, [5, 6, 7], Sampling(max_tokens=6), RuleGuide(rule))
    free = add(driver, [9, 10, 11], Sampling(max_tokens=6))
    driver.step([(guided, None), (free, None)])
    first = runner.dispatch(driver.plan([(guided, None), (free, None)]))
    second = runner.dispatch(driver.plan([(guided, None), (free, None)]))
    assert second.choice is not None, "its masks need tokens of the step before"
    with monkeypatch.context() as broken:
        broken.setattr("rekindle._src.execution.runner.row_results", lambda *parts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.fetch(first)
    result = runner.fetch(second)
    assert [row.token_id is not None for row in result.rows] == [True, True]
