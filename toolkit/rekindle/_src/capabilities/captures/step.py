"""Taps in a step: returns values between the layers and inside them, and changes the residual stream.

A program with the capturing variant returns every residual, each as an array of its own, and the host reads the ones
that a request wants: so no capture compiles anything, and the layers stay fused. A program with the other sites also
returns what layers name inside, such as the outputs of attention and MLP, which are then added apart.

In a program with a steering variant a table has the changes: the tokens, the layer or module after which they are
changed, and the vectors. All of it is in operands of one size, so that other layers, vectors, scales and positions
compile nothing.

Axes: R decode rows, T prefill tokens, N = R + T, E hidden size, B vectors, M changes of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.capabilities.captures.custom import CustomTaps, CustomTapsOption, Tap, check_places
from rekindle._src.capabilities.captures.follower import CAPTURED
from rekindle._src.capabilities.captures.tapped import (
    INNER,
    MAX_PATCHES,
    MAX_RUNS,
    MAX_VECTORS,
    STREAM,
    Edit,
    RequestTaps,
    TapFacts,
    check_named,
    place_of,
    places_of,
)
from rekindle._src.core.captured import CapturedPart, Key
from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.records import Row, StepPlan
from rekindle._src.core.taps import LOGITS, Steer
from rekindle._src.models.base import Model, Placement
from rekindle._src.models.config import Cache, ModelConfig, Pages
from rekindle._src.models.hooks import STREAM_SITES, keeping
from rekindle._src.models.loading.hugepages import aligned
from rekindle._src.programs.buckets import PLAIN_VARIANT, ProgramVariant
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.partitioning import HEADS, ROWS
from rekindle._src.programs.row_option import FeatureRead, Helpers, RowOption, RowReports
from rekindle._src.programs.step_part import Hooks, StepInputs, StepPart

INSIDE = ("q", "k", "v", "attention", "mlp", "experts", "gates")


class CaptureOption(RowOption):
    """Captures of the residual stream: the rows of its arrays that requests want."""

    option = RequestTaps
    _helpers: Helpers

    def in_plan(self, plan: StepPlan) -> bool:
        rows = _tapped(plan)
        return any(map(_captures, rows)) and not any(map(_captures_inside, rows))

    def attach(self, helpers: Helpers) -> None:
        self._helpers = helpers

    def on_host(self, output: Any, plan: StepPlan) -> dict[Key, np.ndarray[Any, Any]]:
        wanted = {key for row in filter(_captures, plan.rows) for key in row.request.extensions[RequestTaps].keys}
        return {key: np.asarray(_of(output, key)) for key in wanted}

    def read(self, read: FeatureRead, reports: RowReports) -> None:
        assert isinstance(read.output, dict), "a program that does not capture ran a request with captures"
        decode, rows = len(read.plan.decode), read.plan.rows
        first = read.places[decode] if decode < len(rows) else 0  # prompts begin after the program's decode rows
        parts: list[tuple[int, Sequence[Key], Any, Any]] = []  # row, its keys, positions, and lines of the output
        for index, row in enumerate(rows):
            place = read.places[index] if index < decode else first
            first += row.length if index >= decode else 0
            tapped = row.request.extensions.get(RequestTaps)
            if tapped is None or not tapped.keys:
                continue
            positions = tapped.wanted_in(row.start, row.start + row.length)
            if len(positions):
                parts.append((index, tapped.keys, positions, positions - row.start + place))
        logits = self._logits(read.output, parts)
        for index, keys, positions, lines in parts:
            arrays = {key: logits[index, key] if key[0] == LOGITS else _floats(read.output[key][lines]) for key in keys}
            CAPTURED.put(reports[index], CapturedPart(positions, arrays))

    def _logits(self, output: Any, parts: Sequence[tuple[int, Sequence[Key], Any, Any]]) -> dict[Any, Any]:
        """Return the logits of rows by row and key. Rows of a step go through the head together."""
        found = {}
        for key in {key for _, keys, *_ in parts for key in keys if key[0] == LOGITS}:
            several = [(index, lines) for index, keys, _, lines in parts if key in keys]
            computed = self._helpers.lens(output[key][np.concatenate([lines for _, lines in several])])
            ends = np.cumsum([len(lines) for _, lines in several])[:-1]
            for (index, _), own in zip(several, np.split(computed, ends), strict=True):
                found[index, key] = own.copy() if len(several) > 1 else own  # a view would keep the others' logits
        return found


class InnerCaptureOption(CaptureOption):
    """Captures inside the layers."""

    def __init__(self, model: ModelConfig) -> None:
        self._config = model

    def in_plan(self, plan: StepPlan) -> bool:
        return any(map(_captures_inside, _tapped(plan)))

    def on_host(self, output: Any, plan: StepPlan) -> dict[Key, np.ndarray[Any, Any]]:
        arrays = super().on_host(output, plan)
        return {key: self._once(array, *key) if key[0] in ("k", "v") else array for key, array in arrays.items()}

    def _once(self, array: np.ndarray[Any, Any], site: str, layer: int) -> np.ndarray[Any, Any]:
        """Return each kv head once: where a mesh has more devices than a layer has heads, several have the same one."""
        return array[:, :: array.shape[1] // self._config.pages_of(layer).heads]


class Captures(StepPart[None, tuple[()]]):
    """The residual stream after every layer, as arrays [N, E]; the host takes the rows that requests want of them."""

    variant, instead = ProgramVariant.CAPTURES, ProgramVariant.INNER_CAPTURES
    inside = has_output = True
    copied = False  # on a device with memory of its own: few of them are wanted
    sites: tuple[str, ...] = ()  # inside the layers

    def hooks(self, inputs: StepInputs, own: None, operands: tuple[()]) -> Hooks:
        kept: dict[tuple[str, int], Array] = {}
        return Hooks(keeping(kept, (*STREAM_SITES, *self.sites)), kept=kept)

    def output(self, model: Model, hidden: Array, inputs: StepInputs, own: None, kept: Any) -> dict[str, object]:
        stream = [array for (site, _), array in kept.items() if site in STREAM_SITES]
        inside: dict[str, dict[str, Array]] = {site: {} for site in self.sites}
        for (site, layer), array in kept.items():
            if site in inside:
                inside[site][str(layer)] = array  # keys are text, as stored programs describe results
        return {"stream": stream, "norm": hidden, **inside}


class InnerCaptures(Captures):
    """The residual stream after every layer, and what attention and MLP compute inside of them."""

    variant, instead, sites = ProgramVariant.INNER_CAPTURES, PLAIN_VARIANT, INSIDE
    # Outputs of modules are whole on each device of a mesh, since they were summed there; each has its own heads.
    output_layout = dict.fromkeys(("stream", "norm", *INSIDE), ROWS) | dict.fromkeys("qkv", HEADS)


def _floats(lines: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an output's lines as a request gets them: 16-bit floats, which numpy lacks, become float32."""
    return lines if lines.dtype in (np.float32, np.int32) else lines.astype(np.float32)


