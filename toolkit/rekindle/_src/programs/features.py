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
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.late_masks import NO_MASKS, LateMasks
from rekindle._src.programs.logprobs import (
    Distribution,
    DistributionOption,
    Logprobs,
    LogprobsOption,
    PromptLogprobs,
    PromptLogprobsOption,
)
from rekindle._src.programs.partitioning import ROWS
from rekindle._src.programs.row_option import GREEDY, Helpers, RowOption, TokenPlaces, drawing_flags, wanting
from rekindle._src.programs.sampling import LogitShaping, ShapingOption
from rekindle._src.programs.step_part import StepPart
from rekindle._src.programs.user_functions import LogitsProcessor, Processors, ProcessorsOption


def _union(variants: Iterable[ProgramVariant]) -> ProgramVariant:
    return functools.reduce(operator.or_, variants, PLAIN_VARIANT)


def _choices(parts: Sequence[StepPart]) -> tuple[tuple[ProgramVariant, ...], ...]:
    """Return the variants of parts in groups; a program has at most one variant of each group."""
    present, others = _union(part.variant for part in parts), _union(part.instead for part in parts)
    groups = dict.fromkeys((part.variant, *part.instead) for part in parts if part.variant not in others)
    return tuple(tuple(variant for variant in group if variant in present) for group in groups)


_variant = functools.cache(ProgramVariant)  # calling an enumeration takes three times as long


