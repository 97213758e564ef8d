"""Dispatch: wires the tasks together and runs them until everything has drained.

    submissions          requests   ┌ backend ─────────────────────────────┐
    ──────────▶ intake ──────────▶  │          turns                       │
                                    │ schedule ◀────────▶ step ── device thread
                                    │          outcomes                    │
                                    └──┬───▲───────────────────────────────┘
                                events ▼   │ stop strings
                                    detokenize ──▶ mailboxes

A request goes from left to right, once. Draining goes the same way: intake ends with its inbox and tells the backend,
the backend ends after its last request and closes the stream to detokenize. The backend of the picture is an `Engine`;
that of a fleet has replicas in place of schedule and step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio

from rekindle._src.core.own_failure import root_cause
from rekindle._src.core.records import FinishReason, Request
from rekindle._src.dispatch import detokenize, intake
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.detokenize import Output, RelayedOutput, Take
from rekindle._src.dispatch.device import DeviceThread
from rekindle._src.dispatch.mailbox import Mailbox, Relayed
from rekindle._src.dispatch.messages import Abort, Control, Events, ScheduleMessage, Submission


class Dispatch:
    """The tasks of one session or fleet. Its methods are called on the loop that runs them and return at once.

    Its streams have room for all sequences that the admission limiter lets in. A live sequence has at most three
    messages in the backend's inbox (itself, an abort, a stop string), so sending there never waits and no two tasks
    wait for each other.
    """

    def __init__(self, front: Front, device: DeviceThread) -> None:
        self.backend = front.backend
        self.outputs: dict[str, Output] = {}  # live sequences: intake adds, detokenize removes
        self.mailboxes: set[Mailbox] = set()  # of live submissions, tokenized or not
        bound = self.backend.bound
        self._submissions, submitted = anyio.create_memory_object_stream[Submission | Control](2 * bound + 64)
        self._messages, inbox = anyio.create_memory_object_stream[ScheduleMessage](8 * bound + 256)
        events, happened = anyio.create_memory_object_stream[Events](1)
        from_intake, from_backend, from_detokenize = (self._messages.clone() for _ in range(3))
        self._streams: tuple[Any, ...] = (
            submitted,
            inbox,
            events,
            happened,
            from_intake,
            from_backend,
            from_detokenize,
        )
        self._tasks = (
            partial(intake.run, submitted, from_intake, front, self.outputs),
            partial(self.backend.serve, inbox, from_backend, events, device),
            partial(detokenize.run, happened, from_detokenize, self.outputs),
        )

    async def run(self) -> None:
        """Run the tasks until they have drained. Raises a task's own error, never an ExceptionGroup."""
        try:
            async with anyio.create_task_group() as group:
                for task in self._tasks:
                    group.start_soon(task)
        except BaseExceptionGroup as group_error:
            raise root_cause(group_error) from None
        finally:
            for stream in (self._submissions, self._messages, *self._streams):
                stream.close()

    def submit(self, submission: Submission) -> None:
        self.mailboxes.add(submission.mailbox)
        submission.mailbox.on_complete = self.mailboxes.discard
        self._submissions.send_nowait(submission)

    def relay(self, request: Request, mailbox: Mailbox, take: Take) -> None:
        """Run a request that another process has taken in: `take` gets its events, on this loop."""
        if mailbox.abandoned:  # it was aborted before it came here
            mailbox.complete(0, Relayed(FinishReason.ABORTED))
            return
        self.mailboxes.add(mailbox)
        mailbox.on_complete = self.mailboxes.discard
        mailbox.request_ids.append(request.id)
        self.outputs[request.id] = RelayedOutput(request, mailbox, take)
        self._messages.send_nowait(request)

    def send(self, message: Control) -> None:
        self._submissions.send_nowait(message)

    def abort(self, mailbox: Mailbox) -> None:
        """End the sequences of one submission wherever they are."""
        if not mailbox.abandoned and not mailbox.ended:
            mailbox.abandoned = True  # intake drops the submission if it has not handed it on
            for request_id in mailbox.request_ids:
                self._messages.send_nowait(Abort(request_id))

    def drain(self) -> None:
        """Take no more submissions, and let `run` return once the last request has ended."""
        self._submissions.close()

    def abort_all(self, error: BaseException) -> None:
        """End every live request with `error` now; pages come back as after any abort."""
        for mailbox in tuple(self.mailboxes):
            self.abort(mailbox)
        self.complete_all(error)

    def complete_all(self, error: BaseException) -> None:
        """Give every caller `error`, whatever the tasks still do."""
        self.outputs.clear()
        for mailbox in tuple(self.mailboxes):
            mailbox.complete_all(error)
