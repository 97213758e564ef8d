"""Page tables that stay on the device, as on accelerators, and transfers of many pages: the tokens are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import tiered
from helpers.driving import Driver, plain_tokens, tiny_config, tiny_model
from helpers.fakes import DictStore, DictTier, extended
from helpers.guides import RuleGuide
from rekindle import Sampling
from rekindle._src.capabilities.guides.guidance import Guidance
from rekindle._src.capabilities.guides.step import Guides
from rekindle._src.core.records import PageMove, StepPlan
from rekindle._src.execution.runner import Runner
from rekindle._src.programs import lattice as module
from rekindle._src.programs import packing
from rekindle._src.programs.buckets import GATHER, SCATTER, TABLES, Helper
from rekindle._src.programs.features import features_of
from rekindle._src.programs.layered import LayeredForward, LayeredStep
from rekindle._src.programs.ledger import Form
from rekindle._src.programs.programs import Programs

MODEL = tiny_model()
SIZES = 8, 4
STORE = DictStore()


@pytest.fixture(autouse=True)
def as_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "tables_stay", lambda parts: True)
    monkeypatch.setattr(module, "moved_pages", lambda parts, kv: SIZES)
    monkeypatch.setattr(Programs, "moved_by_host", lambda programs, keys: False)


@pytest.fixture
def driver(as_on_accelerators: None) -> Iterator[Driver]:
    config = tiny_config(max_model_len=256, device_pages=100, max_requests=2)
    programs = Programs(
        MODEL.config, MODEL.graph, MODEL.leaves, config, features=features_of(late=Guides()), store=STORE
    )
    runner = Runner(MODEL, config, host_tier=DictTier(), programs=programs)
    yield Driver(runner)
    runner.close()


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 320, length).tolist()


def expected(prompt: list[int], count: int) -> list[int]:
    return plain_tokens(MODEL, prompt, count, context=256)[0]


def test_mixed_steps_and_slots_used_again(driver: Driver) -> None:
    for group in range(3):
        prompts = [prompt_of(10 * group + index, 4 + 27 * index) for index in range(2)]
        lives = [driver.add(prompt, Sampling(max_tokens=9)) for prompt in prompts]
        driver.finish(lives, chunk=7)
        assert [live.outputs for live in lives] == [expected(prompt, 9) for prompt in prompts]
        for live in lives:
            driver.remove(live)


def test_parts_change_the_tables_that_whole_programs_change(as_on_accelerators: None) -> None:
    """A GPU's session begins with steps made of parts, and goes on in whole ones: both find the other's tables."""
    config = tiny_config(max_model_len=256, device_pages=100, max_requests=2)
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, config)
    programs.settle_for(Form.PARTS)
    runner = Runner(MODEL, config, host_tier=DictTier(), programs=programs)
    driver = Driver(runner)
    try:
        prompts = [prompt_of(index, 4 + 27 * index) for index in range(2)]
        lives = [driver.add(prompt, Sampling(max_tokens=20)) for prompt in prompts]
        for live in lives:
            while live.computed < len(live.request.token_ids):
                driver.step([(live, 7)])
        for _ in range(3):
            driver.step([(live, None) for live in lives])
        assert any(isinstance(program, LayeredStep) for program in programs.ledger.ready.values())
        programs.replace_parts()
        assert not any(isinstance(program, LayeredStep) for program in programs.ledger.ready.values())
        driver.finish(lives)
        assert [live.outputs for live in lives] == [expected(prompt, 20) for prompt in prompts]
    finally:
        runner.close()


@pytest.mark.slow
def test_guided_rows_in_parts_find_their_tables(as_on_accelerators: None) -> None:
    """The first half of their steps returns the tables, which the steps after it change further."""
    config = tiny_config(max_model_len=256, device_pages=100, max_requests=2)
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, config, features=features_of(late=Guides()))
    programs.settle_for(Form.PARTS)
    runner = Runner(MODEL, config, host_tier=DictTier(), programs=programs)
    driver = Driver(runner)
    try:
        live = driver.add(prompt_of(20, 33), Sampling(max_tokens=40))
        live.request = extended(live.request, Guidance(RuleGuide(lambda position, last: range(7, 320, 7))))
        driver.finish([live], chunk=8)
        assert any(isinstance(program, LayeredForward) for program in programs.ledger.ready.values())

        def choose(logits: np.ndarray, output: list[int]) -> int:
            return 7 * (1 + int(np.argmax(logits[7::7])))

        assert live.outputs == plain_tokens(MODEL, prompt_of(20, 33), 40, choose, context=256)[0]
    finally:
        runner.close()


@pytest.mark.thorough
def test_a_prompt_with_more_pages_than_a_step_can_bring(driver: Driver) -> None:
    programs = driver.runner.programs
    assert not programs.ready(TABLES)
    prompt = prompt_of(3, 200)
    live = driver.add(prompt, Sampling(max_tokens=5))
    own, pages = driver.row, live.pages
    # As the scheduler does, which takes all pages of a prompt at once.
    driver.row = lambda live, chunk=None: own(live, chunk)._replace(pages=pages)  # type: ignore[method-assign]
    driver.finish([live], chunk=16)
    assert live.outputs == expected(prompt, 5)
    assert programs.ready(TABLES)


@pytest.mark.slow
def test_guided_rows_beside_others(driver: Driver) -> None:
    prompts = [prompt_of(20, 6), prompt_of(21, 9)]
    guided, free = (driver.add(prompt, Sampling(max_tokens=12)) for prompt in prompts)
    guided.request = extended(guided.request, Guidance(RuleGuide(lambda position, last: range(7, 320, 7))))
    driver.finish([guided, free], chunk=4)
    assert free.outputs == expected(prompts[1], 12)
    assert all(token % 7 == 0 for token in guided.outputs)

    def choose(logits: np.ndarray, output: list[int]) -> int:
        return 7 * (1 + int(np.argmax(logits[7::7])))

    assert guided.outputs == plain_tokens(MODEL, prompts[0], 12, choose, context=256)[0]


def test_after_a_step_that_failed_tables_are_sent_again(driver: Driver) -> None:
    prompt = prompt_of(30, 10)
    live = driver.add(prompt, Sampling(max_tokens=6))
    driver.step([(live, 10)])
    calls: Any = driver.runner.calls
    step, failed = calls.step, []

    def fail(*args: Any) -> Any:
        calls.step = step

        def program(*args: Any) -> Any:
            raise RuntimeError("out of luck")

        failed.append(True)
        return step(args[0], program, *args[2:])

    calls.step = fail
    saved = live.computed, live.planned
    with pytest.raises(RuntimeError, match="luck"):
        driver.step([(live, None)])
    assert failed and not driver.runner.recover()
    live.computed, live.planned = saved
    driver.finish([live])
    assert live.outputs == expected(prompt, 6)
    # New pages and tables: everything is computed again.
    driver.runner.reset()
    live.computed, live.planned, live.fresh, live.outputs = 0, 0, True, []
    driver.finish([live], chunk=5)
    assert live.outputs == expected(prompt, 6)


@pytest.mark.thorough
def test_pages_move_in_transfers_of_many_and_of_few(driver: Driver) -> None:
    prompt = prompt_of(40, 120)
    live = driver.add(prompt, Sampling(max_tokens=6))
    driver.step([(live, 32)])
    driver.step([(live, 32)])
    driver.step([(live, 32)])
    moves = tuple(PageMove(int(page), bytes([index])) for index, page in enumerate(live.pages[:15]))
    runner, programs = driver.runner, driver.runner.programs
    runner.fetch(runner.dispatch(StepPlan(0, (), (), offload=moves)))
    kept = runner.read_pages([move.page for move in moves])
    # To other places, in another order, and the sequence goes on there.
    places = [driver.free_pages.pop() for _ in moves]
    restore = tuple(PageMove(page, move.digest) for page, move in zip(places, moves, strict=True))
    runner.fetch(runner.dispatch(StepPlan(0, (), (), restore=restore[::-1])))
    for one, other in zip(kept, runner.read_pages(places), strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left, right)
    live.pages = np.r_[np.array(places, np.int32), live.pages[15:]]
    driver.finish([live], chunk=32)
    assert live.outputs == expected(prompt, 6)
    for key in (GATHER, SCATTER, Helper("gather", 8), Helper("scatter", 8)):
        assert programs.ready(key), key.name
    assert runner.statistics().pages_out == runner.statistics().pages_in == 15


@pytest.mark.thorough
def test_sessions_over_tiers_give_what_the_plain_loop_gives(tmp_path: Path) -> None:
    with tiered.opened(tmp_path) as session:
        for index in (0, 1, 2, 3, 0, 2, 1, 3, 0):
            tiered.ask(session, index)
        stats = session.stats()
        assert stats.pages_out and stats.pages_in, "no page left the device and came back"


def test_programs_of_few_pages_keep_their_names(as_on_accelerators: None) -> None:
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config())
    names = [key.name for key in programs.keys if isinstance(key, Helper)]
    assert names == ["memory", "admit", "tables", "gather", "gather8", "scatter", "scatter8"]
