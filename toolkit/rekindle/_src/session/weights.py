"""The weights of a session: those in use, and their replacements.

A model's weights are replaced by others of the same graph, shapes and dtypes, so that compiled programs still fit.
"""

from __future__ import annotations

import dataclasses
import uuid
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rekindle import tiny
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import PageMove
from rekindle._src.execution.runner import Runner
from rekindle._src.kvcache import Tiers
from rekindle._src.kvcache.persist.identity import STATES, WINDOWS, Identity
from rekindle._src.kvcache.persist.segment import LeafSpec
from rekindle._src.models.adapters.adapted import merged
from rekindle._src.models.adapters.adapter import Adapter
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.loading.checkpoint import describe, read
from rekindle._src.models.loading.tensor_files import listed
from rekindle._src.models.unpacking import unpacked_in_products, unpacked_model
from rekindle._src.processes.others import OtherProcesses
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.kv_layout import state_bytes
from rekindle.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from flax import nnx

    AnyWeights = LoadedModel | nnx.Module | nnx.State | Mapping[str, Any]


def page_identity(model: LoadedModel, config: EngineConfig, name: str = "") -> Identity:
    """Return the identity of this model's pages, which those of other processes are compared with."""
    assert config.page_size is not None, "resolved"
    layers = tuple(layer._replace(states=()) for layer in _one_page(model, config) if layer.pages)
    leaves = [(leaf.shape[1:], str(leaf.dtype)) for leaf in jax.tree.leaves(layers)]
    layout = f"{jax.default_backend()} {len(layers)} layers {sorted(set(leaves))}"
    if len(model.config.kinds_of_pages) > 1:
        layout += f" of {paged.groups_of(layers)}"
    if config.deterministic:
        layout += " deterministic"  # pages of other sessions hold nearly the same numbers, but not the same
    payload = tuple(LeafSpec(tuple(shape[1:]), str(dtype)) for shape, dtype in paged.payload_layout(layers))
    return Identity(
        model.fingerprint,
        config.kv_dtype,
        config.page_size,
        layout,
        name,
        leaves=payload,
        vocab_size=model.config.vocab_size,
    )


def state_identity(pages: Identity, model: LoadedModel, config: EngineConfig) -> Identity:
    """Return the identity of the states, or pages of layers with a window, stored in addition to this model's pages."""
    leaves: tuple[LeafSpec, ...]
    if model.config.is_recurrent:
        count = state_bytes(model.config) // 4
        leaves, what = (LeafSpec((count,), "float32"),), f"{STATES}{count} numbers"
    else:
        layout = paged.payload_layout(_one_page(model, config), tails=True)
        leaves = tuple(LeafSpec(tuple(shape[1:]), str(dtype)) for shape, dtype in layout)
        what = f"{WINDOWS}{model.config.window} tokens"
    return dataclasses.replace(pages, layout=f"{pages.layout}{what}", leaves=leaves)


def _one_page(model: LoadedModel, config: EngineConfig) -> paged.KV:
    """Return the shapes of one page of each layer."""
    assert config.page_size is not None, "resolved"
    tails = int(model.placement.pages_apart and model.config.window > 0)
    return paged.abstract(model.config, 1, config.page_size, config.kv_dtype, tails=tails)


def replacement(model: LoadedModel, weights: Any, config: EngineConfig) -> LoadedModel:
    """Return `model` with other weights on its devices. A folder or hub id is read."""
    if weights == "tiny":
        weights = tiny.folder()
    unpacks = not unpacked_in_products(model.graph)
    if not isinstance(weights, str | Path):
        if unpacks and isinstance(weights, LoadedModel):
            weights = unpacked_model(weights)
        return replace_weights(model, weights)
    description = describe(weights, dtype=config.dtype, quantize=config.quantize, unpack=unpacks)
    if not model.placement.divided:
        return replace_weights(model, read(description))
    expected = dict(zip(model.graph.paths, model.placement.whole_shapes(model.leaves), strict=True))
    available = dict(zip(description.graph.paths, description.shapes, strict=True))
    alike = description.found.config.computes_as(model.config)
    check_fits(expected, available, same_config=alike)  # before anything is read
    loaded = read(description, placement=model.placement)
    by_path = dict(zip(loaded.graph.paths, loaded.leaves, strict=True))
    leaves = tuple(by_path[path] for path in expected)
    return dataclasses.replace(model, leaves=leaves, fingerprint=loaded.fingerprint, folder=loaded.folder)


