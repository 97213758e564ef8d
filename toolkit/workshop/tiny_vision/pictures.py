"""Pictures of shapes, digits, bars and lines from a seed, and their content.

They are drawn as plots look: a frame, ticks and small texts around them or none, lines of any width, colours near those
that have the name. `Scene` is what is true of a picture; its facts are words, each of which a token of the encoder has
to say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]

COLOURS: dict[str, tuple[Colour, ...]] = {
    "red": ((255, 0, 0), (214, 39, 40), (220, 20, 60), (190, 34, 34), (235, 60, 50)),
    "orange": ((255, 165, 0), (255, 127, 14), (255, 140, 0), (245, 150, 40)),
    "yellow": ((255, 255, 0), (255, 220, 0), (240, 220, 50), (200, 195, 10)),
    "green": ((0, 128, 0), (44, 160, 44), (50, 205, 50), (34, 139, 34), (0, 230, 0)),
    "blue": ((0, 0, 255), (31, 119, 180), (65, 105, 225), (30, 144, 255), (10, 10, 150)),
    "purple": ((128, 0, 128), (148, 103, 189), (138, 43, 226), (100, 10, 140)),
    "pink": ((255, 182, 193), (227, 119, 194), (255, 105, 180), (255, 20, 147)),
    "black": ((0, 0, 0), (25, 25, 25), (45, 45, 45)),
}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
KINDS = ("shape", "digit", "bars", "lines")
MOST_BARS, FEWEST_BARS = 5, 2
FONTS = (
    "DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSans-Oblique.ttf", "DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf",
    "DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf", "STIXGeneral.ttf", "STIXGeneralBol.ttf", "cmr10.ttf", "cmss10.ttf",
)  # fmt: skip
LONGEST = 192  # pixels of a picture's width; processors make it so before they stretch it to a square
JITTER = 10  # levels of a channel
LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of a picture. Fields that its kind has no use for are empty."""

    kind: str
    colours: tuple[str, ...]  # of the shape, the digit, the bars from left to right, or the lines
    shape: str = ""
    digit: int = -1
    heights: tuple[float, ...] = ()  # of bars, in shares of the plot's height
    rises: tuple[bool, ...] = ()  # of each line; of two, one rises and one falls

    @property
    def highest(self) -> str:
        """The colour of the highest bar."""
        return self.colours[self.heights.index(max(self.heights))]

    @property
    def lowest(self) -> str:
        return self.colours[self.heights.index(min(self.heights))]

    def line(self, rises: bool) -> str:
        """The colour of the line that rises, or of the one that falls."""
        return self.colours[self.rises.index(rises)]


def scene(rng: Random, kind: str | None = None, shares: Sequence[float] = (1, 1, 1, 1)) -> Scene:
    """Return a random scene, of a kind if one is named; else kinds come in these shares."""
    kind = kind or rng.choices(KINDS, shares)[0]
    if kind == "shape":
        return Scene(kind, (rng.choice(list(COLOURS)),), shape=rng.choice(SHAPES))
    if kind == "digit":
        return Scene(kind, ("black" if rng.random() < 0.3 else rng.choice(list(COLOURS)),), digit=rng.randrange(10))
    if kind == "lines":
        rises = rng.random() < 0.5
        both = (rises, not rises)[: rng.choice((1, 2, 2))]
        return Scene(kind, tuple(rng.sample(list(COLOURS), len(both))), rises=both)
    count = rng.randint(FEWEST_BARS, MOST_BARS)
    return Scene(kind, tuple(rng.sample(list(COLOURS), count)), heights=_heights(rng, count))


def _heights(rng: Random, count: int) -> tuple[float, ...]:
    """Return heights; the largest and the smallest are a twelfth of the plot apart from the others."""
    while True:
        heights = [rng.uniform(0.08, 1.0) for _ in range(count)]
        ordered = sorted(heights)
        if ordered[-1] - ordered[-2] > 0.08 and ordered[1] - ordered[0] > 0.08:
            return tuple(height / ordered[-1] * rng.uniform(0.94, 0.97) for height in heights)


