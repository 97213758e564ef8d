"""`session.view.tree()`: the prefix tree with foldable nodes, and a prompt's hits in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rekindle._src.core import html
from rekindle._src.notebook.live import Live
from rekindle._src.notebook.panel import button, field
from rekindle._src.notebook.shown import CacheLike, NodeLike
from rekindle.errors import RekindleError

COLOURS = {"device": "#3d8bcd", "host": "#d9822b", "disk": "#8a8a8a", "gone": "transparent"}


class TreeView(Live):
    """Shows the tree at the time of drawing; the button draws it again. Type a prompt to see its hits."""

    def __init__(self, cache: CacheLike, model: str, *, limit: int = 200, restored: bool = False) -> None:
        super().__init__(button("refresh", "Refresh"), field("prompt", "What would this prompt hit?", width="32em"))
        self._cache, self._model, self._limit, self._restored = cache, model, limit, restored
        self.widget.observe(lambda change: self.ask(self.widget.value("prompt")), "values")
        self.refresh()

    def start(self) -> None:
        """Do nothing: the tree is drawn on request, so it needs no thread."""

    def press(self, name: str) -> None:
        if name == "refresh":
            self.refresh()

    def ask(self, prompt: str) -> str:
        """Return in words how much of a prompt is cached."""
        try:
            answer = str(self._cache.explain(prompt)) if prompt else ""
        except (RekindleError, ValueError) as error:
            answer = str(error)
        self.widget.note = str(html.line(answer))
        return answer

    def draw(self) -> str:
        tree = self._cache.tree(limit=self._limit, restored=self._restored)
        legend = [
            html.Markup(f'<span style="color:{COLOURS[tier]}">■</span> {tier}') for tier in ("device", "host", "disk")
        ]
        return html.block(
            html.line(html.count(tree.total_pages, "page"), *legend),
            _foldable(tree.nodes) or ("" if tree.total_pages else html.text("The cache is empty.")),
            *map(html.line, tree.rest()),
            title="Prefix cache",
        )

    def __repr__(self) -> str:
        return f"<TreeView of {self._model}>"


def _foldable(nodes: Sequence[NodeLike]) -> html.Markup:
    """Return nested `<details>`, which fold without scripts."""

    def parts() -> Iterator[str]:
        depth = 0
        for index, node in enumerate(nodes):
            yield "</details>" * max(0, depth - node.depth)
            deeper = index + 1 < len(nodes) and nodes[index + 1].depth > node.depth
            if deeper:
                yield f'<details open style="margin-left:1.2em"><summary>{_node(node)}</summary>'
                depth = node.depth + 1
            else:
                yield f'<div style="margin-left:1.2em">{_node(node)}</div>'
                depth = node.depth
        yield "</details>" * depth

    return html.Markup("".join(parts()))


def _node(node: NodeLike) -> str:
    pin = " 📌" if node.pinned else ""
    facts = f"{html.count(node.tokens, 'token')} at {node.start}, {html.count(node.pages, 'page')}, "
    facts += f"{html.count(node.visits, 'visit') if node.visits else 'not hit yet'}, {node.age:.0f} s ago"
    return (
        f'<span style="color:{COLOURS[node.tier]}" title="{node.tier}">■</span>{pin} '
        f'<code title="{html.escape(facts)}">{html.escape(node.text)}</code> '
        f'<span style="opacity:.6;font-size:85%">{html.escape(facts)}</span>'
    )
