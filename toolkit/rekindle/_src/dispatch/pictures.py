"""Pictures as a capability of requests: their text, their tokens, their rows, and their places in the prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rekindle._src.core.extension import Extension
from rekindle._src.core.pictures import PictureSpan, PictureUse
from rekindle._src.core.records import IntArray, Request
from rekindle._src.dispatch.backend import Front, PictureLike, PicturesLike, Submission
from rekindle._src.dispatch.capability import Capability, Fields, Part, SequenceEnd
from rekindle._src.scheduling.sequence import how_to_fit
from rekindle.errors import InvalidRequest, PromptTooLong


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PromptPictures(Extension):
    """Of a submission: the pictures of its prompt, in their order."""

    pictures: tuple[PictureLike, ...]


class PictureIntake(Capability):
    """Pictures in the prompt. In its text each has a marker, which is spelled out; in token ids they are already."""

    def spell(self, submission: Submission, text: str, front: Front) -> str:
        given = submission.extensions.get(PromptPictures)
        if front.pictures is None or given is None:
            return text
        return front.pictures.spelled(text, given.pictures)

    def expand(self, submission: Submission, token_ids: IntArray, front: Front) -> IntArray:
        given = submission.extensions.get(PromptPictures)
        if given is None or front.pictures is None or submission.token_ids is not None:
            return token_ids
        repeats = np.ones(len(token_ids), np.int64)
        places = np.flatnonzero(token_ids == front.pictures.token)
        lengths = [length for picture in given.pictures for length in front.pictures.counts(picture)]
        if len(places) != len(lengths):
            raise _miscounted(len(places), len(lengths))
        repeats[places] = lengths
        return np.repeat(token_ids, repeats)

    def waits(self, submission: Submission, front: Front) -> bool:
        given, pictures = submission.extensions.get(PromptPictures), front.pictures
        return given is not None and pictures is not None and not all(map(pictures.known, given.pictures))

    def overtaken(self, submission: Submission, front: Front) -> bool:
        return self.waits(submission, front)

    async def resource(self, submission: Submission, front: Front) -> list[Any]:
        given, pictures = submission.extensions.get(PromptPictures), front.pictures
        if given is None or pictures is None:
            return []
        mailbox, limit = submission.mailbox, front.config.max_model_len
        length = 0 if mailbox.prompt_ids is None else len(mailbox.prompt_ids)
        if limit is not None and length > limit:  # before anything is encoded for nothing
            problem = f"is longer than max_model_len, which is {limit}"
            raise PromptTooLong("prompt", f"{length} tokens", problem, how_to_fit(limit, front.longest))
        return [await pictures.encoded(picture, lambda: not mailbox.abandoned) for picture in given.pictures]

    def admit(
        self, submission: Submission, token_ids: IntArray, front: Front, resource: list[Any]
    ) -> PictureUse | None:
        given, pictures = submission.extensions.get(PromptPictures), front.pictures
        if given is None:
            use = submission.extensions.get(PictureUse)
            if use is None and pictures is not None and (token_ids == pictures.token).any():
                raise _miscounted(int((token_ids == pictures.token).sum()), 0)
            return use
        if pictures is None:
            fix = "Open a model that reads pictures"
            raise InvalidRequest("images", f"{len(given.pictures)} pictures", "can't be read by this model", fix)
        use = placed(token_ids, given.pictures, resource, pictures)
        most = front.config.max_tokens_per_step - front.config.max_requests
        longest = max((span.stop - span.start for span in use.spans), default=0)
        if use.whole and longest > most:
            problem = f"has {longest} tokens, which are computed in one step, and that has room for {most}"
            fix = f"Open with max_tokens_per_step={longest + front.config.max_requests} or more"
            raise InvalidRequest("images", "a picture", problem, fix)
        return use

    def part(self, request: Request, submission: Submission, front: Front) -> Part | None:
        given = submission.extensions.get(PromptPictures)
        return None if given is None else PictureOutput(given.pictures)


class PictureOutput(Part):
    """Names the prompt's pictures in the completion, so that it can be continued."""

    __slots__ = ("_pictures",)

    def __init__(self, pictures: tuple[PictureLike, ...]) -> None:
        self._pictures = pictures

    def completion(self, end: SequenceEnd) -> Fields:
        return {"images": self._pictures}


def placed(
    token_ids: IntArray, shown: Sequence[PictureLike], rows: Sequence[Any], pictures: PicturesLike
) -> PictureUse:
    """Return the places of pictures in a prompt. Raises `InvalidRequest` if its tokens are not theirs."""
    places = np.flatnonzero(token_ids == pictures.token)
    counts = [pictures.counts(picture) for picture in shown]
    if len(places) != sum(map(sum, counts)):
        raise _miscounted(len(places), sum(map(sum, counts)))
    runs: list[tuple[int, int]] = []
    spans: list[PictureSpan] = []
    parts: list[Any] = []
    first = 0
    for picture, lengths, own in zip(shown, counts, rows, strict=True):
        done = 0
        for length in lengths:
            start, stop = int(places[first]), int(places[first + length - 1]) + 1
            if stop - start != length:
                raise _miscounted(length, stop - start)
            runs.append((start, stop))
            spans.append(PictureSpan(start, stop, picture.digest))
            parts.append(own[:, done : done + length])
            first, done = first + length, done + length
    coordinates, offset = pictures.use(token_ids, runs, shown)
    return PictureUse(tuple(spans), tuple(parts), coordinates, offset, pictures.whole)


def _miscounted(places: int, expected: int) -> InvalidRequest:
    problem = f"do not fit the prompt, which has {places} places for them instead of {expected}"
    return InvalidRequest(
        "images", f"{expected} places", problem, "Leave the model's own tokens of pictures out of texts"
    )
