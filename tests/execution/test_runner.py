"""The runner against the plain loop: mixed steps, every bucket, options, slots that are used again, pages that move."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import driving, plain_sampling
from helpers.counting import make_scoring_programs
from helpers.driving import CONTEXT, Driver, plain_logits, plain_tokens, tiny_config, tiny_model
from helpers.fakes import DictTier
from helpers.programs import session_features
from rekindle._src.core.records import PageMove, Row, StepPlan
from rekindle._src.core.sampling import Sampling
from rekindle._src.execution.runner import Runner
from rekindle._src.models.base import ALONE, LoadedModel
from rekindle._src.programs.kv_layout import payload_layout
from rekindle._src.programs.packing import Constants, Upload
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.user_functions import LogitsProcessor
from rekindle.errors import ConfigError, InvalidRequest, SessionClosed, StoreError
from workshop import reference

MODEL = tiny_model()
SEVENS = LogitsProcessor(lambda logits, context: logits.at[:, 7].add(1e6), "sevens")
NEXT = LogitsProcessor(
    lambda logits, context: logits + 1e6 * (jnp.arange(logits.shape[1]) == context.last_token[:, None] + 1), "next"
)


@pytest.fixture(scope="module")
def programs() -> Programs:
    features = session_features(MODEL.config, MODEL.graph, tiny_config(), ALONE, processors=(SEVENS, NEXT))
    return Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config(), features=features)


@pytest.fixture
def driver(programs: Programs) -> Iterator[Driver]:
    runner = Runner(MODEL, programs.config, programs=programs, host_tier=DictTier())
    yield Driver(runner)
    runner.close()


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 320, length).tolist()


def expected(prompt: list[int], count: int, model: LoadedModel = MODEL) -> list[int]:
    return plain_tokens(model, prompt, count)[0]


def plain_logprobs(tokens: list[int]) -> np.ndarray:
    """Exact log-probabilities after each token."""
    logits, _ = plain_logits(MODEL, tokens, reference.empty_cache(MODEL, CONTEXT))
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))


@pytest.mark.parametrize("chunk", [1, 3, 8, 32])
def test_chunked_prefill_and_decode_equal_the_plain_loop(driver: Driver, chunk: int) -> None:
    prompt = prompt_of(1, 21)
    assert driver.solo(prompt, Sampling(max_tokens=9), chunk=chunk).outputs == expected(prompt, 9)


def test_mixed_steps_equal_the_plain_loop_for_every_request(driver: Driver) -> None:
    prompts = [prompt_of(seed, length) for seed, length in ((2, 5), (3, 17), (4, 30))]
    lives = [driver.add(prompt, Sampling(max_tokens=8)) for prompt in prompts]
    driver.step([(lives[0], None)])
    driver.step([(lives[0], None), (lives[1], 9)])
    driver.step([(lives[0], None), (lives[1], 8), (lives[2], 11)])
    driver.finish(lives, chunk=6)
    assert [live.outputs for live in lives] == [expected(prompt, 8) for prompt in prompts]


def test_all_slots_at_once_and_slots_used_again(driver: Driver) -> None:
    for group in range(3):
        prompts = [prompt_of(10 * group + index, 4 + 3 * index) for index in range(4)]
        lives = [driver.add(prompt, Sampling(max_tokens=6)) for prompt in prompts]
        driver.finish(lives, chunk=5)
        assert [live.outputs for live in lives] == [expected(prompt, 6) for prompt in prompts]
        for live in lives:
            driver.remove(live)


def test_the_largest_context_is_reached(driver: Driver) -> None:
    prompt = prompt_of(5, 50)
    assert driver.solo(prompt, Sampling(max_tokens=14), chunk=32).outputs == expected(prompt, 14)


def test_nothing_is_traced_or_compiled_after_warm_up_whatever_the_options(driver: Driver, programs: Programs) -> None:
    driver.runner.warm()
    make_scoring_programs(programs)
    before = programs.counts.traces, programs.counts.compilations
    rng = np.random.default_rng(0)
    for _ in range(12):
        lives = []
        for _ in range(int(rng.integers(1, 5))):
            options = {
                "max_tokens": int(rng.integers(1, 6)), "temperature": float(rng.choice([0.0, 1.0])),
                "top_k": int(rng.choice([0, 5, 200])), "top_p": float(rng.choice([1.0, 0.5])),
                "min_p": float(rng.choice([0.0, 0.1])), "repetition_penalty": float(rng.choice([1.0, 1.2])),
                "presence_penalty": float(rng.choice([0.0, 1.0])), "logit_bias": {4: 1.0} if rng.random() < 0.3 else {},
                "logprobs": int(rng.integers(0, 21)) if rng.random() < 0.5 else None,
                "prompt_logprobs": int(rng.integers(0, 21)) if rng.random() < 0.5 else None,
                "processors": ("sevens",) if rng.random() < 0.2 else (), "seed": int(rng.integers(0, 2**62)),
            }  # fmt: skip
            lives.append(driver.add(prompt_of(int(rng.integers(99)), int(rng.integers(1, 40))), Sampling(**options)))
        driver.finish(lives, chunk=int(rng.integers(1, 9)))
        for live in lives:
            driver.remove(live)
    moves = (PageMove(1, b"a"), PageMove(2, b"b"))
    driver.runner.fetch(driver.runner.dispatch(StepPlan(0, (), (), offload=moves)))
    driver.runner.fetch(driver.runner.dispatch(StepPlan(0, (), (), restore=moves)))
    assert (programs.counts.traces, programs.counts.compilations) == before
    assert set(driver.runner.statistics().programs) >= {"r2t0", "r4t0", "r2t32"}


OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {8: 3.0}, "repetition_penalty": 0.8, "min_tokens": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_seed_gives_the_same_tokens_alone_among_others_and_after_a_preemption(
    driver: Driver, options: dict[str, float]
) -> None:
    sampling, prompt = Sampling(**{"max_tokens": 12, "seed": 2**62 + 17, **options}), prompt_of(30, 11)
    alone = driver.solo(prompt, sampling).outputs
    others = [driver.add(prompt_of(40 + i, 6), Sampling(max_tokens=9, temperature=1.0, seed=i)) for i in range(3)]
    driver.step([(live, None) for live in others])
    crowded = driver.add(prompt, sampling)
    driver.finish([*others, crowded], chunk=4)
    assert crowded.outputs == alone
    for live in (*others, crowded):
        driver.remove(live)

    preempted = driver.add(prompt, sampling, slot=driver.free_slots.pop(0))
    for _ in range(5):
        driver.step([(preempted, 6)])
    driver.preempt(preempted)
    intruder = driver.add(prompt_of(50, 9), Sampling(max_tokens=3, repetition_penalty=2.0), slot=preempted.slot)
    driver.finish([intruder])
    preempted.slot = driver.free_slots.pop()
    driver.finish([preempted], chunk=5)
    assert preempted.outputs == alone


def plain(prompt: list[int], sampling: Sampling, ends: tuple[int, ...] = ()) -> list[int]:
    """Greedy with penalties, step by step in numpy."""

    def choose(logits: np.ndarray, output: list[int]) -> int:
        return int(np.argmax(plain_sampling.shaped(logits, sampling, prompt, output, ends)))

    return plain_tokens(MODEL, prompt, sampling.max_tokens, choose)[0]


@pytest.mark.parametrize("chunk", [3, 32])
def test_penalties_count_prompt_and_output_over_chunks_and_resumption(driver: Driver, chunk: int) -> None:
    sampling = Sampling(
        max_tokens=8, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7, logit_bias={9: 2.0}
    )
    prompt = prompt_of(60, 10)
    live = driver.add(prompt, sampling)
    for _ in range(6):
        driver.step([(live, chunk)])
    driver.preempt(live)
    driver.finish([live], chunk=chunk)
    assert live.outputs == plain(prompt, sampling)


def test_min_tokens_keeps_the_end_out_until_then(driver: Driver) -> None:
    prompt = prompt_of(61, 7)
    free = expected(prompt, 6)
    sampling = Sampling(max_tokens=6, min_tokens=3)
    barred = driver.solo(prompt, sampling, ends=[free[0], free[4]]).outputs
    assert barred == plain(prompt, sampling, (free[0], free[4]))
    assert free[0] not in barred[:3]


def test_logprobs_and_prompt_logprobs_over_chunk_borders(driver: Driver) -> None:
    prompt = prompt_of(62, 20)
    live = driver.solo(prompt, Sampling(max_tokens=4, logprobs=3, prompt_logprobs=2, repetition_penalty=1.5), chunk=6)
    tokens = [*prompt, *live.outputs]
    exact = plain_logprobs(tokens)
    assert [entry.token_id for entry in live.prompt_logprobs] == prompt[1:]
    for position, entry in enumerate(live.prompt_logprobs):
        assert entry.logprob == pytest.approx(exact[position, entry.token_id], abs=1e-4)
        assert entry.top_logprobs == pytest.approx(np.sort(exact[position])[::-1][:2], abs=1e-4)
    for position, entry in enumerate(live.logprobs, start=len(prompt) - 1):
        assert entry is not None
        assert entry.token_id == tokens[position + 1]
        assert entry.logprob == pytest.approx(exact[position, entry.token_id], abs=1e-4)
        assert entry.top_ids == tuple(np.argsort(-exact[position])[:3].tolist())


def test_nothing_is_reported_that_was_not_asked_for(driver: Driver) -> None:
    asks = driver.add(prompt_of(63, 6), Sampling(max_tokens=3, logprobs=0, prompt_logprobs=0))
    silent = driver.add(prompt_of(64, 6), Sampling(max_tokens=3))
    driver.finish([asks, silent])
    assert all(entry is not None and entry.top_ids == () for entry in asks.logprobs)
    assert len(asks.prompt_logprobs) == 5
    assert silent.logprobs == [None] * 3
    assert silent.prompt_logprobs == []


def test_a_processor_touches_only_the_rows_that_name_it(driver: Driver) -> None:
    prompt = prompt_of(65, 6)
    sevens = driver.add(prompt, Sampling(max_tokens=4, processors=("sevens",)))
    following = driver.add([5, 20], Sampling(max_tokens=4, processors=("next",)))
    without = driver.add(prompt, Sampling(max_tokens=4))
    driver.finish([sevens, following, without])
    assert sevens.outputs == [7] * 4
    assert following.outputs == [21, 22, 23, 24]
    assert without.outputs == expected(prompt, 4)


def test_pages_leave_and_come_back_elsewhere_with_the_same_content(driver: Driver) -> None:
    prompt = prompt_of(66, 40)
    live = driver.add(prompt, Sampling(max_tokens=6))
    driver.step([(live, 32)])
    driver.step([(live, 8)])
    moves = tuple(PageMove(int(page), bytes([index])) for index, page in enumerate(live.pages[:5]))
    elsewhere = [driver.free_pages.pop() for _ in moves]
    runner = driver.runner
    runner.fetch(runner.dispatch(StepPlan(0, (), (), offload=moves)))
    spoiler = driver.add(prompt_of(67, 40), Sampling(max_tokens=1))
    spoiler.pages[:5] = live.pages[:5]
    driver.finish([spoiler], chunk=32)
    back = tuple(PageMove(page, move.digest) for page, move in zip(elsewhere, moves, strict=True))
    runner.fetch(runner.dispatch(StepPlan(0, (), (), restore=back)))
    live.pages[:5] = elsewhere
    driver.finish([live])
    assert live.outputs == expected(prompt, 6)
    assert (runner.statistics().pages_out, runner.statistics().pages_in) == (5, 5)


def test_offload_reads_before_the_same_step_restores_and_writes(driver: Driver) -> None:
    runner, tier = driver.runner, driver.runner.host_tier
    assert tier is not None
    live = driver.add(prompt_of(68, 12), Sampling(max_tokens=2))
    driver.finish([live])
    first, second = (int(page) for page in live.pages)
    runner.fetch(runner.dispatch(StepPlan(0, (), (), offload=(PageMove(first, b"1"),))))
    swap = StepPlan(0, (), (), offload=(PageMove(second, b"2"),), restore=(PageMove(second, b"1"),))
    runner.fetch(runner.dispatch(swap))
    runner.fetch(runner.dispatch(StepPlan(0, (), (), offload=(PageMove(second, b"3"),))))
    assert np.array_equal(tier.get(b"1")[0], tier.get(b"3")[0])
    assert not np.array_equal(tier.get(b"1")[0], tier.get(b"2")[0])


def test_a_page_that_left_the_tier_is_reported_and_the_step_goes_on_without_it(driver: Driver) -> None:
    gone = PageMove(3, b"gone")
    result = driver.runner.fetch(driver.runner.dispatch(StepPlan(0, (), (), restore=(gone,))))
    assert [lost.move for lost in result.lost] == [gone]
    with pytest.raises(StoreError, match="left the host tier"):
        raise result.lost[0].error
    prompt = prompt_of(69, 5)
    assert driver.solo(prompt, Sampling(max_tokens=3)).outputs == expected(prompt, 3)


def test_a_page_of_another_layout_is_lost_and_those_beside_it_are_restored(driver: Driver) -> None:
    runner, tier = driver.runner, driver.runner.host_tier
    assert tier is not None
    live = driver.add(prompt_of(77, 20), Sampling(max_tokens=4))
    driver.finish([live])
    pages = [int(page) for page in live.pages[:2]]
    runner.fetch(runner.dispatch(StepPlan(0, (), (), offload=(PageMove(pages[0], b"good"),))))
    good = tier.get(b"good")
    assert [(leaf.shape, leaf.dtype) for leaf in good] == payload_layout(runner.programs.recipes.kv)
    for wrong in (
        tuple(leaf[..., :2] for leaf in good),
        tuple(leaf.astype(np.float16) for leaf in good),
        (*good, good[0]),
    ):
        tier.put(b"wrong", wrong)
        moves = PageMove(pages[0], b"wrong"), PageMove(pages[1], b"good")
        result = runner.fetch(runner.dispatch(StepPlan(0, (), (), restore=moves)))
        assert [lost.move for lost in result.lost] == [moves[0]]
        assert "where this session's pages have" in str(result.lost[0].error)
        runner.fetch(runner.dispatch(StepPlan(0, (), (), offload=(PageMove(pages[1], b"back"),))))
        assert np.array_equal(tier.get(b"back")[0], good[0])


def test_a_request_that_can_not_be_prepared_is_left_out_and_its_neighbours_are_exact(driver: Driver) -> None:
    """Forty end tokens with min_tokens: decode rows and prefills around the offender go on, its slot is used again."""
    prompts = [prompt_of(90, 9), prompt_of(91, 12), prompt_of(92, 14)]
    lives = [driver.add(prompts[0], Sampling(max_tokens=6))]
    driver.step([(lives[0], 9)])
    offender = driver.add(prompts[1], Sampling(max_tokens=6, min_tokens=2), ends=range(3, 43))
    lives.append(driver.add(prompts[2], Sampling(max_tokens=6)))
    result = driver.step([(lives[0], None), (offender, 12), (lives[1], 9)])
    failed = result.rows[1]
    assert failed.request_id == offender.request.id
    assert isinstance(failed.error, InvalidRequest) and "40 end tokens" in str(failed.error)
    assert [row.error for row in result.rows if row is not failed] == [None, None]
    assert result.valid == (True, False, True)
    again = driver.runner.fetch(driver.runner.dispatch(driver.plan([(offender, None)])))  # planned before it was known
    assert isinstance(again.rows[0].error, InvalidRequest)
    driver.remove(offender)
    lives.append(driver.add(prompts[1], Sampling(max_tokens=6)))
    driver.finish(lives)
    assert [live.outputs for live in lives] == [expected(prompts[index], 6) for index in (0, 2, 1)]


@pytest.mark.parametrize("alone", [False, True])
def test_a_row_that_can_not_be_packed_is_left_out_whatever_the_reason(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    prompts = [prompt_of(80, 9), prompt_of(81, 12), prompt_of(82, 7)]
    first, offender, last = [driver.add(prompt, Sampling(max_tokens=5)) for prompt in prompts]
    columns = Upload._columns

    def broken(upload: Upload, row: Row, constants: Constants) -> tuple[int, int, int, int]:
        if row.request is offender.request:
            raise OverflowError("a defect")
        return columns(upload, row, constants)

    monkeypatch.setattr(Upload, "_columns", broken)
    parts = [(offender, 12)] if alone else [(first, 9), (offender, 12), (last, 7)]
    result = driver.runner.fetch(driver.runner.dispatch(driver.plan(parts)))
    assert [type(row.error) for row in result.rows if row.request_id == offender.request.id] == [OverflowError]
    driver.commit(result, [first, offender, last])
    monkeypatch.undo()
    driver.remove(offender)
    again = driver.add(prompts[1], Sampling(max_tokens=5))
    driver.finish([first, last, again])
    assert [live.outputs for live in (first, last, again)] == [expected(prompts[i], 5) for i in (0, 2, 1)]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e300},
        {"temperature": 1e-300},
        {"temperature": 1e300, "top_p": 0.5, "top_k": 5},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"temperature": 1.0, "top_k": 2**70, "min_p": 1e-300},
    ],
)
def test_options_beyond_float32_hurt_no_neighbour_where_warnings_are_errors(
    driver: Driver, options: dict[str, Any]
) -> None:
    prompt = prompt_of(95, 9)
    extreme = driver.add(prompt_of(96, 8), Sampling(max_tokens=4, seed=1, **options))
    live = driver.add(prompt, Sampling(max_tokens=4))
    with warnings.catch_warnings(), np.errstate(all="warn", under="ignore"):
        warnings.simplefilter("error")
        driver.finish([extreme, live])
    assert live.outputs == expected(prompt, 4)
    assert len(extreme.outputs) == 4 and max(extreme.outputs) < MODEL.config.vocab_size


def test_end_ids_that_no_vocabulary_has_are_ignored(driver: Driver) -> None:
    prompt = prompt_of(97, 9)
    live = driver.add(prompt, Sampling(max_tokens=4, min_tokens=2), ends=(2**70, -1, 2**31))
    driver.finish([live])
    assert live.outputs == expected(prompt, 4)


def test_swapped_weights_are_used_without_compiling(driver: Driver, programs: Programs) -> None:
    other, prompt = tiny_model(seed=9), prompt_of(70, 8)
    assert driver.solo(prompt, Sampling(max_tokens=5)).outputs == expected(prompt, 5)
    before = programs.counts.compilations
    driver.runner.swap_weights(other.leaves)
    assert driver.solo(prompt, Sampling(max_tokens=5)).outputs == expected(prompt, 5, other)
    assert programs.counts.compilations == before
    with pytest.raises(ConfigError, match="Open a new session"):
        driver.runner.swap_weights([leaf[:1] for leaf in other.leaves])


def test_reset_forgets_the_pages_and_goes_on(driver: Driver) -> None:
    prompt = prompt_of(71, 8)
    driver.solo(prompt, Sampling(max_tokens=5))
    for leaf in jax.tree.leaves(driver.runner.calls.kv):
        leaf.delete()  # as a failed step leaves them
    with pytest.raises(Exception, match=r"deleted|donated"):
        driver.solo(prompt, Sampling(max_tokens=5))
    driver.runner.reset()
    assert driver.solo(prompt, Sampling(max_tokens=5)).outputs == expected(prompt, 5)


def test_close_gives_every_buffer_back_and_is_idempotent(programs: Programs) -> None:
    gc.collect()
    before = len(jax.live_arrays())
    runner = Runner(MODEL, programs.config, programs=programs)
    driver = Driver(runner)
    driver.solo(prompt_of(72, 8), Sampling(max_tokens=5, repetition_penalty=1.1))
    left = runner.dispatch(driver.plan([(driver.add([4, 5], Sampling()), None)]))
    runner.close()
    runner.close()
    del left
    gc.collect()
    assert len(jax.live_arrays()) == before
    with pytest.raises(SessionClosed):
        runner.dispatch(StepPlan(0, (), ()))


def test_uploads_are_not_shared_between_steps_in_flight(driver: Driver) -> None:
    live = driver.add(prompt_of(73, 5), Sampling(max_tokens=30))
    flights = [driver.runner.dispatch(driver.plan([(live, None)])) for _ in range(3)]
    uploads = {id(flight.upload) for flight in flights}
    assert len(uploads) == 3
    for flight in flights:
        driver.commit(driver.runner.fetch(flight), [live])
    again = driver.runner.dispatch(driver.plan([(live, None)]))
    assert id(again.upload) in uploads
    driver.commit(driver.runner.fetch(again), [live])
    assert live.outputs == expected(prompt_of(73, 5), 4)


def test_the_smallest_ready_program_serves_while_the_right_one_is_missing() -> None:
    fresh = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config())
    (large,) = (bucket for bucket in fresh.lattice.ahead if bucket.name == "r4t32")
    fresh.get(large)
    runner = Runner(MODEL, fresh.config, programs=fresh, prefer_ready=True)
    prompt = prompt_of(74, 6)
    assert Driver(runner).solo(prompt, Sampling(max_tokens=4)).outputs == expected(prompt, 4)
    assert runner.statistics().programs == {"r4t32": 4}
    assert {record.name for record in fresh.manifest()} == {"r4t32", "memory"}
    runner.close()


def test_times_are_reported(driver: Driver) -> None:
    start = time.perf_counter()
    live = driver.add(prompt_of(75, 6), Sampling(max_tokens=2))
    result = driver.step([(live, None)])
    assert result.program == "r2t32"
    assert 0 < result.host_seconds < time.perf_counter() - start
    assert 0 < result.device_seconds < time.perf_counter() - start
    assert driving.TINY["vocab_size"] == MODEL.config.vocab_size