def _tapped(plan: StepPlan) -> list[Row]:
    return [row for row in plan.rows if RequestTaps in row.request.extensions]


def _captures(row: Row) -> bool:
    tapped = row.request.extensions.get(RequestTaps)
    return tapped is not None and bool(tapped.keys) and tapped.captures(row.start, row.start + row.length)


def _captures_inside(row: Row) -> bool:
    return _captures(row) and row.request.extensions[RequestTaps].inner


def _of(output: Any, key: Key) -> Any:
    """Return the array of a site and layer, or of a site without layers."""
    if isinstance(key, str):
        return output[key]
    site, layer = key
    return output["stream"][layer + (site != "residual_before")] if site in STREAM else output[site][str(layer)]


class Edits(NamedTuple):
    """The operands of steps with changes."""

    starts: Any  # int32 [places + 1]: the first change of each place; see `Edit.place`
    where: Any  # int32 [M, 4]: its tokens, half-open; its vector; and 1 if each token has a vector of its own
    factors: Any  # float32 [M, 3], as in `Edit`
    vectors: Any  # float32 [B, E]


class _EditPart(NamedTuple):
    """The vector of a change, or the vectors of some of its positions."""

    edit: Edit
    first: int
    length: int


class SteeringOption(RowOption):
    """Changes of the residual stream alone."""

    option = RequestTaps

    def in_plan(self, plan: StepPlan) -> bool:
        rows = _tapped(plan)
        return any(map(_edits, rows)) and not any(map(_edits_inside, rows))


class InnerSteeringOption(RowOption):
    """Changes of the outputs of attention and MLP, too."""

    option = RequestTaps

    def in_plan(self, plan: StepPlan) -> bool:
        return any(map(_edits_inside, _tapped(plan)))


