"""A drawing of boxes, words and arrows as an SVG file that follows the reader's light or dark theme.

It has a background of its own, so that it can be read on any page. Viewers that know no style sheets, variables or
themes draw the light one.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

INK, FAINT, PAPER = ("#24292f", "#e6edf3"), ("#636c76", "#9198a1"), ("#ffffff", "#1b1f24")  # light and dark
FILLS = {
    "a": ("#cfe3ff", "#1f4272"),
    "b": ("#ffe2b8", "#6b4714"),
    "c": ("#d3f2d6", "#1f5130"),
    "d": ("#f6d5ee", "#5d2b52"),
    "n": ("#eef1f4", "#2d333b"),
}
# The light theme is attributes, which every viewer reads; where a viewer has style sheets, this one makes it dark.
DARK = {
    "text, .ink": f"fill: {INK[1]}",
    ".small": f"fill: {FAINT[1]}",
    ".box": f"stroke: {FAINT[1]}",
    ".line": f"stroke: {INK[1]}",
    ".paper": f"fill: {PAPER[1]}",
    **{f".{name}": f"fill: {dark}" for name, (_, dark) in FILLS.items()},
}
LINE = f'class="line" stroke="{INK[0]}" stroke-width="1.3" fill="none"'
HEAD = 'marker-end="url(#head)"'


class Drawing:
    """Boxes, words and arrows in pixels."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, words: str = "", *, fill: str = "n") -> None:
        self.parts.append(
            f'<rect class="box {fill}" x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{FILLS[fill][0]}" '
            f'stroke="{FAINT[0]}"/>'
        )
        lines = words.split("\n")
        for index, line in enumerate(lines):
            self.words(x + w / 2, y + h / 2 + (index - (len(lines) - 1) / 2) * 15, line)

    def words(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Write `text` around a point, or from it on if "left" is in `kind`; "small" is smaller and fainter."""
        if text:
            look = f' class="small" font-size="11" fill="{FAINT[0]}"' if "small" in kind else ""
            look += ' text-anchor="start"' if "left" in kind else ""
            self.parts.append(f'<text{look} x="{x}" y="{y}" dy="0.35em">{escape(text)}</text>')

    def link(self, target: str) -> None:
        """Make the box that was drawn last, with its words, a link."""
        start = max(at for at, part in enumerate(self.parts) if part.startswith("<rect"))
        self.parts[start] = f'<a href="{escape(target)}">{self.parts[start]}'
        self.parts[-1] += "</a>"

    def travel(self, way: str, seconds: float) -> None:
        """Let a dot travel along a way, again and again."""
        self.parts.append(
            f'<circle class="ink" r="6" fill="{INK[0]}">'
            f'<animateMotion dur="{seconds:g}s" repeatCount="indefinite" path="{way}"/></circle>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(f'<line {LINE} x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" {HEAD}/>')

    def path(self, way: str, *, arrow: bool = True) -> None:
        self.parts.append(f'<path {LINE} d="{way}"{f" {HEAD}" if arrow else ""}/>')

    def svg(self) -> str:
        rules = " ".join(f"{name} {{ {look} }}" for name, look in DARK.items())
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path class="ink" d="M0 0 L8 4 L0 8 z" fill="{INK[0]}"/></marker></defs>'
        )
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        text = f'font-family="sans-serif" font-size="13" text-anchor="middle" fill="{INK[0]}"'
        body = "\n".join(
            (
                f"<title>{escape(self.title)}</title>",
                f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>",
                head,
                f'<rect class="paper" width="{self.width}" height="{self.height}" rx="8" fill="{PAPER[0]}"/>',
                *self.parts,
            )
        )
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {text}>\n{body}\n</svg>\n'
