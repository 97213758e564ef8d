"""Live views by their names on the session. Making the first one loads ipywidgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.core import html
from rekindle._src.session.client import Client
from rekindle._src.session.prompts import PromptLike

if TYPE_CHECKING:
    from rekindle._src.notebook.chat import ChatView
    from rekindle._src.notebook.dashboard import Dashboard
    from rekindle._src.notebook.shown import SessionLike
    from rekindle._src.notebook.streaming import StreamView
    from rekindle._src.notebook.tree import TreeView


NAMES = ("stream", "chat", "tree")


class Views:
    """`session.view`: widgets for a notebook that show the session at work."""

    # Any: the signature of a public class names no private type.
    def __init__(self, client: Any, session: Any) -> None:
        self._client: Client = client
        self._session: SessionLike = session

    def __repr__(self) -> str:
        return f"<Views of {self._session!r}: stream(prompt), chat(), tree()>"

    def _repr_html_(self) -> str:
        rows = [(f"session.view.{name}", getattr(type(self), name).__doc__.partition("\n")[0]) for name in NAMES]
        return str(html.table(["view", "shows"], rows))

    def stream(self, prompt: PromptLike, **options: Any) -> StreamView:
        """A request's text while it is made, with a button that stops it."""
        self._client.host.check()  # a view of a closed session would never change
        from rekindle._src.notebook.streaming import StreamView

        return StreamView(self._session, prompt, **options)

    def chat(self, *, system: str | None = None, restore: str | None = None, **options: Any) -> ChatView:
        """A conversation with buttons to stop, answer again, edit, and fork an answer at a token.

        It is kept in the cache folder while it goes on. `restore` is the `name` of one to continue, after a
        restart too, or "auto" for the newest.
        """
        self._client.host.check()
        from rekindle._src.notebook.chat import ChatView

        return ChatView(self._session, system=system, restore=restore, **options)

    def tree(self, *, limit: int = 200, restored: bool = False) -> TreeView:
        """The prefix tree, live: fold and unfold it, and type a prompt to see what it would hit.

        The text of other sessions, which `open(..., restore=...)` brings back, is shown only with `restored`.
        """
        self._client.host.check()
        from rekindle._src.notebook.tree import TreeView

        return TreeView(self._session.cache, self._session.model, limit=limit, restored=restored)


def dashboard(client: Client, session: SessionLike) -> Dashboard:
    """Return the dashboard of `session.watch()`: throughput, queue, the batch over time and pages by tier."""
    client.host.check()
    from rekindle._src.notebook.dashboard import Dashboard

    return Dashboard(session, client.host)
