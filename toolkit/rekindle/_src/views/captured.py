"""The drawing of captured arrays: their shapes, and their size along the positions."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from rekindle._src.core import words
from rekindle._src.core.captured import Captured, key_name
from rekindle._src.views import html, style, svg

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DRAWN = 120  # positions of a picture at most; each is then the mean of several


def captured(arrays: Captured) -> html.Markup:
    """Draw a line for each array, below it how many positions they have and of what size they are."""
    rows = [
        (key_name(key), "×".join(map(str, array.shape)), _along(array), *_spread(array), str(array.dtype))
        for key, array in arrays.arrays.items()
    ]
    seen = len(arrays.patches)
    positions = words.count(len(arrays.positions), "position") + (f", {seen} of them of pictures" if seen else "")
    size = html.line(positions, words.mebibytes(arrays.nbytes))
    heads = ["captured", "shape", "size along the positions", "mean", "deviation", "dtype"]
    return html.block(html.table(heads, rows), size)


def _along(array: NDArray[Any]) -> html.Markup:
    """Return the root mean square of each position's values as a line; empty if there is one position, or no number."""
    if array.ndim < 2 or len(array) < 2 or not array.size:
        return html.Markup("")
    count = min(_DRAWN, len(array))
    bounds = [len(array) * place // count for place in range(count + 1)]
    parts = (array[start:stop].astype("float32") for start, stop in itertools.pairwise(bounds))
    sizes = [math.sqrt(float((part * part).mean())) for part in parts]
    highest = max(sizes)
    if not math.isfinite(highest) or highest <= 0:
        return html.Markup("")
    width, height = 120, 18
    points = [
        (width * place / max(1, len(sizes) - 1), height - 1 - (height - 2) * size / highest)
        for place, size in enumerate(sizes)
    ]
    label = f"root mean square along the positions, at most {highest:.3g}"
    return svg.picture(width, height, [svg.stroke(points, style.BLUE)], label=label)


def _spread(array: NDArray[Any]) -> tuple[float, float]:
    return (float(array.mean()), float(array.std())) if array.size else (0.0, 0.0)
