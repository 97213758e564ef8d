"""The small model or the assistant that drafts for a session, as a value; and the checks that it can."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rekindle._src.models.base import Graph, Placement
from rekindle._src.models.config import AssistantSpec, ModelConfig, Pages
from rekindle._src.opening.source import CheckpointSource, refuse_drafter
from rekindle._src.programs.assistants import source_layers
from rekindle._src.programs.draft_model import DraftShapes
from rekindle._src.text.tokenizer import Tokenizer

_FEW = 32  # characters of a token in an error


class DraftPlan(NamedTuple):
    """All that is known of the model that drafts before its weights are read."""

    name: str
    folder: Path  # of its tokenizer
    fingerprint: str
    shapes: DraftShapes
    placement: Placement  # on each of the devices all of it
    device_bytes: int  # of its weights

    @classmethod
    def of(cls, source: CheckpointSource, model: ModelConfig, placement: Placement) -> DraftPlan:
        """Return what the headers say; each of the devices of the model that it drafts for has all of it. Raise
        ConfigError for one that can't draft for this model."""
        _check(source.name, source.graph.config, model, placement)
        own = placement.whole(source.graph)
        shapes = DraftShapes(source.graph, source.leaves(own))
        return cls(source.name, source.plan.found.folder, source.fingerprint, shapes, own, source.added_bytes(own))

    @property
    def graph(self) -> Graph:
        return self.shapes.graph

    @property
    def positions(self) -> int:
        """The longest text that it can draft for."""
        return self.graph.config.max_position_embeddings

    def check_tokens(self, model: Tokenizer) -> None:
        """Raise ConfigError unless all ids that both models have a token for have the same one.

        Where neither has a tokenizer, ids are taken to mean the same. An assistant without one has the model's.
        """
        own = Tokenizer.load(self.folder)
        if self.shapes.assists and not own.has_text:
            return  # its vocabulary has the size of the model's
        if own.has_text != model.has_text:
            lacks = "the model has one" if model.has_text else "the model has none to compare it with"
            problem = f"has {'a' if own.has_text else 'no'} tokenizer, and {lacks}"
            refuse_drafter(self.name, problem, "Use a model with the same tokenizer")
        if not own.has_text or own.definition == model.definition:
            return
        for token_id in range(min(own.vocab_size, model.vocab_size)):
            mine, theirs = own.token(token_id), model.token(token_id)
            if mine is not None and theirs is not None and mine != theirs:
                problem = (
                    f"has another tokenizer: token {token_id} is {mine[:_FEW]!r} there, and {theirs[:_FEW]!r} here"
                )
                refuse_drafter(self.name, problem, "Use a model with the same tokenizer")


def _check(name: str, own: ModelConfig, model: ModelConfig, placement: Placement) -> None:
    """Raise ConfigError for a model that can't draft for this one, on these devices."""
    if own.assists is not None:
        if placement.divided:
            problem = "is an assistant, which attends to this model's pages: several devices have a part of them each"
            refuse_drafter(name, problem, "Use one device, or a small model with the same tokenizer")
        _check_assistant(name, own, own.assists, model)
        return
    if own.is_recurrent:
        problem = f"is a {own.model_type} model, whose states can't be taken back where its drafts were wrong"
        refuse_drafter(name, problem, "Use a small model with attention in all layers")
    if own.is_bidirectional or own.only_embeds:
        refuse_drafter(
            name, f"is a {own.model_type} model, which makes no tokens", "Use a small model that generates text"
        )


def _check_assistant(name: str, own: ModelConfig, spec: AssistantSpec, model: ModelConfig) -> None:
    """Raise ConfigError for an assistant of another model than this one."""
    fix = "Use the assistant that was made for this model"
    if spec.hidden_size != model.hidden_size:
        problem = f"drafts for a model whose hidden states have {spec.hidden_size:,} numbers, and this one's have"
        refuse_drafter(name, f"{problem} {model.hidden_size:,}", fix)
    if own.vocab_size != model.vocab_size:
        problem = f"has a vocabulary of {own.vocab_size:,} tokens, and this model one of {model.vocab_size:,}"
        refuse_drafter(name, problem, fix)
    for layer, source in enumerate(source_layers(own, model)):
        kind = "full attention" if own.attention[layer].sliding_window is None else "a window"
        if source is None:
            refuse_drafter(name, f"attends to a layer with {kind}, and this {model.model_type} model has none", fix)
        wanted, there = own.pages_of(layer), model.pages_of(source)
        if wanted != there:
            problem = f"attends to a layer with {kind} and {_heads(wanted)}, and this model's has {_heads(there)}"
            refuse_drafter(name, problem, fix)


def _heads(pages: Pages) -> str:
    return f"{pages.heads} heads of {pages.key_size}"
