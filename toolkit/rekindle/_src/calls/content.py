"""The content of prompts and messages in addition to their text: the options and parts that bring it, and its reading.

Calls pass it on as one value. Pictures are the only kind there is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypedDict

import numpy as np

from rekindle._src.calls.prompts import Prompt, from_column, is_missing
from rekindle._src.capabilities.pictures import request as pictures_of_requests
from rekindle._src.capabilities.pictures.request import PICTURES, PicturesLike, PromptPictures
from rekindle._src.core import words
from rekindle._src.core.extension import Extension, Extensions
from rekindle._src.core.pictures import PictureLike
from rekindle._src.core.records import IntArray
from rekindle._src.core.sampling import PageOptions, Sampling, SamplingOptions, WeightOptions
from rekindle._src.core.soft_prompt import EmbeddedPrompt
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.capability import KeyedPrompt
from rekindle._src.images.thumbnail import Thumbnail
from rekindle._src.views import html
from rekindle._src.views.html import ImageLike
from rekindle.errors import InvalidRequest

Images = object  # a picture or a list of them; see `rekindle.images`
Content = PromptPictures  # of a prompt, as it was read
MARKER = "<image>"  # the place of a picture in a caller's text
MOST_DRAWN = html.IMAGES  # thumbnails in one output
MOST_WRITTEN = 256 << 20  # characters of the pictures in a saved conversation
_MOST_SHOWN = 400  # characters of a text that are shown next to its pictures
_KINDS = {
    "image": ("image", "url", "path", "data", "source"),
    "image_url": ("image_url",),
    "input_image": ("image_url",),
}


class PromptOptions(TypedDict, total=False):
    """Options that give a prompt its content. None leaves one out."""

    images: Images


class RequestOptions(PromptOptions, SamplingOptions, total=False):
    """Keyword options of one request except `n`, which decides the type of the result."""


class KeyedOptions(PromptOptions, PageOptions, total=False):
    """All options that a prompt's pages depend on."""


class ReadOptions(PromptOptions, WeightOptions, total=False):
    """Options of a prompt that is read and not continued."""


def split(options: Mapping[str, object]) -> tuple[PromptOptions, dict[str, object]]:
    """Return the options that give a prompt its content, and all others."""
    content: Any = {name: options[name] for name in _NAMES if options.get(name) is not None}
    return content, {name: value for name, value in options.items() if name not in _NAMES}


_NAMES = frozenset(PromptOptions.__annotations__)


def attach(
    front: Front, prompts: list[Prompt], content: PromptOptions, *, many: bool, keep_errors: bool = False
) -> list[Prompt]:
    """Return the prompts of a call with their content, which has an entry for each of `many` prompts.

    Invalid content raises an error, or its prompt is listed with this error if errors are kept.
    """
    images: Any = content.get("images")
    if images is None:
        return prompts
    if not many:
        return [_with_pictures(front, prompts[0], images)]
    entries, placed = _of_several(images, len(prompts)), list[Prompt]()
    for index, (prompt, own) in enumerate(zip(prompts, entries, strict=True)):
        try:
            placed.append(_with_pictures(front, prompt, None if is_missing(own) else own, f"images[{index}]"))
        except InvalidRequest as error:
            if not keep_errors:
                raise
            placed.append(Prompt("", None, error=error))
    return placed


def attach_one(front: Front, prompt: Prompt, content: PromptOptions) -> Prompt:
    """Return a prompt with its content."""
    return _with_pictures(front, prompt, content.get("images"))


def _with_pictures(front: Front, prompt: Prompt, images: Any, field: str = "images") -> Prompt:
    """Return a prompt with its pictures. Each takes the place of one MARKER; without any, they come first.

    In token ids each has a place already: the model's own placeholder, once or as often as it has rows.
    """
    if images is None or prompt.error is not None:
        return prompt
    if EmbeddedPrompt in prompt.extensions:
        raise InvalidRequest(field, images, "can't be combined with a SoftPrompt", "Pass one of them")
    read = _read_values(front, images, field)
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


def content_of(extensions: Extensions) -> Content | None:
    """Return the content among a prompt's extensions; None if it is text alone."""
    return extensions.get(PromptPictures)


def copied(source: ForkSource) -> Extension | None:
    """Return the content of a source for its fork, where the prompt's tokens have it already."""
    return PromptPictures(source.images) if source.images else source.embedded


def encoded(front: Front, text: str, content: Content | None, *, special: bool = True) -> IntArray:
    """Return the token ids of a text with its content, as a request has them."""
    shown = () if content is None else content.pictures
    return pictures_of_requests.encoded(front, text, shown, special=special)


