"""The pictures of a session: read, planned, decoded and encoded in threads of their own, and their rows kept.

An encoder computes the rows of a picture once. They are kept in host memory, the least recently used ones leave first,
and on disk, so that a prompt needs no encoder when its pages have left the cache. Steps go on while a picture is
encoded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Protocol

import numpy as np

from rekindle._src.capabilities.pictures.encoder import PictureEncoder, Rows
from rekindle._src.capabilities.pictures.encoding_programs import Cancellation, EncodingPrograms
from rekindle._src.capabilities.pictures.kept_rows import KeptRows
from rekindle._src.capabilities.pictures.reading import EncoderPlan, framed
from rekindle._src.capabilities.pictures.request import PICTURES
from rekindle._src.capabilities.pictures.stages import PictureStages
from rekindle._src.capabilities.plans import Owner, SessionPlan
from rekindle._src.core import words
from rekindle._src.core.contracts import TokenizerLike
from rekindle._src.core.pictures import (
    EncodedRows,
    PictureCost,
    PictureLike,
    PictureStatistics,
    RowsOrigin,
    TokenGrid,
)
from rekindle._src.core.records import IntArray
from rekindle._src.core.store import Store
from rekindle._src.dispatch.backend import Services
from rekindle._src.images.picture import EncodedPicture, Picture, open_pictures
from rekindle._src.images.processor import PicturePatches, PicturePlan, PictureProcessor, TokenRun
from rekindle._src.images.thumbnail import MOST_DECODED, thumbnail
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest, RequestAborted

FOLDER = "pictures"  # in a cache folder
SHARE = 8  # of host memory and of disk that rows may have: a part in so many
log = logging.getLogger("rekindle.engine")


class GivenPicture:
    """A picture of a request. Its number of tokens is known from its size.

    Its pixels are decoded when they are needed, and let go once they are encoded: a completion that names its pictures
    keeps files as they came. A picture that came as pixels keeps them, since there is nothing else of it.
    """

    __slots__ = ("_digest", "_thumbnail", "plan", "source")

    def __init__(self, source: EncodedPicture | Picture, plan: PicturePlan) -> None:
        self.source, self.plan = source, plan
        self._digest: bytes | None = None
        self._thumbnail: str | None = None

    @property
    def width(self) -> int:
        return self.source.width

    @property
    def height(self) -> int:
        return self.source.height

    @property
    def grids(self) -> tuple[TokenGrid, ...]:
        """The tokens of each of its runs of rows."""
        return self.plan.grids

    @property
    def thumbnail(self) -> str:
        """A small picture of it as a `data:` URI, made when it is read first; empty if there is none."""
        if self._thumbnail is None:
            self._thumbnail = thumbnail(self.source)
        return self._thumbnail

    @property
    def digest(self) -> bytes:
        """The digest of its pixels, and of how they are encoded."""
        assert self._digest is not None, "its rows are asked for first"
        return self._digest

    @property
    def identified(self) -> bool:
        """True if its digest is known: it was decoded before."""
        return self._digest is not None

    @property
    def content(self) -> str:
        """A digest of the passed value: of a file's bytes, or of pixels."""
        return self.source.content

    def uri(self) -> str:
        """Return it as a `data:` URI: the file that was passed, or a PNG, which it is from then on."""
        self.source = self.source.encode()
        return self.source.uri

    def decode(self, identity: bytes) -> Picture:
        """Return the pixels. They are not kept, since its rows are."""
        picture = self.source.decode()
        if self._thumbnail is None and self.source.weight > MOST_DECODED:
            self._thumbnail = thumbnail(picture)  # while its pixels are here
        self._digest = sha256(b"".join(framed(part) for part in (identity, picture.digest.encode()))).digest()
        return picture

    def __deepcopy__(self, memory: object) -> GivenPicture:
        return self

    def __repr__(self) -> str:
        return repr(self.source)


