"""Pictures as a capability of requests: their text, their tokens, their rows, and their places in the prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from rekindle._src.core import words
from rekindle._src.core.extension import Extension
from rekindle._src.core.pictures import (
    EncodedRows,
    PictureCost,
    PictureGrids,
    PictureLike,
    PictureStatistics,
    origins_in_words,
)
from rekindle._src.core.prompt_rows import PromptRows, RowSpan
from rekindle._src.core.records import IntArray, Request
from rekindle._src.dispatch.backend import Front, SessionService, Submission
from rekindle._src.dispatch.capability import Capability, Fields, KeyedPrompt, Part, SequenceEnd
from rekindle._src.scheduling.sequence import how_to_fit
from rekindle.errors import InvalidRequest, PromptTooLong


class PicturesLike(Protocol):
    """The pictures of a session: how prompts spell them, and the encoder that makes rows of them."""

    @property
    def marker(self) -> str:
        """The text that stands for one picture in a prompt, before it is spelled."""
        ...

    @property
    def whole(self) -> bool:
        """True if a step computes either all or no tokens of a picture."""
        ...

    @property
    def token(self) -> int:
        """The id of the tokens that rows of pictures take the place of."""
        ...

    def read(self, values: Sequence[object], field: str = "images") -> tuple[PictureLike, ...]:
        """Return the pictures in values of the caller. Raises `InvalidRequest` for anything else."""
        ...

    def cost(self, width: int, height: int, field: str = "images") -> PictureCost:
        """Return the tokens and bytes of a picture of this size. Raises `InvalidRequest` for an unreadable one."""
        ...

    def spelled(self, text: str, pictures: Sequence[PictureLike]) -> str:
        """Return a text with one token for each run of rows, from one with a marker for each picture."""
        ...

    def filled(self, token_ids: IntArray, pictures: Sequence[PictureLike], field: str = "images") -> IntArray:
        """Return a prompt's token ids with all tokens of its pictures, from ids with one placeholder for each picture.

        Ids that have them all are returned as they are. Raises `InvalidRequest` for another number.
        """
        ...

    def counts(self, picture: PictureLike) -> Sequence[int]:
        """Return the lengths of the runs of rows of a picture."""
        ...

    def identify(self, picture: PictureLike) -> None:
        """Decode a picture, so that its digest is known."""
        ...

    def known(self, picture: PictureLike, salt: str | None) -> bool:
        """True if the rows of a picture are here, for requests with this salt."""
        ...

    async def encoded(
        self, picture: PictureLike, wanted: Callable[[], bool], *, caller: str, salt: str | None
    ) -> EncodedRows:
        """Return the rows of a picture. Callers take turns; requests with a salt share rows with that salt alone.

        Raises `RequestAborted` once it is not `wanted`.
        """
        ...

    def statistics(self) -> PictureStatistics:
        """Return the figures of now."""
        ...

    def use(
        self, token_ids: IntArray, runs: Sequence[tuple[int, int]], pictures: Sequence[PictureLike]
    ) -> tuple[IntArray | None, int]:
        """Return the coordinates of a prompt's tokens, and the offset after them; None and 0 for other ropes."""
        ...


PICTURES: SessionService[PicturesLike] = SessionService("pictures")  # of models that read them


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PromptPictures(Extension):
    """Of a submission: the pictures of its prompt, in their order, and the text that came with them, shortened."""

    pictures: tuple[PictureLike, ...]
    question: str = ""


class PictureIntake(Capability[list[EncodedRows]]):
    """Pictures in the prompt. In its text each has a marker, which is spelled out; in token ids they are already."""

    def spell(self, submission: Submission, text: str, front: Front) -> str:
        given = submission.extensions.get(PromptPictures)
        pictures = PICTURES.of(front)
        if pictures is None or given is None:
            return text
        return pictures.spelled(text, given.pictures)

    def expand(self, submission: Submission, token_ids: IntArray, front: Front) -> IntArray:
        given, pictures = submission.extensions.get(PromptPictures), PICTURES.of(front)
        if given is None or pictures is None or submission.token_ids is not None:
            return token_ids
        return _expanded(token_ids, given.pictures, pictures)

    def waits(self, submission: Submission, front: Front) -> bool:
        given, pictures = submission.extensions.get(PromptPictures), PICTURES.of(front)
        if given is None or pictures is None:
            return False
        return not all(pictures.known(picture, submission.sampling.salt) for picture in given.pictures)

    def overtaken(self, submission: Submission, front: Front) -> bool:
        return self.waits(submission, front)

    async def resource(self, submission: Submission, front: Front) -> list[EncodedRows]:
        given, pictures = submission.extensions.get(PromptPictures), PICTURES.of(front)
        if given is None or pictures is None:
            return []
        mailbox, limit = submission.mailbox, front.config.max_model_len
        length = 0 if mailbox.prompt_ids is None else len(mailbox.prompt_ids)
        if limit is not None and length > limit:  # before anything is encoded for nothing
            problem = f"is longer than max_model_len, which is {limit}"
            raise PromptTooLong("prompt", f"{length} tokens", problem, how_to_fit(limit, front.longest))
        caller, salt = submission.caller, submission.sampling.salt
        return [
            await pictures.encoded(picture, lambda: not mailbox.abandoned, caller=caller, salt=salt)
            for picture in given.pictures
        ]

    def admit(
        self, submission: Submission, token_ids: IntArray, front: Front, resource: list[EncodedRows] | None
    ) -> PromptRows | None:
        given, pictures = submission.extensions.get(PromptPictures), PICTURES.of(front)
        if given is None:
            use = submission.extensions.get(PromptRows)
            if use is None and pictures is not None and (token_ids == pictures.token).any():
                raise _miscounted(int((token_ids == pictures.token).sum()), 0)
            return use
        if pictures is None:
            fix = "Open a model that reads pictures"
            raise InvalidRequest("images", f"{len(given.pictures)} pictures", "can't be read by this model", fix)
        use = placed(token_ids, given.pictures, resource or (), pictures)
        most = front.config.max_tokens_per_step - front.config.max_requests
        longest = max((span.stop - span.start for span in use.spans), default=0)
        if use.whole and longest > most:
            problem = f"has {longest} tokens, which are computed in one step, and that has room for {most}"
            fix = f"Open with max_tokens_per_step={longest + front.config.max_requests} or more"
            raise InvalidRequest("images", "a picture", problem, fix)
        return use

    def keying(self, prompt: KeyedPrompt, front: Front) -> PromptRows | None:
        """Return the places of the prompt's pictures, which are decoded for this, without their rows."""
        given, pictures = prompt.extensions.get(PromptPictures), PICTURES.of(front)
        if pictures is None:
            return None
        shown = () if given is None else given.pictures
        for picture in shown:
            pictures.identify(picture)
        return PromptRows(tuple(span for span, _ in _spans(prompt.token_ids, shown, pictures)), ())

    def part(self, request: Request, submission: Submission, front: Front) -> Part | None:
        given = submission.extensions.get(PromptPictures)
        use = request.extensions.get(PromptRows)
        return None if given is None or use is None else PictureOutput(given, use.spans)


