"""A conversation: send, stop, answer again, edit the last message, or fork an answer at a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets

from rekindle import html
from rekindle.notebook.live import Live

if TYPE_CHECKING:
    from rekindle.handle import Handle
    from rekindle.session import Session


class ChatView(Live):
    """`messages` is the conversation so far. Every answer comes from the session's prefix cache as far as possible."""

    def __init__(self, session: Session, *, system: str | None = None, **options: Any) -> None:
        button = {"width": "7.5em"}
        self._input = ipywidgets.Text(placeholder="Say something", layout={"width": "26em"})
        send = ipywidgets.Button(description="Send", icon="paper-plane", layout=button)
        halt = ipywidgets.Button(description="Stop", icon="stop", layout=button)
        again = ipywidgets.Button(description="Again", icon="refresh", layout=button)
        edit = ipywidgets.Button(description="Edit last", icon="pencil", layout=button)
        super().__init__(self._input, send, halt, again, edit)
        self._session, self._options = session, options
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._handle: Handle | None = None  # of the last answer, which is no message yet
        self._beginning = ""  # of that answer, where it was forked
        send.on_click(lambda _: self.send(self._input.value))
        self._input.continuous_update = False
        halt.on_click(lambda _: self.halt())
        again.on_click(lambda _: self.again())
        edit.on_click(lambda _: self.edit())
        self.start()

    @property
    def ended(self) -> bool:
        return super().ended or self._session.closed

    @property
    def answering(self) -> bool:
        return self._handle is not None and not self._handle.done

    def send(self, text: str) -> None:
        """Say something; an answer that is still being made is kept as far as it got."""
        if text:
            self._settle()
            self.messages.append({"role": "user", "content": text})
            self._input.value = ""
            self._answer()

    def halt(self) -> None:
        """Stop the answer; what was said stays."""
        if self._handle is not None:
            self._handle.cancel()

    def again(self, **options: Any) -> None:
        """Another answer to the last message; at a temperature above 0 with another seed."""
        self._drop()
        if self.messages and self.messages[-1]["role"] == "user":
            self._answer(**options)

    def edit(self) -> None:
        """Take the last question and its answer back, into the input line."""
        self._drop()
        if self.messages and self.messages[-1]["role"] == "user":
            self._input.value = self.messages.pop()["content"]

    def fork(self, at: int, edit: str = "") -> None:
        """Go on from token `at` of the last answer, with `edit` in place of what came there."""
        handle = self._handle
        if handle is not None and handle.token_ids:
            beginning = self._session.tokenizer.decode(list(handle.token_ids[:at])) + edit
            forked = self._session.fork(handle, at=at, edit=edit or None)
            handle.cancel()
            self._handle, self._beginning = forked, beginning

    def _answer(self, **options: Any) -> None:
        call = self._session.chat(self.messages, **{**self._options, **options})
        call.submit()
        self._handle, self._beginning = call, ""

    def _settle(self) -> None:
        """The answer becomes a message."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.cancel()
            self.messages.append({"role": "assistant", "content": self._beginning + handle.text})

    def _drop(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.cancel()

    def draw(self) -> str:
        said = [(message["role"], message["content"]) for message in self.messages]
        handle = self._handle
        if handle is not None:
            said.append(("assistant", self._beginning + handle.text + ("" if handle.done else " ▌")))
        rows = [html.block(html.line(role), html.text(content)) for role, content in said]
        return html.block(*rows) if rows else html.line("Nothing was said yet")
