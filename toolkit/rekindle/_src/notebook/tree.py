"""`session.view.tree()`: the prefix cache as an icicle, the text of a bar, and what can be done with it."""

from __future__ import annotations

from rekindle._src.core import words
from rekindle._src.notebook.live import CacheLike, Live, NodeLike, PrefixLike, button, field
from rekindle._src.views import html
from rekindle._src.views.icicle import HOW, facts, icicle, rows, summary
from rekindle.errors import RekindleError

_CONTROLS = (button("refresh", "Refresh"), field("prompt", "What would this prompt hit?", width="32em"))
_PRESS = html.Markup('<span class="rekindle-live" style="display:none"> · press a bar for its text</span>')
_READ = html.line(html.Markup(f"{HOW}{_PRESS}"))
_TEXT = 1200  # characters of a node's text, its end


class TreeView(Live):
    """Shows the tree at the time of drawing; the button draws it again. Type a prompt to see its hits.

    A bar that is pressed shows its text; it can be pinned, so that it stays on the device, and dropped.
    """

    def __init__(self, cache: CacheLike, model: str, *, limit: int = 200, restored: bool = False) -> None:
        super().__init__(*_CONTROLS)
        self._cache, self._model, self._limit, self._restored = cache, model, limit, restored
        self.nodes: tuple[NodeLike, ...] = ()
        self._marked: NodeLike | None = None
        self._text = ""  # of the marked node
        self._hit: PrefixLike | None = None  # what the typed prompt would hit
        self._pinned: dict[int, NodeLike] = {}  # by this view: those are what it can unpin
        self.widget.observe(lambda change: self.ask(self.widget.value("prompt")), "values")
        self.refresh()

    def start(self) -> None:
        """Do nothing: the tree is drawn on request, so it needs no thread."""

    def ask(self, prompt: str) -> str:
        """Mark what a prompt would hit, and return in words how much of it is cached."""
        before, self._hit, answer = self._hit, None, ""
        try:
            if prompt:
                self._hit = self._cache.explain(prompt)
                answer = str(self._hit)
        except (RekindleError, ValueError) as error:
            answer = str(error)
        self.widget.note = str(html.line(answer))
        if self._keys(before) != self._keys(self._hit):
            self.refresh()
        return answer

    @staticmethod
    def _keys(hit: PrefixLike | None) -> tuple[int, ...]:
        return () if hit is None else hit.keys

    def hits(self) -> dict[int, int]:
        """Return how many tokens of each bar the typed prompt would hit."""
        hit, keys = self._hit, frozenset(self._keys(self._hit))
        return {
            place: min(node.tokens, hit.cached_tokens - node.start)
            for place, node in enumerate(self.nodes)
            if hit is not None and node.first_key in keys
        }

    def token(self, index: int) -> None:
        """Mark a bar and show its text; the same one again is no longer marked."""
        if not 0 <= index < len(self.nodes):
            return
        pressed = self.nodes[index]
        again = self._marked is not None and self._marked.key == pressed.key
        self._mark(None if again else pressed)
        self.refresh()

    def press(self, name: str) -> None:
        if name in ("pin", "unpin", "drop", "back") and self._marked is not None:
            self._act(name, self._marked)
            self.refresh()
        else:
            super().press(name)

    def _act(self, name: str, node: NodeLike) -> None:
        if name == "pin":
            covered = self._cache.pin(node)
            self._pinned[node.key] = node
            self._say(f"{words.count(covered, 'token')} stay on the device until they are unpinned")
        elif name == "unpin" and self._pinned.pop(node.key, None) is not None:
            self._cache.unpin(node)
            self._say("unpinned")
        elif name == "drop":
            left = self._cache.drop(node)
            self._say(f"{words.count(left, 'page')} left the device; what is in use or pinned stays")
        self._mark(node if name in ("pin", "unpin") else None)

    def _say(self, words: str) -> None:
        self.widget.note = str(html.line(words))

    def _mark(self, node: NodeLike | None) -> None:
        self._text = "" if node is None else self._cache.text(node)[-_TEXT:]
        self._marked = node
        acts = []
        if node is not None:
            pinned = node.key in self._pinned
            acts = [
                button("unpin", "Unpin") if pinned else button("pin", "Pin", title="Keep it and all before it"),
                button("drop", "Drop", title="Forget it and all after it", disabled=pinned),
                button("back", "Close", title="Mark nothing"),
            ]
        self.widget.controls = [*_CONTROLS, *acts]

    def draw(self) -> str:
        stats = self._cache.stats()
        tree = self._cache.tree(limit=self._limit, restored=self._restored)
        self.nodes = tuple(tree.nodes)
        keys = [node.key for node in self.nodes]
        marked = None
        if self._marked is not None and self._marked.key in keys:
            marked = keys.index(self._marked.key)
            self._marked = self.nodes[marked]
        return html.block(
            summary({"tokens kept": tree.total_pages * stats.page_size}, stats),
            _READ if tree.total_pages else "",
            icicle(self.nodes, pressed=True, marked=marked, hits=self.hits()),
            "" if marked is None else _detail(self.nodes[marked], self._text),
            *map(html.line, tree.rest()),
            rows(self.nodes),
            title="Prefix cache",
        )

    def __repr__(self) -> str:
        return f"<TreeView of {self._model}>"


def _detail(node: NodeLike, text: str) -> html.Markup:
    """Return a node's facts and its text."""
    return html.block(html.line(facts(node)), html.text(text or node.text))