def replace_weights(model: LoadedModel, weights: AnyWeights, *, fingerprint: str | None = None) -> LoadedModel:
    """Return `model` with other weights. One `CheckpointError` lists the differences in names, shapes and dtypes.

    `weights` is another loaded model, a module of the same family, its nnx state, or arrays by path such as
    `layers.0.mlp.down.weight`. The result takes `fingerprint`, else the loaded model's own, else a new random
    one, so that nothing cached for other weights can match. If the running model lies on a mesh, the new weights
    are put there; `weights` are whole, as for one device.
    """
    leaves = _by_path(weights)
    running = dict(zip(model.graph.paths, model.placement.whole_shapes(model.leaves), strict=True))
    leaves |= {
        path: jax.lax.bitcast_convert_type(leaf, jnp.uint16)
        for path, leaf in leaves.items()
        if path in running and running[path].dtype == jnp.uint16 and leaf.dtype == model.graph.precision.weights
    }
    config = weights.config if isinstance(weights, LoadedModel) else None
    check_fits(running, leaves, same_config=config is None or config.computes_as(model.config))
    if fingerprint is None:
        fingerprint = weights.fingerprint if isinstance(weights, LoadedModel) else f"state-{uuid.uuid4().hex}"
    current = zip(model.graph.paths, model.leaves, strict=True)
    placed = tuple(model.placement.replacement(path, leaves[path], old) for path, old in current)
    folder = weights.folder if isinstance(weights, LoadedModel) else model.folder
    return dataclasses.replace(model, leaves=placed, fingerprint=fingerprint, folder=folder or model.folder)


def check_fits(wanted: Mapping[str, Any], found: Mapping[str, Any], *, same_config: bool) -> None:
    """Raise CheckpointError with the differences between the leaves of the running model and others, by path."""
    problems = [f"missing: {path}" for path in wanted if path not in found]
    problems += [f"unexpected: {path}" for path in found if path not in wanted]
    for path, old in wanted.items():
        new = found.get(path)
        if new is not None and (tuple(new.shape) != tuple(old.shape) or new.dtype != old.dtype):
            problems.append(f"{path}: {new.dtype}{list(new.shape)}, expected {old.dtype}{list(old.shape)}")
    if not same_config and not problems:
        problems.append("the configs differ")
    if problems:
        raise CheckpointError(
            f"The weights do not fit the running model ({len(problems)} differences): {listed(problems)}. "
            "Open a new session for them."
        )


def _by_path(weights: AnyWeights) -> dict[str, Any]:
    if isinstance(weights, LoadedModel):
        return dict(zip(weights.graph.paths, weights.leaves, strict=True))
    from flax import nnx

    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights, nnx.Param)
    if isinstance(weights, nnx.State):
        keyed, _ = jax.tree_util.tree_flatten_with_path(weights)
        return {".".join(str(key.key) for key in path[:-1]): leaf for path, leaf in keyed}
    return dict(weights)


def delete(model: LoadedModel) -> None:
    """Free the memory of its leaves."""
    for leaf in model.leaves:
        leaf.delete()


class FreedMemory(NamedTuple):
    """Bytes of device memory that were given back."""

    weights: int
    pages: int