class PictureOutput(Part[None]):
    """Names the prompt's pictures in the completion, so that it can be continued."""

    __slots__ = ("_pictures", "_runs")

    def __init__(self, pictures: PromptPictures, spans: Sequence[RowSpan]) -> None:
        self._pictures, self._runs = pictures, tuple((span.start, span.stop) for span in spans)

    def completion(self, end: SequenceEnd) -> Fields:
        return {
            "images": self._pictures.pictures,
            "image_runs": self._runs,
            "question": self._pictures.question,
        }


def encoded(front: Front, text: str, shown: Sequence[PictureLike] = (), *, special: bool = True) -> IntArray:
    """Return the token ids of a text with a marker for each picture, as a request has them."""
    pictures = PICTURES.of(front) if shown else None
    spelled = text if pictures is None else pictures.spelled(text, shown)
    token_ids = np.asarray(front.tokenizer.encode(spelled, add_special_tokens=special), np.int32)
    return token_ids if pictures is None else _expanded(token_ids, shown, pictures)


def placed(
    token_ids: IntArray, shown: Sequence[PictureLike], rows: Sequence[EncodedRows], pictures: PicturesLike
) -> PromptRows:
    """Return the places of pictures in a prompt. Raises `InvalidRequest` if its tokens are not theirs."""
    spans, parts, done = list[RowSpan](), list[Any](), [0] * len(shown)
    for span, index in _spans(token_ids, shown, pictures):
        first = done[index]
        done[index] = first + span.stop - span.start
        spans.append(span)
        parts.append(rows[index].rows[:, first : done[index]])
    coordinates, offset = pictures.use(token_ids, [(span.start, span.stop) for span in spans], shown)
    described = origins_in_words([own.origin for own in rows])
    grids = PictureGrids(tuple(tuple(picture.grids) for picture in shown))
    return PromptRows(
        tuple(spans), tuple(parts), coordinates, offset, pictures.whole, count=len(shown), described=described,
        source=grids,
    )  # fmt: skip


def _spans(token_ids: IntArray, shown: Sequence[PictureLike], pictures: PicturesLike) -> Iterator[tuple[RowSpan, int]]:
    """Yield the places of pictures in a prompt, each with the index of its picture, which may have several."""
    places = np.flatnonzero(token_ids == pictures.token)
    counts = [pictures.counts(picture) for picture in shown]
    if len(places) != sum(map(sum, counts)):
        raise _miscounted(len(places), sum(map(sum, counts)))
    first = 0
    for index, (picture, lengths) in enumerate(zip(shown, counts, strict=True)):
        for length in lengths:
            start, stop = int(places[first]), int(places[first + length - 1]) + 1
            if stop - start != length:
                raise _miscounted(length, stop - start)
            yield RowSpan(start, stop, picture.digest), index
            first += length


def _expanded(token_ids: IntArray, shown: Sequence[PictureLike], pictures: PicturesLike) -> IntArray:
    repeats = np.ones(len(token_ids), np.int64)
    places = np.flatnonzero(token_ids == pictures.token)
    lengths = [length for picture in shown for length in pictures.counts(picture)]
    if len(places) != len(lengths):
        raise _miscounted(len(places), len(lengths))
    repeats[places] = lengths
    return np.repeat(token_ids, repeats)


def _miscounted(places: int, expected: int) -> InvalidRequest:
    if not expected:
        fix = "Pass a picture for each place as images=…, or leave the model's own tokens of pictures out of texts"
        return InvalidRequest(
            "images", None, f"has no pictures, and the prompt has {words.count(places, 'place')} for them", fix
        )
    problem = f"do not fit the prompt, which has {places} places for them instead of {expected}"
    fix = "Pass the prompt's pictures as images=…, and leave the model's own tokens of pictures out of texts"
    return InvalidRequest("images", f"{expected} places", problem, fix)
