"""The number that a caller differentiates, and the sites at which: checked, and resolved for a prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from rekindle._src.capabilities.captures.tapped import MISSING, TapFacts
from rekindle._src.core.contracts import TokenizerLike
from rekindle._src.core.drawable import Drawable
from rekindle._src.core.positions import layer_of
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from jax import Array

Point = tuple[str, int]  # a site and its layer
SITES = ("embedding", "residual_before", "q", "k", "v", "heads", "attention", "gates", "mlp", "residual", "norm")
MOST_LAYERS = 10_000  # that are read of one site
WITHOUT_LAYERS = ("embedding", "norm")
_OBJECTIVES = 'rekindle.logprob(" Paris"), rekindle.logit_difference(" he", " she") or a JAX function'
ObjectiveFunction = Callable[["Array", Mapping[Any, "Array"]], "Array"]


@dataclasses.dataclass(frozen=True, slots=True)
class Objective(Drawable):
    """A number of the token after one position of a prompt; `rekindle.logprob` and `logit_difference` make it."""

    token: str | int
    minus: str | int | None = None  # its logit is subtracted; None: the log-probability of `token`
    position: int = -1

    def __post_init__(self) -> None:
        if isinstance(self.position, bool) or not isinstance(self.position, int):
            raise InvalidRequest("position", self.position, "is not a position", "Pass an int, such as -1")
        for token in (self.token,) if self.minus is None else (self.token, self.minus):
            if isinstance(token, bool) or not isinstance(token, str | int):
                raise InvalidRequest("of", token, "is not a token", 'Pass its text, such as " Paris", or its id')

    def __repr__(self) -> str:
        at = "" if self.position == -1 else f", position={self.position}"
        if self.minus is None:
            return f"logprob({self.token!r}{at})"
        return f"logit_difference({self.token!r}, {self.minus!r}{at})"


def logprob(token: str | int, *, position: int = -1) -> Objective:
    """Return the log-probability of a token after a position of a prompt, for `session.gradients(…, of=…)`.

    `token` is an id, or a text that is a single token. Negative positions count from the end of the prompt.
    """
    return Objective(token, None, position)


def logit_difference(token: str | int, other: str | int, *, position: int = -1) -> Objective:
    """Return the logit of a token minus the logit of another one, for `session.gradients(…, of=…)`.

    Tokens and `position` are as in `logprob`.
    """
    if other is None:
        raise InvalidRequest("of", other, "is not a token", 'Pass its text, such as " she", or its id')
    return Objective(token, other, position)


class ResolvedObjective(NamedTuple):
    """An objective for one prompt: token ids and a position, or a function."""

    tokens: tuple[int, int] = (0, 0)
    position: int = 0
    difference: bool = False
    function: ObjectiveFunction | None = None


def resolved(of: object, length: int, vocab_size: int, tokenizer: TokenizerLike) -> ResolvedObjective:
    """Return an objective for a prompt of this length. Raise `InvalidRequest` for others."""
    if not isinstance(of, Objective):
        if not callable(of) or isinstance(of, type):
            raise InvalidRequest("of", of, "can't be differentiated", f"Pass {_OBJECTIVES}")
        return ResolvedObjective(position=length - 1, function=of)
    position = of.position + length if of.position < 0 else of.position
    if not 0 <= position < length:
        fix = f"Pass a number from {-length} to {length - 1}"
        raise InvalidRequest("position", of.position, f"is outside of the prompt's {length} tokens", fix)
    first = token_of("of", of.token, vocab_size, tokenizer)
    second = first if of.minus is None else token_of("of", of.minus, vocab_size, tokenizer)
    return ResolvedObjective((first, second), position, of.minus is not None)


def token_of(field: str, token: object, vocab_size: int, tokenizer: TokenizerLike) -> int:
    """Return the id of a token, given as an id or a text. Raise `InvalidRequest` for others."""
    if isinstance(token, int) and not isinstance(token, bool):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(field, token, "is not a token id", f"Pass a number from 0 to {vocab_size - 1}")
        return token
    if not isinstance(token, str):
        raise InvalidRequest(field, token, "is not a token", 'Pass its text, such as " Paris", or its id')
    ids = [int(one) for one in tokenizer.encode(token[:4096], add_special_tokens=False)]
    if len(ids) != 1:
        shown = f" ({', '.join(map(str, ids[:4]))}{', …' if len(ids) > 4 else ''})" if ids else ""
        fix = "Pass a text that is one token, often with the space before it, or a token id"
        raise InvalidRequest(field, token, f"is {len(ids)} tokens{shown}, where one is needed", fix)
    return ids[0]


def _layers(layers: object, count: int) -> tuple[int, ...]:
    if isinstance(layers, str | bytes | Mapping) or not isinstance(layers, Iterable):
        return (layer_of("at", layers, count),)
    return tuple(layer_of("at", layer, count) for layer in islice(layers, MOST_LAYERS))


def points_of(at: object, facts: TapFacts) -> tuple[Point, ...]:
    """Return the sites and layers at which to differentiate. Raise `InvalidRequest` for others."""
    if not isinstance(at, Mapping) or not at:
        raise InvalidRequest("at", at, "does not map sites to layers", 'Pass a dict such as {"residual": [4, 8]}')
    points: dict[Point, None] = {}
    for site, layers in at.items():
        if site not in SITES:
            known = ", ".join(map(repr, SITES))
            raise InvalidRequest("at", site, "is not a site with gradients", f"Use one of {known}")
        if site in WITHOUT_LAYERS:
            points[site, 0] = None
            continue
        present = facts.sites.get("q" if site == "heads" else site)  # a layer with queries has heads
        if not present:
            raise InvalidRequest("at", site, MISSING, "Leave it out")
        if layers == "all":
            points.update(dict.fromkeys((site, layer) for layer in present))
            continue
        for layer in _layers(layers, facts.layers):
            if layer not in present:
                raise InvalidRequest("at", {site: layer}, "is a layer without this site", f"Use {list(present)}")
            points[site, layer] = None
    if not points:
        raise InvalidRequest("at", at, "names no layers", 'Pass numbers such as [4, 8], or "all"')
    return tuple(points)
