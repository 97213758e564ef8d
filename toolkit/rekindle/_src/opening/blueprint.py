"""The blueprint of an opening: options, shapes, devices, programs, caches and taps, as one value.

`blueprint` computes it once, from the model's source: it starts no thread, writes no file and makes no array.
The owners of a session are opened from it; `rekindle warm`, `rekindle doctor --plan` and followers of several
processes read the same value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import Array

from rekindle._src.capabilities import ENTRIES
from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments, SessionPlan
from rekindle._src.core.config import ResolvedConfig
from rekindle._src.data_shards.sizes import config_of_one, packing_for
from rekindle._src.drafts.plan import DraftPlan
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.segment import LeafSpec
from rekindle._src.models import drafters
from rekindle._src.models.base import Graph, LoadedModel, Placement
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.drafters.own import leaves_of_trunk, trunk_of
from rekindle._src.models.loading.hub import readable_name
from rekindle._src.opening.open_request import OpenRequest, precompiles
from rekindle._src.opening.resolve import budgeted, deterministic, resolve
from rekindle._src.opening.source import ModelSource
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.plan import ProgramPlan
from rekindle._src.programs.side_caches import slots_of
from rekindle.errors import UnsupportedModel


class CachePlan(NamedTuple):
    """A kind of cache: its slots on the device, and its bytes in the tiers below."""

    kind: str  # pages, or the name of a side cache
    slots: int  # on the device
    slot_bytes: int
    host_bytes: int  # of host memory; 0 without tiers
    disk_bytes: int  # of disk, which all kinds share


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Blueprint:
    """All that an opening will do. Blueprints are equal if they describe equal sessions."""

    config: ResolvedConfig
    folder: Path | None  # of tokenizer and chat template: a folder or a GGUF file
    fingerprint: str  # of config and weights, without a merged adapter
    name: str  # of the model, for people to read
    programs: ProgramPlan
    precompile: str  # "all", "background" or "lazy"
    caches: tuple[CachePlan, ...]  # pages first
    capabilities: tuple[CapabilityPlan, ...]
    drafts: DraftPlan

    @property
    def model(self) -> ModelConfig:
        return self.programs.model

    @property
    def graph(self) -> Graph:
        return self.programs.graph

    @property
    def placement(self) -> Placement:
        return self.programs.placement

    def leaves_of(self, model: LoadedModel) -> tuple[Array, ...]:
        """Return the leaves of a model that programs of steps take: without a head of its own, which has its owner."""
        return leaves_of_trunk(model.graph, model.leaves)

    def session(self, show: Callable[[str], None]) -> SessionPlan:
        """Return the plan that the owners of capabilities are opened from; `show` shows the stage of the opening."""
        return SessionPlan(self.name, self.config, self.programs, self.precompile, show)

    def with_pages(self, pages: int) -> Blueprint:
        """Return the blueprint with so many KV pages on each device, as all processes have room for."""
        config = self.config
        config = dataclasses.replace(
            config, device_pages=pages, device_memory=pages * (config.device_memory // config.device_pages)
        )
        programs = dataclasses.replace(self.programs, config=config_of_one(config, self.placement.data))
        return dataclasses.replace(
            self, config=config, programs=programs, caches=_caches(config, programs, self.drafts)
        )

    def page_identity(self, fingerprint: str, name: str = "") -> Identity:
        """Return the identity of pages computed with these weights, to compare with other processes' pages."""
        config = self.config
        one = paged.abstract(self.model, 1, config.page_size, config.kv_dtype, slots_of(self.programs.sides))
        layers = tuple(paged.Layer(layer.pages) for layer in one if layer.pages)
        leaves = [(leaf.shape[1:], str(leaf.dtype)) for leaf in jax.tree.leaves(layers)]
        layout = f"{jax.default_backend()} {len(layers)} layers {sorted(set(leaves))}"
        if len(self.model.kinds_of_pages) > 1:
            layout += f" of {paged.groups_of(layers)}"
        if config.rope_scaling is not None:
            layout += f" positions {config.rope_scaling}"
        if config.attention_budget is not None:
            layout += f" budget {config.attention_budget}"  # of keys that tokens which were decoded attended to
        if config.deterministic:
            layout += " deterministic"  # pages of other sessions hold nearly the same numbers, but not the same
        return Identity(
            fingerprint + self.drafts.mark,
            config.kv_dtype,
            config.page_size,
            layout,
            name,
            leaves=tuple(LeafSpec(tuple(shape[1:]), str(dtype)) for shape, dtype in paged.payload_layout(layers)),
            vocab_size=self.model.vocab_size,
        )

    def facts(self) -> dict[str, Any]:
        """Return all that is decided, as values that JSON keeps. Blueprints with equal facts are equal."""
        pages = self.page_identity(self.fingerprint, self.name)
        return {
            "model": self.name,
            "fingerprint": self.fingerprint,
            "weights": sum(leaf.size * leaf.dtype.itemsize for leaf in self.programs.leaves),
            "read_from": None if self.folder is None else str(self.folder),
            "options": {
                field.name: value if isinstance(value := getattr(self.config, field.name), int | float) else str(value)
                for field in dataclasses.fields(self.config)
            },
            "devices": [str(device) for device in self.placement.devices],
            "precompile": self.precompile,
            "programs": self.programs.key,
            "ahead": list(self.programs.ahead.words),
            "caches": [cache._asdict() for cache in self.caches],
            "pages": pages.layout,
            "sides": [plan.identity(pages).layout for plan in self.programs.sides],
            "drafter": self.drafts.fingerprint,
            **{name: fact for one in self.capabilities for name, fact in one.facts(self.programs).items()},
        }

    def __eq__(self, other: object) -> bool:
        return self.facts() == other.facts() if isinstance(other, Blueprint) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.programs.key))


