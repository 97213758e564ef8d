"""Pictures of attention: heads as small maps and one of them with its tokens, in a page and in files for papers."""

from __future__ import annotations

import base64
import itertools
import math
import struct
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import words
from rekindle._src.core.names import checked_path
from rekindle._src.views import html, style, svg
from rekindle._src.views.html import Markup
from rekindle._src.views.labels import visible

CELLS = 1 << 20  # of one figure, over all of its layers and heads
SIDE, LEAST = 48, 12  # positions of a picture: at most, and at least
LEVELS = 255  # of a cell: by the square root of its weight, so that small weights are told apart too
WIDTH, RIGHT = 620, 34  # pixels, of a page's picture and at the right of its map
SMALL = 64  # pixels of a head's small map
DARKEST = (8, 64, 129)  # red, green and blue of the largest weight on paper; the smallest is white

_BLUE = tuple(bytes.fromhex(style.BLUE[1:]))


class MapLike(Protocol):
    """The weights of one layer's attention."""

    @property
    def tokens(self) -> tuple[str, ...]: ...
    @property
    def layer(self) -> int: ...
    @property
    def weights(self) -> NDArray[np.float32]: ...
    @property
    def positions(self) -> NDArray[np.int32]: ...


class MapGrid(NamedTuple):
    """The positions of a picture. A column is one position, or the sum of those without a place of their own."""

    rows: NDArray[np.int64]  # indices of the positions that read
    columns: tuple[tuple[int, int], ...]  # runs of the positions that are read, half-open
    row_names: tuple[str, ...]
    column_names: tuple[str, ...]

    @property
    def left(self) -> float:
        """The pixels that the names of rows need."""
        return 10 + max(map(_pixels, self.row_names), default=0.0)

    @property
    def top(self) -> float:
        """The pixels that the names of columns need, which lean."""
        return 12 + math.sin(math.pi / 3) * max(map(_pixels, self.column_names))

    @classmethod
    def of(cls, shown: MapLike, maps: int) -> MapGrid:
        """Return the frame of a picture that has so many `maps`, over its layers and heads."""
        side = min(SIDE, max(LEAST, math.isqrt(CELLS // max(1, maps))))
        reading = shown.positions.tolist()
        rows, stop = np.arange(len(reading))[-side:], (reading[-1] + 1 if reading else 1)
        first = stop - side + 2  # that has a column after those of position 0 and of the sum
        columns = [(at, at + 1) for at in range(stop)]
        if stop > side:
            columns = [(0, 1), (1, first), *columns[first:]]
        names = [
            visible(shown.tokens[start]) if stop == start + 1 else f"{stop - start:,} more" for start, stop in columns
        ]
        return cls(rows, tuple(columns), tuple(visible(shown.tokens[reading[row]]) for row in rows), tuple(names))

    def shares(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return weights [heads, positions that read, positions that are read] by the picture's rows and columns."""
        starts, stop = [start for start, _ in self.columns], self.columns[-1][1]
        return np.add.reduceat(weights[:, self.rows, :stop], starts, axis=-1)

    def words(self, shown: MapLike) -> str:
        """Describe the data left out of the picture; empty if everything fits."""
        left_out = len(shown.positions) - len(self.rows)
        parts = [f"the last {len(self.rows)} of {len(shown.positions):,} positions that read"] if left_out else []
        summed = [stop - start for start, stop in self.columns if stop > start + 1]
        parts += [f"one column sums up {words.count(count, 'position')} that are read" for count in summed]
        return ", and ".join(parts)


def _pixels(name: str) -> float:
    """Return the most pixels that a token's name can take."""
    return sum(11.0 if unicodedata.east_asian_width(letter) in "WF" else 7.0 for letter in name)


def figure(maps: Sequence[MapLike]) -> tuple[dict[str, Any], str, Markup]:
    """Return the data of an interactive figure, its summary, and its markup for a page without scripts."""
    frame = MapGrid.of(maps[0], len(maps) * max(len(each.weights) for each in maps))
    shares = [frame.shares(each.weights) for each in maps]
    left_out = frame.words(maps[0])
    heads = [len(each) for each in shares]
    data = {
        "layers": [each.layer for each in maps],
        "heads": heads,
        "rows": frame.row_names,
        "columns": frame.column_names,
        "left": frame.left,
        "top": frame.top,
        "reading": [int(maps[0].positions[row]) for row in frame.rows],
        "spans": frame.columns,
        "cells": [base64.b64encode(_levels(each).tobytes()).decode() for each in shares],
        "colour": _BLUE,
        "note": left_out,
    }
    layers = f"layer {maps[0].layer}" if len(maps) == 1 else words.count(len(maps), "layer")
    every = words.count(heads[0], "head") if len(set(heads)) == 1 else "all heads"
    still = _still(frame, shares[0], maps[0].layer, left_out)
    return data, f"attention of {layers}, {every}", still


def _levels(shares: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.rint(LEVELS * np.sqrt(np.clip(shares, 0.0, 1.0))).astype(np.uint8)


def _still(frame: MapGrid, shares: NDArray[np.float32], layer: int, left_out: str) -> Markup:
    """Return the mean of a layer's heads, large, and each head, small: the first state of the interactive figure."""
    mean = shares.mean(axis=0)
    first = len(frame.columns) == 1
    scale = _scale(mean, first=first)
    skipped = "" if first or not len(mean) else f"position 0, which gets {mean[:, 0].mean():.0%}, is left out"
    cell, left, top = _cell(frame), frame.left, frame.top
    height = top + cell * len(frame.rows) + 2
    parts = [
        *_names(frame, cell, first=first),
        *(
            svg.rect(
                left + cell * column, top + cell * row, cell, cell, _translucent(share / scale),
                title=f"{frame.row_names[row]} reads {frame.column_names[column]}: {share:.1%}",
            )
            for row, column, share in _visible_cells(mean, scale, first=first)
        ),
    ]  # fmt: skip
    title = f"attention of layer {layer}, mean of its heads"
    small = "".join(_small(f"head {head}", _left(shares[head], first=first)) for head in range(len(shares)))
    return html.block(
        html.line("rows read, columns are read", left_out),
        _reading(frame, mean, first=first),
        svg.picture(WIDTH, height, parts, label=title),
        html.line(Markup(f"0 {_SHADES} {scale:.0%}"), skipped),
        Markup(f'<div style="display:flex;flex-wrap:wrap;gap:8px;margin:8px 0">{small}</div>'),
        title=title,
    )


_SHADES = (
    '<span aria-hidden="true" style="display:inline-block;width:96px;height:.7em;border-radius:2px;'
    f'background:linear-gradient(90deg,transparent,{style.BLUE})"></span>'
)


def _reading(frame: MapGrid, shares: NDArray[np.float32], *, first: bool) -> Markup:
    """Return the text shaded by how much its last reading position attends to each token."""
    if not len(frame.rows):
        return Markup("")
    line, scale = _left(shares[-1], first=first), _scale(shares[-1:], first=first)
    tokens = "".join(
        f'<span title="{share:.1%}" style="border-radius:2px;background:{style.likely(float(share) / scale)}">'
        f"{html.escape(name.replace('·', ' '))}</span>"
        for name, share in zip(frame.column_names, line.tolist(), strict=True)
    )
    words = html.line(f"what {frame.row_names[-1]} reads, in the text")
    return Markup(f'{words}<div style="white-space:pre-wrap;max-width:{WIDTH}px;line-height:1.7">{tokens}</div>')


def _cell(frame: MapGrid, width: float = WIDTH) -> float:
    return min(18.0, (width - frame.left - RIGHT) / len(frame.columns))


def _left(shares: NDArray[np.float32], *, first: bool) -> NDArray[np.float32]:
    """Return the shares of a head, without position 0 unless it is shown."""
    return shares if first else np.where(np.arange(shares.shape[-1]) == 0, 0.0, shares)


def _scale(shares: NDArray[np.float32], *, first: bool) -> float:
    """Return the largest share that is shown; its shade is the strongest."""
    return max(float(_left(shares, first=first).max(initial=0.0)), 1e-6)


def _visible_cells(shares: NDArray[np.float32], scale: float, *, first: bool) -> Iterator[tuple[int, int, float]]:
    kept = _left(shares, first=first)
    for row, column in np.argwhere(kept > 0.01 * scale).tolist():
        yield row, column, float(kept[row, column])


def _names(frame: MapGrid, cell: float, *, first: bool) -> Iterator[Markup]:
    """Yield the tokens of rows and columns, and the outline of the map."""
    size, left, top = min(11.0, cell), frame.left, frame.top
    for row, name in enumerate(frame.row_names):
        yield svg.words(left - 5, top + cell * (row + 0.5) + size * 0.35, name, anchor="end", size=size)
    for column, name in enumerate(frame.column_names):
        x, y = left + cell * (column + 0.5) + size * 0.3, top - 5
        faint = 1 if first or column else style.QUIET
        yield svg.words(x, y, name, size=size, transform=f"rotate(-60 {x:.1f} {y:.1f})", opacity=faint)
    width, height = cell * len(frame.columns), cell * len(frame.rows)
    yield _outline(left, top, width, height)


def _outline(x: float, y: float, width: float, height: float) -> Markup:
    return svg.rect(x, y, width, height, "none", stroke="currentColor", stroke_opacity=0.4, stroke_width=0.5)


def _translucent(share: float) -> str:
    return f"rgba({','.join(map(str, _BLUE))},{min(1.0, share):.2f})"


def _plain(share: float) -> str:
    return "#" + "".join(f"{round(255 + (channel - 255) * min(1.0, share)):02x}" for channel in DARKEST)


def _small(name: str, shares: NDArray[np.float32]) -> str:
    """Return a small map with its name, as an image: hundreds of heads of thousands of cells are too many elements."""
    largest = float(shares.max(initial=0.0))
    source = _png(shares / max(largest, 1e-6))
    look = f"width:{SMALL}px;height:{SMALL}px;image-rendering:pixelated;border:1px solid {style.HAIR};display:block"
    caption = f'<figcaption style="font-size:{style.TINY}">{html.escape(name)}</figcaption>'
    words = f"{name}: at most {largest:.0%}"
    image = f'<img src="{source}" alt="{html.escape(words)}" title="{html.escape(words)}" style="{look}">'
    return f'<figure style="margin:0">{image}{caption}</figure>'


def _png(shares: NDArray[np.float32]) -> str:
    """Return shares [rows, columns] as the `data:` URI of a PNG: one colour, as opaque as the share."""
    rows, columns = max(1, shares.shape[0]), shares.shape[1]
    pixels = np.zeros((rows, columns, 4), np.uint8)
    pixels[..., :3] = _BLUE
    pixels[: len(shares), :, 3] = np.rint(255 * np.clip(shares, 0.0, 1.0))
    lines = np.zeros((rows, 1 + 4 * columns), np.uint8)  # each line begins with its filter, none
    lines[:, 1:] = pixels.reshape(rows, -1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def save(shown: MapLike, path: str | Path, *, head: int | None, first: bool) -> Path:
    """Write an SVG file: one head with its tokens and its scale, or all heads in a grid. Return its path."""
    target = checked_path("path", path)
    frame = MapGrid.of(shown, len(shown.weights))
    shares, first = frame.shares(shown.weights), first or len(frame.columns) == 1
    draw = _head if head is not None else _grid
    width, height, parts = draw(frame, shares if head is None else shares[head : head + 1], first)
    title = f"Attention of layer {shown.layer}" + ("" if head is None else f", head {head}")
    target.write_text(svg.document(width, height, parts, title=title), encoding="utf-8")
    return target


def _head(frame: MapGrid, shares: NDArray[np.float32], first: bool) -> tuple[float, float, list[Markup]]:
    cell, scale, left, top = _cell(frame), _scale(shares[0], first=first), frame.left, frame.top
    width, bottom = left + cell * len(frame.columns) + RIGHT, top + cell * len(frame.rows)
    parts = [*_paper(shares[0], scale, left, top, cell, first=first), *_names(frame, cell, first=first)]
    steps = 24
    bar = [svg.rect(left + 5 * step, bottom + 14, 5.2, 8, _plain((step + 0.5) / steps)) for step in range(steps)]
    numbers = [
        svg.words(left, bottom + 33, "0", size=10),
        svg.words(left + 5 * steps, bottom + 33, f"{scale:.0%}", anchor="end", size=10),
    ]
    return max(width, left + 5 * steps + 4), bottom + 38, [*parts, *bar, *numbers]


def _grid(frame: MapGrid, shares: NDArray[np.float32], first: bool) -> tuple[float, float, list[Markup]]:
    side, across = 96.0, min(6, max(1, len(shares)))
    cell = side / max(len(frame.columns), len(frame.rows), 1)
    parts: list[Markup] = []
    for head, each in enumerate(shares):
        x, y = 4 + (side + 12) * (head % across), 16 + (side + 24) * (head // across)
        scale = _scale(each, first=first)
        parts.append(svg.words(x, y - 4, f"head {head}", size=9))
        parts.append(svg.words(x + cell * len(frame.columns), y - 4, f"{scale:.0%}", size=9, anchor="end"))
        parts += _paper(each, scale, x, y, cell, first=first)
        parts.append(_outline(x, y, cell * len(frame.columns), cell * len(frame.rows)))
    lines = -(-len(shares) // across)
    return 4 + (side + 12) * across, 4 + (side + 24) * lines, parts


def _paper(
    shares: NDArray[np.float32], scale: float, x: float, y: float, cell: float, *, first: bool
) -> Iterator[Markup]:
    """Yield a map's cells in plain colours; neighbours of one colour are one shape."""
    levels = np.rint(40 * _left(shares, first=first) / scale).astype(int)
    for row, line in enumerate(levels):
        starts = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
        for start, stop in itertools.pairwise(starts):
            if line[start]:
                place = x + cell * start, y + cell * row, cell * (stop - start), cell
                yield svg.rect(*place, _plain(line[start] / 40), shape_rendering="crispEdges")
