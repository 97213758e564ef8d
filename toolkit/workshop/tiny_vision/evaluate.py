"""`python -m workshop.tiny_vision.evaluate [FOLDER]`: print the accuracy table of the model's card.

Each question is put to the model through a session, as people ask, about pictures that the training has not seen: drawn
as those of the training are, and by matplotlib with its own look. An answer counts if it is the expected sentence.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

import rekindle
from workshop.tiny_vision.pictures import COLOURS, KINDS, Scene, draw, scene
from workshop.tiny_vision.questions import FRAMES, answer, question, topics

HELD_OUT = "held out"  # seed
NAMED = {  # matplotlib's own names for these colours
    "red": ("red", "tab:red", "crimson"), "orange": ("orange", "tab:orange", "darkorange"),
    "yellow": ("yellow", "gold"), "green": ("green", "tab:green", "limegreen"),
    "blue": ("blue", "tab:blue", "royalblue"), "purple": ("purple", "tab:purple", "blueviolet"),
    "pink": ("pink", "tab:pink", "hotpink"), "black": ("black",),
}  # fmt: skip
assert NAMED.keys() == COLOURS.keys()


class Share(NamedTuple):
    """How many of some answers were right."""

    right: int
    of: int

    def __str__(self) -> str:
        return f"{self.right / self.of:.0%} of {self.of}"


def figure(scene: Scene, rng: Random) -> Any:
    """Return a scene as a matplotlib figure in its default style."""
    from matplotlib.figure import Figure

    result = Figure()
    axes = result.subplots()
    inks = [rng.choice(NAMED[name]) for name in scene.colours]
    if scene.kind == "bars":
        axes.bar([chr(97 + number) for number in range(len(inks))], scene.heights, color=inks)
    elif scene.kind == "lines":
        x = np.linspace(0, 10, 50)
        for ink, rises in zip(inks, scene.rises, strict=True):
            curve = (x / 10) ** rng.uniform(0.5, 2.0) * rng.uniform(0.5, 1.0)
            axes.plot(x, curve if rises else rng.uniform(0.7, 1.0) - curve, color=ink, linewidth=rng.choice((1.5, 3)))
    elif scene.kind == "digit":
        axes.text(
            0.5, 0.48, str(scene.digit), fontsize=rng.choice((180, 220, 250)), color=inks[0], ha="center", va="center"
        )
        if rng.random() < 0.7:
            axes.axis("off")
    else:
        _shape(axes, scene.shape, inks[0], rng)
    return result


def _shape(axes: Any, shape: str, ink: str, rng: Random) -> None:
    from matplotlib import patches

    x, y, size = rng.uniform(4, 6), rng.uniform(4, 6), rng.uniform(2, 3.6)
    axes.set(xlim=(0, 10), ylim=(0, 10), aspect="equal")
    if shape == "circle":
        axes.add_patch(patches.Circle((x, y), size, color=ink))
    elif shape == "ring":
        axes.add_patch(patches.Annulus((x, y), size, size * rng.uniform(0.15, 0.35), color=ink))
    elif shape == "square":
        axes.add_patch(patches.Rectangle((x - size * 0.7, y - size * 0.7), size * 1.4, size * 1.4, color=ink))
    elif shape == "triangle":
        axes.add_patch(patches.RegularPolygon((x, y), 3, radius=size, color=ink))
    else:
        axes.scatter([x], [y], s=(size * 45) ** 2 / 2, marker={"star": "*", "cross": "P"}[shape], color=ink)


def cases(count: int, *, matplotlib: bool) -> list[tuple[str, Any, str, str]]:
    """Return topics, pictures, questions and answers: as many scenes of each kind."""
    rng = Random(f"{HELD_OUT} {matplotlib}")
    result = []
    for kind in KINDS:
        for _ in range(count):
            seen = scene(rng, kind)
            picture = figure(seen, rng) if matplotlib else draw(seen, rng)
            result += [(topic, picture, question(seen, topic, rng), answer(seen, topic)) for topic in topics(seen)]
    return result


async def measure(session: rekindle.Session, count: int, *, matplotlib: bool) -> dict[str, Share]:
    """Return the share of right answers by topic."""
    wrong = list[str]()

    async def right(picture: Any, text: str, expected: str) -> bool:
        content = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
        reply = await session.chat([{"role": "user", "content": content}], temperature=0.0, max_tokens=32)
        if reply.text != expected:
            wrong.append(f"{text!r}: {reply.text!r}, not {expected!r}")
        return bool(reply.text == expected)

    entries = cases(count, matplotlib=matplotlib)
    answers = await asyncio.gather(*(right(*rest) for _, *rest in entries))
    result = dict[str, Share]()
    for topic in FRAMES:
        own = [one for one, (name, *_) in zip(answers, entries, strict=True) if name == topic]
        result[topic] = Share(sum(own), len(own))
    for line in Random(0).sample(wrong, min(6, len(wrong))):
        print(f"  {line}")
    return result


async def evaluate(folder: str | Path, count: int) -> None:
    async with await rekindle.open(folder, quiet=True, max_requests=16, max_model_len=512) as session:
        drawn = await measure(session, count, matplotlib=False)
        plotted = await measure(session, count, matplotlib=True)
    print("| asked about | drawn as in the training | by matplotlib |\n|---|---|---|")
    for topic, share in drawn.items():
        print(f"| {topic} | {share} | {plotted[topic]} |")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m workshop.tiny_vision.evaluate", description=__doc__)
    parser.add_argument("folder", nargs="?", default="tiny-vision", help="default: the shipped one")
    parser.add_argument("--count", type=int, default=200, help="pictures of each kind")
    options = parser.parse_args(argv)
    asyncio.run(evaluate(options.folder, options.count))


if __name__ == "__main__":
    main()
