"""The weights of a session: those in use, and their replacements.

A model's weights are replaced by others of the same graph, shapes and dtypes, so that compiled programs still fit.
"""

from __future__ import annotations

import dataclasses
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle import tiny
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.words import count
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.loading.checkpoint import WeightForm, describe, read
from rekindle._src.models.loading.load_progress import Report
from rekindle._src.models.loading.rope_override import with_scaling
from rekindle._src.models.loading.stored import look
from rekindle._src.models.loading.tensor_files import listed
from rekindle._src.models.unpacking import unpacked_in_products, unpacked_model
from rekindle._src.opening.blueprint import Blueprint
from rekindle._src.opening.source import Brought, ModelSource
from rekindle._src.processes.others import OtherProcesses
from rekindle.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from flax import nnx

    AnyWeights = LoadedModel | nnx.Module | nnx.State | Mapping[str, Any]


def replacement(model: LoadedModel, weights: Any, config: EngineConfig, form: WeightForm | None = None) -> LoadedModel:
    """Return `model` with other weights on its devices. A folder or hub id is read.

    With the `form` in which a checkpoint was read before, the same weights are read again: from the cache if it has
    them.
    """
    unpacks = not unpacked_in_products(model.graph)
    if not isinstance(weights, str | Path):
        if unpacks and isinstance(weights, LoadedModel):
            weights = unpacked_model(weights)
        return replace_weights(model, weights)
    own_head = model.config.draft_head is not None
    description = describe(
        with_scaling(look(tiny.located(weights), drafts=own_head), config.rope_scaling),
        form or WeightForm(config.dtype, config.quantize),
        cache_dir=None if form is None else config.cache_folder,
        unpack=unpacks,
    )
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
            f"The weights do not fit the running model ({count(len(problems), 'difference')}): {listed(problems)}. "
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


class Weights:
    """The weights in use. Weights that were read here are freed when they are replaced or the session ends."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        owned: bool,
        others: OtherProcesses | None = None,
        form: WeightForm | None = None,
    ) -> None:
        """`config` is resolved. Without `owned` the arrays are the caller's. A checkpoint was read in `form`."""
        self.model, self._config, self._owned, self._others = model, config, owned, others or OtherProcesses()
        self._form = form
        self._from_folder = owned  # they can be read again
        self._change: Callable[[LoadedModel], LoadedModel] | None = None  # made to all weights
        self._arrays: deque[tuple[dict[str, weakref.ref[Any]], str]] = deque(maxlen=8)  # of callers, and fingerprints
        self._asleep: list[Any] | None = None  # while the session sleeps, the weights in host memory, or None for each

    @classmethod
    def open(
        cls,
        plan: Blueprint,
        source: ModelSource,
        *,
        progress: Report | None = None,
        brought: Brought = lambda kept: None,
        others: OtherProcesses | None = None,
    ) -> Weights:
        """Put the weights of a source on the devices of its blueprint.

        `brought` returns weights of the cache that were brought into memory before.
        """
        model = source.load(plan.placement.of(source.graph), progress, brought)
        form = None if source.checkpoint is None else source.checkpoint.form
        return cls(model, plan.config, owned=not source.lends(model), others=others, form=form)

    @property
    def changed(self) -> bool:
        """True if they are not the weights as they were read or passed."""
        return self._change is not None

    @property
    def asleep(self) -> bool:
        return self._asleep is not None

    def change(self, change: Callable[[LoadedModel], LoadedModel]) -> None:
        """Change the weights, and all that replace them."""
        self.model, self._change = change(self.model), change

    def replacement(self, weights: Any) -> LoadedModel:
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

    def use(self, model: LoadedModel, weights: Any) -> None:
        """Use other weights from now on, and free those before if they were read here."""
        self.close()
        self._take(model, weights)

    def _take(self, model: LoadedModel, weights: Any) -> None:
        from_source = isinstance(weights, str | Path)
        self.model, self._owned, self._from_folder = model, from_source or model.placement.divided, from_source
        self._form = None  # that of the running model's arrays

    def sleep(self, drop: bool) -> int:
        """Keep the weights in host memory alone, or `drop` them. Return the bytes of device memory that this gave back.

        The caller's own arrays are only let go.
        """
        model = self.model
        if not self._owned:
            self._asleep = list(model.leaves)
            return 0
        self._asleep = []
        for leaf in model.leaves:  # one by one: in host memory, which a CPU computes in, both would lie at once
            self._asleep.append(None if drop else np.array(leaf))
            leaf.delete()
        return sum(leaf.nbytes for leaf in model.leaves)

    def check_dropped(self) -> None:
        """Raise InvalidRequest if the weights can't be read again."""
        if self.model.folder is None or not self._from_folder:
            problem = "can't be read again: they don't come from a folder"
            raise InvalidRequest("weights", "drop", problem, 'Use "host", or drop your own arrays')

    def wake(self, weights: Any) -> None:
        """Put the weights back on the device, or other ones."""
        kept, model = self._asleep, self.model
        assert kept is not None, "the session does not sleep"
        if weights is not None:
            self._take(self._replacement(weights), weights)
        elif self._owned:
            if any(leaf is None for leaf in kept):
                again = self._replacement(str(model.folder), self._form)
                if again.fingerprint != model.fingerprint:
                    raise CheckpointError(
                        f"{model.folder} holds other weights than before. Pass wake(weights=…) to use them."
                    )
                kept = list(again.leaves)
            places = [leaf.sharding if leaf.committed else None for leaf in model.leaves]
            kept = [jax.device_put(array, place) for array, place in zip(kept, places, strict=True)]
            self.model = dataclasses.replace(model, leaves=tuple(kept))

    def woken(self) -> None:
        """Let go of the copies kept while the session slept: the device has its weights."""
        self._asleep = None

    def close(self) -> None:
        """Free the weights, unless they are the caller's."""
        if self._owned:
            delete(self.model)

    def _replacement(self, weights: Any, form: WeightForm | None = None) -> LoadedModel:
        """Return the model with other weights, changed as those before."""
        model = replacement(self.model, weights, self._config, form)
        if not isinstance(weights, LoadedModel | str | Path):
            model = dataclasses.replace(model, fingerprint=self._fingerprint(weights, model.fingerprint))
        return model if self._change is None else self._change(model)

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
