"""The content of clients' messages: texts in the forms of all dialects, and parts that are read by their kinds.

Pictures are the only kind in addition to text; see `rekindle._src.serve.pictures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rekindle._src.serve.errors import wrong
from rekindle._src.serve.exchange import Exchange
from rekindle._src.serve.models import ServedSession
from rekindle._src.serve.pictures import RequestPictures, is_picture

T = TypeVar("T")
ReadPart = Callable[[Mapping[str, Any], str], dict[str, Any]]  # from a part and its path to the part of a session
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # part types to members


class RequestContent:
    """The parts of one request's messages that are no text, within the bounds of a server.

    `messages` reads those that came with it; then `tokens` is an estimate for the whole request, and `fetch` completes
    the messages.
    """

    def __init__(self, exchange: Exchange, session: ServedSession) -> None:
        self._pictures = RequestPictures(exchange, session)

    @property
    def tokens(self) -> int:
        """About how many tokens the request has."""
        return self._pictures.tokens

    async def messages(self, make: Callable[[ReadPart], T]) -> T:
        """Return `make(read)`: messages with their parts, which `make` has taken out of the fields."""
        return await self._pictures.messages(make)

    async def fetch(self) -> None:
        """Fetch the parts of URLs. Raises `ApiError`, or `InvalidRequest` for a file that can't be read."""
        await self._pictures.fetch()


def is_other(part: Mapping[str, Any]) -> bool:
    """True if a part is read by its kind, and is no text."""
    return is_picture(part)


def has_other(parts: Sequence[Mapping[str, Any]]) -> bool:
    """True if one of the parts is no text."""
    return any(map(is_other, parts))


def content_of(parts: Sequence[Mapping[str, Any]], path: str, read: ReadPart) -> str | list[dict[str, Any]]:
    """Return the text of content parts, joined by newlines; parts if some are no text."""
    if not has_other(parts):
        return content_text(parts, path)
    return [
        read(part, f"{path}[{index}]")
        if is_other(part)
        else {"type": "text", "text": content_text([part], f"{path}[{index}]")}
        for index, part in enumerate(parts)
    ]


def content_text(parts: Sequence[Mapping[str, Any]], path: str) -> str:
    """Return the text of content parts, joined by newlines."""
    lines = []
    for index, part in enumerate(parts):
        member = _TEXTS.get(part.get("type", ""))
        if member is None:
            raise wrong(f"{path}[{index}].type", part.get("type"), "is not served", "Send parts of text, or pictures")
        if not isinstance(part.get(member), str):
            raise wrong(f"{path}[{index}].{member}", part.get(member), "is not a string", "Pass one")
        lines.append(part[member])
    return "\n".join(lines)
