"""Pictures in the messages of clients, in the forms of OpenAI and Anthropic: their bytes come with the request.

Nothing is fetched, and no path is read: a picture is a `data:` URI, or base64 of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.images import decode_uri
from rekindle._src.serve.errors import wrong

_KINDS = ("image_url", "input_image", "image")  # of chat completions, responses and Anthropic's messages


def has_pictures(parts: Sequence[Mapping[str, Any]]) -> bool:
    """True if one of the parts is a picture."""
    return any(is_picture(part) for part in parts)


def is_picture(part: Mapping[str, Any]) -> bool:
    """True if a part is a picture, in any of the forms."""
    return part.get("type") in _KINDS


def picture_part(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the part that a session takes. Raises `ApiError`, or `InvalidRequest` for what is no picture."""
    uri: Any
    if part["type"] == "image":
        place, uri = f"{path}.source", _anthropic(part.get("source"), f"{path}.source")
    else:
        value, place = part.get("image_url"), f"{path}.image_url"
        if isinstance(value, Mapping):
            value, place = value.get("url"), f"{place}.url"
        uri = value
    if not isinstance(uri, str):
        raise wrong(place, uri, "is not a string", "Pass data:image/png;base64,…")
    if uri[:5].lower() != "data:":
        raise wrong(place, uri, "is not fetched by this server", "Send the picture itself, as data:image/png;base64,…")
    return {"type": "image", "image": decode_uri(uri, field=place)}


def _anthropic(source: Any, path: str) -> str:
    """Return Anthropic's source of a picture as a URI."""
    if not isinstance(source, Mapping):
        raise wrong(path, source, "is not an object", "Pass {'type': 'base64', 'media_type': …, 'data': …}")
    if source.get("type") == "url":
        return str(source.get("url"))
    kind, data = source.get("media_type"), source.get("data")
    if source.get("type") != "base64" or not isinstance(kind, str) or not isinstance(data, str):
        fix = "Pass {'type': 'base64', 'media_type': 'image/png', 'data': …}"
        raise wrong(path, source.get("type"), "is no picture in base64", fix)
    return f"data:{kind};base64,{data}"