def draw(scene: Scene, rng: Random) -> NDArray[np.uint8]:
    """Return the pixels of a scene, [height, width, 3]. The same state of `rng` gives the same ones."""
    height = rng.choice((LONGEST, 144, 144, rng.randint(120, LONGEST)))
    canvas = _Canvas(rng, LONGEST, height)
    {"shape": _shape, "digit": _digit, "bars": _bars, "lines": _lines}[scene.kind](canvas, scene)
    return np.asarray(canvas.image)


class _Canvas:
    """A picture that is drawn: the background, and the place of a plot with its frame."""

    def __init__(self, rng: Random, width: int, height: int) -> None:
        self.rng = rng
        self.paper = (255, 255, 255) if rng.random() < 0.75 else tuple(rng.randint(228, 255) for _ in range(3))
        self.image = Image.new("RGB", (width, height), self.paper)
        self.pen: Any = ImageDraw.Draw(self.image)
        left, right = rng.uniform(0.0, 0.16), rng.uniform(0.86, 1.0)
        top, bottom = rng.uniform(0.0, 0.14), rng.uniform(0.84, 1.0)
        if rng.random() < 0.5:  # where matplotlib has it
            left, right, top, bottom = 0.125, 0.9, 0.12, 0.89
        self.left, self.right = left * (width - 1), right * (width - 1)
        self.top, self.bottom = top * (height - 1), bottom * (height - 1)

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top

    def ink(self, name: str) -> Colour:
        """Return a colour that has this name."""
        red, green, blue = (
            min(255, max(0, level + self.rng.randint(-JITTER, JITTER))) for level in self.rng.choice(COLOURS[name])
        )
        return red, green, blue

    def frame(self) -> None:
        """Draw two or four sides around the plot, ticks with numbers, and a title, or some of these."""
        rng, grey = self.rng, self.rng.randint(0, 90)
        ink = (grey, grey, grey)
        corners = ((self.left, self.top), (self.left, self.bottom), (self.right, self.bottom), (self.right, self.top))
        sides = [*zip(corners, (*corners[1:], corners[0]), strict=True)]  # left, bottom, right, top
        for start, stop in sides[: rng.choice((2, 4, 4))]:
            self.pen.line((*start, *stop), ink, 1)
        if rng.random() < 0.75:
            count = rng.randint(3, 8)
            for number in range(count):
                share = (number + 0.5) / count
                y, x = self.bottom - share * self.height, self.left + share * self.width
                self.pen.line((self.left - 2, y, self.left, y), ink, 1)
                self.pen.line((x, self.bottom, x, self.bottom + 2), ink, 1)
                if rng.random() < 0.9:
                    self.write(self.left - 4, y, "rm", ink)
                    self.write(x, self.bottom + 3, "mt", ink)
        if rng.random() < 0.3:
            self.write(self.left + self.width / 2, self.top - 3, "mb", ink, rng.randint(6, 22))

    def write(self, x: float, y: float, anchor: str, ink: Colour, letters: int = 2) -> None:
        """Write small random letters."""
        text = "".join(self.rng.choice(LETTERS) for _ in range(letters))
        self.pen.text((x, y), text, ink, font("DejaVuSans.ttf", self.rng.randint(5, 8)), anchor)


