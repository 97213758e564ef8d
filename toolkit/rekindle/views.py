"""Live views by their names on the session; they load ipywidgets when the first one is made."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle.session import PromptLike, Session


class Views:
    """`session.view`: what runs, live, in a notebook."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def dashboard(self) -> Any:
        """As `session.watch()`."""
        return _views().Dashboard(self._session)

    def stream(self, prompt: PromptLike, **options: Any) -> Any:
        """A request's text while it is made, with a button that stops it."""
        return _views().StreamView(self._session, prompt, **options)

    def chat(self, *, system: str | None = None, **options: Any) -> Any:
        """A conversation with buttons to stop, answer again and edit."""
        return _views().ChatView(self._session, system=system, **options)

    def tree(self, *, limit: int = 200) -> Any:
        """As `session.cache.view()`."""
        return _views().TreeView(self._session, limit=limit)


def _views() -> Any:
    # By name, because views are built on the session.
    return importlib.import_module("rekindle.notebook")
