"""Functions of the user between and inside the layers: pure JAX functions that change what passes there.

A request names its own in `Sampling.taps`. A step with such a row runs in the variant of its program that contains all
of the session's taps, each applied to the rows that name it. Their place, name, version and a hash of the function's
code and values are part of the key of stored programs, and of the names of the pages that such rows fill.

Axes: R decode rows, T prefill tokens, N = R + T, E hidden size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.capabilities.captures.tapped import MISSING, RequestTaps, TapFacts, place_of
from rekindle._src.core.drawable import Record
from rekindle._src.core.positions import Layers, layer_of
from rekindle._src.core.records import Request, StepPlan
from rekindle._src.core.taps import STEER_SITES, SteerSite, layers_of
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.row_option import Columns, RowOption
from rekindle._src.programs.step_part import Hooks, StepInputs, StepPart
from rekindle._src.programs.user_functions import check_all, check_function, function_hash, problem_of
from rekindle.errors import ConfigError, InvalidRequest

MAX_TAPS = 16  # bits of a row's column


class TapContext(NamedTuple):
    """Facts that a tap may read in addition to the numbers of its token."""

    layer: int  # known while the function is traced
    position: Array  # int32 []: of the token in its sequence
    prompt_length: Array  # int32 []
    token: Array  # int32 []: the token that was read
    arrays: Any  # the tap's own


@dataclasses.dataclass(frozen=True, slots=True, repr=False, eq=False)
class Tap(Record):
    """A `function(x float32 [hidden], context) -> float32 [hidden]` of one token at one layer, mapped over the tokens.

    `layers` and `site` are where it is: a number, several, or "all", and "residual" (after the layer),
    "residual_before", "attention" or "mlp". It is traced once for each layer and program. `arrays`, in any nesting, are
    what it reads as `context.arrays`: weights that a program should not contain. Change `version` when something
    changes that is not visible in the function's own code, such as code that it imports.
    """

    function: Callable[[Array, TapContext], Array]
    name: str
    layers: Layers = "all"
    site: SteerSite = "residual"
    arrays: object = dataclasses.field(default=None, repr=False)
    version: str = "1"

    def __post_init__(self) -> None:
        check_function(self.function, self.name, self.version)
        if self.site not in STEER_SITES:
            sites = ", ".join(map(repr, STEER_SITES))
            raise ConfigError("site", self.site, "can't be changed", f"Use one of {sites}")
        try:
            layers_of(self.site, self.layers, None)
        except InvalidRequest:
            raise ConfigError(
                "layers", self.layers, "names no layers", 'Pass numbers such as [4, 8], or "all"'
            ) from None

    @property
    def digest(self) -> str:
        """The digest of its function, its place, and its arrays."""
        return function_hash((self.name, self.version, self.function, self.site, self.layers, self.arrays))

    @property
    def key(self) -> tuple[object, ...]:
        """The key of compiled programs: taps with equal keys compile to equal programs."""
        shapes = jax.tree.map(lambda array: (array.shape, str(array.dtype)), _shapes(self.arrays))
        return self.name, self.version, function_hash(self.function), self.site, repr(self.layers), repr(shapes)


def _shapes(arrays: Any) -> Any:
    def shape(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(array), jnp.result_type(array))

    return jax.tree.map(shape, arrays)


def _on_host(array: Any) -> Any:
    return np.asarray(array, jnp.result_type(array))


def check_taps(taps: Sequence[Tap]) -> tuple[Tap, ...]:
    """Check and return the session's taps. Raise ConfigError for a wrong type, equal names, or too many."""
    check_all("taps", taps, Tap, MAX_TAPS)
    return tuple(taps)


def check_places(taps: Sequence[Tap], facts: TapFacts | None) -> Mapping[str, str]:
    """Return the digests of taps by name. Raise ConfigError for a tap that does not fit the model or the session."""
    if not taps:
        return {}
    if facts is None:
        problem = "can't be had with several processes"
        raise ConfigError("taps", [tap.name for tap in taps], problem, "Use a session of one process")
    for tap in taps:
        present = facts.sites.get(tap.site)
        if present is None:
            raise ConfigError("taps", tap.name, f"{tap.site} {MISSING}", 'Use site="residual"')
        try:
            layers = present if tap.layers == "all" else _layers(tap, facts.layers)
        except InvalidRequest as error:
            problem = f"has layer {error.value!r}, which {error.problem}"
            raise ConfigError("taps", tap.name, problem, error.fix) from None
        for layer in layers:
            if layer not in present:
                raise ConfigError("taps", tap.name, f"has no {tap.site} in layer {layer}", f"Its layers: {present}")
            _check_result(tap, layer, facts.hidden_size)
    return {tap.name: tap.digest for tap in taps}


