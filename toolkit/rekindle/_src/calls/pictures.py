"""Pictures that callers give with a prompt, or as parts of a chat's messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rekindle._src.calls.prompts import Prompt, from_column, is_missing
from rekindle._src.capabilities.pictures.request import PICTURES, PicturesLike, PromptPictures, encoded
from rekindle._src.core import words
from rekindle._src.core.pictures import PictureLike
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.capability import KeyedPrompt
from rekindle._src.images.thumbnail import Thumbnail
from rekindle._src.views.html import ImageLike
from rekindle.errors import InvalidRequest

MARKER = "<image>"  # the place of a picture in a caller's text
_MOST_SHOWN = 400  # characters of a text that are shown next to its pictures
_KINDS = {
    "image": ("image", "url", "path", "data", "source"),
    "image_url": ("image_url",),
    "input_image": ("image_url",),
}


def with_images(
    front: Front, prompts: list[Prompt], images: object, *, many: bool, keep_errors: bool = False
) -> list[Prompt]:
    """Return the prompts of a call with the pictures of its argument, which has an entry for each of `many` prompts.

    An invalid picture raises an error, or its prompt is listed with this error if errors are kept.
    """
    if images is None:
        return prompts
    if not many:
        return [with_pictures(front, prompts[0], images)]
    entries, placed = of_several(images, len(prompts)), list[Prompt]()
    for index, (prompt, own) in enumerate(zip(prompts, entries, strict=True)):
        try:
            placed.append(with_pictures(front, prompt, None if is_missing(own) else own, f"images[{index}]"))
        except InvalidRequest as error:
            if not keep_errors:
                raise
            placed.append(Prompt("", None, error=error))
    return placed


def with_pictures(front: Front, prompt: Prompt, images: Any, field: str = "images") -> Prompt:
    """Return a prompt with its pictures. Each takes the place of one MARKER; without any, they come first.

    In token ids each has a place already: the model's own placeholder, once or as often as it has rows.
    """
    if images is None or prompt.error is not None:
        return prompt
    read = read_values(front, images, field)
    if prompt.text is None:
        assert prompt.token_ids is not None, "a prompt has text or token ids"
        token_ids = _reader(front, images).filled(prompt.token_ids, read, field)
        return dataclasses.replace(prompt, token_ids=token_ids).plus(PromptPictures(read)) if read else prompt
    marks = prompt.text.count(MARKER)
    if not read and not marks:
        return prompt
    text = prompt.text if marks else MARKER * len(read) + prompt.text
    if marks not in (0, len(read)):
        raise _misplaced(len(read), marks, field)
    text = text.replace(MARKER, _reader(front, images).marker)
    return dataclasses.replace(prompt, text=text, shown=prompt.text).plus(PromptPictures(read, _question(prompt.text)))


def keyed(front: Front, prompt: Prompt, images: object, sampling: Sampling) -> KeyedPrompt:
    """Return everything that the pages of a prompt depend on."""
    prompt = with_pictures(front, prompt, images)
    token_ids = prompt.token_ids
    if token_ids is None:
        given = prompt.extensions.get(PromptPictures)
        token_ids = encoded(front, prompt.text or "", () if given is None else given.pictures)
    return KeyedPrompt(token_ids, sampling, prompt.extensions)


def parts_of(text: str, pictures: Sequence[Any] | None) -> str | list[dict[str, Any]]:
    """Return the content of a message: a text, and pictures where it has MARKER, or before it."""
    texts = text.split(MARKER)
    if pictures is None or len(texts) == 1 + len(pictures) == 1:
        return text
    if len(texts) == 1:
        texts = [""] * len(pictures) + texts
    if len(texts) != len(pictures) + 1:
        raise _misplaced(len(pictures), len(texts) - 1)
    shown = [{"type": "image", "image": picture} for picture in pictures]
    written = [{"type": "text", "text": part} for part in texts]
    pairs = zip(written, [*shown, {}], strict=True)
    return [part for pair in pairs for part in pair if part.get("text") or "image" in part]


def read_values(front: Front, images: Any, field: str = "images") -> tuple[PictureLike, ...]:
    """Open the pictures of an argument and read the headers of files."""
    if images is None:
        return ()
    reader = _reader(front, images)
    values = [*images] if isinstance(images, list | tuple) else [images]
    return reader.read(values, field)


def written_messages(front: Front, messages: Any, most: int) -> tuple[Any, int]:
    """Return messages with `data:` URIs for pictures, as JSON has them, and the number of pictures.

    Raises `InvalidRequest` if the URIs have more than `most` characters in all.
    """
    shown, pictures = read_messages(front, messages)
    if not pictures:
        return messages, 0
    for message in filter(_has_parts, shown):
        for part in filter(is_picture, message["content"]):
            part["image"] = part["image"].uri()
            most -= len(part["image"])
            if most < 0:
                problem = "have more bytes than a saved conversation may have"
                fix = "Drop turns by chat.forget(), or pass smaller pictures"
                raise InvalidRequest("conversation", f"{len(pictures)} pictures", problem, fix)
    return shown, len(pictures)


def restored_messages(front: Front, messages: Any) -> Any:
    """Open the pictures in messages from a file, and read their headers. Only `data:` URIs are accepted as pictures: no
    path is opened. Raises `InvalidRequest`.
    """
    for index, message in enumerate(messages):
        for part in filter(is_picture, message["content"] if _has_parts(message) else ()):
            value = _value(part)
            if not isinstance(value, str) or value[:5].lower() != "data:":
                fix = "Pass a file that chat.save(path) wrote"
                raise InvalidRequest(f"messages[{index}]", value, "is no picture in base64", fix)
    return read_messages(front, messages)[0]


def read_messages(front: Front, messages: Any) -> tuple[Any, tuple[PictureLike, ...]]:
    """Return the messages of a chat with the pictures that were read in their parts, and these."""
    shown, found = of_messages(front, messages)
    if found is None:
        return messages, ()
    rest = iter(found.pictures)
    for message in filter(_has_parts, shown):
        message["content"] = [
            {"type": "image", "image": next(rest)} if is_picture(part) else part for part in message["content"]
        ]
    return shown, found.pictures


def of_several(images: Any, count: int) -> Sequence[Any]:
    """Return the pictures of each of several prompts. Raise `InvalidRequest` for another number of entries."""
    entries = from_column(images)
    if isinstance(entries, np.ndarray) and entries.ndim in (1, 4):  # a column, or pictures of one size
        entries = [*entries]
    if not isinstance(entries, list | tuple) or len(entries) != count:
        found = f"{len(entries)} entries" if isinstance(entries, list | tuple) else type(images).__name__
        fix = "Pass a list with an entry for each prompt: a picture, a list of pictures, or None"
        raise InvalidRequest("images", found, f"do not match {count} prompts", fix)
    return entries


def of_messages(front: Front, messages: Any) -> tuple[Any, PromptPictures | None]:
    """Return the messages of a chat with plain parts in the place of pictures, and the pictures in their order."""
    if not isinstance(messages, list | tuple) or not any(map(_has_parts, messages)):
        return messages, None
    reader = _reader(front, "a picture among the messages")
    found: list[Any] = []
    changed = [_without_pictures(message, found) for message in messages]
    asked = next((message for message in reversed(changed) if isinstance(message, Mapping) and _is_asked(message)), {})
    return changed, PromptPictures(reader.read(found, "messages"), _question(_words(asked.get("content"))))


def _is_asked(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "user" and bool(_words(message.get("content")))


def _words(content: Any) -> str:
    """Return the text of a message, without what stands for its pictures."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return " ".join(text for text in texts if isinstance(text, str))