def keyed(front: Front, prompt: Prompt, options: RequestOptions) -> KeyedPrompt:
    """Return everything that the pages of a prompt depend on."""
    content, sampling = split(options)
    prompt = attach_one(front, prompt, content)
    token_ids = prompt.token_ids
    if token_ids is None:
        token_ids = encoded(front, prompt.text or "", content_of(prompt.extensions))
    return KeyedPrompt(token_ids, Sampling.of(None, sampling), prompt.extensions)


def message_content(text: str, content: PromptOptions) -> str | list[dict[str, Any]]:
    """Return the content of a message: a text, and other parts where it has MARKER, or before it."""
    images: Any = content.get("images")
    if images is None:
        return _parts(text, None)
    return _parts(text, [*images] if isinstance(images, list | tuple) else [images])


def refuse_with_messages(content: PromptOptions) -> None:
    """Raise `InvalidRequest` for content that comes with messages."""
    images: Any = content.get("images")
    if images:
        fix = "Return the pictures as parts of the messages, {'type': 'image', 'image': picture}"
        raise InvalidRequest("images", f"{len(images)} pictures", "come with messages", fix)


def not_of_a_text(content: PromptOptions) -> InvalidRequest:
    """Return the error for content that comes with a chat, if the last message is no text of the user."""
    fix = "Write them into a message: {'role': 'user', 'content': [{'type': 'image', 'image': picture}, …]}"
    problem = "are those of the last message, which is no text of the user"
    return InvalidRequest("images", content.get("images"), problem, fix)


def without_prompt(content: PromptOptions) -> InvalidRequest:
    """Return the error for content that comes without a prompt."""
    fix = "Pass the prompt that they are in"
    return InvalidRequest("images", content.get("images"), "come without a prompt", fix)


def read(front: Front, content: PromptOptions) -> PromptOptions:
    """Return content that was opened, with the headers of its files read."""
    images: Any = content.get("images")
    return content if images is None else {"images": _read_values(front, images)}


def _parts(text: str, pictures: Sequence[Any] | None) -> str | list[dict[str, Any]]:
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


def _read_values(front: Front, images: Any, field: str = "images") -> tuple[PictureLike, ...]:
    """Open the pictures of an argument and read the headers of files."""
    if images is None:
        return ()
    reader = _reader(front, images)
    values = [*images] if isinstance(images, list | tuple) else [images]
    return reader.read(values, field)


def written_messages(front: Front, messages: Any, most: int = MOST_WRITTEN) -> tuple[Any, int]:
    """Return messages with `data:` URIs for pictures, as JSON has them, and the number of pictures.

    Raises `InvalidRequest` if the URIs have more than `most` characters in all.
    """
    shown, content = read_messages(front, messages)
    if content is None:
        return messages, 0
    pictures = content.pictures
    for message in filter(_has_parts, shown):
        for part in filter(_is_picture, message["content"]):
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
        for part in filter(_is_picture, message["content"] if _has_parts(message) else ()):
            value = _value(part)
            if not isinstance(value, str) or value[:5].lower() != "data:":
                fix = "Pass a file that chat.save(path) wrote"
                raise InvalidRequest(f"messages[{index}]", value, "is no picture in base64", fix)
    return read_messages(front, messages)[0]


def read_messages(front: Front, messages: Any) -> tuple[Any, Content | None]:
    """Return the messages of a chat with the content of their parts read, and this content."""
    shown, found = of_messages(front, messages)
    if found is None:
        return messages, None
    rest = iter(found.pictures)
    for message in filter(_has_parts, shown):
        message["content"] = [
            {"type": "image", "image": next(rest)} if _is_picture(part) else part for part in message["content"]
        ]
    return shown, found


def _of_several(images: Any, count: int) -> Sequence[Any]:
    """Return the pictures of each of several prompts. Raise `InvalidRequest` for another number of entries."""
    entries = from_column(images)
    if isinstance(entries, np.ndarray) and entries.ndim in (1, 4):  # a column, or pictures of one size
        entries = [*entries]
    if not isinstance(entries, list | tuple) or len(entries) != count:
        found = f"{len(entries)} entries" if isinstance(entries, list | tuple) else type(images).__name__
        fix = "Pass a list with an entry for each prompt: a picture, a list of pictures, or None"
        raise InvalidRequest("images", found, f"do not match {count} prompts", fix)
    return entries


