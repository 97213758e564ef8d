"""Pictures of a model's inside: the logit lens, and the weights of attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.calls.call import Call
from rekindle._src.core import html
from rekindle._src.core.tapped import TapFacts
from rekindle._src.core.taps import END, Capture, Positions, layer_of, runs_of
from rekindle._src.dispatch.backend import Front
from rekindle.errors import InvalidRequest

TOP = 5  # tokens of a position that hovering shows
BLOCK = 64  # logits of which the largest is looked at first
AT_ONCE = 1 << 25  # logits of one request
SHOWN = 40  # positions of a picture
SHOWN_WEIGHTS = 20_000  # of one picture: each is an element of the page
_HUE = "66,133,244"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lens:
    """The logit lens: the most likely next tokens of each position, layer by layer.

    A layer's residual stream goes through the final norm and the head as if no layer followed.
    """

    tokens: tuple[str, ...]  # of the positions
    positions: NDArray[np.int32]
    texts: tuple[tuple[tuple[str, ...], ...], ...]  # [layers][positions][most likely first]
    token_ids: NDArray[np.int32]  # the same as ids
    probabilities: NDArray[np.float32]  # of them

    def __repr__(self) -> str:
        return f"<Lens: {html.count(len(self.texts), 'layer')}, {html.count(len(self.tokens), 'position')}>"

    def _repr_html_(self) -> str:
        first = max(0, len(self.tokens) - SHOWN)
        heads = "".join(_cell(html.escape(_visible(text)), head=True) for text in ("layer", *self.tokens[first:]))
        rows = []
        for layer in range(len(self.texts) - 1, -1, -1):
            cells = [_cell(str(layer), head=True)]
            for place in range(first, len(self.tokens)):
                texts, shares = self.texts[layer][place], self.probabilities[layer, place]
                title = "\n".join(f"{text!r} {share:.1%}" for text, share in zip(texts, shares, strict=True))
                cells.append(_cell(html.escape(_visible(texts[0])), float(shares[0]), title))
            rows.append(f"<tr>{''.join(cells)}</tr>")
        words = "the most likely next token at each position, by layer; hover for others"
        left = f"the last {SHOWN} of {len(self.tokens)} positions" if first else ""
        table = f'<table style="border-collapse:collapse;font-size:80%"><tr>{heads}</tr>{"".join(rows)}</table>'
        return str(html.block(html.line(words, left), html.Markup(f'<div style="overflow-x:auto">{table}</div>')))


def _visible(text: str) -> str:
    return html.shorten(text.replace("\n", "↵").replace(" ", "·"), 10)


def _cell(text: str, share: float = 0.0, title: str = "", *, head: bool = False) -> str:
    tag, weight = ("th", "600") if head else ("td", "400")
    style = f"padding:1px 5px;text-align:left;white-space:nowrap;font-weight:{weight};border:none"
    shade = f";background:rgba({_HUE},{0.6 * share:.2f})" if share else ""
    hint = f' title="{html.escape(title)}"' if title else ""
    return f'<{tag}{hint} style="{style}{shade}">{text}</{tag}>'


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttentionMap:
    """The weights of one layer's attention: how much each position reads of each other one."""

    tokens: tuple[str, ...]
    layer: int
    weights: NDArray[np.float32]  # [heads, positions that read, positions that are read]
    positions: NDArray[np.int32]  # that read

    def __repr__(self) -> str:
        heads, count, _ = self.weights.shape
        return f"<AttentionMap of layer {self.layer}: {html.count(heads, 'head')}, {html.count(count, 'position')}>"

    def _repr_html_(self) -> str:
        heads, count, _ = self.weights.shape
        parts = [self._picture("mean of all heads", self.weights.mean(axis=0))]
        if heads * count * len(self.tokens) <= SHOWN_WEIGHTS:
            parts += [self._picture(f"head {head}", self.weights[head]) for head in range(heads)]
        title = html.line(f"attention of layer {self.layer}", "rows read, columns are read; hover for the tokens")
        return str(html.block(title, html.Markup(f'<div style="display:flex;flex-wrap:wrap">{"".join(parts)}</div>')))

    def _picture(self, name: str, weights: NDArray[np.float32]) -> str:
        reading, size = self.positions[-SHOWN:].tolist(), min(SHOWN, len(self.tokens))
        first = max(0, reading[-1] + 1 - size) if reading else 0  # of the positions that are read
        cells = []
        for row, position in enumerate(reading):
            for column in range(size):
                share = float(weights[row - len(reading), first + column])
                if share >= 0.005:
                    read, of = self.tokens[position], self.tokens[first + column]
                    cells.append(
                        f'<rect x="{column}" y="{row}" width="1" height="1" fill="rgba({_HUE},{min(1.0, share):.2f})">'
                        f"<title>{html.escape(f'{read!r} reads {of!r}: {share:.1%}')}</title></rect>"
                    )
        rows = max(1, len(reading))
        frame = f'<svg viewBox="0 0 {size} {rows}" width="160" height="{160 * rows // size}" '
        frame += 'style="background:rgba(128,128,128,.12)">'
        caption = f'<div style="font-size:80%;opacity:.75">{html.escape(name)}</div>'
        return f'<div style="margin:4px">{caption}{frame}{"".join(cells)}</svg></div>'


