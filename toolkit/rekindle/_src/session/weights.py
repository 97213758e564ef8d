"""The weights of a session: those in use, and their replacements."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from rekindle import tiny
from rekindle._src.core.config import EngineConfig
from rekindle._src.execution.runner import Runner
from rekindle._src.kvcache import Tiers
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.segment import LeafSpec
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.loading.checkpoint import describe, read
from rekindle._src.models.loading.swap_weights import check_fits, replace_weights
from rekindle._src.models.placement import Placement
from rekindle._src.models.unpacking import unpacked_in_products, unpacked_model
from rekindle._src.programs import kv_layout as paged
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.processes.team import Team


def page_identity(model: LoadedModel, config: EngineConfig, name: str = "") -> Identity:
    """Return the identity of this model's pages, which those of other processes are compared with."""
    assert config.page_size is not None, "resolved"
    layers = paged.abstract(model.config, 1, config.page_size, config.kv_dtype)
    leaves = [(leaf.shape[1:], str(leaf.dtype)) for leaf in jax.tree.leaves(layers)]
    layout = f"{jax.default_backend()} {len(layers)} layers {sorted(set(leaves))}"
    if config.deterministic:
        layout += " deterministic"  # pages of other sessions hold nearly the same numbers, but not the same
    payload = tuple(LeafSpec((len(layers), *shape), dtype) for shape, dtype in leaves[: len(leaves) // len(layers)])
    return Identity(
        model.fingerprint,
        config.kv_dtype,
        config.page_size,
        layout,
        name,
        leaves=payload,
        vocab_size=model.config.vocab_size,
    )


def replacement(model: LoadedModel, weights: Any, config: EngineConfig, placement: Placement | None) -> LoadedModel:
    """Return `model` with other weights on its devices. A folder or hub id is read."""
    if weights == "tiny":
        weights = tiny.folder()
    unpacks = not unpacked_in_products(model.graph)
    if not isinstance(weights, str | Path):
        if unpacks and isinstance(weights, LoadedModel):
            weights = unpacked_model(weights)
        return replace_weights(model, weights, placement=placement)
    description = describe(weights, dtype=config.dtype, quantize=config.quantize, unpack=unpacks)
    if placement is None:
        return replace_weights(model, read(description))
    expected = dict(zip(model.graph.paths, placement.whole_shapes(), strict=True))
    available = dict(zip(description.graph.paths, description.shapes, strict=True))
    check_fits(expected, available, same_config=description.found.config == model.config)  # before anything is read
    loaded = read(description, placement=placement)
    by_path = dict(zip(loaded.graph.paths, loaded.leaves, strict=True))
    leaves = tuple(by_path[path] for path in expected)
    return dataclasses.replace(model, leaves=leaves, fingerprint=loaded.fingerprint, folder=loaded.folder)


def delete(model: LoadedModel) -> None:
    """Free the memory of its leaves."""
    for leaf in model.leaves:
        leaf.delete()


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
        placement: Placement | None,
        team: Team | None = None,
    ) -> None:
        self._model, self._runner, self._config, self._tiers, self._owned = model, runner, config, tiers, owned
        self._placement, self._team = placement, team

    def swap(self, weights: Any) -> bytes:
        """Replace the weights. Return the root key of the cache for the new ones."""
        from_source = isinstance(weights, str | Path)
        model = self._everywhere(weights) if self._team is not None else self._replacement(weights)
        self._runner.swap_weights(model.leaves)
        self.release()
        self._model, self._owned = model, from_source or self._placement is not None
        identity = page_identity(model, self._config, str(weights) if from_source else "")
        if self._tiers is not None:
            self._tiers.identity = identity
        return identity.root

    def release(self) -> None:
        if self._owned:
            delete(self._model)

    def _replacement(self, weights: Any) -> LoadedModel:
        return replacement(self._model, weights, self._config, self._placement)

    def _everywhere(self, weights: Any) -> LoadedModel:
        """Return the weights on this process's devices, once all other processes have them on theirs."""
        assert self._team is not None, "one process"
        if not isinstance(weights, str | Path):
            raise InvalidRequest(
                "weights",
                type(weights).__name__,
                "is in this process only, and others share the model",
                "Pass a folder or hub id that all of them can read",
            )
        models: list[LoadedModel] = []

        def here() -> str:
            models.append(self._replacement(weights))
            return models[0].fingerprint

        try:
            self._team.load_weights(str(weights), here)
        except BaseException:
            for model in models:
                delete(model)
            raise
        return models[0]