def of_messages(front: Front, messages: Any) -> tuple[Any, Content | None]:
    """Return the messages of a chat with plain parts in the place of their content, and this in its order."""
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


def drawn(content: Any, most: int) -> tuple[html.Markup, int]:
    """Draw the content of a message that is no text, and count it; only the first `most` are drawn."""
    parts = filter(_is_picture, content) if _has_pictures(content) else ()
    shown = [_shown(_value(part)) if place < most else Thumbnail() for place, part in enumerate(parts)]
    return html.images(shown, limit=most), len(shown)


def part_as_text(part: Mapping[str, Any]) -> str:
    """Return the text of a part of a message; MARKER for one that is no text."""
    return MARKER if _is_picture(part) else str(part.get("text", ""))


def _shown(value: Any) -> ImageLike:
    is_read = isinstance(getattr(value, "thumbnail", None), str)  # as a conversation keeps it
    return value if is_read else Thumbnail.of(value)


def _misplaced(count: int, marks: int, field: str = "images") -> InvalidRequest:
    fix = f"Write {MARKER} once for each picture, or leave it out: then they come first"
    return InvalidRequest(field, words.count(count, "picture"), f"need as many places, and the prompt has {marks}", fix)


def _has_parts(message: Any) -> bool:
    return _has_pictures(message.get("content") if isinstance(message, Mapping) else None)


def _has_pictures(content: Any) -> bool:
    return isinstance(content, list | tuple) and any(map(_is_picture, content))


def _is_picture(part: Any) -> bool:
    """True if a part of a message is a picture."""
    return isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in _KINDS


def _without_pictures(message: Any, values: list[Any]) -> Any:
    if not _has_parts(message):
        return message
    parts: list[Any] = []
    for part in message["content"]:
        if _is_picture(part):
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


class RowTable(Protocol):
    """Rows of a call that maps them."""

    total: int | None  # None if it is not known

    def check_names(self, names: Iterable[str], field: str = ..., shown: str = ...) -> None:
        """Raise `InvalidRequest` for a field's name that no row has."""
        ...


class RowContent:
    """The content of rows in addition to their text: in one of their columns, or an entry for each row."""

    def __init__(self, front: Front, content: PromptOptions, rows: RowTable) -> None:
        images: Any = content.get("images")
        column = from_column(images)
        self._front = front
        self._images: Any = column
        if isinstance(images, str):
            rows.check_names((images,), "images", "{}")
        elif images is not None:
            if not (isinstance(column, list | tuple) or (isinstance(column, np.ndarray) and column.ndim in (1, 4))):
                fix = "Pass the name of a column, or a column or list with an entry for each row"
                raise InvalidRequest("images", images, "do not match the rows", fix)
            if rows.total not in (None, len(column)):
                problem = f"do not match {words.count(rows.total or 0, 'row')}"
                fix = "Pass an entry for each row: a picture, a list of pictures, or None"
                raise InvalidRequest("images", f"{len(column):,} entries", problem, fix)

    def of(self, index: int, row: Any) -> PromptOptions:
        """Open the content of a row and read the headers of its files. Errors name the row."""
        if self._images is None:
            return {}
        field = f"images[{index}]"
        if isinstance(self._images, str):
            field = f"rows[{index}][{self._images!r}]"
            if not isinstance(row, Mapping) or self._images not in row:
                fix = "Give each row such a field; None stands for no picture"
                raise InvalidRequest(field, row, "is not there", fix)
            entry = row[self._images]
        elif index < len(self._images):
            entry = self._images[index]
        else:
            fix = "Pass an entry for each row: a picture, a list of pictures, or None"
            raise InvalidRequest("images", f"{index:,} entries", "are fewer than the rows", fix)
        return {"images": [] if is_missing(entry) else [*_read_values(self._front, entry, field)]}

    def identified(self, prompt: Any, content: PromptOptions) -> tuple[Any, Any]:
        """Return a row's prompt with the content of its messages read, and a value of JSON that identifies both."""
        pictures: Any = content.get("images")
        shown = prompt
        if isinstance(prompt, list):
            prompt, inside = read_messages(self._front, prompt)
            if inside is not None:
                shown, pictures = of_messages(self._front, prompt)[0], inside.pictures
        return prompt, [shown, [one.content for one in pictures]] if pictures else shown


class ForkSource(Protocol):
    """A completion, or a handle."""

    @property
    def images(self) -> tuple[PictureLike, ...]:
        """The pictures of its prompt."""
        ...

    @property
    def embedded(self) -> EmbeddedPrompt | None:
        """The rows of its prompt."""
        ...
