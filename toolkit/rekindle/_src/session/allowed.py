"""The tokens that a grammar allows at a position of a structured text: for inspection, and for teaching."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from rekindle._src.capabilities.guides.request import GRAMMARS, THINK_IDS
from rekindle._src.core.drawable import Record
from rekindle._src.core.records import Completion, mask_words
from rekindle._src.dispatch.backend import Front
from rekindle._src.views import html
from rekindle.errors import InvalidRequest

SHOWN = 60


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class AllowedTokens(Record):
    """The tokens that may come after the first `at` tokens of a structured text."""

    at: int
    text: str  # the text so far
    token_ids: tuple[int, ...]  # the allowed tokens
    texts: tuple[str, ...]  # of these tokens
    vocab_size: int
    may_end: bool  # an end token is among them, so the text so far is complete
    forced: str  # the text that has to follow
    came: str | None  # the token that was sampled there, if there is one

    def __len__(self) -> int:
        return len(self.token_ids)

    def _repr_html_(self) -> str:
        share = f"{len(self):,} of {self.vocab_size:,} tokens may come"
        ends = "it may end here" if self.may_end else "it may not end here"
        forced = f"{self.forced!r} has to follow" if self.forced else ""
        style = "background:rgba(128,128,128,.18);border-radius:3px;padding:0 4px;margin:1px;white-space:pre"
        chips = [
            html.Markup(f'<span style="{style}{_mark(text == self.came)}">{html.escape(text)}</span> ')
            for text in self.texts[:SHOWN]
        ]
        rest = html.line(f"and {len(self) - SHOWN:,} more") if len(self) > SHOWN else ""
        wrapped = html.Markup(f'<div style="max-width:80ch;line-height:1.8">{"".join(chips)}</div>')
        return str(html.block(html.text(self.text), html.line(share, ends, forced), wrapped, rest))


def _mark(sampled: bool) -> str:
    return ";outline:2px solid rgba(128,128,128,.9)" if sampled else ""


def allowed_tokens(front: Front, source: Completion | Any, at: int | None) -> AllowedTokens:
    """Follow the structured text of a completion or handle up to token `at`, and return the tokens allowed next."""
    token_ids = tuple(source.token_ids)
    at = len(token_ids) if at is None else at
    if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at <= len(token_ids):
        raise InvalidRequest("at", at, f"is outside of the {len(token_ids)} tokens", f"Use 0 to {len(token_ids)}")
    from rekindle._src.structured.spec import structure_of  # with which schemas are read

    structure, grammars = structure_of(source.sampling), GRAMMARS.of(front)
    if structure is None or grammars is None:
        raise InvalidRequest(
            "request", source.id, "has no structure", "Pass schema, regex, choice, grammar or json=True"
        )
    eos = frozenset() if source.sampling.ignore_eos else frozenset(front.tokenizer.eos_ids)
    guide = grammars.compile(structure.spec).guide(eos)
    prompt = source.prompt_token_ids
    decode = front.tokenizer.decode
    prefix = [*prompt[len(prompt) - source.covered :], *token_ids[:at]]
    sampled = decode([token_ids[at]], skip_special_tokens=False) if at < len(token_ids) else None
    mask = np.zeros(mask_words(front.vocab_size), np.int32)
    for token in _behind_reasoning(prefix, THINK_IDS.of(front), at):
        if guide.ended or guide.consume(token).problem:
            raise InvalidRequest("at", at, "lies after the end of the structured text", "Use a smaller one")
    ids = [] if guide.ended or guide.fill(mask) else _set_bits(mask)
    texts = tuple(decode([token], skip_special_tokens=False) for token in ids)
    may_end = guide.ended or bool(eos & set(ids))
    return AllowedTokens(
        at, decode(prefix), tuple(ids), texts, front.vocab_size, may_end, decode(guide.ahead), sampled
    )  # fmt: skip


def _behind_reasoning(tokens: list[int], think_ids: tuple[int, int] | None, at: int) -> list[int]:
    """Return the tokens that follow a structure: those after the model's reasoning."""
    if think_ids is None:
        return tokens
    opens, closes = think_ids
    if closes in tokens:
        return tokens[tokens.index(closes) + 1 :]
    if tokens[:1] == [opens]:
        raise InvalidRequest("at", at, "lies in the model's reasoning, which is free", "Use a larger one")
    return tokens


def _set_bits(mask: np.ndarray) -> list[int]:
    indices: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return indices
