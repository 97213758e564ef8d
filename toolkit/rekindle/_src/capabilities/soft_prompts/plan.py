"""Soft prompts in a session's blueprint: the step's program is made when the first one comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rekindle._src.capabilities.plans import CapabilityPlan, Owner, Provider, SessionPlan
from rekindle._src.capabilities.soft_prompts.request import ROW_WIDTH
from rekindle._src.models.config import ModelConfig

if TYPE_CHECKING:
    from rekindle._src.text.tokenizer import Tokenizer


class SoftPromptsPlan(CapabilityPlan):
    """Decoders take rows in the place of embeddings, unless their layers embed the tokens once more."""

    def open(self, session: SessionPlan, tokenizer: Tokenizer | None) -> Owner | None:
        model = session.programs.model
        return Provider({ROW_WIDTH: model.hidden_size}) if takes_rows(model) else None


def takes_rows(model: ModelConfig) -> bool:
    """True if a model's tokens may have rows in the place of embeddings."""
    return not (model.only_embeds or model.layer_embedding or model.assists)
