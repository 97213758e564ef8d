"""Grounds and texts of front ends, and the legibility of a page on them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Page(NamedTuple):
    """A front end's ground and text, and the variable that tells outputs the text's colour, if it has one."""

    ground: str
    ink: str
    variable: str = ""


_JUPYTER, _CODE = "--jp-content-font-color1", "--vscode-editor-foreground"
PAGES = {
    "JupyterLab, light": Page("#ffffff", "#212121", _JUPYTER),
    "JupyterLab, dark": Page("#111111", "#ffffff", _JUPYTER),
    "a dark cell of JupyterLab": Page("#212121", "#e0e0e0", _JUPYTER),
    "VS Code, light": Page("#ffffff", "#3b3b3b", _CODE),
    "VS Code, dark": Page("#1f1f1f", "#cccccc", _CODE),
    "Colab, dark": Page("#383838", "#e3e3e3"),
    "GitHub, dark": Page("#0d1117", "#e6edf3"),
    "a bare page": Page("#ffffff", "#000000"),
}
DRESS = """([ground, ink, variable, others]) => {
  const { style } = document.documentElement;
  for (const other of others) style.removeProperty(other);
  if (variable) style.setProperty(variable, ink);
  Object.assign(document.body.style, { background: ground, color: ink });
}"""
# WCAG's contrast of each text with what is painted below its middle, as far as that can be seen there.
CONTRASTS = """(root) => {
  const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", {
    willReadFrequently: true,
  });
  const known = new Map();
  const parsed = (css) => {
    if (!known.has(css)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = css;
      pen.fillRect(0, 0, 1, 1);
      const [red, green, blue, alpha] = pen.getImageData(0, 0, 1, 1).data;
      known.set(css, [red, green, blue, alpha / 255]);
    }
    return known.get(css);
  };
  const over = (ground, [red, green, blue, alpha], opacity) =>
    [red, green, blue].map((value, at) => alpha * opacity * value + (1 - alpha * opacity) * ground[at]);
  const up = (one) => one.parentElement ?? one.getRootNode().host ?? null;
  const opacity = (one) => {
    let share = 1;
    for (let at = one; at; at = up(at)) share *= Number(getComputedStyle(at).opacity);
    return share;
  };
  const shape = (one) => one instanceof SVGElement && one.tagName !== "svg";
  const painted = (one) => {
    const look = getComputedStyle(one);
    if (!shape(one)) return [parsed(look.backgroundColor), opacity(one)];
    if (["text", "tspan", "g", "line"].includes(one.tagName) || look.fill === "none") return [[0, 0, 0, 0], 0];
    return [parsed(look.fill), opacity(one) * Number(look.fillOpacity)];
  };
  const luminance = (colour) => {
    const [red, green, blue] = colour.map((value) => value / 255).map((value) =>
      value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const texts = document.createTreeWalker(root ?? document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    const one = node.parentElement;
    if (!node.data.trim() || one.disabled || one.closest("script, style, title, [aria-hidden]")) continue;
    if (!one.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = [...range.getClientRects()].find(({ width, height }) => width > 1 && height > 1);
    if (!box) continue;
    const stack = document.elementsFromPoint(box.x + box.width / 2, box.y + box.height / 2);
    if (!stack.includes(one) && !shape(one)) continue;  // cut off by a scroll bar of its own
    let ground = [255, 255, 255];
    for (const below of stack.reverse()) ground = over(ground, ...painted(below));
    const look = getComputedStyle(one);
    const ink = shape(one)
      ? over(ground, parsed(look.fill), opacity(one) * Number(look.fillOpacity))
      : over(ground, parsed(look.color), opacity(one));
    const [low, high] = [luminance(ink), luminance(ground)].sort((left, right) => left - right);
    found.push([node.data.trim().slice(0, 40), (high + 0.05) / (low + 0.05)]);
  }
  return found;
}"""


def dress(page: Any, host: Page) -> None:
    """Give a page of a browser a front end's ground and text."""
    page.evaluate(DRESS, [host.ground, host.ink, host.variable, [_JUPYTER, _CODE]])


def faint(page: Any, *, within: Any = None, least: float = 4.5) -> list[tuple[str, float]]:
    """The texts that a page of a browser shows with less contrast than that; it has to show some."""
    root = None if within is None else within.element_handle()
    texts = page.evaluate(CONTRASTS, root)
    assert texts, "no text is seen"
    return [(text, round(ratio, 2)) for text, ratio in texts if ratio < least]
