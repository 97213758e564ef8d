"""Objects and figures that notebooks display in addition to live views: their cells, and their ARIA roles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from rekindle import Session
from rekindle._src.core.records import Completion
from rekindle._src.evaluation.attention import AttentionMap, AttentionMaps
from rekindle._src.evaluation.lens import Lens
from rekindle._src.notebook.dashboard import Dashboard
from rekindle._src.notebook.figures import Figure

TESTS = Path(__file__).parents[1]
PROMPTS = ("a" * 64 + "b" * 40, "a" * 64 + "c" * 40, "d" * 70)
# The first cell defines the names that the others use; it needs no model.
FIRST = f"""import sys
sys.path.insert(0, {str(TESTS)!r})
from helpers import shown
from helpers.sessions import fake_session
session = fake_session(step_seconds=0.002)
dashboard, done = await shown.worked(session)
print("session ready")"""
CELLS = {
    "attention": "shown.attention()",
    "lens": "shown.lens()",
    "distribution": "session.view.distribution(shown.logits(session))",
    "prefixes": 'session.view.prefixes(["the boy went to the park", "the boy went home"])',
    "run": "dashboard.recorded()",
    "completion": "done",
    "session": "session",
    "cache": "session.cache",
    "explain": "session.explain(done.id)",
}
# What a screen reader is told of each.
ROLES = {
    "attention": ['slider "layer"', 'checkbox "position 0"', 'button "head 1"', 'img "attention of layer 0'],
    "lens": ["table", 'rowheader "layer 0"', 'columnheader "·t1"'],
    "distribution": ['slider "temperature"', 'checkbox "logarithmic"', "list"],
    "prefixes": ['textbox "a prompt"', 'slider "words in a page"'],
    "run": ['slider "time in ms"', 'img "'],
    "cache": ['img "the prefix cache', "group"],
    "explain": ['img "timeline'],
}


def saved(session: Session, dashboard: Dashboard, done: Completion) -> dict[str, str]:
    """Return the HTML of each, as a notebook saves it."""
    names = {"shown": sys.modules[__name__], "session": session, "dashboard": dashboard, "done": done}
    made = {name: eval(code, names) for name, code in CELLS.items()}
    return {name: one.saved() if isinstance(one, Figure) else one._repr_html_() for name, one in made.items()}


async def worked(session: Session) -> tuple[Dashboard, Completion]:
    """Give a session some work; returns its dashboard, ended, and a completion."""
    dashboard = session.watch()
    await session.generate(list(PROMPTS), max_tokens=4)
    done = await session.generate("hello", max_tokens=12, logprobs=2)
    dashboard.refresh()
    dashboard.stop()
    dashboard.join(60)
    return dashboard, done


def lens() -> Lens:
    ids = np.arange(5, dtype=np.int32)[None, None].repeat(4, 0).repeat(12, 1)
    texts = tuple(tuple(tuple(f" word{token}" for token in row) for row in layer) for layer in ids.tolist())
    shares, entropies = np.full((4, 12, 5), 0.2, np.float32), np.ones((4, 12), np.float32)
    names = ("layer 0", "layer 1", "layer 2", "layer 3: the answer")
    return Lens(
        tuple(f" t{at}" for at in range(12)), np.arange(12, dtype=np.int32), names, texts, ids, shares, entropies
    )


def attention() -> AttentionMaps:
    weights = np.tril(np.random.default_rng(0).random((3, 12, 12), np.float32))
    weights /= weights.sum(axis=-1, keepdims=True)
    tokens, positions = tuple(f" t{at}" for at in range(12)), np.arange(12, dtype=np.int32)
    return AttentionMaps([AttentionMap(tokens, layer, weights, positions) for layer in range(2)])


def logits(session: Session) -> Any:
    return np.random.default_rng(1).normal(size=session.tokenizer.vocab_size)