class Features:
    """All features of a session's steps, combined. Logits pass them in this order."""

    def __init__(self, entries: Sequence[Feature], late: LateMasks = NO_MASKS) -> None:
        self.entries, self.late = tuple(entries), late
        self.options = options = tuple(feature.row for feature in entries)
        self.parts = parts = tuple(feature.part for feature in entries)
        lost = [part for part in parts if type(part).hooks is not StepPart.hooks and not part.inside]
        assert not lost, f"{lost} have hooks, which programs made of parts lack: set `inside`"
        self.ints = sum(option.ints for option in options)
        self.row_ints = sum(option.row_ints for option in options)
        self.neutral = tuple(value for option in options for value in option.neutral)
        self.per_row = tuple(option for option in options if option.row_ints)
        self.per_token = tuple(option for option in options if option.per_token)
        self.steady = functools.reduce(lambda bits, option: bits | option.steady, options, 0)
        self.history = functools.reduce(lambda bits, option: bits | option.history, options, 0)
        self.changing = functools.reduce(lambda bits, part: bits | part.changing, parts, 0)
        self.outputs = tuple(part for part in parts if part.has_output)
        self._with_slots = tuple(one for one in entries if one.slot.ints or one.slot.floats)
        self.slots = tuple(feature.slot for feature in self._with_slots)  # in the order of `RequestState.own`
        assert all(one.part.variant for one in self._with_slots), "every program would carry these slots"
        self._owning = int(_union(one.part.variant for one in self._with_slots))
        self.copied = tuple(bool(part.variant) and part.copied for part in self.outputs)  # in every step
        self.streams = next((part.streams for part in parts if part.streams), ())
        self.matrices: str | None = next((part.matrices for part in parts if part.warmed and part.matrices), None)
        ahead = tuple(feature for feature in entries if feature.part.variant and feature.part.warmed)
        as_needed = tuple(feature for feature in entries if feature.part.variant and not feature.part.warmed)
        self.as_needed = _union(feature.part.variant for feature in as_needed)
        self.warmed, self.choices = (_choices([one.part for one in group]) for group in (ahead, as_needed))
        # Features of extensions are asked only if a row's request has some.
        self._planned = tuple(
            (int(one.part.variant), isinstance(one.row.option, type), one.row.in_plan) for one in (*ahead, *as_needed)
        )
        self._instead = tuple((int(part.variant), int(part.instead)) for part in parts)
        self._wanting = tuple((option, wanting(option.option)) for option in options)
        self._plain = tuple(one for one in self._wanting if isinstance(one[0].option, str))
        plain = (one.row for one in entries if not one.part.variant)  # other features are not in plain programs
        self._single = tuple(wanting(option.option) for option in plain if not option.repeats)
        self.prepared = tuple(one for one in entries if type(one.part).prepare is not StepPart.prepare)
        self._reading = tuple(one for one in entries if type(one.row).read is not RowOption.read)
        self._read_bits = functools.reduce(lambda bits, feature: bits | feature.row.bits, self._reading, 0)
        self._read_by: dict[tuple[int, ProgramVariant], tuple[Feature, ...]] = {}
        self._compiled: dict[ProgramVariant, tuple[Feature, ...]] = {}
        self._sides = tuple((index, option) for index, option in enumerate(options) if option.side)

    # -- a request enters its slot

    def flags(self, request: Request) -> int:
        return functools.reduce(lambda bits, option: bits | option.flags(request), self._wanted(request), 0)

    def has_options(self, request: Request) -> bool:
        """True if a request's rows may have flags other than the flags of greedy rows without further options."""
        flags = drawing_flags(request.sampling) | self.flags(request)
        return bool(flags & ~int(GREEDY)) or bool(self.row_flags(request))

    def row_flags(self, request: Request) -> tuple[Callable[[Row], int], ...]:
        functions = (option.row_flags(request) for option in self._wanted(request))
        return tuple(function for function in functions if function is not None)

    def constants(self, request: Request) -> tuple[list[int], list[float]]:
        """Return the values of all columns of a request. Raises `InvalidRequest` for one that these features lack."""
        self.late.check(request)
        ints: list[int] = []
        floats: list[float] = []
        for option, wants in self._wanting:
            own = option.constants(request) if wants(request) else ((0,) * option.ints, option.neutral)
            ints += own[0]
            floats += own[1]
        return ints, floats

    def repeats(self, request: Request) -> bool:
        """True if rows of a request may be in steps of the plain variant that the device repeats."""
        return not self.row_flags(request) and not any(wants(request) for wants in self._single)

    def reads_slot(self, request: Request) -> bool:
        return any(option.reads_slot(request) for option in self._wanted(request))

    def _wanted(self, request: Request) -> list[RowOption]:
        """Return the options that a request has."""
        return [option for option, wants in (self._wanting if request.extensions else self._plain) if wants(request)]

    # -- a step

    def variants(self, plan: StepPlan) -> ProgramVariant:
        """Return the variants of the program that a plan needs."""
        extended = bool([row for row in plan.rows if row.request.extensions])
        bits = 0
        for variant, extends, in_plan in self._planned:
            if (extended or not extends) and in_plan(plan):
                bits |= variant
        return _variant(bits)

    def keeps_own(self, variants: ProgramVariant) -> bool:
        """True if a program contains a feature with slots of its own: others neither take nor return these arrays."""
        return bool(int(variants) & self._owning)

    def slot_index(self, feature: Feature) -> int:
        """Return the place of a feature's slots in `RequestState.own`."""
        return self._with_slots.index(feature)

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
        for part in self.parts:
            part.load(plan.loads)

    def free(self) -> None:
        """Let go of the features' arrays on the device."""
        for part in self.parts:
            part.free()

    def attach(self, helpers: Helpers) -> None:
        """Let options call programs that are no steps while they read results."""
        for option in self.options:
            option.attach(helpers)

    def prepare(self, plan: StepPlan, variants: ProgramVariant, rows: int) -> None:
        """Replace the operands of features in a program by a step's operands; see `StepPart.prepare`."""
        compiled = self.compiled(variants)
        for feature in self.prepared:
            if feature in compiled:
                feature.part.prepare(plan, rows)

    def for_layers(self, own: Sequence[object], places: TokenPlaces) -> dict[str, tuple[Array, ...]]:
        """Return the arrays that layers use with each side cache, from the inputs of the features."""
        return {option.side: option.for_layers(own[index], places) for index, option in self._sides}

    def operands(self, variants: ProgramVariant) -> tuple[object, ...]:
        """Return the operands of each feature in a program."""
        return tuple([feature.part.operands for feature in self.compiled(variants)])

    def operand_shapes(self, variants: ProgramVariant) -> tuple[object, ...]:
        """Return the shapes of the operands of each feature in a program."""
        return tuple([feature.part.operand_shapes for feature in self.compiled(variants)])

    def operand_layouts(self, variants: ProgramVariant) -> tuple[object, ...]:
        """Return the layouts of the operands of each feature in a program."""
        return tuple([feature.part.operand_layout for feature in self.compiled(variants)])

    def output_layouts(self, variants: ProgramVariant) -> tuple[object, ...]:
        """Return the layouts of the outputs of all features that have one, as a program returns them."""
        compiled = [feature.part for feature in self.compiled(variants)]
        return tuple([part.output_layout if part in compiled else ROWS for part in self.outputs])

    def compiled(self, variants: ProgramVariant) -> tuple[Feature, ...]:
        """Return the features that a program contains."""
        known = self._compiled.get(variants)
        if known is None:
            chosen = (feature for feature in self.entries if feature.part.variant in variants)
            known = self._compiled[variants] = tuple(chosen)
        return known

    def columns_of(self, feature: Feature, variants: ProgramVariant) -> slice:
        """Return the slice of a feature's columns among those next to each row's token, in a program."""
        compiled = self.compiled(variants)
        first = sum(one.part.width for one in compiled[: compiled.index(feature)])
        return slice(first, first + feature.part.width)

    def read_in(self, flags: int, variants: ProgramVariant) -> tuple[Feature, ...]:
        """Return the features with results to read, for a step's flags and a program's variants."""
        key = flags & self._read_bits, variants
        reading = self._read_by.get(key)
        if reading is None:
            compiled = self.compiled(variants)
            reading = self._read_by[key] = tuple(
                feature
                for feature in self._reading
                if feature in compiled and (feature.row.bits & flags or feature.part.variant)
            )
        return reading

    def on_host(self, feature: Feature, extra: Sequence[object], plan: StepPlan) -> object:
        """Wait for a feature's output of a step; None if the feature or the program has no output."""
        output = extra[self.outputs.index(feature.part)] if feature.part.has_output else None
        return None if output is None else feature.row.on_host(output, plan)


def features_of(
    processors: Sequence[LogitsProcessor] = (),
    vocab_size: int = 0,
    *more: Feature,
    deterministic: bool = False,
    late: LateMasks = NO_MASKS,
) -> Features:
    """Return the features of a session with these logits processors, `more` that depend on its model, and its late
    masks."""
    own = (Feature(ProcessorsOption(processors), Processors(processors)),) if processors else ()
    scores = (
        Feature(LogprobsOption(), Logprobs(deterministic=deterministic)),
        Feature(PromptLogprobsOption(), PromptLogprobs(deterministic=deterministic)),
        Feature(DistributionOption(), Distribution(vocab_size, deterministic=deterministic)),
    )
    return Features((*own, Feature(ShapingOption(), LogitShaping()), *scores, *more), late)


PLAIN = features_of()