def blueprint(request: OpenRequest, source: ModelSource) -> Blueprint:
    """Plan the opening of a model. Raise typed errors if it can't be opened."""
    graph = source.graph
    if graph.config.model_type in drafters.MODULES:
        raise UnsupportedModel(
            f"{source.name} is a {graph.config.model_type} model, which drafts for another model and makes no texts of "
            f"its own. Open that model, with drafts={source.name!r}."
        )
    options, placement = source.placed(request.config)
    arguments = OpenArguments(options, request.additions, source.checkpoint)
    capabilities = tuple(one for entry in ENTRIES if (one := entry.plan(arguments)) is not None)
    drafts = source.drafts
    if options.attention_budget is not None:
        graph = budgeted(graph, options.attention_budget)
    trunk = trunk_of(graph, drafts.pages)
    programmed = placement.of(trunk)
    weight_bytes = source.added_bytes(placement) + sum(one.device_bytes for one in capabilities)
    config = resolve(
        options,
        trunk.config,
        weight_bytes=weight_bytes + drafts.device_bytes,
        placement=programmed,
        more_bytes=drafts.page_bytes,
    )
    if config.deterministic:
        trunk = deterministic(trunk, config)
    programs = ProgramPlan(
        trunk.config,
        trunk,
        leaves_of_trunk(graph, source.leaves(placement)),
        config_of_one(config, placement.data),
        programmed,
        tuple(request.processors),
        capabilities,
        name="" if source.folder is None else readable_name(source.folder),
        drafter=drafts.programs,
        packed_by=packing_for(placement.data),
    )
    for one in capabilities:
        one.check(programs)
    precompile = precompiles(config.precompile)
    if precompile == "background" and graph.config.only_embeds:
        precompile = "lazy"  # of the programs that are made ahead, it needs none
    return Blueprint(
        config,
        source.folder,
        source.fingerprint,
        source.name,
        programs,
        precompile,
        _caches(config, programs, drafts),
        capabilities,
        drafts,
    )


def _caches(config: ResolvedConfig, programs: ProgramPlan, drafts: DraftPlan) -> tuple[CachePlan, ...]:
    """Return the kinds of caches on each device, with their share of the memory below it."""
    placement, sides = programs.placement, programs.sides
    local = placement.local_config(programs.model)
    host, disk = (config.host_memory, config.disk_memory) if config.prefix_cache else (0, 0)
    page = paged.page_bytes(local, config.page_size, config.kv_dtype, slots=slots_of(sides))
    host -= sum(plan.host_bytes for plan in sides)
    pages = CachePlan("pages", config.device_pages, page, host, disk)
    kinds = [CachePlan(plan.name, plan.slots, plan.slot_bytes, plan.host_bytes, disk) for plan in sides]
    if own := drafts.page_bytes(config):  # below the device there are none: they are computed again
        kinds.append(CachePlan("drafts", config.device_pages, own, 0, 0))
    return pages, *kinds
