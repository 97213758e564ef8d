"""The drawings of types that show themselves but live below this room, found by the type's name.

Neither side imports the other early: a drawing's module is loaded at the first output of its type.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from rekindle._src.core.drawable import Record, measured
from rekindle._src.views import html

# From a type, by its module and name, to the module of this room that draws it and the function there.
DRAWINGS: Final[Mapping[str, str]] = {
    "core.activity.State": "facts.wait",
    "core.captured.Captured": "captured.captured",
    "core.records.Completion": "completion.completion",
    "core.reply.Reply": "replies.reply",
    "core.drawable.Record": "drawing.record",
    "kvcache.persist.snapshot.SnapshotInfo": "facts.snapshot",
    "kvcache.writer.SaveReport": "facts.save_report",
    "models.base.LoadedModel": "facts.loaded_model",
    "scheduling.drafting.drafter.DraftCounts": "facts.draft_counts",
    "scheduling.sequence.Explanation": "timeline.explanation",
    "text.tokenizer.Tokenizer": "facts.tokenizer",
}
_SOURCE = "rekindle._src."


def html_of(value: object) -> str:
    """Draw a value as the nearest of its types with a drawing; without one, its repr as a line."""
    for kind in type(value).__mro__:
        place = DRAWINGS.get(f"{kind.__module__}.{kind.__qualname__}".removeprefix(_SOURCE))
        if place is not None:
            module, _, name = place.partition(".")
            draw: Callable[[Any], str] = getattr(importlib.import_module(f"rekindle._src.views.{module}"), name)
            return str(draw(value))  # encoders such as msgspec, which marimo uses, take no subclass of str
    return str(html.line(repr(value)))


def record(value: Record) -> html.Markup:
    """Draw a record as a table of its figures; a record inside of it is drawn inside."""
    cells = {
        name: html.Markup(html_of(cell)) if isinstance(cell, Record) else cell for name, cell in measured(value).items()
    }
    return html.block(html.pairs(cells), title=repr(value).partition("(")[0])
