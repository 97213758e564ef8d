"""`session.view`: widgets for a notebook that show a session at work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from rekindle._src.calls.prompts import PromptLike
from rekindle._src.core.names import nearest
from rekindle._src.evaluation.attention import AttentionMapCall, AttentionMapsCall
from rekindle._src.evaluation.attribution import AttributionCall
from rekindle._src.evaluation.lens import LensCall
from rekindle._src.session.client import Client, open_sessions
from rekindle._src.views import html

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from rekindle._src.capabilities.gradients.request import Objective, ObjectiveFunction
    from rekindle._src.notebook.chat import ChatView
    from rekindle._src.notebook.dashboard import Dashboard
    from rekindle._src.notebook.figures import Figure
    from rekindle._src.notebook.live import SessionLike, StreamView
    from rekindle._src.notebook.tree import TreeView
    from rekindle._src.session.stats import StepReport

Several = Sequence[int] | Literal["all"]  # layers
_CALLS = {
    "stream": "session.view.stream(prompt)",
    "chat": "session.view.chat()",
    "tree": "session.view.tree()",
    "lens": "await session.view.lens(prompt)",
    "attention": "await session.view.attention(prompt)",
    "attribution": "await session.view.attribution(prompt)",
    "steps": "session.view.steps(reports)",
    "distribution": "session.view.distribution(logits)",
    "prefixes": "session.view.prefixes(texts)",
}
NAMES = tuple(_CALLS)


_SHOWN = {
    "cache": "session.view.tree() shows the prefix cache, and session.cache has its figures",
    "pages": "session.watch() shows the pages, and session.view.tree() what they hold",
    "dashboard": "session.watch() is the dashboard",
    "watch": "session.watch() is the dashboard",
    "stats": "session.watch() shows the figures live, and session.stats() now",
    "conversation": "session.view.chat() is one",
    "generate": "session.view.stream(prompt) shows a text while it is made",
    "prompt": "session.view.stream(prompt) shows a text while it is made",
}


def _view_named(name: str) -> str:
    """Return advice for a name that is no view."""
    close = nearest(name, NAMES)
    return _SHOWN.get(name) or (f"Did you mean {close}?" if close else f"There are: {', '.join(NAMES)}")


class Views:
    """`session.view`: widgets for a notebook that show the session at work."""

    # Any: the signature of a public class names no private type.
    def __init__(self, client: Any, session: Any) -> None:
        self._client: Client = client
        self._session: SessionLike = session

    def __repr__(self) -> str:
        calls = "stream(prompt), chat(), tree(), lens(prompt), attention(prompt), attribution(prompt)"
        return f"<Views of {self._session!r}: {calls}, steps(reports), distribution(logits), prefixes(texts)>"

    def _repr_html_(self) -> str:
        rows = [("session.watch()", "The engine at work: who runs, who waits and why, and the memory of each tier.")]
        for name, call in _CALLS.items():
            words = getattr(type(self), name).__doc__.partition("\n")[0].replace("`", "").removesuffix(" Await it.")
            rows.append((call, words))
        return str(
            html.table(["view", "shows"], [(html.Markup(f"<code>{call}</code>"), words) for call, words in rows])
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"session.view has no view {name!r}. {_view_named(name)}", name=name, obj=self)

    def stream(self, prompt: PromptLike, **options: Any) -> StreamView:
        """A request's text while it is made, with a button that stops it."""
        self._client.host.check()  # a view of a closed session would never change
        from rekindle._src.notebook.live import StreamView

        return StreamView(self._session, prompt, **options)

    def chat(
        self,
        system: str | None = None,
        *,
        restore: str | None = None,
        suggestions: Sequence[str] | None = None,
        **options: Any,
    ) -> ChatView:
        """A conversation to stop, answer again, edit, and fork at a token of an answer.

        It is kept in the cache folder while it goes on. `restore` is the `name` of one to continue, after a
        restart too, or "auto" for the newest. `suggestions` are first messages to press; [] for none. `overflow` is
        "drop" unless it is passed: a chat that outgrows the context goes on without its oldest turns, and says so.
        """
        self._client.host.check()
        from rekindle._src.notebook.chat import ChatView

        return ChatView(
            self._session, system=system, restore=restore, suggestions=suggestions, sessions=open_sessions, **options
        )

    def tree(self, *, limit: int = 200, restored: bool = False) -> TreeView:
        """The prefix cache, live, with its shared prefixes. Press a bar for its text, to pin or to drop it.

        Type a prompt to see what it would hit. Of `limit` bars and more, those with the most pages are drawn.
        The text of other sessions, which `open(..., restore=...)` brings back, is shown only with `restored`.
        """
        self._client.host.check()
        from rekindle._src.notebook.tree import TreeView

        return TreeView(self._session.cache, self._session.model, limit=limit, restored=restored)

    def lens(self, prompt: PromptLike, *, positions: Any = None, **options: Any) -> LensCall:
        """The logit lens: the likeliest next tokens at each position of a prompt, layer by layer. Await it.

        `positions` are as in `Capture`, all of the prompt by default. `options` are the request's, such as `steer`.
        """
        return LensCall(self._session, self._client.front, prompt, positions, options)

    @overload
    def attention(
        self, prompt: PromptLike, *, layer: int, positions: Any = None, **options: Any
    ) -> AttentionMapCall: ...
    @overload
    def attention(
        self, prompt: PromptLike, *, layer: Several = "all", positions: Any = None, **options: Any
    ) -> AttentionMapsCall: ...
    def attention(self, prompt: PromptLike, *, layer: Any = "all", positions: Any = None, **options: Any) -> Any:
        """The weights with which each position of a prompt reads the others: all heads, layer by layer. Await it.

        `positions` are the reading ones, as in `Capture`; all of the prompt by default. With one `layer` the result is
        its map, and `save("figure.svg")` writes a figure for a paper; with several it has the map of each.
        """
        call = AttentionMapCall if hasattr(layer, "__index__") else AttentionMapsCall
        return call(self._session, self._client.front, prompt, layer, positions, options)

    def attribution(
        self, prompt: PromptLike, *, of: Objective | ObjectiveFunction | None = None, **options: Any
    ) -> AttributionCall:
        """The words and heads that an answer came from: the prompt in colours, and maps of heads and layers. Await it.

        `of` is the number to explain, as in `session.attribute`; by default the log-probability of the likeliest next
        token. `options` are those of `session.attribute`. `save("figure.svg")` writes a figure for a paper.
        """
        session: Any = self._session  # which can attribute: other views do without
        return AttributionCall(session, prompt, of, options)

    def steps(self, reports: Iterable[StepReport | None]) -> Figure:
        """A batch over time, from the reports of its steps: go from one to the next, or play them.

        This figure and the next two have all that they show, so that they act in a saved notebook without a kernel.
        """
        from rekindle._src.notebook import figures

        return figures.steps(reports)

    def distribution(self, logits: ArrayLike) -> Figure:
        """The next token's distribution, from its logits, under a temperature, `top_p` and `min_p` that you turn."""
        from rekindle._src.notebook import figures

        return figures.distribution(logits, self._session.tokenizer)

    def prefixes(self, texts: Sequence[str], *, page: int = 4) -> Figure:
        """A prefix tree of prompts in pages of so many words. Type another prompt to see its hit, and to grow
        the tree.
        """
        from rekindle._src.notebook import figures

        return figures.prefixes(texts, page)


def dashboard(client: Client, session: SessionLike) -> Dashboard:
    """Return the dashboard of `session.watch()`: throughput, queue, the batch over time and pages by tier."""
    client.host.check()
    from rekindle._src.notebook.dashboard import Dashboard

    return Dashboard(session, client)
