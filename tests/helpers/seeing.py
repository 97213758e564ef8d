"""Sessions over the fake model that read pictures: real intake and processor, and an encoder that returns zero rows."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from helpers.sessions import CONFIG, checked, fake_front, session_of
from rekindle import Session
from rekindle._src.capabilities.pictures.kept_rows import KeptRows
from rekindle._src.capabilities.pictures.owner import SessionPictures
from rekindle._src.capabilities.pictures.request import PICTURES
from rekindle._src.core.store import Store
from rekindle._src.images.processor import PicturePatches
from rekindle._src.images.qwen import QwenPictures
from rekindle._src.images.settings import ProcessorSettings
from rekindle._src.text.chat import ChatTemplate

MARK = "\x01"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}|"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
).replace("MARK", MARK)


class BytePictures(QwenPictures):
    """Qwen's pictures in a vocabulary of bytes: a token for 32 × 32 pixels, at most 64."""

    marker: ClassVar[str] = MARK
    image_token: ClassVar[str] = MARK
    before: ClassVar[str] = "["
    after: ClassVar[str] = "]"


def processor() -> BytePictures:
    sizes = {"shortest_edge": 32 * 32, "longest_edge": 64 * 32 * 32}
    settings = ({"patch_size": 16, "merge_size": 2, "size": sizes}, {}, {})
    return BytePictures.read(*(ProcessorSettings(part, "a test") for part in settings))


class ZeroEncoder:
    """Makes rows of zeros, without programs."""

    programs, nbytes, token_bytes = SimpleNamespace(compilations=0), 0, 32

    def __call__(self, patches: PicturePatches, wanted: Callable[[], bool]) -> Any:
        return np.zeros((1, patches.plan.tokens, 8), np.float32)

    def sleep(self) -> int:
        return 0

    def wake(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def opened(config: Any = CONFIG, *, folder: Path | None = None, **options: Any) -> Iterator[Session]:
    """Open a session that reads pictures and keeps their rows in `folder`; it has to be whole again afterwards."""
    store = None if folder is None else Store(folder, verified=True, max_bytes=1 << 20)
    encoder: Any = ZeroEncoder()
    pictures = SessionPictures(processor(), encoder, KeptRows(1 << 20, store), identity=b"test", token=ord(MARK))
    front = fake_front(config, **options)._replace(chat=ChatTemplate(TEMPLATE))
    with checked(lambda: session_of(front._replace(services={PICTURES: pictures}))) as session:
        yield session
        pictures.close()


def noise(seed: int, width: int, height: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def uri(pixels: np.ndarray[Any, Any]) -> str:
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()
