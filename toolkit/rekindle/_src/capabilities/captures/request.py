"""Taps as a capability of requests: sites to read and change inside the model, and the captured output."""

from __future__ import annotations

import dataclasses

import anyio

from rekindle._src.capabilities.captures.files import CaptureFiles
from rekindle._src.capabilities.captures.follower import CAPTURED
from rekindle._src.capabilities.captures.tapped import NAME_A_FOLDER, RequestTaps, TapFacts, resolve
from rekindle._src.capabilities.captures.writer import CaptureWriter, Doors
from rekindle._src.core.captured import Backlog, Captured, CapturedPart
from rekindle._src.core.pictures import PictureRun, runs_of
from rekindle._src.core.prompt_rows import PromptRows
from rekindle._src.core.records import FinishReason, IntArray, Request, TokenEvent
from rekindle._src.dispatch.backend import Front, SessionService, Submission
from rekindle._src.dispatch.capability import Capability, Fields, KeyedPrompt, Part, SequenceEnd
from rekindle._src.dispatch.threads import Mailbox, OneShot
from rekindle.errors import InvalidRequest

PATIENCE = 10.0  # seconds that a request waits for its folder
LOOK_SECONDS = 0.25  # between two checks whether a waiting request was cancelled

TAPS: SessionService[TapFacts] = SessionService("taps")  # what requests may read and change inside the model


def steering_of(front: Front) -> tuple[str, ...]:
    """Return the names of changes that requests may use."""
    facts = TAPS.of(front)
    return () if facts is None else tuple(facts.steering)


class TapIntake(Capability[None]):
    """The taps of a request: captures, changes and functions of the session."""

    def __init__(self) -> None:
        self._doors = Doors()

    def waits(self, submission: Submission, front: Front) -> bool:
        """True if the captures need a new folder."""
        capture = submission.sampling.capture
        return capture is not None and capture.into is not None

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: None) -> RequestTaps | None:
        sampling = submission.sampling
        if not sampling.looks_inside:
            return None
        tapped = resolve(
            sampling.capture, sampling.steer, sampling.patch, len(token_ids), TAPS.of(front), sampling.taps
        )
        if tapped is None or tapped.into is None or not tapped.keys:
            return tapped
        return dataclasses.replace(tapped, backlog=Backlog())

    def keying(self, prompt: KeyedPrompt, front: Front) -> RequestTaps | None:
        sampling = prompt.sampling
        if not sampling.looks_inside:
            return None
        length = len(prompt.token_ids)
        return resolve(sampling.capture, sampling.steer, sampling.patch, length, TAPS.of(front), sampling.taps)

    def part(self, request: Request, submission: Submission, front: Front) -> Part | None:
        tapped = request.extensions.get(RequestTaps)
        if tapped is None or not tapped.keys:
            return None
        pictures = runs_of(request.extensions.get(PromptRows))
        if tapped.backlog is None:
            return CaptureOutput(request, tapped, pictures)
        length = request.prompt_length + max(0, request.sampling.max_tokens - 1)
        files = CaptureFiles(tapped, length, pictures, quiet=front.config.quiet)
        return CaptureFileOutput(request, CaptureWriter(files, tapped.backlog, self._doors), self._doors)


def _end(request: Request, count: int) -> int:
    """Return the position after the last capture of a sequence with `count` tokens: steps after a stop string are not
    part of the output.
    """
    return request.prompt_length + max(0, count - 1)


class CaptureOutput(Part[None]):
    """Captures that are delivered as they come."""

    __slots__ = ("_delivered", "_parts", "_pictures", "_request", "_tapped")

    def __init__(self, request: Request, tapped: RequestTaps, pictures: tuple[PictureRun, ...]) -> None:
        self._request, self._tapped, self._pictures = request, tapped, pictures
        self._parts: list[CapturedPart] = []
        self._delivered = 0  # parts

    def take(self, event: TokenEvent) -> None:
        self._parts += CAPTURED.of(event)

    def delta(self, text: str, start: int, stop: int, reason: FinishReason | None) -> Fields:
        first, self._delivered = self._delivered, len(self._parts)
        return {"captured": self._joined(first)}

    def completion(self, end: SequenceEnd) -> Fields:
        joined = self._joined()
        return {"captured": None if joined is None else joined.before(_end(self._request, len(end.tokens)))}

    def _joined(self, first: int = 0) -> Captured | None:
        return Captured.joined(self._parts[first:], self._tapped.layers, self._pictures)


class CaptureFileOutput(Part[Captured]):
    """Captures that are written into a folder as they come; the completion waits until its files are whole."""

    __slots__ = ("_captured", "_doors", "_request", "_writer")
    opens = True
    last_work = "its captures were written"

    def __init__(self, request: Request, writer: CaptureWriter, doors: Doors) -> None:
        self._request, self._writer, self._doors = request, writer, doors
        self._captured: Captured | None = None

    async def open(self, mailbox: Mailbox) -> None:
        """Make the folder. Raises `InvalidRequest` if it can't be made within `PATIENCE`, and `Busy` if the folders of
        other requests do not answer for as long."""
        writer, doors = self._writer, self._doors
        patience = anyio.current_time() + PATIENCE
        while not doors.try_enter(writer):
            if doors.stuck(PATIENCE) or anyio.current_time() > patience:
                raise doors.refusal(PATIENCE)
            with anyio.move_on_after(LOOK_SECONDS):
                await doors.place()
            mailbox.check_waited_for()
        reply = writer.begin()
        while not reply.filled:
            with anyio.move_on_after(LOOK_SECONDS):
                await reply.get()
            mailbox.check_waited_for()
            if not reply.filled and anyio.current_time() > patience:
                problem = f"has not answered for {PATIENCE:.0f} s"
                raise InvalidRequest("capture", writer.folder, problem, NAME_A_FOLDER)
        await reply.get()
        doors.leave(writer)

    def take(self, event: TokenEvent) -> None:
        for part in CAPTURED.of(event):
            self._writer.add(part)

    def ending(self, count: int) -> OneShot[Captured]:
        return self._writer.finish(_end(self._request, count))

    def take_over(self, value: Captured) -> None:
        self._captured = value

    def completion(self, end: SequenceEnd) -> Fields:
        return {"captured": self._captured}

    def close(self, reason: FinishReason, count: int) -> None:
        """Its captures stay as far as they came, and are removed if it failed."""
        self._writer.leave(None if reason is FinishReason.FAILED else _end(self._request, count))
