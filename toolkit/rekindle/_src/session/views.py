"""Live views by their names on the session; they load ipywidgets when the first one is made."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rekindle._src.core import html

if TYPE_CHECKING:
    from rekindle._src.session.session import PromptLike, Session


NAMES = ("stream", "chat", "tree")


class Views:
    """`session.view`: what runs, live, in a notebook."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<Views of {self._session!r}: stream(prompt), chat(), tree()>"

    def _repr_html_(self) -> str:
        rows = [(f"session.view.{name}", getattr(type(self), name).__doc__) for name in NAMES]
        return html.table(["view", "shows"], rows)

    def _dashboard(self) -> Any:
        return self._kinds().Dashboard(self._session)

    def stream(self, prompt: PromptLike, **options: Any) -> Any:
        """A request's text while it is made, with a button that stops it."""
        return self._kinds().StreamView(self._session, prompt, **options)

    def chat(self, *, system: str | None = None, **options: Any) -> Any:
        """A conversation with buttons to stop, answer again, edit, and fork an answer at a token."""
        return self._kinds().ChatView(self._session, system=system, **options)

    def tree(self, *, limit: int = 200) -> Any:
        """The prefix tree, live: fold and unfold it, and type a prompt to see what it would hit."""
        return self._kinds().TreeView(self._session, limit=limit)

    def _kinds(self) -> Any:
        self._session._host.check()  # a view of a closed session would never change
        # By name, because views are built on the session.
        return importlib.import_module("rekindle._src.notebook")
