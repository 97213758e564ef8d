"""Pictures that callers give with a prompt, or as parts of a chat's messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.core.records import IntArray
from rekindle._src.dispatch.backend import Front, PicturesLike
from rekindle._src.dispatch.pictures import PromptPictures, encoded, names_of
from rekindle._src.session.prompts import Prompt
from rekindle.errors import InvalidRequest

MARKER = "<image>"  # the place of a picture in a caller's text
_KINDS = {
    "image": ("image", "url", "path", "data", "source"),
    "image_url": ("image_url",),
    "input_image": ("image_url",),
}


def with_pictures(front: Front, prompt: Prompt, images: Any) -> Prompt:
    """Return a prompt with its pictures. Each takes the place of one MARKER; without any, they come first."""
    if images is None or prompt.error is not None:
        return prompt
    pictures = _reader(front, images)
    values = images if isinstance(images, list | tuple) else [images]
    if prompt.text is None:
        problem = "come with token ids, which have no place for them"
        raise InvalidRequest("images", f"{len(values)} pictures", problem, "Pass the prompt as a text")
    if not values:
        return prompt
    read = pictures.read(values)
    marks = prompt.text.count(MARKER)
    text = prompt.text if marks else MARKER * len(read) + prompt.text
    if marks not in (0, len(read)):
        fix = f"Write {MARKER} once for each picture, or leave it out: then they come first"
        raise InvalidRequest("images", f"{len(read)} pictures", f"have {marks} places in the prompt", fix)
    text = text.replace(MARKER, pictures.marker)
    return dataclasses.replace(prompt, text=text, shown=prompt.text).plus(PromptPictures(read))


def prefix_of(front: Front, prompt: Prompt, images: Any) -> IntArray:
    """Return what the prefix tree calls the tokens of a prompt. Its pictures are decoded, which may take seconds.

    Token ids that have places of pictures already, such as those of a completion, come with these pictures.
    """
    values = [] if images is None else [*images] if isinstance(images, list | tuple) else [images]
    if prompt.text is not None:
        prompt = with_pictures(front, prompt, values or None)
        given = prompt.extensions.get(PromptPictures)
        shown = () if given is None else given.pictures
        token_ids = encoded(front, prompt.text or "", shown)
    else:
        assert prompt.token_ids is not None, "a prompt has text or token ids"
        token_ids, shown = prompt.token_ids, _reader(front, images).read(values) if values else ()
    pictures, page_size = front.pictures, front.config.page_size
    return token_ids if pictures is None or page_size is None else names_of(token_ids, shown, pictures, page_size)


def of_several(images: Any, count: int) -> Sequence[Any]:
    """Return the pictures of each of several prompts. Raise `InvalidRequest` for another number of entries."""
    if images is None:
        return [None] * count
    if not isinstance(images, list | tuple) or len(images) != count:
        found = f"{len(images)} entries" if isinstance(images, list | tuple) else type(images).__name__
        fix = "Pass a list with an entry for each prompt: a picture, a list of pictures, or None"
        raise InvalidRequest("images", found, f"are not those of {count} prompts", fix)
    return images


def of_messages(front: Front, messages: Any) -> tuple[Any, PromptPictures | None]:
    """Return the messages of a chat with plain parts in the place of pictures, and the pictures in their order."""
    if not isinstance(messages, list | tuple) or not any(map(_has_parts, messages)):
        return messages, None
    reader = _reader(front, "a picture among the messages")
    found: list[Any] = []
    changed = [_without_pictures(message, found) for message in messages]
    return changed, PromptPictures(reader.read(found, "messages"))


def _has_parts(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list | tuple) and any(map(_is_picture, content))


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def _without_pictures(message: Any, values: list[Any]) -> Any:
    if not _has_parts(message):
        return message
    parts: list[Any] = []
    for part in message["content"]:
        if _is_picture(part):
            values.append(_value(part))
            part = {"type": "image"}
        parts.append(part)
    return {**message, "content": parts}


def _value(part: Mapping[str, Any]) -> Any:
    """Return the picture in a part, as OpenAI's, Anthropic's and transformers' messages have it."""
    for name in _KINDS[part["type"]]:
        value = part.get(name)
        if name == "source" and isinstance(value, Mapping):
            if value.get("type") == "base64":
                return f"data:{value.get('media_type', '')};base64,{value.get('data', '')}"
            return value.get("url")
        if value is not None:
            return value.get("url") if isinstance(value, Mapping) else value
    fix = "Write {'type': 'image', 'image': picture}"
    raise InvalidRequest("messages", dict(part), "is a part without a picture", fix)


def _reader(front: Front, value: Any) -> PicturesLike:
    if front.pictures is None:
        problem = f"can't be read: {front.model or 'the model'} reads text alone"
        raise InvalidRequest("images", value, problem, "Open a model that reads pictures")
    return front.pictures