@cache
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Return one of the fonts that matplotlib has in its package."""
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", name), size)


def _shape(canvas: _Canvas, scene: Scene) -> None:
    rng, pen = canvas.rng, canvas.pen
    if rng.random() < 0.4:
        canvas.frame()
    least = min(canvas.width, canvas.height)
    radius = least * rng.uniform(0.13, 0.46)
    x = rng.uniform(canvas.left + radius, canvas.right - radius)
    y = rng.uniform(canvas.top + radius, canvas.bottom - radius)
    ink, turn = canvas.ink(scene.colours[0]), rng.uniform(-0.2, 0.2)
    box = (x - radius, y - radius, x + radius, y + radius)
    if scene.shape == "circle":
        pen.ellipse(box, ink)
    elif scene.shape == "ring":
        pen.ellipse(box, None, ink, max(2, round(radius * rng.uniform(0.1, 0.4))))
    else:
        pen.polygon(
            [(x + radius * across, y + radius * down) for across, down in _corners(scene.shape, turn, rng)], ink
        )


def _corners(shape: str, turn: float, rng: Random) -> list[tuple[float, float]]:
    """Return the corners of a shape in a circle of radius 1."""
    if shape == "square":
        points = [(math.pi * (0.25 + 0.5 * i), 0.98) for i in range(4)]
    elif shape == "triangle":
        points = [(math.pi * (-0.5 + 2 / 3 * i), 1.0) for i in range(3)]
    elif shape == "star":
        inner = rng.uniform(0.36, 0.5)
        points = [(math.pi * (-0.5 + 0.2 * i), inner if i % 2 else 1.0) for i in range(10)]
    else:
        half = rng.uniform(0.14, 0.3)  # of an arm's width
        turn += rng.choice((0.0, math.pi / 4))
        arm = [(half, -half), (1.0, -half), (1.0, half), (half, half)]
        quarters = [(0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0)]
        flat = [(x * c - y * s, x * s + y * c) for s, c in quarters for x, y in arm[:3]]
        return [(x * math.cos(turn) - y * math.sin(turn), x * math.sin(turn) + y * math.cos(turn)) for x, y in flat]
    return [(radius * math.cos(angle + turn), radius * math.sin(angle + turn)) for angle, radius in points]


def _digit(canvas: _Canvas, scene: Scene) -> None:
    rng = canvas.rng
    if rng.random() < 0.3:
        canvas.frame()
    size = round(min(canvas.width, canvas.height) * rng.uniform(0.6, 1.15))
    letters = font(rng.choice(FONTS), size)
    x = canvas.left + canvas.width * rng.uniform(0.35, 0.65)
    y = canvas.top + canvas.height * rng.uniform(0.42, 0.58)
    canvas.pen.text((x, y), str(scene.digit), canvas.ink(scene.colours[0]), letters, "mm")


def _bars(canvas: _Canvas, scene: Scene) -> None:
    rng, count = canvas.rng, len(scene.heights)
    if rng.random() < 0.8:
        canvas.frame()
    margin, share = canvas.width * rng.uniform(0.02, 0.08), rng.uniform(0.5, 0.95)
    place = (canvas.width - 2 * margin) / (count - 1 + share)
    edge = (0, 0, 0) if rng.random() < 0.15 else None
    for number, (name, height) in enumerate(zip(scene.colours, scene.heights, strict=True)):
        left = canvas.left + margin + number * place
        box = (left, canvas.bottom - height * canvas.height, left + share * place, canvas.bottom)
        canvas.pen.rectangle(box, canvas.ink(name), edge)


def _lines(canvas: _Canvas, scene: Scene) -> None:
    rng = canvas.rng
    if rng.random() < 0.85:
        canvas.frame()
    steps = np.linspace(0.0, 1.0, rng.choice((2, 4, 8, 40)))
    wide, dots = rng.choice((1, 1, 2, 2, 3)), rng.random() < 0.2
    noise = np.random.default_rng(rng.getrandbits(32))
    for name, rises in zip(scene.colours, scene.rises, strict=True):
        least, most = rng.uniform(0.04, 0.4), rng.uniform(0.6, 0.96)
        curve = steps ** math.exp(rng.uniform(-0.9, 0.9))
        if rng.random() < 0.2:
            curve = 1 / (1 + np.exp(-10 * (steps - 0.5)))
        if rng.random() < 0.3:
            curve = curve + noise.normal(0, 0.03, len(steps))
        heights = least + (most - least) * (curve if rises else 1 - curve)
        x = canvas.left + canvas.width * (0.045 + 0.91 * steps)
        y = canvas.bottom - canvas.height * heights
        points, ink = list(zip(x.tolist(), y.tolist(), strict=True)), canvas.ink(name)
        canvas.pen.line(points, ink, wide, joint="curve")
        if dots and len(points) <= 8:
            for at in points:
                canvas.pen.ellipse((at[0] - 3, at[1] - 3, at[0] + 3, at[1] + 3), ink)


def square(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Return a picture of `draw` as the processor stretches it."""
    return np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.LANCZOS))


def drawn(
    seed: str, count: int, side: int, shares: Sequence[float] = (1, 1, 1, 1)
) -> tuple[list[Scene], NDArray[np.uint8]]:
    """Return scenes of a seed and their pixels [count, side, side, 3]."""
    rng, scenes = Random(seed), list[Scene]()
    pixels = np.empty((count, side, side, 3), np.uint8)
    for number in range(count):
        scenes.append(scene(rng, shares=shares))
        pixels[number] = square(draw(scenes[-1], rng), side)
    return scenes, pixels