class Steering(StepPart[None, Edits]):
    """Changes of the residual stream of some tokens after some layers."""

    variant, instead = ProgramVariant.STEERING, ProgramVariant.INNER_STEERING
    inside, operand_layout = True, ROWS

    def __init__(self, model: ModelConfig, config: ResolvedConfig, *, ahead: bool = False) -> None:
        self._layers, self._places = model.num_layers, places_of(model.num_layers)
        self.warmed = ahead
        self._most = MAX_RUNS * config.max_requests
        vectors = MAX_VECTORS * config.max_requests + MAX_PATCHES * config.max_tokens_per_step
        self._shape = vectors, model.hidden_size
        self._held: list[_EditPart] = []  # the contents of the operands' vectors
        self._operands: Edits | None = None

    @property
    def operands(self) -> Edits:  # type: ignore[override]
        """The changes of the last prepared step; empty before the first one."""
        if self._operands is None:
            self._operands = self._none(self._vectors())
        return self._operands

    @property
    def operand_shapes(self) -> Any:
        return jax.eval_shape(lambda: self._none(np.zeros(self._shape, np.float32)))

    def _none(self, vectors: Any) -> Edits:
        starts, where = np.zeros(self._places + 1, np.int32), np.zeros((self._most, 4), np.int32)
        return Edits(starts, where, np.zeros((self._most, 3), np.float32), vectors)

    def _vectors(self) -> Any:
        return aligned(self._shape, np.float32)

    def prepare(self, plan: StepPlan, rows: int) -> None:
        entries, needed = self._entries(plan, rows)
        vectors = self.operands.vectors
        if _identities(needed) != _identities(self._held):
            vectors = self._vectors()  # steps in flight read the others
            place = 0
            for edit, first, count in needed:
                vectors[place : place + count] = edit.vectors[first : first + count]
                place += count
            self._held = needed
        changes = self._none(vectors)
        for line, (_, begin, end, edit, vector) in enumerate(entries):
            changes.where[line] = begin, end, vector, edit.each
            changes.factors[line] = edit.factors
        changes.starts[:] = np.searchsorted([entry[0] for entry in entries], np.arange(self._places + 1))
        self._operands = changes

    def _entries(self, plan: StepPlan, rows: int) -> tuple[list[tuple[int, int, int, Edit, int]], list[_EditPart]]:
        """Return the changes of a plan by place: place, tokens, the change, and its first vector; and all vectors."""
        entries: list[tuple[int, int, int, Edit, int]] = []
        needed: list[_EditPart] = []
        numbers: dict[Any, int] = {}
        count = 0
        first = rows
        for index, row in enumerate(plan.rows):
            token = index if index < len(plan.decode) else first
            first += row.length if index >= len(plan.decode) else 0
            tapped = row.request.extensions.get(RequestTaps)
            if tapped is None or not tapped.edits:
                continue
            for number, edit in enumerate(tapped.edits):
                passed = 0  # positions of the runs before
                for start, stop in edit.runs:
                    begin, end = max(start, row.start), min(stop, row.start + row.length)
                    if begin < end:
                        vector = passed + begin - start if edit.each else 0
                        length = end - begin if edit.each else 1
                        key = (id(tapped), number, vector, length)
                        if key not in numbers:
                            numbers[key] = count
                            needed.append(_EditPart(edit, vector, length))
                            count += length
                        offset = token - row.start
                        entries.append((edit.place, begin + offset, end + offset, edit, numbers[key]))
                    passed += stop - start if edit.each else 0
        entries.sort(key=lambda entry: entry[0])
        return entries, needed

    def hooks(self, inputs: StepInputs, own: None, operands: Edits) -> Hooks:
        return self.hooks_at(STREAM_SITES, inputs, operands)

    def hooks_at(self, sites: Sequence[str], inputs: StepInputs, operands: Edits) -> Hooks:
        """Return the hooks that make the changes at some sites."""
        index = lax.iota(jnp.int32, inputs.tokens.shape[0])

        def change(place: int, x: Array) -> Array:
            def one(number: Array, x: Array) -> Array:
                first, stop, vector, each = (operands.where[number, column] for column in range(4))
                a, b, c = (operands.factors[number, column] for column in range(3))
                v = operands.vectors[jnp.clip(vector + each * (index - first), 0, operands.vectors.shape[0] - 1)]
                wide = x.astype(jnp.float32)
                changed = a * wide + b * v + c * jnp.sum(wide * v, axis=-1, keepdims=True) * v
                return jnp.where(((index >= first) & (index < stop))[:, None], changed.astype(x.dtype), x)

            with jax.named_scope("steer"):
                return lax.fori_loop(operands.starts[place], operands.starts[place + 1], one, x)

        def listener(site: str, layer: int) -> Callable[[Array], Array] | None:
            return functools.partial(change, place_of(site, layer, self._layers)) if site in sites else None

        return Hooks(listener)


def _identities(parts: Sequence[_EditPart]) -> list[tuple[int, int, int]]:
    return [(id(edit), first, count) for edit, first, count in parts]


