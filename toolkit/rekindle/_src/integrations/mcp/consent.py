"""The user's consent to the tools of a server: asked for in the notebook or the terminal, and declined by default.

A yes is remembered while this process runs, for the same server with the same tools. Nothing is written to disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rekindle._src.core import words
from rekindle._src.core.activity import in_notebook
from rekindle._src.core.drawable import Drawable
from rekindle._src.core.names import printable
from rekindle._src.dispatch.threads import blocks
from rekindle._src.views import html
from rekindle.errors import InvalidRequest, ToolServerError

_SHOWN = 300  # characters of a description
_QUESTION = "Let the model call these tools? [y/N] "
granted: set[bytes] = set()  # digests of offers


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ToolServerOffer(Drawable):
    """The tools of a server, as `consent` gets them. Names and descriptions are the server's own words."""

    server: str  # its name
    target: str  # the URL, or the command that was started
    tools: tuple[Mapping[str, Any], ...]  # as the model will be shown them: JSON schemas with name and description
    _identity: bytes = b""  # of the server, with what is not shown

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tools, as the model calls them."""
        return tuple(tool["function"]["name"] for tool in self.tools)

    def __repr__(self) -> str:
        return f"<ToolServerOffer of {self.server}: {words.count(len(self.tools), 'tool')}>"

    def __str__(self) -> str:
        lines = [self._head(), *(f"  {name}: {text}" for name, text in self._rows())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return str(html.block(html.line(self._head()), html.table(["tool", "description"], self._rows())))

    def _head(self) -> str:
        return f"The tool server {self.server} ({self.target}) offers {words.count(len(self.tools), 'tool')}:"

    def _rows(self) -> list[tuple[str, str]]:
        functions = [tool["function"] for tool in self.tools]
        return [(one["name"], _beginning(" ".join(one["description"].split()))) for one in functions]

    def digest(self) -> bytes:
        """Return a digest of the server and everything that the model is told of its tools."""
        parts = [self.server, self.target, self._identity.hex(), self.tools]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).digest()


def _beginning(text: str) -> str:
    more = len(text) - _SHOWN
    return printable(text, _SHOWN) if more <= 0 else f"{printable(text[:_SHOWN], _SHOWN)}… ({more:,} more characters)"


Consent = Callable[[ToolServerOffer], bool | Awaitable[bool]]


async def ask(offer: ToolServerOffer, consent: Consent | None) -> None:
    """Ask for consent. Raise `ToolServerError` unless it is given."""
    if consent is None:
        if offer.digest() in granted:
            return
        if _prompted(offer):
            granted.add(offer.digest())
            return
    else:
        answer = consent(offer)
        if inspect.isawaitable(answer):
            if blocks():
                if inspect.iscoroutine(answer):
                    answer.close()
                raise InvalidRequest("consent", consent, "is async, in code without an event loop", "Pass a plain one")
            answer = await answer
        if answer is True:
            return
    raise ToolServerError(offer.server, None, "has no consent: it was declined", "Connect again to be asked again")


def _prompted(offer: ToolServerOffer) -> bool:
    """Show the offer and wait for an answer; the thread waits, as a cell does for `input`."""
    try:
        if in_notebook():
            from IPython.display import display

            display(offer)
        elif sys.stdin is not None and sys.stdin.isatty():
            print(offer)
        else:
            raise EOFError
        return input(_QUESTION).strip().lower() in ("y", "yes")
    except (EOFError, NotImplementedError):  # a kernel that runs without anybody has no input
        fix = "Pass consent=function, which gets the offer and returns True or False"
        raise ToolServerError(offer.server, None, "needs consent, and there is nobody to ask", fix) from None
