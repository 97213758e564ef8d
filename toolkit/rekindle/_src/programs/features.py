"""The features of a session's steps, in the order of their columns and results.

Axes: S prefill sequences, T prefill tokens, E hidden size.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence

from jax import Array

from rekindle._src.core.records import Request, Row, StepPlan
from rekindle._src.programs.buckets import PLAIN_VARIANT, ProgramVariant
from rekindle._src.programs.feature import (
    GREEDY,
    Feature,
    Helpers,
    TokenPlaces,
    drawing_flags,
    wanting,
)
from rekindle._src.programs.guides import Guides
from rekindle._src.programs.logprobs import Distribution, Logprobs, PromptLogprobs
from rekindle._src.programs.partitioning import ROWS
from rekindle._src.programs.sampling import LogitShaping
from rekindle._src.programs.user_functions import LogitsProcessor, Processors


def _overrides(feature: Feature, method: str) -> bool:
    return getattr(type(feature), method) is not getattr(Feature, method)


def _union(variants: Iterable[ProgramVariant]) -> ProgramVariant:
    return functools.reduce(operator.or_, variants, PLAIN_VARIANT)


def _choices(features: Sequence[Feature]) -> tuple[tuple[ProgramVariant, ...], ...]:
    """Return the variants of features in groups; a program has at most one variant of each group."""
    present, others = _union(one.variant for one in features), _union(one.instead for one in features)
    groups = dict.fromkeys((one.variant, *one.instead) for one in features if one.variant not in others)
    return tuple(tuple(variant for variant in group if variant in present) for group in groups)


_variant = functools.cache(ProgramVariant)  # calling an enumeration takes three times as long


class Features:
    """All features of a session's steps, combined. Logits pass them in this order."""

    def __init__(self, entries: Sequence[Feature], late: Guides) -> None:
        self.entries, self.late = tuple(entries), late
        lost = [feature for feature in entries if _overrides(feature, "hooks") and not feature.inside]
        assert not lost, f"{lost} have hooks, which programs made of parts lack: set `inside`"
        self.ints = sum(feature.ints for feature in entries)
        self.row_ints = sum(feature.row_ints for feature in entries)
        self.neutral = tuple(value for feature in entries for value in feature.neutral)
        self.per_token = tuple(feature for feature in entries if feature.per_token)
        self.outputs = tuple(feature for feature in entries if feature.has_output)
        self.streams = next((feature.streams for feature in entries if feature.streams), ())
        self.copied = tuple(bool(feature.variant) and feature.copied for feature in self.outputs)  # in every step
        self.steady = functools.reduce(lambda bits, feature: bits | feature.steady, entries, 0)
        self.changing = functools.reduce(lambda bits, feature: bits | feature.changing, entries, 0)
        self.history = functools.reduce(lambda bits, feature: bits | feature.history, entries, 0)
        ahead = tuple(feature for feature in entries if feature.variant and feature.warmed)
        as_needed = tuple(feature for feature in entries if feature.variant and not feature.warmed)
        self.matrices: str | None = next(
            (feature.matrices for feature in entries if feature.warmed and feature.matrices), None
        )
        self.as_needed = _union(feature.variant for feature in as_needed)
        self.warmed, self.choices = _choices(ahead), _choices(as_needed)
        # Features of extensions are asked only if a row's request has some.
        planned = (*ahead, *as_needed)
        self._planned = tuple((int(one.variant), isinstance(one.option, type), one.in_plan) for one in planned)
        self._instead = tuple((int(feature.variant), int(feature.instead)) for feature in entries)
        self._wanting = tuple((feature, wanting(feature.option)) for feature in entries)
        self._plain = tuple(one for one in self._wanting if isinstance(one[0].option, str))
        self._prepared = tuple(feature for feature in entries if _overrides(feature, "prepare"))
        self._reading = tuple(feature for feature in entries if _overrides(feature, "read"))
        self._read_bits = functools.reduce(lambda bits, feature: bits | feature.bits, self._reading, 0)
        self._read_by: dict[tuple[int, ProgramVariant], tuple[Feature, ...]] = {}
        self._compiled: dict[ProgramVariant, tuple[Feature, ...]] = {}
        self._sides = tuple((index, feature) for index, feature in enumerate(entries) if feature.side)

    # -- a request enters its slot

    def flags(self, request: Request) -> int:
        return functools.reduce(lambda bits, feature: bits | feature.flags(request), self._wanted(request), 0)

    def has_options(self, request: Request) -> bool:
        """True if a request's rows may have flags other than the flags of greedy rows without further options."""
        flags = drawing_flags(request.sampling) | self.flags(request)
        return bool(flags & ~int(GREEDY)) or bool(self.row_flags(request))

    def row_flags(self, request: Request) -> tuple[Callable[[Row], int], ...]:
        functions = (feature.row_flags(request) for feature in self._wanted(request))
        return tuple(function for function in functions if function is not None)

    def constants(self, request: Request) -> tuple[list[int], list[float]]:
        """Return the values of all columns of a request."""
        ints: list[int] = []
        floats: list[float] = []
        for feature, wants in self._wanting:
            own = feature.constants(request) if wants(request) else ((0,) * feature.ints, feature.neutral)
            ints += own[0]
            floats += own[1]
        return ints, floats

    def reads_slot(self, request: Request) -> bool:
        return any(feature.reads_slot(request) for feature in self._wanted(request))

    def _wanted(self, request: Request) -> list[Feature]:
        """Return the features that a request's options use."""
        return [feature for feature, wants in (self._wanting if request.extensions else self._plain) if wants(request)]

    # -- a step

    def variants(self, plan: StepPlan) -> ProgramVariant:
        """Return the variants of the program that a plan needs."""
        extended = bool([row for row in plan.rows if row.request.extensions])
        bits = 0
        for variant, extends, in_plan in self._planned:
            if (extended or not extends) and in_plan(plan):
                bits |= variant
        return _variant(bits)

    def joined(self, alone: Iterable[ProgramVariant]) -> ProgramVariant:
        """Return the variants of the program for several rows, from the variants that each row needs alone."""
        needed = joined = 0
        for variants in alone:
            needed |= int(variants)
        for variant, instead in self._instead:
            if needed & variant and not needed & instead:
                joined |= variant
        return _variant(joined)

    def load(self, plan: StepPlan) -> None:
        """Take the data that a plan puts on the device."""
        for feature in self.entries:
            feature.load(plan.loads)

    def free(self) -> None:
        """Let go of the features' arrays on the device."""
        for feature in self.entries:
            feature.free()

    def attach(self, helpers: Helpers) -> None:
        """Let features call programs that are no steps."""
        for feature in self.entries:
            feature.attach(helpers)

    def prepare(self, plans: Sequence[StepPlan], variants: ProgramVariant, rows: int) -> None:
        """Replace the operands of features in a program by a step's operands; see `Feature.prepare`."""
        compiled = self.compiled(variants)
        for feature in self._prepared:
            if feature in compiled:
                feature.prepare(plans, rows)

    def for_layers(self, own: Sequence[object], places: TokenPlaces) -> dict[str, tuple[Array, ...]]:
        """Return the arrays that layers use with each side cache, from the inputs of the features."""
        return {feature.side: feature.for_layers(own[index], places) for index, feature in self._sides}

    def operands(self, variants: ProgramVariant) -> tuple[object, ...]:
        """Return the operands of each feature in a program."""
        return tuple([feature.operands for feature in self.compiled(variants)])

    def operand_shapes(self, variants: ProgramVariant) -> tuple[object, ...]:
        """Return the shapes of the operands of each feature in a program."""
        return tuple([feature.operand_shapes for feature in self.compiled(variants)])

    def operand_layouts(self, variants: ProgramVariant) -> tuple[object, ...]:
        """Return the layouts of the operands of each feature in a program."""
        return tuple([feature.operand_layout for feature in self.compiled(variants)])

    def output_layouts(self, variants: ProgramVariant) -> tuple[object, ...]:
        """Return the layouts of the outputs of all features that have one, as a program returns them."""
        compiled = self.compiled(variants)
        return tuple([feature.output_layout if feature in compiled else ROWS for feature in self.outputs])

    def compiled(self, variants: ProgramVariant) -> tuple[Feature, ...]:
        """Return the features that a program contains."""
        known = self._compiled.get(variants)
        if known is None:
            chosen = (feature for feature in self.entries if feature.variant in variants)
            known = self._compiled[variants] = tuple(chosen)
        return known

    def columns_of(self, feature: Feature, variants: ProgramVariant) -> slice:
        """Return the slice of a feature's columns among those next to each row's token, in a program."""
        compiled = self.compiled(variants)
        first = sum(one.width for one in compiled[: compiled.index(feature)])
        return slice(first, first + feature.width)

    def read_in(self, flags: int, variants: ProgramVariant) -> tuple[Feature, ...]:
        """Return the features with results to read, for a step's flags and a program's variants."""
        key = flags & self._read_bits, variants
        reading = self._read_by.get(key)
        if reading is None:
            reading = self._read_by[key] = tuple(
                feature
                for feature in self._reading
                if feature.bits & flags or (feature.variant and feature.variant in variants)
            )
        return reading

    def on_host(self, feature: Feature, extra: Sequence[object], plan: StepPlan) -> object:
        """Wait for a feature's output of a step; None if the feature or the program has no output."""
        output = extra[self.outputs.index(feature)] if feature.has_output else None
        return None if output is None else feature.on_host(output, plan)


def features_of(
    processors: Sequence[LogitsProcessor] = (), vocab_size: int = 0, *more: Feature, deterministic: bool = False
) -> Features:
    """Return the features of a session with these logits processors, and `more` that depend on its model."""
    own = (Processors(processors),) if processors else ()
    scores = Logprobs(deterministic=deterministic), PromptLogprobs(deterministic=deterministic)
    whole = Distribution(vocab_size, deterministic=deterministic)
    return Features((*own, LogitShaping(), *scores, whole, *more), Guides())


PLAIN = features_of()