class Weights:
    """The weights in use. Those loaded here are freed when they are replaced or the session ends."""

    def __init__(
        self,
        model: LoadedModel,
        runner: Runner,
        config: EngineConfig,
        tiers: Tiers | None,
        *,
        owned: bool,
        others: OtherProcesses,
        state_tiers: Tiers | None = None,
        merge: Adapter | None = None,
    ) -> None:
        self._model, self._runner, self._config, self._tiers, self._owned = model, runner, config, tiers, owned
        self._state_tiers = state_tiers
        self._others, self._merge = others, merge
        self._from_folder = owned  # they can be read again
        self._arrays: deque[tuple[dict[str, weakref.ref[Any]], str]] = deque(maxlen=8)  # of callers, and fingerprints
        self._asleep: list[Any] | None = None  # while the session sleeps, the weights in host memory, or None for each

    @property
    def model(self) -> LoadedModel:
        """The model with the weights in use."""
        return self._model

    def swap(self, weights: Any) -> bytes:
        """Replace the weights. Return the root key of the cache for the new ones."""
        if self._asleep is not None:
            raise InvalidRequest("weights", weights, "can't be swapped while the session sleeps", "Use wake(weights=…)")
        model = self._everywhere(weights)
        self._runner.swap_weights(model.leaves)
        self.release()
        return self._use(model, weights)

    def _use(self, model: LoadedModel, weights: Any) -> bytes:
        """Note the weights that are used from now on. Return the root key of the cache for them."""
        from_source = isinstance(weights, str | Path)
        self._model, self._owned, self._from_folder = model, from_source or model.placement.divided, from_source
        identity = page_identity(model, self._config, str(weights) if from_source else "")
        if self._tiers is not None:
            self._tiers.identity = identity
        if self._state_tiers is not None:
            self._state_tiers.identity = state_identity(identity, model, self._config)
        return identity.root

    def sleep(self, leaving: Sequence[PageMove], drop: bool) -> FreedMemory:
        """Give device memory back: pages, `leaving` among them for the tiers, and weights.

        Weights are kept in host memory, or dropped if they can be read again. Those of the caller are only let go.
        """
        model = self._model
        if drop and not (model.folder is not None and self._from_folder):
            problem = "can't be read again: they are not those of a folder"
            raise InvalidRequest("weights", "drop", problem, 'Use "host", or drop your own arrays')
        pages = self._runner.page_bytes
        self._runner.sleep(leaving)
        if not self._owned:
            self._asleep = list(model.leaves)
            return FreedMemory(0, pages)
        self._asleep = []
        for leaf in model.leaves:  # one by one: in host memory, which a CPU computes in, both would lie at once
            self._asleep.append(None if drop else np.array(leaf))
            leaf.delete()
        return FreedMemory(sum(leaf.nbytes for leaf in model.leaves), pages)

    def wake(self, weights: Any) -> bytes | None:
        """Put the weights back on the device, or other ones. Return the cache's new root key for other ones."""
        kept, model = self._asleep, self._model
        assert kept is not None, "the session does not sleep"
        root: bytes | None = None
        if weights is not None:
            model = self._replacement(weights)
            root = self._use(model, weights)
        elif self._owned:
            if kept and kept[0] is None:
                again = self._replacement(str(model.folder))
                if again.fingerprint != model.fingerprint:
                    raise CheckpointError(
                        f"{model.folder} holds other weights than before. Pass wake(weights=…) to use them."
                    )
                kept = list(again.leaves)
            places = [leaf.sharding if leaf.committed else None for leaf in model.leaves]
            kept = [jax.device_put(array, place) for array, place in zip(kept, places, strict=True)]
            self._model = dataclasses.replace(model, leaves=tuple(kept))
        self._runner.wake(self._model.leaves)
        self._asleep = None
        return root

    def release(self) -> None:
        if self._owned:
            delete(self._model)

    def _replacement(self, weights: Any) -> LoadedModel:
        """Return the model with other weights, to which the session's merged adapter is added, too."""
        model = replacement(self._model, weights, self._config)
        if not isinstance(weights, LoadedModel | str | Path):
            model = dataclasses.replace(model, fingerprint=self._fingerprint(weights, model.fingerprint))
        return model if self._merge is None else merged(model, self._merge)

    def _fingerprint(self, weights: Any, new: str) -> str:
        """Return the fingerprint of a caller's arrays: the one they had before, if they are the very same ones."""
        arrays = _by_path(weights)
        if not all(isinstance(array, jax.Array) for array in arrays.values()):
            return new  # arrays of numpy may have changed meanwhile
        for known, fingerprint in self._arrays:
            if known.keys() == arrays.keys() and all(known[path]() is array for path, array in arrays.items()):
                return fingerprint
        self._arrays.append(({path: weakref.ref(array) for path, array in arrays.items()}, new))
        return new

    def _everywhere(self, weights: Any) -> LoadedModel:
        """Return the weights on this process's devices, once all other processes have them on theirs."""
        models: list[LoadedModel] = []

        def here() -> str:
            models.append(self._replacement(weights))
            return models[0].fingerprint

        try:
            self._others.load_weights(weights, here)
        except BaseException:
            for model in models:
                delete(model)
            raise
        return models[0]
