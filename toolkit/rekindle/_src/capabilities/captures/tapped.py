"""Taps of one request, resolved for its prompt: the engine's reads and changes, and the parts that come back."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle._src.capabilities.captures.follower import CaptureFileFollower, CaptureFollower
from rekindle._src.capabilities.captures.kept import KeptCaptures
from rekindle._src.core.captured import Backlog, Captured, Key
from rekindle._src.core.positions import END, Positions, Run, layer_of, position_of, runs_of
from rekindle._src.core.records import Request
from rekindle._src.core.taps import LOGITS, Capture, Steer, SteerLike, layers_of
from rekindle._src.kvcache import PrefixCache
from rekindle._src.scheduling.followers import FollowedExtension, Follower
from rekindle.errors import ConfigError, InvalidRequest

STREAM = ("residual_before", "residual", LOGITS, "norm")  # of what layers hand over; other sites are inside them
INNER = ("attention", "mlp")  # modules of a layer with outputs that can be changed
MISSING = "is in no layer of this model"
MAX_RUNS = 64  # of positions that one request changes: each is looked at in every step
MAX_VECTORS = 64  # of one request, in addition to MAX_PATCHES for each of its positions
MAX_PATCHES = 4
NAME_A_FOLDER = "Name a folder that can be written to"


class Edit(NamedTuple):
    """A change for one prompt: x becomes a · x + b · v + c · (x · v) · v in its runs of positions."""

    place: int  # in the residual stream: 0 is before the first layer, n after the n-th one; see `place_of`
    factors: tuple[float, float, float]
    vectors: NDArray[np.float32]  # [1, hidden], or with `each` one for each position
    runs: tuple[Run, ...]
    each: bool


def place_of(site: str, layer: int, layers: int) -> int:
    """Return the number of a place where a model can be changed: first the places of the residual stream, then the
    outputs of each layer's attention and MLP.
    """
    if site in INNER:
        return layers + 1 + len(INNER) * layer + INNER.index(site)
    return layer + (site == "residual")


def places_of(layers: int) -> int:
    """Return the number of places of a model."""
    return layers + 1 + len(INNER) * layers


class AttentionFacts(Protocol):
    """The attention of a layer, with all facts to compute its weights from queries and keys."""

    @property
    def scale(self) -> float: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def soft_cap(self) -> float | None: ...


class TapFacts(NamedTuple):
    """The sites of a session's model that can be tapped."""

    layers: int
    hidden_size: int
    sites: Mapping[str, Sequence[int]]  # the layers that have each site
    attention: Sequence[AttentionFacts | None] = ()  # of each layer; None where its weights can not be computed
    custom: Mapping[str, str] = MappingProxyType({})  # digests of the taps that the session was opened with, by name
    steering: Mapping[str, tuple[Steer, ...]] = MappingProxyType({})  # changes that have a name
    keeps: str = ""  # why captures can't be kept
    both_ways: Sequence[int] = ()  # layers where the tokens of a picture see each other
    elsewhere: bool = False  # the model is in another process, which resolves names and takes nothing else

    @classmethod
    def of_another_process(cls, names: Iterable[str]) -> TapFacts:
        """Return the facts of a model in another process, which has changes of these names."""
        return cls(0, 0, {}, steering=dict.fromkeys(names, ()), elsewhere=True)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RequestTaps(FollowedExtension):
    """The taps of one request, resolved for its prompt."""

    keys: tuple[Key, ...] = ()
    wanted: tuple[Run, ...] = ()  # positions that are captured
    edits: tuple[Edit, ...] = ()
    digest: str = ""  # of all that changes the model; empty without any
    layers: int = 0  # of the model
    custom: tuple[str, ...] = ()  # names of the session's taps
    into: str | None = None  # the folder for captures
    keep: bool = False  # the captures
    backlog: Backlog | None = None  # of the files in that folder

    @property
    def held(self) -> bool:
        """True while too many captures wait for their disk."""
        return self.backlog is not None and self.backlog.full

    @property
    def altered(self) -> tuple[str, ...]:
        return (f"steer-{self.digest}",) if self.digest else ()

    @property
    def by_position(self) -> bool:
        return True

    def reusable(self, prompt_length: int) -> int:
        return min(prompt_length, self.next_wanted(0))

    def follower(self, request: Request, cache: PrefixCache | None) -> Follower | None:
        if not self.keys:
            return None
        kept = KeptCaptures.of(cache)
        return CaptureFollower(self) if kept is None or not self.keep else CaptureFileFollower(request, self, kept)

    def another(self) -> RequestTaps:
        return dataclasses.replace(self, backlog=Backlog()) if self.backlog is not None else self

    @property
    def inner(self) -> bool:
        """True if it captures more than the residual stream."""
        return any(key[0] not in STREAM for key in self.keys if key != "norm")

    @property
    def reads_logits(self) -> bool:
        """True if it captures logits, which a program of their own computes."""
        return any(key[0] == LOGITS for key in self.keys)

    @property
    def edits_inside(self) -> bool:
        """True if it changes more than the residual stream."""
        return any(edit.place > self.layers for edit in self.edits)

    def next_wanted(self, position: int) -> int:
        """Return the first position from this one on that is captured, or END."""
        return min((max(start, position) for start, stop in self.wanted if stop > position), default=END)

    def wanted_in(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return the captured positions in [start, stop)."""
        parts = [np.arange(max(first, start), min(last, stop), dtype=np.int32) for first, last in self.wanted]
        parts = [part for part in parts if len(part)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int32), *parts])

    def captures(self, start: int, stop: int) -> bool:
        """True if a position in [start, stop) is captured."""
        return self.next_wanted(start) < stop

    def edits_in(self, start: int, stop: int) -> bool:
        """True if a position in [start, stop) is changed."""
        return any(first < stop and start < last for edit in self.edits for first, last in edit.runs)


def resolve(
    capture: Capture | None,
    steers: Sequence[SteerLike],
    patch: Captured | None,
    prompt_length: int,
    facts: TapFacts | None,
    custom: Sequence[str] = (),
) -> RequestTaps | None:
    """Return the taps of a request that has any; None elsewhere than in the model's process. Raise `InvalidRequest` for
    what can't be had.

    `custom` are the names of the session's taps that the request uses.
    """
    if facts is None or facts.elsewhere:
        arrays = tuple(steer for steer in steers if facts is None or isinstance(steer, Steer))
        options = (("capture", capture), ("steer", arrays), ("patch", patch), ("taps", custom))
        for name, value in options:
            if value is not None and value != ():
                fix = "Use a session of one process, in its own process"
                raise InvalidRequest(name, value, "needs the model's own process, which is another one", fix)
        assert facts is not None
        tuple(_named(steers, facts))  # raises for an unknown name
        return None
    for name in custom:
        if name not in facts.custom:
            raise InvalidRequest("taps", name, "is not a tap of this session", _registered("taps=[…]", facts.custom))
    changes = (*_named(steers, facts), *(() if patch is None else patch.steers()))
    if capture is not None and capture.keep and facts.keeps:
        fix = "Capture with keep=False"
        raise InvalidRequest("capture", capture, f"can't be kept: {facts.keeps}", fix)
    edits = tuple(sorted((edit_of(steer, facts, prompt_length) for steer in changes), key=lambda edit: edit.place))
    _check_size(edits)
    wanted = () if capture is None else runs_of("capture", capture.positions, prompt_length)
    names = tuple(name for name in facts.custom if name in custom)
    return RequestTaps(
        () if capture is None else keys_of(capture, facts),
        wanted,
        edits,
        _digest(edits, [facts.custom[name] for name in names]) if edits or names else "",
        facts.layers,
        names,
        None if capture is None else _folder(capture),
        capture is not None and capture.keep,
    )


def _folder(capture: Capture) -> str | None:
    """Return the absolute path of the folder for captures. Raise `InvalidRequest` if it is not a path."""
    if capture.into is None:
        return None
    try:
        return os.path.abspath(Path(capture.into).expanduser())
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # no such user; the working folder is gone
        raise InvalidRequest("capture", capture.into, f"is not the name of a folder: {error}", NAME_A_FOLDER) from None


def _named(steers: Sequence[SteerLike], facts: TapFacts) -> Iterator[Steer]:
    """Yield changes, with the session's changes in place of their names."""
    for steer in steers:
        if isinstance(steer, Steer):
            yield steer
            continue
        for name, weight in ({steer: 1.0} if isinstance(steer, str) else steer).items():
            if name not in facts.steering:
                fix = _registered("steering={…}", facts.steering)
                raise InvalidRequest("steer", name, "is not a steering vector of this session", fix)
            for change in facts.steering[name]:
                yield change if weight == 1.0 else dataclasses.replace(change, scale=change.scale * weight)


def _registered(option: str, names: Iterable[str]) -> str:
    known = ", ".join(map(repr, names)) or "none"
    return f"Give it to open({option}); known: {known}"


def _check_size(edits: Sequence[Edit]) -> None:
    """Raise `InvalidRequest` for more changes than a step has room for."""
    runs = sum(len(edit.runs) for edit in edits)
    if runs > MAX_RUNS:
        problem = f"are over the {MAX_RUNS} runs of positions that one request may change"
        raise InvalidRequest("steer", f"{runs} runs", problem, "Change fewer layers, or adjacent positions")
    beyond = sum(not edit.each for edit in edits)
    bounds = sorted({bound for edit in edits if edit.each for run in edit.runs for bound in run})
    for first, last in itertools.pairwise(bounds):
        covers = sum(start <= first < stop for edit in edits if edit.each for start, stop in edit.runs)
        beyond += max(0, covers - MAX_PATCHES) * (last - first)
    if beyond > MAX_VECTORS:
        problem = f"are over {MAX_VECTORS}, in addition to {MAX_PATCHES} for each position"
        raise InvalidRequest("steer", f"{beyond} vectors", problem, "Change fewer layers or positions in one request")


def _digest(edits: Iterable[Edit], custom: Sequence[str]) -> str:
    state = hashlib.blake2b("\0".join(custom).encode(), digest_size=16)
    for edit in edits:
        state.update(repr((edit.place, edit.factors, edit.runs, edit.each, edit.vectors.shape)).encode())
        state.update(np.ascontiguousarray(edit.vectors).astype("<f4").tobytes())
    return state.hexdigest()


def keys_of(capture: Capture, facts: TapFacts) -> tuple[Key, ...]:
    """Return the keys to capture. Raise `InvalidRequest` for sites that the model does not have."""
    keys: list[Key] = []
    for site, layers in capture.sites.items():
        present = facts.sites.get(site)
        if present is None:
            raise InvalidRequest("capture", site, MISSING, "Leave it out")
        if site == "norm":
            keys.append(site)
            continue
        chosen = present if layers == "all" else layers_of(site, layers, facts.layers)
        for layer in chosen:
            if layer not in present:
                raise InvalidRequest("capture", {site: layer}, "is not in that layer", f"Its layers: {present}")
        keys += [(site, layer) for layer in chosen]
    return tuple(dict.fromkeys(keys))


def edit_of(steer: Steer, facts: TapFacts, prompt_length: int) -> Edit:
    """Return the change for a prompt. Raise `InvalidRequest` for a site that the model does not have."""
    layer = check_steer(steer, facts)
    vectors = np.zeros((1, facts.hidden_size), np.float32) if steer.vector is None else np.atleast_2d(steer.vector)
    runs, each = runs_of("steer", steer.positions, prompt_length), False
    if steer.vector is not None and np.ndim(steer.vector) == 2:
        vectors, runs = _in_order(steer.positions, vectors, runs, prompt_length)
        each = len(vectors) > 1
    factors = (1.0, steer.scale, 0.0)
    if steer.mode == "replace":
        factors = (0.0, steer.scale, 0.0)
    elif steer.mode == "scale" and steer.vector is None:
        factors = (steer.scale, 0.0, 0.0)
    elif steer.mode != "add":
        vectors = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
        factors = (1.0, 0.0, -steer.scale if steer.mode == "project_out" else steer.scale - 1.0)
    return Edit(place_of(steer.site, layer, facts.layers), factors, vectors, runs, each)


def check_steer(steer: Steer, facts: TapFacts) -> int:
    """Return the layer of a change, counted from 0. Raise `InvalidRequest` if it does not fit the model."""
    layer = layer_of("steer", steer.layer, facts.layers)
    present = facts.sites.get(steer.site)
    if present is None or layer not in present:
        raise InvalidRequest("steer", steer.site, MISSING, "Change the residual stream")
    if steer.vector is not None and (size := np.shape(steer.vector)[-1]) != facts.hidden_size:
        problem = f"has {size} numbers, and the model's residual stream {facts.hidden_size}"
        raise InvalidRequest("steer", steer.vector, problem, "Take a vector of this model")
    return layer


def check_named(steering: Mapping[str, Sequence[Steer]], facts: TapFacts | None) -> None:
    """Raise ConfigError for named changes that do not fit the model or the session."""
    if not steering:
        return
    if facts is None:
        problem = "needs a model in one process"
        raise ConfigError("steering", list(steering), problem, "Use a session of one process")
    for name, changes in steering.items():
        for change in changes:
            try:
                check_steer(change, facts)
            except InvalidRequest as error:
                raise ConfigError(
                    "steering", name, f"does not fit the model: {error}", "Take one of this model"
                ) from None


def _in_order(
    positions: Positions, vectors: NDArray[np.float32], runs: tuple[Run, ...], prompt_length: int
) -> tuple[NDArray[np.float32], tuple[Run, ...]]:
    """Return the rows of a matrix in the order of their positions."""
    if isinstance(positions, Sequence) and not isinstance(positions, str):
        numbers = [position_of("steer", position, prompt_length) for position in positions]
        if len(numbers) == len(vectors):
            vectors = vectors[np.argsort(numbers, kind="stable")]
    count = sum(stop - start for start, stop in runs)
    if count != len(vectors):
        many = "positions without an end" if runs and runs[-1][1] == END else f"{count} different positions"
        problem = f"of {len(vectors)} rows are for {many}"
        raise InvalidRequest("steer", vectors, problem, "Pass one row for each position")
    return vectors, runs