def _check_result(tap: Tap, layer: int, size: int) -> None:
    """Raise ConfigError for a tap that fails at a layer, or changes the shape."""
    x: Any = jax.ShapeDtypeStruct((1, size), jnp.float32)
    numbers: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
    fix = "Use jax.numpy, and return numbers of the shape that it was given"
    try:
        arrays = _shapes(tap.arrays)
    except Exception:
        raise ConfigError("taps", tap.name, "has values that are not arrays", "Pass arrays of numbers") from None
    try:
        result = jax.eval_shape(functools.partial(_mapped, tap, layer), x, numbers, numbers, numbers, arrays)
    except Exception as error:  # code of the user's
        problem = problem_of(tap.function, error, f"for layer {layer} and numbers ({size},)")
        raise ConfigError("taps", tap.name, problem, fix) from None  # the chain is JAX's
    shape = getattr(result, "shape", None)
    if shape != x.shape:
        returned = "no array" if shape is None else f"shape {shape[1:]}"
        raise ConfigError("taps", tap.name, f"returned {returned} for numbers of shape ({size},)", fix)


def _mapped(
    tap: Tap, layer: int, x: Array, positions: Array, prompt_lengths: Array, tokens: Array, arrays: Any
) -> Array:
    """Apply a tap to each of the tokens [N, E]."""

    def of_token(x: Array, position: Array, prompt_length: Array, token: Array) -> Array:
        return tap.function(x, TapContext(layer, position, prompt_length, token, arrays))

    return jax.vmap(of_token)(x, positions, prompt_lengths, tokens)


def _layers(tap: Tap, count: int) -> tuple[int, ...]:
    if tap.layers == "all":
        return tuple(range(count))
    numbers = [tap.layers] if isinstance(tap.layers, int) else tap.layers
    return tuple(dict.fromkeys(layer_of("taps", layer, count) for layer in numbers))


class CustomTapsOption(RowOption[Array]):
    """The session's taps that a request names: a bit for each in a column."""

    option, ints = RequestTaps, 1

    def __init__(self, taps: Sequence[Tap]) -> None:
        self._bits = {tap.name: 1 << index for index, tap in enumerate(taps)}

    def constants(self, request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        tapped = request.extensions.get(RequestTaps)
        assert tapped is not None, "its option"
        return (sum(self._bits[name] for name in tapped.custom),), ()

    def in_plan(self, plan: StepPlan) -> bool:
        tapped = [row.request.extensions.get(RequestTaps) for row in plan.rows]
        return any(one.custom for one in tapped if one is not None)

    def unpack(self, columns: Columns) -> Array:
        bits: Array = columns.ints[:, 0]
        return bits


class CustomTaps(StepPart[Array, tuple[object, ...]]):
    """The session's taps, in the programs of a variant that is compiled ahead."""

    variant, warmed, inside = ProgramVariant.TAPS, True, True

    def __init__(self, taps: Sequence[Tap], layers: int, *, divided: bool = False) -> None:
        self._taps, self._layers, self._divided = tuple(taps), layers, divided
        self._places: dict[int, list[tuple[int, int]]] = {}  # the taps of each place, and their layers there
        for index, tap in enumerate(taps):
            for layer in _layers(tap, layers):
                self._places.setdefault(place_of(tap.site, layer, layers), []).append((index, layer))

    @functools.cached_property
    def operands(self) -> tuple[object, ...]:  # type: ignore[override]
        """The arrays of each tap, put on the device when a step first needs them; a mesh takes them from the host."""
        if self._divided:
            return tuple(jax.tree.map(_on_host, tap.arrays) for tap in self._taps)
        return tuple(jax.tree.map(jnp.asarray, tap.arrays) for tap in self._taps)

    @property
    def operand_shapes(self) -> Any:
        return tuple(_shapes(tap.arrays) for tap in self._taps)

    def hooks(self, inputs: StepInputs, own: Array, operands: tuple[object, ...]) -> Hooks:
        bits = inputs.of_tokens(own)

        def change(place: int, x: Array) -> Array:
            for index, layer in self._places[place]:
                mine = (bits >> index) & 1 == 1
                x = _changed(self._taps[index], layer, x, mine, inputs, operands[index])
            return x

        def listener(site: str, layer: int) -> Callable[[Array], Array] | None:
            place = place_of(site, layer, self._layers) if site in STEER_SITES else None
            return None if place is None or place not in self._places else functools.partial(change, place)

        return Hooks(listener)


def _changed(tap: Tap, layer: int, x: Array, mine: Array, inputs: StepInputs, arrays: Any) -> Array:
    """Apply a tap to the tokens [N] in rows that name it."""

    def changed() -> Array:
        with jax.named_scope("tap"):
            y = _mapped(
                tap, layer, x.astype(jnp.float32), inputs.positions, inputs.prompt_lengths, inputs.tokens, arrays
            )
        return jnp.where(mine[:, None], y.astype(x.dtype), x)

    result: Array = lax.cond(mine.any(), changed, lambda: x)
    return result
