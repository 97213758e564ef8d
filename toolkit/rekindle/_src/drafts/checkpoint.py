"""The checkpoint of a drafter: its headers were read, and its weights are read when it is opened."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple, NoReturn

import jax

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.dtypes import DTypeLike
from rekindle._src.models.base import Graph, LoadedModel, Placement
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.checkpoint import CheckpointPlan, WeightForm, describe, read
from rekindle._src.programs.partitioning import WHOLE, DeviceLayout, WeightsOf
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import ConfigError

_FEW = 32  # characters of a token in an error


class Target(NamedTuple):
    """The model that is drafted for, as its source has it, and the options of its session."""

    graph: Graph  # with the head that it may have of its own
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # as they lie on the devices
    placement: Placement
    config: EngineConfig

    @property
    def model(self) -> ModelConfig:
        return self.graph.config


class DraftShapes(NamedTuple):
    """A drafter's own weights, as its programs see them."""

    graph: Graph  # of one device's part
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # as they lie on the devices
    layout: DeviceLayout | WeightsOf = WHOLE

    def facts(self) -> list[object]:
        """Return all that its programs depend on."""
        leaves = zip(self.graph.paths, self.leaves, strict=True)
        return [self.graph.config.digest(), [(path, leaf.shape, str(leaf.dtype)) for path, leaf in leaves]]


@dataclasses.dataclass(frozen=True, eq=False)
class DraftCheckpoint:
    """A checkpoint that `drafts` names."""

    name: str
    plan: CheckpointPlan
    placement: Placement  # on each of the devices all of it

    @classmethod
    def describe(cls, name: str, folder: str | Path, target: Target, dtype: DTypeLike | None = None) -> DraftCheckpoint:
        """Read the headers. The weights have the session's precision, or this dtype."""
        config = target.config
        plan = describe(
            folder,
            WeightForm.of(config.dtype if dtype is None else dtype, config.quantize),
            cache_dir=config.cache_folder,
            device_memory=config.device_memory,
        )
        return cls(name, plan, target.placement.whole(plan.graph))

    @property
    def config(self) -> ModelConfig:
        return self.plan.graph.config

    @property
    def folder(self) -> Path:
        """The folder of its tokenizer, or the GGUF file."""
        return self.plan.found.folder

    @property
    def fingerprint(self) -> str:
        return self.plan.fingerprint

    @property
    def shapes(self) -> DraftShapes:
        return DraftShapes(self.plan.graph, self.placement.shapes(self.plan.shapes))

    @property
    def device_bytes(self) -> int:
        """The bytes of its weights on each device."""
        return self.placement.bytes_per_device(self.plan.shapes)

    def load(self) -> LoadedModel:
        """Read its weights."""
        return read(self.plan, placement=self.placement)

    def check_tokens(self, model: Tokenizer, *, required: bool) -> None:
        """Raise ConfigError unless all ids that both models have a token for have the same one.

        Where neither has a tokenizer, ids are taken to mean the same. Unless one is `required`, a drafter without one
        has the model's.
        """
        own = Tokenizer.load(self.folder)
        if not required and not own.has_text:
            return  # its vocabulary has the size of the model's
        if own.has_text != model.has_text:
            lacks = "the model has one" if model.has_text else "the model has none to compare it with"
            problem = f"has {'a' if own.has_text else 'no'} tokenizer, and {lacks}"
            refuse(self.name, problem, "Use a model with the same tokenizer")
        if not own.has_text or own.definition == model.definition:
            return
        for token_id in range(min(own.vocab_size, model.vocab_size)):
            mine, theirs = own.token(token_id), model.token(token_id)
            if mine is not None and theirs is not None and mine != theirs:
                problem = (
                    f"has another tokenizer: token {token_id} is {mine[:_FEW]!r} there, and {theirs[:_FEW]!r} here"
                )
                refuse(self.name, problem, "Use a model with the same tokenizer")


def refuse(name: str, problem: str, fix: str) -> NoReturn:
    """Raise ConfigError for what `drafts` names."""
    raise ConfigError("drafts", name, problem, fix)
