"""Pictures in a chat view: taken from the page or a caller, kept in messages as `data:` URIs, shown as thumbnails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rekindle._src.images.picture import PictureLimits, decode_uri, open_picture
from rekindle._src.images.thumbnail import Thumbnail
from rekindle._src.notebook.live import button, file
from rekindle._src.views import html
from rekindle.errors import InvalidRequest

MOST_FILE = 6 << 20  # bytes of a picture from the page: a notebook's server takes messages of 10 MiB, in base64
MOST_OF_CHAT = 32 << 20  # characters of all pictures of a conversation, which is kept with them
MOST_SHOWN = 16  # thumbnails in a conversation, of its latest pictures: each redraw sends them
_KINDS = "image/png,image/jpeg,image/webp,image/gif,image/bmp,image/tiff"
_HINT = "Add a picture to the next message; or drop or paste it here"
_ATTACH = file("attach", "Picture", kinds=_KINDS, title=_HINT, group="say")
_DETACH = button("detach", "Remove pictures", title="Send the next message without them", group="say", look="quiet")


class Attachment(NamedTuple):
    """A picture of a message, as a `data:` URI, and how it is shown."""

    uri: str
    shown: Thumbnail

    @classmethod
    def of(cls, source: Any) -> Attachment:
        """Return the picture in any form that `session.chat` takes. Raises `InvalidRequest`."""
        picture = open_picture(source, field="picture", limits=PictureLimits(bytes=MOST_OF_CHAT)).encode()
        return cls(picture.uri, Thumbnail.of(picture))


class AttachingSession(Protocol):
    """A session, as far as attachments depend on it."""

    @property
    def model(self) -> str: ...
    @property
    def reads_pictures(self) -> bool: ...


class Attachments:
    """The pictures that are attached to the next message of a chat."""

    def __init__(self, session: AttachingSession) -> None:
        self._model, self._reads = session.model, session.reads_pictures
        self.entries: tuple[Attachment, ...] = ()

    @property
    def most_file(self) -> int:
        """The most bytes of a file that the page sends; 0 if it is refused in any case."""
        return MOST_FILE if self._reads else 0

    @property
    def controls(self) -> tuple[dict[str, Any], ...]:
        if not self._reads:
            return ()
        return (_ATTACH, _DETACH) if self.entries else (_ATTACH,)

    def add(self, picture: Any, contents: Iterable[Any]) -> None:
        """Attach a picture, in addition to those in the `contents` of messages. Raises `InvalidRequest`."""
        self._check_reads(type(picture).__name__)
        attachment = Attachment.of(picture)
        before = sum(len(uri) for content in contents for uri in uris_in(content))
        characters = before + sum(len(one.uri) for one in self.entries) + len(attachment.uri)
        if characters > MOST_OF_CHAT:
            problem = (
                f"makes {characters:,} characters of pictures in a conversation, which has {MOST_OF_CHAT:,} at most"
            )
            raise InvalidRequest(
                "picture", f"{len(attachment.uri):,} characters", problem, "Begin another conversation"
            )
        self.entries = (*self.entries, attachment)

    def add_file(self, value: Mapping[str, Any], contents: Iterable[Any]) -> None:
        """Attach a file that the page has sent: its `size`, and its content as `uri` unless that is too much."""
        size, uri = value.get("size"), value.get("uri")
        words = f"a file of {size:,} bytes" if isinstance(size, int) else "a file"
        self._check_reads(words)
        if not isinstance(uri, str) or not uri:
            problem = f"can't be sent by the page, which sends at most {MOST_FILE:,} bytes"
            raise InvalidRequest("picture", words, problem, "Attach it in a cell, with attach(path) of this view")
        self.add(decode_uri(uri, field="picture", limits=PictureLimits(bytes=MOST_FILE)), contents)

    def draw(self) -> str:
        if not self.entries:
            return ""
        return html.block(html.line("for the next message"), html.images([one.shown for one in self.entries]))

    def content(self, text: str) -> Any:
        """Return the content of a message with the pictures: a text, or parts if there are any."""
        if not self.entries:
            return text
        pictures = [{"type": "image", "image": one.uri} for one in self.entries]
        return [*pictures, {"type": "text", "text": text}] if text else pictures

    def take_back(self, content: Any) -> str:
        """Attach the pictures of a message that was taken back. Return its text."""
        self.entries = tuple(Attachment(uri, Thumbnail.of(uri)) for uri in uris_in(content))
        return text_in(content)

    def _check_reads(self, words: str) -> None:
        if not self._reads:
            problem = f"can't be read: {self._model or 'the model'} reads text alone"
            raise InvalidRequest("picture", words, problem, "Open a model that reads pictures")


def text_in(content: Any) -> str:
    """Return the text of a message's content."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content if "text" in part)


def uris_in(content: Any) -> list[str]:
    """Return the pictures of a message's content."""
    return [] if isinstance(content, str) else [part["image"] for part in content if "image" in part]


def drawn_of(content: Any, most: int) -> str:
    """Return the pictures of a message's content as HTML. The first `most` are drawn."""
    shown = [Thumbnail.of(uri) if place < most else Thumbnail() for place, uri in enumerate(uris_in(content))]
    return html.images(shown, limit=most)


def rooms(contents: Sequence[Any]) -> list[int]:
    """Return how many thumbnails each message may have, so that MOST_SHOWN of the latest pictures have one."""
    left, counts = MOST_SHOWN, list[int]()
    for content in reversed(contents):
        count = len(uris_in(content))
        counts.append(count if count <= left else 0)
        left -= count
    return counts[::-1]


def is_content(content: Any) -> bool:
    """True if it can be the content of a kept message: a text, or parts of text and pictures.

    A picture is a `data:` URI there. A path would be that of any file of this machine.
    """
    return isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content)))


def _is_part(part: Any) -> bool:
    match part:
        case {"type": "text", "text": str(), **others} if not others:
            return True
        case {"type": "image", "image": str(uri), **others} if not others:
            return uri.startswith("data:image/")
    return False