class LensCall(Call[Lens]):
    """Await it for a `Lens`."""

    _awaited = "await session.view.lens(…)"

    # Any: the signature of a public class names no private type.
    def __init__(self, session: Any, front: Any, prompt: Any, positions: Any, options: Mapping[str, Any]) -> None:
        self._session, self._prompt, self._positions, self._options = session, prompt, positions, options
        self._front: Front = front

    async def _result(self) -> Lens:
        facts = _facts(self._front)
        first = await _captured(self._session, self._prompt, {"logits": 0}, self._positions, self._options)
        positions = first.captured.positions
        each = max(1, AT_ONCE // max(1, len(positions) * self._front.vocab_size))
        ids, shares = [], []
        for start in range(0, facts.layers, each):
            layers = list(range(start, min(start + each, facts.layers)))
            done = await _captured(self._session, self._prompt, {"logits": layers}, self._positions, self._options)
            for layer in layers:
                top, probabilities = _most_likely(done.captured["logits", layer])
                ids.append(top)
                shares.append(probabilities)
        known = {token: first.text_of(token) for token in np.unique(np.stack(ids)).tolist()}
        texts = tuple(tuple(tuple(known[token] for token in top) for top in layer.tolist()) for layer in ids)
        texts_of_prompt = first.prompt_texts
        tokens = tuple(texts_of_prompt[position] for position in positions)
        return Lens(tokens, positions, texts, np.stack(ids), np.stack(shares))


def _most_likely(logits: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the ids of the most likely tokens [positions, TOP], and their probabilities."""
    top = _candidates(logits)
    values = np.take_along_axis(logits, top, axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :TOP]
    top, values = np.take_along_axis(top, order, axis=-1), np.take_along_axis(values, order, axis=-1)
    total = np.exp(logits - values[:, :1]).sum(axis=-1, keepdims=True)
    return top.astype(np.int32), (np.exp(values - values[:, :1]) / total).astype(np.float32)


def _candidates(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return ids [positions, n] that contain the TOP likeliest.

    They are the ids of the TOP blocks with the largest maxima, and those after the last whole block. Choosing among
    all ids is ten times slower.
    """
    count, size = logits.shape
    blocks = size // BLOCK
    whole = blocks * BLOCK
    if blocks <= TOP:
        return np.broadcast_to(np.arange(size), (count, size))
    largest = logits[:, :whole].reshape(count, blocks, BLOCK).max(axis=-1)
    chosen = np.argpartition(largest, blocks - TOP, axis=-1)[:, -TOP:]
    inside = (chosen[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(count, -1)
    return np.concatenate([inside, np.broadcast_to(np.arange(whole, size), (count, size - whole))], axis=-1)


class AttentionMapCall(Call[AttentionMap]):
    """Await it for an `AttentionMap`."""

    _awaited = "await session.view.attention(…)"

    # Any: the signature of a public class names no private type.
    def __init__(
        self, session: Any, front: Any, prompt: Any, layer: int, positions: Any, options: Mapping[str, Any]
    ) -> None:
        self._session, self._prompt, self._layer, self._options = session, prompt, layer, options
        self._front: Front = front
        self._positions: Positions = positions

    async def _result(self) -> AttentionMap:
        facts = _facts(self._front)
        layer = layer_of("layer", self._layer, facts.layers)
        runs_of("positions", self._positions, None)
        spec = facts.attention[layer]
        if spec is None:
            raise InvalidRequest("layer", layer, "has attention whose weights can't be shown", "Show another layer")
        done = await _captured(self._session, self._prompt, {"q": layer, "k": layer}, None, self._options)
        q, k = done.captured["q", layer], done.captured["k", layer]
        count, heads, groups = len(q), q.shape[1], q.shape[1] // k.shape[1]
        reading = _positions_in(self._positions, count)
        scores = np.einsum("ihd,jhd->hij", q[reading], np.repeat(k, groups, axis=1)) * spec.scale
        if spec.soft_cap is not None:
            scores = np.tanh(scores / spec.soft_cap) * spec.soft_cap
        limits = np.arange(1, count + 1)
        for start, stop in done.image_runs if layer in facts.both_ways else ():
            limits[start:stop] = stop
        seen = np.arange(count) < limits[reading][:, None]
        seen &= reading[:, None] - np.arange(count) < (spec.sliding_window or count)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        assert weights.shape == (heads, len(reading), count)
        return AttentionMap(done.prompt_texts, layer, weights.astype(np.float32), reading)


def _positions_in(positions: Positions, count: int) -> NDArray[np.int32]:
    """Return positions of a prompt as numbers. Raise `InvalidRequest` for one past its end."""
    every, runs = np.arange(count, dtype=np.int32), runs_of("positions", positions, count)
    for start, stop in runs:
        if stop > count and stop != END:
            problem = f"has a position after the prompt, which has {count} tokens"
            raise InvalidRequest("positions", (start, stop), problem, f"Use positions below {count}")
    return np.concatenate([every[:0], *(every[start:stop] for start, stop in runs)])


def _facts(front: Front) -> TapFacts:
    if front.taps is None or front.taps.elsewhere:
        fix = "Use a session of one process, in its own process"
        raise InvalidRequest("session", front.model, "has its model in another process", fix)
    return front.taps


async def _captured(session: Any, prompt: Any, sites: Any, positions: Positions, options: Mapping[str, Any]) -> Any:
    """Return the completion of a prompt with captures, of which only the prompt is computed."""
    wanted = Capture(sites, "prompt" if positions is None else positions)
    return await session.generate(prompt, **{"max_tokens": 0, "temperature": 0.0, **options, "capture": wanted})
