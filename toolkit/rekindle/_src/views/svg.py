"""Pieces of static pictures in SVG: shapes with hints, words, and the frame around them.

Words have the colour of the text around the picture, so that it reads on light and on dark pages. A file of its own
begins with `xmlns`; see `document`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rekindle._src.views.html import Markup, escape

Number = float | int


def _attributes(values: dict[str, object]) -> str:
    """Return attributes with their names in SVG's spelling: `stroke_width=2` is `stroke-width="2"`."""
    present = ((name, value) for name, value in values.items() if value not in ("", None))
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_number(value) if isinstance(value, float) else escape(value)}"'
        for name, value in present
    )


def _number(value: Number) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def shape(tag: str, *, title: str = "", **attributes: object) -> Markup:
    """Return one shape. Hovering over it shows its title."""
    opened = f"<{tag}{_attributes(attributes)}"
    return Markup(f"{opened}><title>{escape(title)}</title></{tag}>" if title else f"{opened}/>")


def rect(
    x: Number, y: Number, width: Number, height: Number, fill: str, *, title: str = "", **attributes: object
) -> Markup:
    """Return a rectangle. Hovering over it shows its title."""
    return shape("rect", title=title, x=x, y=y, width=width, height=height, fill=fill, **attributes)


def stroke(points: Sequence[tuple[Number, Number]], colour: str = "currentColor", *, width: Number = 1.5) -> Markup:
    """Return a line through points."""
    places = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return shape("polyline", points=places, fill="none", stroke=colour, stroke_width=width)


def words(
    x: Number,
    y: Number,
    text: object,
    *,
    anchor: str = "start",
    size: Number = 11,
    title: str = "",
    **attributes: object,
) -> Markup:
    """Return words at a place. `anchor` is the part of them that stands there: start, middle or end."""
    attributes = {"x": x, "y": y, "text_anchor": anchor, "font_size": size, "fill": "currentColor", **attributes}
    hint = f"<title>{escape(title)}</title>" if title else ""
    return Markup(f"<text{_attributes(attributes)}>{escape(text)}{hint}</text>")


def group(parts: Iterable[str], **attributes: object) -> Markup:
    """Return parts that share their attributes, such as `transform` or `opacity`."""
    return Markup(f"<g{_attributes(attributes)}>{''.join(parts)}</g>")


def picture(width: Number, height: Number, parts: Iterable[str], *, label: str, wide: bool = False) -> Markup:
    """Return the picture; `label` describes it to screen readers. A wide one takes all of the width."""
    look = "display:block;max-width:100%;height:auto;font-family:inherit" + (";width:100%" if wide else "")
    frame = {"viewBox": f"0 0 {_number(width)} {_number(height)}", "width": width, "height": height}
    return Markup(
        f'<svg role="img" aria-label="{escape(label)}"{_attributes({**frame, "style": look})}>{"".join(parts)}</svg>'
    )


def document(width: Number, height: Number, parts: Iterable[str], *, title: str, ink: str = "#111111") -> str:
    """Return a picture as a file of its own, for papers and slides: without a ground, with text in `ink`."""
    space = f'xmlns="http://www.w3.org/2000/svg" color="{escape(ink)}" font-family="sans-serif"'
    frame = f'{space} width="{_number(width)}" height="{_number(height)}"'
    frame += f' viewBox="0 0 {_number(width)} {_number(height)}"'
    return f"<svg {frame}><title>{escape(title)}</title>{''.join(parts)}</svg>\n"
