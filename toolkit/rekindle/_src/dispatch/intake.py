"""Intake: turns submissions into validated, tokenized requests with their seeds drawn.

What an option needs beyond that is up to its capability; see capability.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rekindle._src.core.contracts import TokenizerLike
from rekindle._src.core.own_failure import close_each, own_failure
from rekindle._src.core.records import FinishReason, IntArray, Request
from rekindle._src.dispatch.backend import Control, Drain, Front, ScheduleMessage, Submission, next_waiting
from rekindle._src.dispatch.capabilities import NO_RESOURCES, Capabilities, Resources
from rekindle._src.dispatch.capability import ReadPrompt
from rekindle._src.dispatch.detokenize import Output, OutputState
from rekindle._src.scheduling.sequence import how_to_fit
from rekindle.errors import PromptTooLong

LONG_TEXT = 20_000  # characters; encoding more takes over 5 ms, which a worker thread spends rather than the loop
AT_A_TIME = 32  # requests that are taken in before those that run get a step: 1,000 would take half a second
AT_ONCE = 2  # long prompts that are rendered and encoded at a time
_PROBED = 8  # characters per token of the limit: a beginning that shows that a text is far too long
_AT_A_CUT = 256  # extra tokens that a cut within a word may give a text's beginning


async def run(
    inbox: MemoryObjectReceiveStream[Submission | Control],
    outbox: MemoryObjectSendStream[ScheduleMessage],
    front: Front,
    outputs: dict[str, Output],
    capabilities: Capabilities,
) -> None:
    """Hand requests and controls on to schedule until the inbox ends, then tell it to drain."""
    intake = _Intake(outbox, front, outputs, capabilities)
    async with inbox, outbox:
        async with anyio.create_task_group() as group:
            async for first in inbox:
                message: Submission | Control | None = first
                # Everything that waits is handed on before schedule runs again, so that it can run in one step; next to
                # requests that run, a part of it.
                taken, others = 0, bool(outputs)
                while message is not None:
                    if not isinstance(message, Submission):
                        await intake.none_apart()  # a control overtakes only submissions that wait for long
                        outbox.send_nowait(message)
                    elif intake.at_once(message):
                        await intake.hand_on(message)
                        taken += max(1, len(message.mailbox.request_ids))  # one that was refused took its time, too
                        if others and taken >= AT_A_TIME:
                            await anyio.lowlevel.checkpoint()
                            taken, others = 0, bool(outputs)
                    elif intake.overtaken(message):
                        group.start_soon(intake.hand_on, message)
                    else:
                        intake.apart += 1
                        group.start_soon(intake.hand_on_apart, message)
                    message = next_waiting(inbox)
        outbox.send_nowait(Drain())


def _is_long(submission: Submission) -> bool:
    """True if rendering or encoding the prompt takes so long that other submissions go on meanwhile."""
    return submission.long or (submission.text is not None and len(submission.text) >= LONG_TEXT)


class _Intake:
    def __init__(
        self,
        outbox: MemoryObjectSendStream[ScheduleMessage],
        front: Front,
        outputs: dict[str, Output],
        capabilities: Capabilities,
    ) -> None:
        self._outbox, self._front, self._outputs = outbox, front, outputs
        self._seeds, self._turns = random.Random(front.config.seed), Turns(AT_ONCE)
        self._capabilities = capabilities
        self.apart = 0  # submissions that are taken in while others go on, because they wait or their prompts are long
        self._none_apart = anyio.Event()

    def at_once(self, submission: Submission) -> bool:
        """True if a submission is taken in before the next one. An error here is raised again when it is taken in."""
        try:
            return not (_is_long(submission) or self._capabilities.waits(submission, self._front))
        except Exception:
            return False

    def overtaken(self, submission: Submission) -> bool:
        """True if controls overtake a submission, which waits for long."""
        return self._capabilities.overtaken(submission, self._front)

    async def none_apart(self) -> None:
        while self.apart:
            await self._none_apart.wait()

    async def hand_on_apart(self, submission: Submission) -> None:
        """Take in one submission while others go on."""
        try:
            await self.hand_on(submission)
        finally:
            self.apart -= 1
            if not self.apart:
                self._none_apart.set()
                self._none_apart = anyio.Event()

    async def hand_on(self, submission: Submission) -> None:
        mailbox, front, capabilities = submission.mailbox, self._front, self._capabilities
        states: list[OutputState] = []
        try:
            mailbox.check_waited_for()
            with anyio.CancelScope() as taking_in:  # an abort leaves every line, and lets go of the prompt's files
                mailbox.on_abandon = taking_in.cancel
                submission, token_ids = await self._fitted(submission)
                mailbox.prompt, mailbox.prompt_ids = submission.text, token_ids
                mailbox.extensions = submission.extensions
                resources = await capabilities.resources(submission, front)
                requests = prepare(submission, token_ids, front, self._seeds, capabilities, resources)
                mailbox.seed = requests[0].sampling.seed
                decode = text_of_tokens(front.tokenizer)
                for request in requests:
                    parts = capabilities.parts(request, submission, front)
                    visible = frozenset[str]().union(*(part.visible for part in parts))
                    detokenizer = front.detokenizer(request.sampling, visible)
                    states.append(
                        OutputState(request, mailbox, submission.text, detokenizer, decode, front.program_wait, parts)
                    )
                for part in [part for output in states for part in output.parts if part.opens]:
                    await part.open(mailbox)
            mailbox.check_waited_for()
        except BaseException as error:
            for output in states:
                close_each(f"request {output.request.id}", *output.closings(FinishReason.FAILED))
            mailbox.complete_all(own_failure(error, "the prompt could not be taken in"))
            return
        finally:
            mailbox.on_abandon = None
        # No await since the check, so an abort was either seen there or comes after the requests in schedule's inbox.
        for output in states:
            self._outputs[output.request.id] = output
            mailbox.request_ids.append(output.request.id)
            self._outbox.send_nowait(output.request)

    async def _fitted(self, submission: Submission) -> ReadPrompt:
        """Return the submission with the prompt that fits, the only one of almost all submissions."""
        fit = self._capabilities.fit(submission, self._front)
        step = await fit.next(None)
        while isinstance(step, Submission):
            read: ReadPrompt | PromptTooLong
            try:
                read = await self._read(step)
            except PromptTooLong as error:
                read = error
            step = await fit.next(read)
        return step

    async def _read(self, submission: Submission) -> ReadPrompt:
        """Render and encode a prompt."""
        front, capabilities = self._front, self._capabilities
        async with self._turns.turn(submission.caller) if _is_long(submission) else contextlib.nullcontext():
            submission = await render_chat(submission)
            spelled = capabilities.spelled(submission, front)
            return ReadPrompt(submission, capabilities.expanded(spelled, await tokenize(spelled, front), front))


async def render_chat(submission: Submission) -> Submission:
    """Return the submission with its prompt's text. Raises `RequestAborted` if it was cancelled."""
    submission.mailbox.check_waited_for()
    if submission.render is None:
        return submission
    submission.mailbox.prompt = await anyio.to_thread.run_sync(submission.render)
    submission.mailbox.check_waited_for()
    return submission._replace(text=submission.mailbox.prompt)


