"""The small model or the assistant that drafts for a session, as a value; and the checks that it can."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import NamedTuple, NoReturn, get_args

from rekindle import tiny
from rekindle._src.core.config import DraftSource, EngineConfig
from rekindle._src.models.base import Graph, LoadedModel, Placement
from rekindle._src.models.config import AssistantSpec, ModelConfig, Pages
from rekindle._src.models.loading.checkpoint import CheckpointPlan, describe, read
from rekindle._src.models.loading.hub import on_disk
from rekindle._src.programs.assistants import source_layers
from rekindle._src.programs.draft_model import DraftShapes
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import ConfigError

_FEW = 32  # characters of a token in an error


class DraftPlan(NamedTuple):
    """All that is known of the model that drafts before its weights are read."""

    name: str
    checkpoint: CheckpointPlan

    @property
    def graph(self) -> Graph:
        return self.checkpoint.graph

    @property
    def shapes(self) -> DraftShapes:
        return DraftShapes(self.checkpoint.graph, self.checkpoint.shapes)

    @property
    def positions(self) -> int:
        """The longest text that it can draft for."""
        return self.graph.config.max_position_embeddings

    @property
    def device_bytes(self) -> int:
        """Bytes of its weights on the device."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.checkpoint.shapes)

    def load(self) -> LoadedModel:
        """Read its weights."""
        return read(self.checkpoint)

    def check_tokens(self, model: Tokenizer) -> None:
        """Raise ConfigError unless all ids that both models have a token for have the same one.

        Where neither has a tokenizer, ids are taken to mean the same.
        """
        own = Tokenizer.load(self.checkpoint.found.folder)
        if self.shapes.assists and not own.has_text:
            return  # its vocabulary has the size of the model's
        if own.has_text != model.has_text:
            lacks = "the model has one" if model.has_text else "the model has none to compare it with"
            problem = f"has {'a' if own.has_text else 'no'} tokenizer, and {lacks}"
            raise ConfigError("drafts", self.name, problem, "Use a model with the same tokenizer")
        if not own.has_text or own.definition == model.definition:
            return
        for token_id in range(min(own.vocab_size, model.vocab_size)):
            mine, theirs = own.token(token_id), model.token(token_id)
            if mine is not None and theirs is not None and mine != theirs:
                problem = (
                    f"has another tokenizer: token {token_id} is {mine[:_FEW]!r} there, and {theirs[:_FEW]!r} here"
                )
                raise ConfigError("drafts", self.name, problem, "Use a model with the same tokenizer")


def draft_plan(config: EngineConfig, model: ModelConfig, placement: Placement) -> DraftPlan | None:
    """Return how the model that drafts for a session is read; None if drafts come from elsewhere. Raise ConfigError for
    one that can't draft for this model."""
    name = config.draft_model
    if name is None:
        return None
    folder = tiny.located(name)
    _check_source(name, folder)
    if placement.divided or placement.processes > 1:
        _refuse(name, "is another model, which can't be divided over several devices yet", "Use one device")
    if model.is_bidirectional:
        _refuse(name, f"drafts tokens, and this {model.model_type} model makes none", 'Use drafts="auto"')
    plan = DraftPlan(
        name,
        describe(
            folder,
            dtype=config.dtype,
            quantize=config.quantize,
            cache_dir=config.cache_folder,
            device_memory=config.device_memory,
        ),
    )
    own = plan.graph.config
    if own.assists is not None:
        _check_assistant(name, own, own.assists, model)
        return plan
    if own.is_recurrent:
        problem = f"is a {own.model_type} model, whose states can't be taken back where its drafts were wrong"
        _refuse(name, problem, "Use a small model with attention in all layers")
    if own.is_bidirectional or own.only_embeds:
        _refuse(name, f"is a {own.model_type} model, which makes no tokens", "Use a small model that generates text")
    return plan


def _check_source(name: str, folder: str | Path) -> None:
    """Raise ConfigError for a misspelled word before anything is looked up."""
    words = get_args(DraftSource)
    if on_disk(folder) is None and "/" not in name and ":" not in name:
        matches = difflib.get_close_matches(name, words, n=1)
        close = f"Did you mean {matches[0]!r}? " if matches else ""
        known = ", ".join(map(repr, words))
        _refuse(name, "is neither a known source nor a model on this machine", f"{close}Use one of {known}, or a model")


def _check_assistant(name: str, own: ModelConfig, spec: AssistantSpec, model: ModelConfig) -> None:
    """Raise ConfigError for an assistant of another model than this one."""
    fix = "Use the assistant that was made for this model"
    if spec.hidden_size != model.hidden_size:
        problem = f"drafts for a model whose hidden states have {spec.hidden_size:,} numbers, and this one's have"
        _refuse(name, f"{problem} {model.hidden_size:,}", fix)
    if own.vocab_size != model.vocab_size:
        problem = f"has a vocabulary of {own.vocab_size:,} tokens, and this model one of {model.vocab_size:,}"
        _refuse(name, problem, fix)
    for layer, source in enumerate(source_layers(own, model)):
        kind = "full attention" if own.attention[layer].sliding_window is None else "a window"
        if source is None:
            _refuse(name, f"attends to a layer with {kind}, and this {model.model_type} model has none", fix)
        wanted, there = own.pages_of(layer), model.pages_of(source)
        if wanted != there:
            problem = f"attends to a layer with {kind} and {_heads(wanted)}, and this model's has {_heads(there)}"
            _refuse(name, problem, fix)


def _heads(pages: Pages) -> str:
    return f"{pages.heads} heads of {pages.key_size}"


def _refuse(name: str, problem: str, fix: str) -> NoReturn:
    raise ConfigError("drafts", name, problem, fix)
