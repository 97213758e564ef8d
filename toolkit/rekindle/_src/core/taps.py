"""Taps: a request's reads and changes of the numbers inside the model.

A `Capture` and `Steer`s are options of a request; `captured.py` has the results. `tapped.py` has the options as
the engine resolves them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rekindle._src.core.drawable import Drawable
from rekindle._src.core.positions import Positions, layer_of, runs_of
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Mode = Literal["add", "replace", "project_out", "scale"]
SteerSite = Literal["residual", "residual_before", "attention", "mlp"]

# Where a layer is read, in the order of the layer. "norm" is the final norm, after all layers.
SITES = ("residual_before", "q", "k", "v", "attention", "experts", "gates", "mlp", "residual", "logits", "norm")
LOGITS = "logits"
MODES: tuple[Mode, ...] = ("add", "replace", "project_out", "scale")
STEER_SITES: tuple[SteerSite, ...] = ("residual", "residual_before", "attention", "mlp")


@dataclasses.dataclass(frozen=True, slots=True)
class Capture(Drawable):
    """The numbers inside the model that a request wants to see.

    `sites` maps each site to its layers: a number, several, or "all"; negative numbers count from the last layer.

    site               | array                      | what it is
    -------------------|----------------------------|----------------------------------------------------------
    "residual"         | [positions, hidden]        | the residual stream after the layer
    "residual_before"  | [positions, hidden]        | the same before it; before layer 0 these are the embeddings
    "attention"        | [positions, hidden]        | the output of the layer's attention module
    "mlp"              | [positions, hidden]        | the output of its MLP, or of its experts
    "q", "k", "v"      | [positions, heads, size]   | as attention takes them: normed and rotated
    "experts", "gates" | [positions, chosen]        | the experts that the router chose, and their weights
    "logits"           | [positions, vocabulary]    | the head's logits of "residual": the logit lens
    "norm"             | [positions, hidden]        | after the final norm; it has no layers: `{"norm": True}`

    `positions` are by default all computed positions: the prompt, and the output except its last token. Or
    they are numbers, which count from 0, or negative ones from the end of the prompt (-1 is its last token); a slice of
    such numbers; "prompt"; or "output".

    `into` names a folder: then the arrays are written to files in a folder of the request's own within it, and the
    completion's arrays are mapped from there. Deltas of streams have none.

    With `keep`, captures also stay in host memory (`capture_memory` of `open()`), along with the cached pages of the
    prompt: a later request that captures the same of these pages, with `keep`, gets it without computing them.
    """

    sites: Mapping[str, object]
    positions: Positions = None
    into: str | os.PathLike[str] | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.sites, Mapping) or not self.sites:
            fix = 'Pass a dict such as {"residual": [4, 8]}'
            raise InvalidRequest("capture", self.sites, "does not map sites to layers", fix)
        for site, layers in self.sites.items():
            if site not in SITES:
                raise InvalidRequest("capture", site, "is not a site", f"Use one of {', '.join(map(repr, SITES))}")
            layers_of(site, layers, None)
        runs_of("capture", self.positions, None)
        if self.into is not None and not _names_a_folder(self.into):
            raise InvalidRequest("capture", self.into, "is not the name of a folder", "Pass into as a str or a Path")
        if self.into is not None and not isinstance(self.into, str | Path):
            object.__setattr__(self, "into", os.fspath(self.into))  # code of the user's, called once and here
        if not isinstance(self.keep, bool):
            raise InvalidRequest("capture", self.keep, "is not True or False", "Pass keep as a bool")

    def __repr__(self) -> str:
        positions = "" if self.positions is None else f", positions={self.positions!r}"
        into = "" if self.into is None else f", into={os.fspath(self.into)!r}"
        keep = ", keep=True" if self.keep else ""
        return f"Capture({dict(self.sites)!r}{positions}{into}{keep})"


def _names_a_folder(into: Any) -> bool:
    try:
        path = os.fspath(into)
    except Exception:  # a user's class may raise anything
        return False
    return isinstance(path, str) and bool(path) and "\0" not in path


def layers_of(site: str, layers: object, count: int | None) -> tuple[int, ...]:
    """Return layer numbers as a tuple; without a `count` of layers they are only checked for their form."""
    if site == "norm" or layers == "all":
        return ()
    numbers = [layers] if isinstance(layers, int) and not isinstance(layers, bool) else layers
    if isinstance(numbers, str | bytes | Mapping) or not isinstance(numbers, Iterable):
        raise InvalidRequest("capture", {site: layers}, "names no layers", 'Pass numbers such as [4, 8], or "all"')
    return tuple(layer_of("capture", layer, count) for layer in numbers)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Steer(Drawable):
    """A change of the residual stream at one layer, or of the output of its attention or MLP.

    `mode` "add" adds `scale · vector`, and "replace" puts it in place of the old value. "project_out" removes
    `scale` times the component along `vector`. "scale" multiplies by `scale`: the component along `vector`, or all
    that is there if no vector is given.

    `vector` has one number for each of the model's `hidden_size`, or one such row for each of the `positions`, which
    have an end then. `positions` are as in `Capture`; None is all of them. `site` is "residual", after the
    layer, "residual_before", or "attention" or "mlp": their outputs are changed before they are added to the residual
    stream. Several changes of one position are made in their order.
    """

    layer: int
    vector: ArrayLike | None = None  # of float32 once it is checked
    scale: float = 1.0
    positions: Positions = None
    mode: Mode = "add"
    site: SteerSite = "residual"

    def __post_init__(self) -> None:
        layer_of("steer", self.layer, None)
        if self.mode not in MODES:
            raise InvalidRequest("steer", self.mode, "is not a mode", f"Use one of {', '.join(map(repr, MODES))}")
        if self.site not in STEER_SITES:
            raise InvalidRequest("steer", self.site, "can't be changed", f"Use {STEERED}")
        if isinstance(self.scale, bool) or not isinstance(self.scale, int | float) or not math.isfinite(self.scale):
            raise InvalidRequest("steer", self.scale, "is not a finite number", "Pass scale as a float")
        runs_of("steer", self.positions, None)
        if self.vector is None:
            if self.mode != "scale":
                raise InvalidRequest("steer", None, f"is no vector, which mode={self.mode!r} needs", "Pass one")
            return
        import numpy as np  # `import rekindle` does without it

        try:
            vector = np.array(self.vector, np.float32)
        except Exception:
            raise InvalidRequest("steer", self.vector, "is not a vector", "Pass an array of numbers") from None
        if vector.ndim not in (1, 2) or not vector.size or not np.isfinite(vector).all():
            problem = f"of shape {vector.shape} is not a vector of finite numbers"
            raise InvalidRequest("steer", vector, problem, "Pass [hidden_size] numbers, or a row for each position")
        if self.mode in ("project_out", "scale") and not np.linalg.norm(vector, axis=-1).all():
            raise InvalidRequest("steer", vector, "is zero, so that it has no direction", "Pass another vector")
        vector.setflags(write=False)
        object.__setattr__(self, "vector", vector)

    def __repr__(self) -> str:
        vector: Any = self.vector
        shape = "" if vector is None else f", vector of {'×'.join(map(str, vector.shape))}"
        where = "" if self.positions is None else f", positions={self.positions!r}"
        where += "" if self.site == "residual" else f", site={self.site!r}"
        return f"Steer(layer={self.layer}{shape}, scale={self.scale:g}, mode={self.mode!r}{where})"

    def __str__(self) -> str:
        """Return the repr with a digest of the vector: `session.map` tells options apart by their texts."""
        return f"{self!r} {digest_of((self.vector,))} {self.site}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steer) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[Any, ...]:
        vector: Any = self.vector
        numbers = b"" if vector is None else vector.tobytes()
        return self.layer, numbers, self.scale, repr(self.positions), self.mode, self.site


SteerLike = Steer | str | Mapping[str, float]  # a name of the session's, or names and the factors of their scales
STEERED = f"{', '.join(map(repr, STEER_SITES[:-1]))} or {STEER_SITES[-1]!r}"


def digest_of(arrays: Iterable[Any]) -> str:
    """Return a digest of arrays; an array may be None."""
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        state.update(b"" if array is None else array.tobytes())
    return state.hexdigest()
