"""Dispatch: wires the four tasks together and runs them until everything has drained.

    submissions          requests              turns
    ──────────▶ intake ──────────▶ schedule ◀────────▶ step ── device thread
                                    │   ▲    outcomes
                             events ▼   │ stop strings
                                 detokenize ──▶ mailboxes

A request goes from left to right, once. Draining goes the same way: intake ends with its inbox and tells schedule,
schedule ends after its last request and closes the streams of the other two.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio

from rekindle._src.core.records import FinishReason, Request
from rekindle._src.dispatch import detokenize, intake, schedule, step
from rekindle._src.dispatch.detokenize import Output
from rekindle._src.dispatch.device import DeviceThread
from rekindle._src.dispatch.mailbox import Mailbox, Relayed
from rekindle._src.dispatch.messages import Abort, Control, Engine, Events, ScheduleMessage, Submission, Turn
from rekindle._src.dispatch.relayed import RelayedOutput, Take
from rekindle._src.dispatch.root_cause import root_cause
from rekindle._src.dispatch.step_watchdog import StepWatchdog

Task = Callable[[], Coroutine[Any, Any, None]]


class Dispatch:
    """The four tasks of one session. Its methods are called on the loop that runs them and return at once.

    `places` is how many sequences the admission limiter lets in. A live sequence has at most three messages in the
    inbox of schedule (itself, an abort, a stop string), so sending there never waits and no two tasks wait for each
    other.
    """

    def __init__(self, engine: Engine, device: DeviceThread, places: int) -> None:
        self.engine = engine
        self.places: int = places
        self.outputs: dict[str, Output] = {}  # live sequences: intake adds, detokenize removes
        self.mailboxes: set[Mailbox] = set()  # of live submissions, tokenized or not
        self.watchdog = StepWatchdog(engine.scheduler, engine.runner, engine.config)
        self.observers: list[schedule.Observer] = [self.watchdog]  # called with every committed step
        self._submissions, submitted = anyio.create_memory_object_stream[Submission | Control](2 * places + 64)
        self._messages, self._inbox = anyio.create_memory_object_stream[ScheduleMessage](8 * places + 256)
        self._events, happened = anyio.create_memory_object_stream[Events](1)
        from_intake, from_detokenize = self._messages.clone(), self._messages.clone()
        self._streams: list[Any] = [submitted, self._inbox, self._events, happened, from_intake, from_detokenize]
        self._tasks: tuple[Task, ...] = (
            partial(intake.run, submitted, from_intake, engine, self.outputs),
            *self._engine_tasks(device),
            partial(detokenize.run, happened, from_detokenize, self.outputs),
        )

    def _engine_tasks(self, device: DeviceThread) -> tuple[Task, ...]:
        """Make the tasks between requests and events: here schedule and step."""
        engine, from_step = self.engine, self._messages.clone()
        turns, turned = anyio.create_memory_object_stream[Turn](1)
        self._streams += [turns, turned, from_step]
        return (
            partial(
                schedule.run,
                self._inbox,
                turns,
                self._events,
                engine.scheduler,
                engine.recover,
                self.observers,
                self.watchdog.rest,
            ),
            partial(step.run, turned, from_step, engine.runner, device, self.watchdog),
        )

    async def run(self) -> None:
        """Run the tasks until they have drained. Raises a task's own error, never an ExceptionGroup."""
        try:
            async with anyio.create_task_group() as watching:
                watching.start_soon(self.watchdog.run)
                async with anyio.create_task_group() as group:
                    for task in self._tasks:
                        group.start_soon(task)
                watching.cancel_scope.cancel()
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
