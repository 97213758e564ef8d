"""The visual language of all that a notebook shows: its colours, sizes and distances, once.

Text and grounds belong to the front end: text inherits its colour, and a shade is a translucent colour over whatever
ground is there, so one output reads the same on light and on dark pages. Colours mark, they never carry text alone. A
coloured word mixes the text's own colour with an accent, so it is light on a dark page and dark on a light one.

`SHEET` has the same tokens as variables for pages with style sheets. Static HTML has them inline.
"""

from __future__ import annotations

from typing import Final

BLUE: Final = "#3d8bcd"  # the first accent: what the model does, and what can be acted on
ORANGE: Final = "#c8741c"  # the second one: what wants a look, such as a surprise, a mark, or a cut
GREY: Final = "#8a8a8a"  # the rest

# Hues for requests or other parts without an order. Neighbours differ for colour-blind eyes, too.
SERIES: Final = (BLUE, ORANGE, "#2b9a77", "#b565a7", "#8a79d6", "#a3892b", "#4a9bb8", "#c9605a")
PHASES: Final = {"prefill": ORANGE, "decode": BLUE}
# The tiers of the cache, the nearest first.
TIERS: Final = {"device": BLUE, "host": ORANGE, "disk": GREY, "gone": "transparent"}

STRONGEST: Final = 0.5  # opacity of a shade under text
HAIR: Final = "rgba(128,128,128,.35)"  # lines between things
EDGE: Final = "rgba(128,128,128,.65)"  # outlines of buttons and fields
WASH: Final = "rgba(128,128,128,.1)"  # the ground of a thing that stands out
PRESS: Final = "rgba(128,128,128,.22)"  # the same under the pointer
QUIET: Final = 0.75  # opacity of secondary text

SMALL: Final = "90%"  # of the text's size
TINY: Final = "80%"
WIDE: Final = "80ch"  # most of a line of running text
INK: Final = "var(--jp-content-font-color1,var(--vscode-editor-foreground,inherit))"
CODE: Final = "var(--jp-code-font-family,var(--vscode-editor-font-family,ui-monospace,monospace))"
_TEXT: Final = INK.replace("inherit", "currentColor")
BLUE_INK: Final = f"color-mix(in srgb,{_TEXT} 50%,{BLUE})"
ORANGE_INK: Final = f"color-mix(in srgb,{_TEXT} 50%,{ORANGE})"
_MUTED: Final = f"color-mix(in srgb,{_TEXT} {QUIET:.0%},transparent)"

VARIABLES: Final = {
    "blue": BLUE,
    "orange": ORANGE,
    "grey": GREY,
    "blue-ink": BLUE_INK,
    "orange-ink": ORANGE_INK,
    "quiet-ink": _MUTED,
    "ink": INK,
    "hair": HAIR,
    "edge": EDGE,
    "wash": WASH,
    "press": PRESS,
    "code": CODE,
    "small": SMALL,
    "tiny": TINY,
    "gap": "8px",  # all distances are 4, 8, 12 or 16 pixels
    "round": "6px",  # of controls; bubbles have twice that
    **{f"series-{place}": colour for place, colour in enumerate(SERIES)},
    **{f"tier-{name}": colour for name, colour in TIERS.items()},
}


def shade(colour: str, share: float) -> str:
    """Return a colour as strong as a share of one; text on it stays readable at any strength."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{STRONGEST * min(1.0, max(0.0, share)):.2f})"


def likely(probability: float) -> str:
    """Return the shade of a probability: the bluer, the likelier. For comparisons, such as a lens or attention."""
    return shade(BLUE, probability)


def surprise(probability: float) -> str:
    """Return the shade of an unlikely token in running text: the more orange, the less likely it was."""
    return shade(ORANGE, 1.0 - probability)


def sheet(scope: str) -> str:
    """Return the tokens as variables `--rk-…` of the elements that a selector names."""
    return f"{scope} {{ {' '.join(f'--rk-{name}: {value};' for name, value in VARIABLES.items())} }}\n"


SHEET: Final = sheet(".rekindle-panel, .rekindle-figure")
