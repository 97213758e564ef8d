"""Pooling in a step: a prompt's hidden states as one vector.

Axes: S prefill sequences, T prefill tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.capabilities.plans import CapabilityPlan
from rekindle._src.capabilities.pooling.request import POOLED, PromptPooling
from rekindle._src.core.records import Pooling as Kind
from rekindle._src.core.records import StepPlan
from rekindle._src.models.base import Model
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.partitioning import DeviceLayout
from rekindle._src.programs.plan import ProgramPlan
from rekindle._src.programs.row_option import FeatureRead, RowOption, RowReports
from rekindle._src.programs.step_part import StepInputs, StepPart

KINDS: tuple[str, ...] = get_args(Kind)


def pooled_states(hidden: Array, cu_lengths: Array) -> Array:
    """Return float32 [3, S, E] for states [T, E]: the sum of each sequence's chunk, its last state, and its first.

    `cu_lengths` [S + 1] are the half-open offsets of the sequences. The sums are a product with a matrix of ones and
    zeros. A state that is not finite is left out of it, and makes only its own sequence's sum NaN.
    """
    with jax.named_scope("pooling"):
        T, S = hidden.shape[0], cu_lengths.shape[0] - 1
        states = hidden.astype(jnp.float32)
        index = lax.iota(jnp.int32, T)
        members = (index >= cu_lengths[:-1, None]) & (index < cu_lengths[1:, None])  # [S, T]
        broken = ~jnp.isfinite(states).all(axis=-1)
        sums = jnp.dot(
            members.astype(jnp.float32),
            jnp.where(broken[:, None], 0.0, states),
            precision=lax.Precision.HIGHEST,
        )
        sums = jnp.where((members & broken).any(axis=1)[:, None], jnp.nan, sums)
        last = states[jnp.maximum(cu_lengths[1:] - 1, 0)]
        first = states[jnp.minimum(cu_lengths[:-1], T - 1)]
        assert sums.shape == (S, hidden.shape[1])
        return jnp.stack([sums, last, first])  # in the order of KINDS


class PooledRows(RowOption):
    """Prompts that become vectors."""

    option = PromptPooling

    def in_plan(self, plan: StepPlan) -> bool:
        return any(PromptPooling in row.request.extensions for row in plan.prefill)

    def read(self, read: FeatureRead, reports: RowReports) -> None:
        assert isinstance(read.output, np.ndarray), "a program that does not pool ran a request with pooling"
        for index, row in enumerate(read.plan.prefill):
            pooling = row.request.extensions.get(PromptPooling)
            if pooling is not None:
                vector = read.output[KINDS.index(pooling.kind), index].copy()
                POOLED.put(reports[len(read.plan.decode) + index], vector)


class Pooling(StepPart[None, tuple[()]]):
    """The sums, the last and the first states of each prefill, in a program of their own variant."""

    variant, has_output = ProgramVariant.POOLING, True

    @property
    def output_layout(self) -> object:
        return DeviceLayout.POOLED

    def output(self, model: Model, hidden: Array, inputs: StepInputs, own: None, kept: object) -> Array:
        return pooled_states(hidden[inputs.decode_rows :], inputs.cu_lengths)


class PoolingPlan(CapabilityPlan):
    """Any session embeds prompts."""

    def features(self, plan: ProgramPlan) -> Sequence[Feature]:
        return (Feature(PooledRows(), Pooling()),)
