"""`python tutorials/diagrams.py`: the course's diagrams, as SVG files beside the pictures.

Each has a background of its own and follows the reader's light or dark theme, so it can be read on any page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent / "pictures"
STYLE = """
svg { --paper: #ffffff; --ink: #24292f; --faint: #8c959f; --a: #cfe3ff; --b: #ffe2b8; --c: #d3f2d6; --d: #f6d5ee; --n: #eef1f4 }
@media (prefers-color-scheme: dark) {
  svg { --paper: #1b1f24; --ink: #e6edf3; --faint: #7d8590; --a: #1f4272; --b: #6b4714; --c: #1f5130; --d: #5d2b52; --n: #2d333b }
}
text { font: 13px sans-serif; fill: var(--ink); text-anchor: middle; dominant-baseline: central }
.small { font-size: 11px; fill: var(--faint) } .left { text-anchor: start }
.box { stroke: var(--faint); stroke-width: 1 } .line { stroke: var(--ink); stroke-width: 1.3; fill: none }
""".strip()


class Drawing:
    """Boxes, words and arrows in pixels."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, words: str = "", *, fill: str = "n") -> None:
        self.parts.append(
            f'<rect class="box" x="{x}" y="{y}" width="{w}" height="{h}" rx="4" style="fill: var(--{fill})"/>'
        )
        lines = words.split("\n")
        for index, line in enumerate(lines):
            self.words(x + w / 2, y + h / 2 + (index - (len(lines) - 1) / 2) * 15, line)

    def words(self, x: float, y: float, text: str, kind: str = "") -> None:
        if text:
            self.parts.append(f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(
            f'<line class="line" x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" style="marker-end: url(#head)"/>'
        )

    def svg(self) -> str:
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" style="fill: var(--ink)"/></marker></defs>'
        )
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        paper = f'<rect width="{self.width}" height="{self.height}" rx="8" style="fill: var(--paper)"/>'
        body = "\n".join((f"<title>{escape(self.title)}</title>", f"<style>{STYLE}</style>", head, paper, *self.parts))
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{body}\n</svg>\n'


def generation() -> Drawing:
    """01: text, tokens, a distribution, a draw, and back."""
    d = Drawing("Text becomes tokens, tokens a distribution, and the token drawn from it is appended", 700, 130)
    for x, words, fill in (
        (15, "text\n“Once upon a”", "n"),
        (155, "tokens\n521 576 260", "a"),
        (295, "model", "b"),
        (435, "probabilities\n“ time” 1.00", "c"),
        (575, "next token\n“ time”", "d"),
    ):
        d.box(x, 25, 110, 46, words, fill=fill)
    for x in (125, 265, 405, 545):
        d.arrow(x, 48, x + 28, 48)
    d.parts.append('<path class="line" d="M630 73 V105 H210 V76" style="marker-end: url(#head)"/>')
    d.words(420, 94, "append it, and go on until eos, a stop string or max_tokens", "small")
    return d


def step() -> Drawing:
    """02: a prefill and two decode steps beside the cache."""
    d = Drawing("Prefill computes all prompt positions, decode one position that reads all keys and values", 700, 190)
    for row, (label, first, last) in enumerate((("prefill", 0, 4), ("decode", 4, 5), ("decode", 5, 6))):
        y = 30 + row * 50
        d.words(45, y + 15, label)
        for at in range(last):
            d.box(100 + at * 46, y, 40, 30, f"kv {at}", fill="b" if at >= first else "a")
        d.arrow(112 + last * 46, y + 15, 470, y + 15)
        d.box(475, y, 205, 30, f"logits of position {last - 1} → token {last}", fill="c")
    d.words(240, 180, "orange: computed in this step · blue: read from the cache", "small")
    return d


def batching() -> Drawing:
    """03: slots over time, static and continuous."""
    d = Drawing(
        "Static batches wait for their longest text; continuous batching gives a free slot to the next", 700, 190
    )
    groups = {
        "static": [[(0, 9, "a")], [(0, 3, "b"), (9, 4, "n")], [(0, 5, "c"), (9, 6, "d")]],
        "continuous": [[(0, 9, "a")], [(0, 3, "b"), (3, 4, "n")], [(0, 5, "c"), (5, 6, "d")]],
    }
    for column, (name, slots) in enumerate(groups.items()):
        left = 20 + column * 345
        d.words(left + 160, 18, name)
        for row, blocks in enumerate(slots):
            for start, length, fill in blocks:
                d.box(left + start * 21, 35 + row * 40, length * 21 - 2, 30, f"{length} steps", fill=fill)
        end = max(start + length for blocks in slots for start, length, _ in blocks)
        d.arrow(left, 162, left + end * 21, 162)
        d.words(left + end * 10.5, 176, f"{end} steps for the same five texts", "small")
    return d


def tree() -> Drawing:
    """05: a prefix tree with branches."""
    d = Drawing("Pages of three prompts in a prefix tree: what they share is stored once", 700, 190)
    d.box(20, 75, 150, 34, "system prompt", fill="a")
    d.box(230, 35, 150, 34, "document 1", fill="b")
    d.box(230, 120, 150, 34, "document 2", fill="b")
    d.box(440, 12, 120, 30, "question A", fill="c")
    d.box(440, 58, 120, 30, "question B", fill="c")
    d.box(440, 122, 120, 30, "question A", fill="c")
    for x, y, to_x, to_y in (
        (170, 87, 228, 56),
        (170, 97, 228, 132),
        (380, 48, 438, 28),
        (380, 56, 438, 72),
        (380, 137, 438, 137),
    ):
        d.arrow(x, y, to_x, to_y)
    d.words(632, 27, "computed", "small")
    d.words(632, 73, "hits 2 boxes", "small")
    d.words(632, 137, "hits 1 box", "small")
    d.words(350, 177, "“question A” is stored twice: keys and values depend on everything before them", "small")
    return d


def tiers() -> Drawing:
    """06: pages between device, host and disk."""
    d = Drawing("Pages move down when a tier is full, and up when a prompt hits them", 700, 150)
    for x, name, size, fill in (
        (20, "device", "fast, small", "a"),
        (280, "host memory", "larger", "b"),
        (540, "disk", "largest, survives", "c"),
    ):
        d.box(x, 35, 140, 60, f"{name}\n{size}", fill=fill)
    for x in (160, 420):
        d.arrow(x + 4, 52, x + 114, 52)
        d.arrow(x + 116, 80, x + 6, 80)
    d.words(220, 40, "full: least recent", "small")
    d.words(220, 94, "hit: copy < compute", "small")
    d.words(480, 40, "written behind", "small")
    d.words(480, 94, "hit: read", "small")
    d.words(
        350,
        132,
        "on a CPU, device and host memory are the same chips: the copies are real, the speed-up isn't",
        "small",
    )
    return d


def pages() -> Drawing:
    """09: a page table."""
    d = Drawing("A page table maps a text's tokens to pages anywhere in one array", 700, 170)
    d.words(75, 22, "text of 19 tokens", "small")
    for index, words in enumerate(("0–7", "8–15", "16–18")):
        d.box(20 + index * 56, 36, 52, 30, words, fill="abc"[index])
    d.words(350, 22, "its row of the page table", "small")
    for index, page in enumerate((9, 2, 5)):
        d.box(280 + index * 48, 36, 44, 30, str(page), fill="abc"[index])
    d.box(424, 36, 44, 30, "0")
    d.arrow(192, 51, 274, 51)
    fills = {9: "a", 2: "b", 5: "c"}
    for page in range(12):
        d.box(20 + page * 55, 110, 50, 30, str(page), fill=fills.get(page, "n"))
    for index, page in enumerate((9, 2, 5)):
        d.arrow(302 + index * 48, 66, 45 + page * 55, 108)
    d.words(350, 157, "one array of pages, shared by all texts; page 0 is scratch", "small")
    return d


def loop() -> Drawing:
    """12: the dispatch loop's overlap."""
    d = Drawing("The host plans step N+1 while the device runs step N, and reads tokens one step late", 700, 150)
    d.words(45, 45, "host")
    d.words(45, 100, "device")
    for index in range(4):
        d.box(100 + index * 150, 30, 60, 30, f"plan {index}", fill="a")
    for index in range(3):
        x = 170 + index * 150
        d.box(x, 85, 146, 30, f"step {index}", fill="b")
        d.box(x + 151, 30, 72, 30, f"commit {index}", fill="c")
        d.arrow(x - 40, 60, x + 6, 83)
    d.words(350, 135, "the device never waits for the host: the next step is there when one ends", "small")
    return d


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "01_generation": generation,
    "02_step": step,
    "03_batching": batching,
    "05_tree": tree,
    "06_tiers": tiers,
    "09_pages": pages,
    "12_loop": loop,
}


def main() -> None:
    for name, drawing in DIAGRAMS.items():
        (FOLDER / f"{name}.svg").write_text(drawing().svg())


if __name__ == "__main__":
    main()
