"""A packed plan, read back on the device, says what the plan said; padding points at scratch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle._src.core.records import Request, Row, StepPlan
from rekindle._src.core.sampling import Sampling
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.features import features_of
from rekindle._src.programs.logprobs import PromptLogprobsOption
from rekindle._src.programs.packing import Constants, Layout, Upload, unpack
from rekindle._src.programs.row_option import FIRST_PROCESSOR, RowFlag, RowOption
from rekindle._src.programs.sampling import ShapingOption
from rekindle._src.programs.step_part import StepInputs
from rekindle._src.programs.user_functions import LogitsProcessor

PAGE, SLOTS, WIDTH = 8, 8, 4
FEATURES = features_of([LogitsProcessor(lambda logits, context: logits, name) for name in ("mine", "yours")])
LAYOUT = Layout.of(Bucket(4, 32), max_requests=SLOTS, width=WIDTH, features=FEATURES)


def row(slot: int, start: int, tokens: list[int] | None, sampling: Sampling | None = None, **changes: object) -> Row:
    request = Request(f"r{slot}", np.arange(100, 130, dtype=np.int32), sampling or Sampling())
    values = {
        "request": request, "epoch": 0, "slot": slot, "start": start, "length": len(tokens) if tokens else 1,
        "pages": np.array([slot * 10 + 1, slot * 10 + 2, slot * 10 + 3], np.int32), "samples": True,
        "token_ids": None if tokens is None else np.array(tokens, np.int32), **changes,
    }  # fmt: skip
    return Row(**values)  # type: ignore[arg-type]


unpacked = jax.jit(functools.partial(unpack, LAYOUT, PAGE))


def inputs_of(upload: Upload, plan: StepPlan) -> StepInputs:
    constants = Constants(SLOTS, FEATURES)
    for each in plan.rows:
        constants.put(each)
    upload.pack(plan, constants)
    last_token = jnp.arange(1000, 1000 + SLOTS + 1, dtype=jnp.int32)
    return unpacked(jnp.array(upload.ints), jnp.array(upload.floats), last_token)


def own(step: StepInputs, kind: type[RowOption]) -> Any:
    """The inputs of a feature."""
    return next(own for option, own in zip(FEATURES.options, step.own, strict=True) if isinstance(option, kind))


def test_a_mixed_step_is_read_back_and_padding_goes_to_scratch() -> None:
    upload = Upload(LAYOUT)
    full = StepPlan(
        0,
        tuple(row(slot, 20, None) for slot in range(4)),
        tuple(row(slot, 0, list(range(8)), Sampling(prompt_logprobs=1)) for slot in range(4, 8)),
    )
    inputs_of(upload, full)  # what the buffer held before must not shine through
    plan = StepPlan(1, (row(3, 17, None), row(1, 9, [77])), (row(5, 6, [50, 51, 52]), row(0, 0, [60])))
    step = inputs_of(upload, plan)
    assert step.tokens.tolist() == [1003, 77, 0, 0, 50, 51, 52, 60] + [0] * 28
    assert step.positions.tolist() == [17, 9, 0, 0, 6, 7, 8, 0] + [0] * 28
    assert step.page_ids.tolist() == [33, 12, 0, 0, 51, 51, 52, 1] + [0] * 28
    assert step.offsets.tolist() == [1, 1, 0, 0, 6, 7, 0, 0] + [0] * 28
    assert step.slots.tolist() == [3, 1, 8, 8, 5, 0, 8, 8]
    assert step.lengths.tolist() == [18, 10, 0, 0, 9, 1, 0, 0]
    assert step.cu_lengths.tolist() == [0, 3, 4, 4, 4]
    assert int(step.num_prefills) == 2
    assert step.last.tolist()[:6] == [0, 1, 2, 3, 6, 7]
    assert own(step, PromptLogprobsOption).tolist() == [-1] * 32
    assert step.choice.position.tolist() == [18, 10, 0, 0, 9, 1, 0, 0]
    assert step.flag(RowFlag.SAMPLES).tolist() == [True, True, False, False, True, True, False, False]
    assert int(step.any_flags) == RowFlag.SAMPLES | RowFlag.CHOOSES


def test_options_and_seeds_arrive_and_empty_rows_are_neutral() -> None:
    sampling = Sampling(
        seed=2**63 - 2, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, repetition_penalty=1.5, presence_penalty=-1,
        frequency_penalty=0.75, logit_bias={3: 1.0}, logprobs=2, min_tokens=5, processors=("yours",), max_tokens=9,
    )  # fmt: skip
    step = inputs_of(Upload(LAYOUT), StepPlan(0, (row(2, 4, None, sampling, generated=4),), ()))
    choice, shaping = step.choice, own(step, ShapingOption)
    assert np.asarray(choice.seed[0]).tolist() == [2**31 - 1, 2**32 - 2]
    assert [float(x[0]) for x in (choice.temperature, choice.top_p, choice.min_p)] == [0.5, 0.25, 0.125]
    assert [float(x[0]) for x in (shaping.repetition, shaping.presence, shaping.frequency)] == [1.5, -1.0, 0.75]
    assert int(choice.top_k[0]) == 7
    assert [bool(x[0]) for x in (shaping.biased, shaping.barred, step.flag(RowFlag.LOGPROBS))] == [True] * 3
    assert int(step.flags[0]) >> FIRST_PROCESSOR == 2
    assert int(step.any_flags) == int(step.flags[0])
    assert (
        RowFlag(int(step.any_flags) & 0xFFF)
        == RowFlag(0x3FF) ^ RowFlag.CHOOSES ^ RowFlag.LARGE_K ^ RowFlag.PROMPT_LOGPROBS
    )
    assert choice.temperature.tolist()[1:] == [0.0] * 7
    assert choice.top_p.tolist()[1:] == [1.0] * 7
    assert step.flags.tolist()[1:] == [0] * 7


def test_min_tokens_bars_until_that_many_were_generated() -> None:
    sampling = Sampling(min_tokens=5)
    for generated, barred in ((0, True), (4, True), (5, False)):
        step = inputs_of(Upload(LAYOUT), StepPlan(0, (row(2, 4, None, sampling, generated=generated),), ()))
        assert bool(own(step, ShapingOption).barred[0]) is barred


def test_a_draft_chooses_as_its_request_does_but_is_no_writer_of_its_slot() -> None:
    sampling = Sampling(temperature=0.5, seed=9, min_tokens=5, max_tokens=9)
    rows = (row(2, 20, None, sampling, generated=4), row(2, 21, [50], sampling, generated=5, draft=True))
    step = inputs_of(Upload(LAYOUT), StepPlan(0, rows, ()))
    assert step.tokens.tolist()[:2] == [1002, 50]
    assert step.positions.tolist()[:2] == [20, 21]
    assert step.choice.position.tolist()[:2] == [21, 22]
    assert step.choice.seed.tolist()[:2] == [[0, 9], [0, 9]]
    assert step.choice.temperature.tolist()[:2] == [0.5, 0.5]
    assert own(step, ShapingOption).barred.tolist()[:2] == [True, False]
    assert step.flag(RowFlag.SAMPLES).tolist()[:2] == [True, False]
    assert step.flag(RowFlag.CHOOSES).tolist()[:2] == [True, True]
    assert step.flag(RowFlag.DRAWS).tolist()[:2] == [True, True]


def test_targets_look_one_token_past_the_chunk_and_end_with_the_prompt() -> None:
    sampling = Sampling(prompt_logprobs=0)
    plain = row(1, 0, [1, 2])
    middle, end = row(2, 10, [110, 111, 112], sampling), row(3, 28, [128, 129], sampling)
    step = inputs_of(Upload(LAYOUT), StepPlan(0, (), (plain, middle, end)))
    assert own(step, PromptLogprobsOption).tolist() == [-1, -1, 111, 112, 113, 129] + [-1] * 26