def _question(text: str) -> str:
    """Return a text as it is shown next to its pictures."""
    return words.shorten(" ".join(text[: 2 * _MOST_SHOWN].replace(MARKER, "…").split()).strip("… "), _MOST_SHOWN)


def thumbnails(content: Any, most: int) -> list[ImageLike]:
    """Return the pictures in the content of a message; only the first `most` are drawn."""
    parts = filter(is_picture, content) if _has_pictures(content) else ()
    return [_shown(_value(part)) if place < most else Thumbnail() for place, part in enumerate(parts)]


def _shown(value: Any) -> ImageLike:
    is_read = isinstance(getattr(value, "thumbnail", None), str)  # as a conversation keeps it
    return value if is_read else Thumbnail.of(value)


def _misplaced(count: int, marks: int, field: str = "images") -> InvalidRequest:
    fix = f"Write {MARKER} once for each picture, or leave it out: then they come first"
    return InvalidRequest(field, words.count(count, "picture"), f"need as many places, and the prompt has {marks}", fix)


def _has_parts(message: Any) -> bool:
    return _has_pictures(message.get("content") if isinstance(message, Mapping) else None)


def _has_pictures(content: Any) -> bool:
    return isinstance(content, list | tuple) and any(map(is_picture, content))


def is_picture(part: Any) -> bool:
    """True if a part of a message is a picture."""
    return isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in _KINDS


def _without_pictures(message: Any, values: list[Any]) -> Any:
    if not _has_parts(message):
        return message
    parts: list[Any] = []
    for part in message["content"]:
        if is_picture(part):
            value = _value(part)
            if value is None:
                fix = "Write {'type': 'image', 'image': picture}"
                raise InvalidRequest("messages", dict(part), "is a part without a picture", fix)
            values.append(value)
            part = {"type": "image"}
        parts.append(part)
    return {**message, "content": parts}


def _value(part: Mapping[str, Any]) -> Any:
    """Return the picture in a part, as OpenAI's, Anthropic's and transformers' messages have it; None without one."""
    for name in _KINDS[part["type"]]:
        value = part.get(name)
        if name == "source" and isinstance(value, Mapping):
            if value.get("type") == "base64":
                return f"data:{value.get('media_type', '')};base64,{value.get('data', '')}"
            return value.get("url")
        if value is not None:
            return value.get("url") if isinstance(value, Mapping) else value
    return None


def _reader(front: Front, value: Any) -> PicturesLike:
    pictures = PICTURES.of(front)
    if pictures is None:
        problem = f"can't be read: {front.model or 'the model'} reads text alone"
        raise InvalidRequest("images", value, problem, 'Open a model that reads pictures, such as "tiny-vision"')
    return pictures