class RowEncoder(Protocol):
    """Computes the rows of a picture from its patches."""

    @property
    def programs(self) -> EncodingPrograms: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def token_bytes(self) -> int:
        """Bytes of the rows of one token."""
        ...

    def __call__(self, patches: PicturePatches, wanted: Callable[[], bool]) -> Rows: ...
    def sleep(self) -> int: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class SessionPictures(Owner):
    """Reads and encodes the pictures of requests. Its methods may be called in any thread."""

    def __init__(
        self,
        processor: PictureProcessor,
        encoder: RowEncoder,
        kept: KeptRows,
        *,
        identity: bytes,
        token: int,
        merge: int = 0,
        whole: bool = False,
        tokenizer: TokenizerLike | None = None,
    ) -> None:
        """`identity` names everything that rows depend on but pixels; `token` is the id that marks their places.
        Without the `tokenizer`, prompts of token ids have as many of them as pictures have rows.

        `merge` is how many patches a row has along each side where ropes have coordinates, else 0. With `whole`, a step
        computes all tokens of a picture.
        """
        self._processor, self._encoder, self._kept = processor, encoder, kept
        self._identity, self.token, self._merge, self.whole = identity, token, merge, whole
        self._tokenizer, self._placeholder = tokenizer, token
        if tokenizer is not None and processor.marker != processor.image_token:
            ids = tokenizer.encode(processor.marker, add_special_tokens=False)
            self._placeholder = ids[0] if len(ids) == 1 else token
        self._stages = PictureStages()
        self._counting, self._waiting = threading.Lock(), 0
        self.encoded_pictures = 0

    @classmethod
    def open(cls, pictures: EncoderPlan, plan: SessionPlan, tokenizer: Tokenizer) -> SessionPictures | None:
        """Return the picture reader of a session; None if its tokenizer has no token that marks a picture's places."""
        name = pictures.processor.image_token
        ids = tokenizer.encode(name, add_special_tokens=False) if tokenizer.has_text else []
        if len(ids) != 1:
            log.warning("pictures can't be read: the tokenizer of %s has no token %s", plan.name, name)
            return None
        config, merge = plan.config, 0
        if any(rope.sections for rope in plan.programs.model.ropes):
            merge = pictures.tower.graph.config.merge
        store = None
        if config.disk_memory:
            folder = config.cache_folder / FOLDER
            store = Store(folder, verified=True, max_bytes=config.disk_memory // SHARE)
        kept = KeptRows(config.host_memory // SHARE, store)
        encoder = PictureEncoder.open(pictures, plan.programs)
        encoder.make_ahead(plan.precompile)
        spec = plan.programs.model.pictures
        assert spec is not None, "it has a plan for them"
        return cls(
            pictures.processor,
            encoder,
            kept,
            identity=pictures.identity,
            token=ids[0],
            merge=merge,
            whole=spec.both_ways != "no",
            tokenizer=tokenizer,
        )

    @property
    def services(self) -> Services:
        return {PICTURES: self}

    @property
    def compilations(self) -> int:
        """The number of the encoder's programs that were compiled."""
        return self._encoder.programs.compilations

    def statistics(self) -> PictureStatistics:
        """Return the figures of now."""
        return PictureStatistics(
            pictures_encoded=self.encoded_pictures,
            pictures_waiting=self._waiting,
            picture_row_bytes=self._kept.nbytes,
            encoder_bytes=self._encoder.nbytes,
            encoder_compilations=self.compilations,
        )

    def sleep(self) -> int:
        """Give the encoder's memory back until `wake`. Return its bytes. Rows of pictures stay in host memory."""
        return self._encoder.sleep()

    def wake(self) -> None:
        """Go on."""
        self._encoder.wake()

    @property
    def marker(self) -> str:
        """The text that stands for one picture in a prompt."""
        processor = self._processor
        return processor.before + processor.marker + processor.after

    def read(self, values: Sequence[object], field: str = "images") -> tuple[GivenPicture, ...]:
        """Return the pictures in a caller's values; files' headers are read. Raises `InvalidRequest`."""
        plan = self._processor.plan
        values = [one.source if isinstance(one, GivenPicture) else one for one in values]
        return tuple(GivenPicture(one, plan(one.width, one.height)) for one in open_pictures(values, field=field))

    def cost(self, width: int, height: int, field: str = "images") -> PictureCost:
        """Return the tokens and bytes of a picture of this size. Raises `InvalidRequest` for an unreadable one."""
        tokens = self._processor.plan(width, height, field=field).tokens
        return PictureCost(tokens, tokens * self._encoder.token_bytes)

    def spelled(self, text: str, pictures: Sequence[PictureLike]) -> str:
        """Return a text with one token for each run of rows, from one with a marker for each picture."""
        parts = text.split(self._processor.marker)
        if len(parts) != len(pictures) + 1:
            problem = f"do not fit the text, which has {len(parts) - 1} places for them"
            fix = f"Leave {self._processor.marker!r} out of texts: it stands for a picture"
            raise InvalidRequest("images", f"{len(pictures)} pictures", problem, fix)
        whole = [parts[0]]
        for part, picture in zip(parts[1:], pictures, strict=True):
            expansion = self._processor.expansion(_given(picture).plan)
            whole += [one.token if isinstance(one, TokenRun) and self._stands(one) else _text(one) for one in expansion]
            whole.append(part)
        return "".join(whole)

    def filled(self, token_ids: IntArray, pictures: Sequence[PictureLike], field: str = "images") -> IntArray:
        """Return a prompt's token ids with all tokens of its pictures, from ids with one placeholder for each picture.

        Ids that have them all already, as a processor of transformers makes them, are returned as they are. The
        placeholder is the token that the model's chat template writes. Raises `InvalidRequest` for another number.
        """
        counts = [sum(self.counts(picture)) for picture in pictures]
        there = int((token_ids == self.token).sum())
        if there == sum(counts):
            return token_ids
        places = np.flatnonzero(token_ids == self._placeholder)
        apart = self._placeholder != self.token
        if len(places) != len(pictures) or (apart and there) or self._tokenizer is None:
            name = self._processor.marker
            problem = f"do not fit the token ids, which have {name} ({self._placeholder}) {len(places)} times"
            if apart:
                problem += f", and {self._processor.image_token} ({self.token}) {there} times"
            fix = f"Write {name} once for each picture, or {self._processor.image_token} {sum(counts)} times in all"
            raise InvalidRequest(field, words.count(len(pictures), "picture"), problem, fix)
        parts, done = list[Any](), 0
        for place, picture in zip(places.tolist(), pictures, strict=True):
            parts += [token_ids[done:place], self._ids(picture)]
            done = place + 1
        return np.concatenate([*parts, token_ids[done:]]).astype(np.int32)

    def _ids(self, picture: PictureLike) -> IntArray:
        """Return the token ids that stand for a picture, in the place of its placeholder."""
        assert self._tokenizer is not None, "placeholders are not filled without it"
        ids: list[int] = []
        for part in self._processor.expansion(_given(picture).plan):
            if isinstance(part, TokenRun) and self._stands(part):
                ids += [self.token] * part.times
            else:
                ids += self._tokenizer.encode(_text(part), add_special_tokens=False)
        return np.array(ids, np.int32)

    def counts(self, picture: PictureLike) -> list[int]:
        """Return the lengths of the runs of rows of a picture."""
        expansion = self._processor.expansion(_given(picture).plan)
        return [one.times for one in expansion if isinstance(one, TokenRun) and self._stands(one)]

    def identify(self, picture: PictureLike) -> None:
        """Decode a picture, so that its digest is known."""
        given = _given(picture)
        if not given.identified:
            given.decode(self._identity)

    def known(self, picture: PictureLike, salt: str | None) -> bool:
        """True if the rows of a picture are at hand; False before it is decoded, because its digest is unknown."""
        given = _given(picture)
        return given.identified and self._kept.at_hand(given.digest, salt) is not None

    async def encoded(
        self, picture: PictureLike, wanted: Callable[[], bool], *, caller: str, salt: str | None
    ) -> EncodedRows:
        """Return the rows of a picture, and where they came from. Raise `RequestAborted` once it is not `wanted`."""
        given, left = _given(picture), threading.Event()
        if given.identified:
            kept = self._kept.at_hand(given.digest, salt)
            if kept is not None:
                return kept

        def still() -> bool:
            return wanted() and not left.is_set()

        with self._counting:
            self._waiting += 1
        try:
            return await self._stages.rows(
                caller,
                given.source.work,
                lambda: self._decoded(given, salt, still),
                lambda patches: self._encoded(given, salt, patches, still),
            )
        finally:
            left.set()
            with self._counting:
                self._waiting -= 1

    def _decoded(
        self, picture: GivenPicture, salt: str | None, wanted: Callable[[], bool]
    ) -> EncodedRows | PicturePatches:
        """Return the patches of a picture, or its rows if they are kept."""
        if not wanted():
            raise _cancelled()
        kept = self._kept.get(picture.digest, salt) if picture.identified else None
        if kept is not None:
            return kept
        pixels = picture.decode(self._identity)
        return self._kept.get(picture.digest, salt) or self._processor.patches(pixels)

    def _encoded(
        self, picture: GivenPicture, salt: str | None, patches: PicturePatches, wanted: Callable[[], bool]
    ) -> EncodedRows:
        kept = self._kept.at_hand(picture.digest, salt)  # another request has brought the same one meanwhile
        if kept is not None:
            return kept
        try:
            rows = self._encoder(patches, wanted)
        except Cancellation:
            raise _cancelled() from None
        self.encoded_pictures += 1
        self._kept.put(picture.digest, salt, rows)
        return EncodedRows(rows, RowsOrigin.ENCODER)

    def use(
        self, token_ids: IntArray, runs: Sequence[tuple[int, int]], pictures: Sequence[PictureLike]
    ) -> tuple[IntArray | None, int]:
        """Return the coordinates of a prompt's tokens, and the offset after them; None and 0 for other ropes."""
        if not self._merge:
            return None, 0
        views = [view for picture in pictures for view in _given(picture).plan.views]
        return coordinates_of(len(token_ids), runs, [(view.rows, view.columns) for view in views], self._merge)

    def close(self) -> None:
        """End the threads after the step that they compute, and give all memory back."""
        self._stages.close()
        self._encoder.close()

    def _stands(self, run: TokenRun) -> bool:
        return run.token == self._processor.image_token


def _given(picture: PictureLike) -> GivenPicture:
    assert isinstance(picture, GivenPicture), "`SessionPictures.read` has read it"
    return picture


def _cancelled() -> RequestAborted:
    return RequestAborted("the request was cancelled before its pictures were encoded")


def _text(part: str | TokenRun) -> str:
    return part if isinstance(part, str) else part.token * part.times


def coordinates_of(
    length: int, runs: Sequence[tuple[int, int]], grids: Sequence[tuple[int, int]], merge: int
) -> tuple[IntArray, int]:
    """Return the coordinates [length, 3] of a prompt's tokens, and what to add to positions after it.

    A token of text has its position three times. A row of a picture has the position of its first row, plus its own
    row and column; text goes on after the longer side.
    """
    coordinates = np.empty((length, 3), np.int32)
    place = position = 0
    for (start, stop), (rows, columns) in zip(runs, grids, strict=True):
        coordinates[place:start] = (np.arange(start - place) + position)[:, None]
        position += start - place
        height, width = rows // merge, columns // merge
        index = np.arange(stop - start)
        coordinates[start:stop] = position + np.stack([0 * index, index // width, index % width], axis=1)
        position += max(height, width)
        place = stop
    coordinates[place:] = (np.arange(length - place) + position)[:, None]
    return coordinates, int(coordinates.max()) + 1 - length if length else 0
