"""A request's text while it is generated, with a button that stops it."""

from __future__ import annotations

from typing import Any

from rekindle._src.core import html
from rekindle._src.notebook.live import Live
from rekindle._src.notebook.panel import button
from rekindle._src.notebook.shown import RequestLike, SessionLike


class StreamView(Live):
    """`StreamView(session, prompt, **options)`. The request runs once the view is made; `handle` is its handle."""

    def __init__(self, session: SessionLike, prompt: Any, **options: Any) -> None:
        super().__init__(button("stop", "Stop", title="Cancel the request; its text stays"))
        self.handle: RequestLike = session.submit(prompt, **options)
        self._shown_deltas = 0
        self.start()

    @property
    def ended(self) -> bool:
        return self.handle.done

    def press(self, name: str) -> None:
        if name == "stop":
            self.stop()

    def wait(self) -> None:
        """Block until there is another delta, so an idle view costs nothing."""
        self._shown_deltas = self.handle.wait_for_more(self._shown_deltas)

    def stop(self) -> None:
        """Cancel the request. Its text so far stays."""
        self.handle.cancel()
        super().stop()

    def draw(self) -> str:
        handle = self.handle
        if handle.done:
            return handle._repr_html_()
        prompt = html.text(html.shorten(handle.prompt, 400)) if handle.prompt else ""
        return html.block(
            html.line(handle.id, f"{html.count(len(handle.token_ids), 'token')} so far"), prompt, html.text(handle.text)
        )