class InnerSteering(StepPart[None, Edits]):
    """Changes of the residual stream, and of the outputs of attention and MLP. Shares the operands of `Steering`."""

    variant = ProgramVariant.INNER_STEERING
    inside, operand_layout = True, ROWS

    def __init__(self, stream: Steering, *, ahead: bool = False) -> None:
        self._stream, self.warmed = stream, ahead

    @property
    def operands(self) -> Edits:  # type: ignore[override]
        return self._stream.operands

    @property
    def operand_shapes(self) -> Any:
        return self._stream.operand_shapes

    def prepare(self, plan: StepPlan, rows: int) -> None:
        self._stream.prepare(plan, rows)

    def hooks(self, inputs: StepInputs, own: None, operands: Edits) -> Hooks:
        return self._stream.hooks_at((*STREAM_SITES, *INNER), inputs, operands)


def _edits(row: Row) -> bool:
    tapped = row.request.extensions.get(RequestTaps)
    return tapped is not None and tapped.edits_in(row.start, row.start + row.length)


def _edits_inside(row: Row) -> bool:
    tapped = row.request.extensions.get(RequestTaps)
    return tapped is not None and tapped.edits_inside and _edits(row)


def tap_features(
    model: ModelConfig, config: ResolvedConfig, placement: Placement, taps: Sequence[Tap], ahead: ProgramVariant
) -> tuple[Feature, ...]:
    """Return the features of taps: changes come before captures, which see the changed values."""
    steering = Steering(model, config, ahead=ProgramVariant.STEERING in ahead)
    inner = InnerSteering(steering, ahead=ProgramVariant.INNER_STEERING in ahead)
    changes: list[Feature] = [Feature(SteeringOption(), steering), Feature(InnerSteeringOption(), inner)]
    if taps:
        own = CustomTaps(taps, model.num_layers, divided=placement.divided)
        changes.append(Feature(CustomTapsOption(taps), own))
    captures = Feature(CaptureOption(), Captures()), Feature(InnerCaptureOption(model), InnerCaptures())
    return *changes, *captures


def variants_of(steering: Mapping[str, Sequence[Steer]]) -> ProgramVariant:
    """Return the variants of programs for requests that name these changes."""
    variants = PLAIN_VARIANT
    for changes in steering.values():
        inner = any(change.site in INNER for change in changes)
        variants |= ProgramVariant.INNER_STEERING if inner else ProgramVariant.STEERING
    return variants


def session_facts(
    model: ModelConfig, config: ResolvedConfig, taps: Sequence[Tap], steering: Mapping[str, tuple[Steer, ...]]
) -> TapFacts | None:
    """Return a session's sites for taps, and the taps and changes that have a name there; None if nothing can be
    tapped.

    Raise ConfigError for taps and changes that do not fit the model.
    """
    facts = tap_facts(model, processes=config.processes)
    custom = check_places(taps, facts)
    check_named(steering, facts)
    keeps = "" if config.prefix_cache else "prefix_cache is off"
    keeps = keeps or ("" if config.capture_memory else "capture_memory is 0")
    return facts and facts._replace(custom=custom, steering=steering, keeps=keeps)


def tap_facts(model: ModelConfig, *, processes: int) -> TapFacts | None:
    """Return a model's sites for taps; None if nothing can be tapped."""
    if processes > 1:
        return None
    layers = tuple(range(model.num_layers))
    caches = model.caches
    attention = tuple(layer for layer in layers if caches[layer].pages is not None)
    mlps = tuple(layer for layer in layers if model.mlp_size(layer))
    mixing = tuple(layer for layer in layers if caches[layer] != Cache())
    keys = {layer: pages for layer in layers if isinstance(pages := caches[layer].pages, Pages)}  # others have no own
    values = [layer for layer, pages in keys.items() if not pages.latent]
    experts = tuple(layer for layer in layers if model.moe and model.moe[layer] is not None)
    sites: dict[str, Sequence[int]] = {"residual": layers, "residual_before": layers, LOGITS: layers, "norm": ()}
    sites |= {"attention": mixing, "mlp": mlps, "q": attention, "k": tuple(keys), "v": tuple(values)}
    sites |= {"experts": experts, "gates": experts} if experts else {}
    plain = [layer for layer in values if not model.attention[layer].sinks]
    specs = [model.attention[layer] if layer in plain else None for layer in layers]
    both_ways = [layer for layer in layers if model.sees_pictures_both_ways(layer)]
    return TapFacts(model.num_layers, model.hidden_size, sites, specs, both_ways=both_ways)