def text_of_tokens(tokenizer: TokenizerLike) -> Callable[[Sequence[int]], str] | None:
    """Return a function from token ids to text with special tokens; None if the tokenizer knows only ids."""
    if not tokenizer.has_text:
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


async def tokenize(submission: Submission, front: Front) -> IntArray:
    """Return the prompt's token ids."""
    if submission.token_ids is not None:
        return submission.token_ids
    text, special = submission.text, submission.add_special_tokens
    assert text is not None, "a submission has text or token ids"

    def encode() -> IntArray:
        check_characters(text, front)
        check_beginning(text, front)
        return np.asarray(front.tokenizer.encode(text, add_special_tokens=special), np.int32)

    quick = len(text) < LONG_TEXT and not front.tokenizer.encodes_apart
    return encode() if quick else await anyio.to_thread.run_sync(encode)


def check_characters(text: str, front: Front) -> None:
    """Raise `PromptTooLong` for a text with more characters than `max_model_len` tokens can stand for."""
    limit = front.config.max_model_len
    if limit is None or len(text) <= limit or front.characters_per_token is None:
        return
    most = front.characters_per_token()
    if len(text) > limit * most:
        raise _too_long(text, f"has at least {-(-len(text) // most):,} tokens", limit, front)


def check_beginning(text: str, front: Front) -> None:
    """Raise `PromptTooLong` if the beginning of a text alone has more than `max_model_len` tokens."""
    limit = front.config.max_model_len
    if limit is None or len(text) <= 2 * _PROBED * limit + LONG_TEXT:
        return
    length = _PROBED * limit
    count = len(front.tokenizer.encode(text[:length], add_special_tokens=False))
    if count > limit + _AT_A_CUT:
        raise _too_long(
            text, f"has {count:,} tokens in the first {length:,} of its {len(text):,} characters", limit, front
        )


