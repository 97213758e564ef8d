"""Small drawings of the rooms below: waits, models, tokenizers, drafts, snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rekindle._src.views import html

if TYPE_CHECKING:
    from rekindle._src.core.activity import State
    from rekindle._src.kvcache.persist.snapshot import SnapshotInfo
    from rekindle._src.kvcache.writer import SaveReport
    from rekindle._src.models.base import LoadedModel
    from rekindle._src.scheduling.drafting.drafter import DraftCounts
    from rekindle._src.text.tokenizer import Tokenizer

_SIZES = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")


def wait(state: State) -> html.Markup:
    """Draw the state of a wait, its fraction as a bar."""
    fraction = state.fraction
    bar = "" if fraction is None else html.bar({"done": fraction, "to do": 1.0 - fraction}, rest="to do", named=False)
    return html.block(bar, html.line(state.line))


def loaded_model(model: LoadedModel) -> html.Markup:
    """Draw a model's size and shape."""
    return html.block(html.line(repr(model)), html.pairs({name: getattr(model.config, name) for name in _SIZES}))


def tokenizer(tokens: Tokenizer) -> html.Markup:
    """Draw a tokenizer with its special tokens."""
    return html.block(html.line(repr(tokens)), html.pairs(tokens.special))


def draft_counts(counts: DraftCounts) -> html.Markup:
    """Draw how many drafts were accepted."""
    return html.block(html.pairs({"drafts": str(counts)}))


def save_report(report: SaveReport) -> html.Markup:
    """Draw a saved snapshot, and how much of it was new."""
    counts = {"written now": report.written, "on disk already": report.pages - report.written}
    return html.block(html.text(str(report)), html.bar(counts))


def snapshot(info: SnapshotInfo) -> html.Markup:
    """Draw a snapshot as a line."""
    return html.line(str(info))
