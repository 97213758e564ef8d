"""The second half of a guided step with every option: native kernels and XLA choose the same tokens from masks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import plain_sampling
from rekindle import LogitsProcessor, Sampling
from rekindle._src.core.records import Request, Row, StepPlan, mask_words
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.features import features_of
from rekindle._src.programs.late_masks import NO_TOKEN
from rekindle._src.programs.packing import Constants, Layout, Upload
from rekindle._src.programs.request_state import RequestState, abstract_state, admit, pack_admission
from rekindle._src.programs.step import ChoiceInputs, make_choice
from rekindle_kernels import unavailable_reason

VOCAB, CONTEXT, HIDDEN = 1000, 40, 16
ENDS = frozenset({2, 9})
FEATURES = features_of([LogitsProcessor(lambda logits, context: logits / 2, "halved")])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 7, "logprobs": 3},
    {"temperature": 1.2, "top_k": 90, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.5, "min_p": 0.05},
    {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.3, "min_tokens": 20, "max_tokens": 30},
    {"logit_bias": {3: 5.0, 40: -5.0, 999: 2.0}, "logprobs": 0},
    {"temperature": 1.0, "logit_bias": {5: float("inf")}, "top_k": 3},
    {"min_tokens": 20, "max_tokens": 30},
    {"processors": ("halved",)},
    {"temperature": 0.8, "processors": ("halved",), "presence_penalty": 0.4, "logprobs": 2},
]
KINDS = ("all", "half", "few", "one", "ends", "none")
CASES = [(options, kind) for kind in KINDS for options in OPTIONS]


def allowed_by(kind: str, random: np.random.Generator) -> np.ndarray:
    allowed = np.zeros(VOCAB, bool)
    if kind == "all":
        allowed[:] = True
    if kind == "half":
        allowed[:] = random.random(VOCAB) < 0.5
    if kind == "few":
        allowed[random.integers(0, VOCAB, 12)] = True
    if kind == "one":
        allowed[random.integers(10, VOCAB)] = True
    if kind == "ends":
        allowed[[*ENDS, 700]] = True
    return allowed


class Step:
    """One guided step over all cases; each has a slot of its own, and six tokens after its prompt."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        count = len(CASES)
        self.layout = Layout(count, 0, 0, 8, count, features=FEATURES, variants=ProgramVariant.PROCESSORS)
        constants = Constants(count, FEATURES)
        rng = np.random.default_rng(1)
        shapes = jax.tree.leaves(abstract_state(count, VOCAB))
        leaves = [rng.integers(1, 9, leaf.shape).astype(leaf.dtype) for leaf in shapes]
        state, put = RequestState(*map(jnp.asarray, leaves)), jax.jit(admit)
        self.samplings, self.histories, rows = [], [], []
        for slot, (options, _) in enumerate(CASES):
            sampling = Sampling(seed=slot * 77, **options)
            prompt, outputs = random.integers(0, VOCAB, 20), random.integers(0, VOCAB, 6).astype(np.int32)
            request = Request(f"r{slot}", prompt.astype(np.int32), sampling, eos_ids=ENDS)
            row = Row(request, 0, slot, 25, 1, np.arange(4, dtype=np.int32), None, True, False, 6, outputs)
            constants.put(row)
            state = put(state, *pack_admission(row, CONTEXT))
            rows.append(row)
            self.samplings.append(sampling)
            self.histories.append((prompt.tolist(), outputs.tolist()))
        self.state = state
        self.upload = Upload(self.layout)
        self.upload.pack(StepPlan(0, tuple(rows), ()), constants)
        self.logits = (random.standard_normal((count, VOCAB)) * 3).astype(np.float32)
        self.allowed = np.stack([allowed_by(kind, random) for _, kind in CASES])
        bits = np.ones((count, mask_words(VOCAB) * 32), bool)
        bits[:, :VOCAB] = self.allowed
        self.masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)

    def run(self, implementation: str) -> tuple[RequestState, np.ndarray]:
        choice = make_choice(self.layout, 8, implementation=implementation)
        scores = ChoiceInputs(jnp.asarray(self.logits), jnp.ones((len(CASES), HIDDEN)))
        state, rows = jax.jit(choice)(self.state, scores, self.upload.ints, self.upload.floats, self.masks)
        return state, np.asarray(rows)


@pytest.fixture(scope="module")
def step() -> Step:
    return Step()


@pytest.fixture(scope="module")
def plain(step: Step) -> tuple[RequestState, np.ndarray]:
    return step.run("xla")


def test_tokens_are_those_of_plain_numpy_among_what_the_masks_allow(
    step: Step, plain: tuple[RequestState, np.ndarray]
) -> None:
    tokens = plain[1][:, 0]
    for row, (sampling, (prompt, outputs)) in enumerate(zip(step.samplings, step.histories, strict=True)):
        logits = step.logits[row] / 2 if sampling.processors else step.logits[row]
        shaped = plain_sampling.shaped(logits, sampling, prompt, outputs, set(ENDS))
        shaped = np.where(step.allowed[row], shaped, -np.inf)
        if not np.isfinite(shaped).any():
            assert tokens[row] == NO_TOKEN, CASES[row]
            continue
        assert step.allowed[row][tokens[row]], CASES[row]
        if sampling.greedy:
            assert tokens[row] == shaped.argmax(), CASES[row]
        elif sampling.top_k:
            assert shaped[tokens[row]] >= np.sort(shaped)[-sampling.top_k], CASES[row]


@pytest.mark.skipif(unavailable_reason() is not None, reason="numba is not installed")
def test_native_kernels_choose_the_same(step: Step, plain: tuple[RequestState, np.ndarray]) -> None:
    state, rows = step.run("native")
    assert rows[:, 0].tolist() == plain[1][:, 0].tolist()
    np.testing.assert_array_equal(rows[:, 1:], plain[1][:, 1:], "log-probabilities are of the model's own distribution")
    told = rows[:, 0] >= 0
    for ours, theirs in zip(*map(jax.tree.leaves, (state, plain[0])), strict=True):
        assert np.array_equal(np.asarray(ours)[:-1][told], np.asarray(theirs)[:-1][told])