def check_count(tokens: int, front: Front) -> None:
    """Raise `PromptTooLong` if so many tokens are more than `max_model_len`."""
    limit = front.config.max_model_len
    if limit is not None and tokens > limit:
        problem = f"is longer than max_model_len, which is {limit:,}"
        raise PromptTooLong("prompt", f"{tokens:,} tokens", problem, how_to_fit(limit, front.longest))


def _too_long(text: str, problem: str, limit: int, front: Front) -> PromptTooLong:
    problem = f"{problem}, and max_model_len is {limit:,}"
    return PromptTooLong("prompt", text[:80], problem, how_to_fit(limit, front.longest))


def prepare(
    submission: Submission,
    token_ids: IntArray,
    front: Front,
    seeds: random.Random,
    capabilities: Capabilities,
    resources: Resources = NO_RESOURCES,
) -> list[Request]:
    """Return one request for each of the n sequences; sequence i of a seeded submission has seed + i."""
    sampling = submission.sampling
    extensions = capabilities.admit(submission, token_ids, front, resources)
    seed = sampling.seed if sampling.seed is not None else seeds.getrandbits(32)
    stop_ids, eos_ids = frozenset(sampling.stop_token_ids), front.eos_ids(sampling)
    return [
        Request(
            id=submission.id if sampling.n == 1 else f"{submission.id}.{index}",
            token_ids=token_ids,
            sampling=dataclasses.replace(sampling, seed=(seed + index) % 2**63),
            stop_ids=stop_ids,
            eos_ids=eos_ids,
            arrival=submission.arrival,
            group=submission.id,
            index=index,
            caller=submission.caller,
            messages=submission.messages,
            extensions=extensions.another() if index else extensions,
        )
        for index in range(sampling.n)
    ]


class Turns:
    """Lets `places` tasks of one loop work at a time. Waiting callers take turns, each with its oldest task first."""

    def __init__(self, places: int) -> None:
        self.free = places
        self.waiting: dict[str, deque[anyio.Event]] = {}  # the caller whose turn is next stands first

    @asynccontextmanager
    async def turn(self, caller: str = "") -> AsyncIterator[None]:
        """Work within the block, when there is a place. A task that is cancelled while it waits leaves the line."""
        await self._enter(caller)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, caller: str) -> None:
        if self.free:
            self.free -= 1
            return
        begin = anyio.Event()
        line = self.waiting.setdefault(caller, deque())
        line.append(begin)
        try:
            await begin.wait()
        except BaseException:
            if begin.is_set():  # its turn came in the meantime
                self._leave()
            else:
                line.remove(begin)
                if not line and self.waiting.get(caller) is line:
                    del self.waiting[caller]
            raise

    def _leave(self) -> None:
        if not self.waiting:
            self.free += 1
            return
        caller = next(iter(self.waiting))
        line = self.waiting.pop(caller)
        line.popleft().set()
        if line:
            self.waiting[caller] = line  # to the end of the line, after all other callers
