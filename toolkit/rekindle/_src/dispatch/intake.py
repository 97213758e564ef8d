"""Intake: turns submissions into validated, tokenized requests with their seeds drawn and their grammars compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import numpy as np
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rekindle._src.core.capture_files import CaptureFiles
from rekindle._src.core.contracts import TokenizerLike
from rekindle._src.core.own_failure import close_each, own_failure
from rekindle._src.core.records import FinishReason, GuideLike, IntArray, Request
from rekindle._src.core.sampling import Sampling
from rekindle._src.core.tapped import NAME_A_FOLDER, Backlog, RequestTaps, resolve
from rekindle._src.dispatch.backend import (
    Control,
    Drain,
    Front,
    GrammarLike,
    GrammarsLike,
    ScheduleMessage,
    Submission,
    next_waiting,
)
from rekindle._src.dispatch.capture_writer import CaptureWriter, Doors
from rekindle._src.dispatch.detokenize import Output, OutputState, TextStructure
from rekindle._src.dispatch.threads import Mailbox, OneShot
from rekindle._src.scheduling.sequence import how_to_fit
from rekindle.errors import InvalidRequest, PromptTooLong, RequestAborted

if TYPE_CHECKING:
    from rekindle._src.structured.grammar import Reasoning
    from rekindle._src.structured.spec import Spec
    from rekindle._src.structured.token_rules import TokenRules

LONG_TEXT = 20_000  # characters; encoding more takes over 5 ms, which a worker thread spends rather than the loop
AT_ONCE = 2  # long prompts that are rendered and encoded at a time
_PROBED = 8  # characters per token of the limit: a beginning that shows that a text is far too long
_AT_A_CUT = 256  # extra tokens that a cut within a word may give a text's beginning


async def run(
    inbox: MemoryObjectReceiveStream[Submission | Control],
    outbox: MemoryObjectSendStream[ScheduleMessage],
    front: Front,
    outputs: dict[str, Output],
) -> None:
    """Hand requests and controls on to schedule until the inbox ends, then tell it to drain."""
    intake = _Intake(outbox, front, outputs)
    async with inbox, outbox:
        async with anyio.create_task_group() as group:
            async for first in inbox:
                message: Submission | Control | None = first
                # Everything that waits is handed on before schedule runs again, so that it can run in one step.
                while message is not None:
                    if not isinstance(message, Submission):
                        await intake.none_apart()  # a control never overtakes a submission
                        outbox.send_nowait(message)
                    elif _at_once(message, front):
                        await intake.hand_on(message)
                    else:
                        intake.apart += 1
                        group.start_soon(intake.hand_on_apart, message)
                    message = next_waiting(inbox)
        outbox.send_nowait(Drain())


def _at_once(submission: Submission, front: Front) -> bool:
    """True if a submission is taken in before the next one. An error here is raised again when it is taken in."""
    try:
        return compiled(submission, front) and not _is_long(submission) and not _waits_for_disk(submission)
    except Exception:
        return False


def _is_long(submission: Submission) -> bool:
    """True if rendering or encoding the prompt takes so long that other submissions go on meanwhile."""
    return submission.long or (submission.text is not None and len(submission.text) >= LONG_TEXT)


def _waits_for_disk(submission: Submission) -> bool:
    """True if a folder has to be made for what it captures."""
    capture = submission.sampling.capture
    return capture is not None and capture.into is not None


class _Intake:
    def __init__(
        self, outbox: MemoryObjectSendStream[ScheduleMessage], front: Front, outputs: dict[str, Output]
    ) -> None:
        self._outbox, self._front, self._outputs = outbox, front, outputs
        self._seeds, self._turns, self._doors = random.Random(front.config.seed), Turns(AT_ONCE), Doors()
        self.apart = 0  # submissions that are taken in while others go on, because of their grammars or long prompts
        self._none_apart = anyio.Event()

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
        mailbox, front = submission.mailbox, self._front
        states: list[OutputState] = []
        try:
            async with self._turns.turn(submission.caller) if _is_long(submission) else contextlib.nullcontext():
                submission = await _render(submission)
                token_ids = await tokenize(submission, front)
            mailbox.prompt_ids = token_ids
            grammar = await grammar_of(submission, front)
            requests = prepare(submission, token_ids, front, self._seeds, grammar)
            decode = text_of_tokens(front.tokenizer)
            states += [_output(request, submission, token_ids, front, decode, self._doors) for request in requests]
            for output in states:
                if output.writer is not None:
                    await _begin_captures(output.writer, mailbox, self._doors)
            _check_waited_for(submission)
        except BaseException as error:
            for output in states:
                close_each(f"request {output.request.id}", partial(output.close, FinishReason.FAILED))
            mailbox.complete_all(own_failure(error, "the prompt could not be taken in"))
            return
        # No await since the check, so an abort was either seen there or comes after the requests in schedule's inbox.
        for output in states:
            self._outputs[output.request.id] = output
            mailbox.request_ids.append(output.request.id)
            self._outbox.send_nowait(output.request)


async def _render(submission: Submission) -> Submission:
    """Return the submission with its prompt's text. Raises `RequestAborted` if it was cancelled."""
    _check_waited_for(submission)
    if submission.render is None:
        return submission
    submission.mailbox.prompt = await anyio.to_thread.run_sync(submission.render)
    _check_waited_for(submission)
    return submission._replace(text=submission.mailbox.prompt)


def _check_waited_for(submission: Submission) -> None:
    _check_abandoned(submission.mailbox)


def _check_abandoned(mailbox: Mailbox) -> None:
    if mailbox.abandoned:
        raise RequestAborted("the request was cancelled before it was queued")


def _output(
    request: Request,
    submission: Submission,
    token_ids: IntArray,
    front: Front,
    decode: Callable[[Sequence[int]], str] | None,
    doors: Doors,
) -> OutputState:
    reply, sampling = submission.reply, request.sampling
    scanner = None
    if reply is not None:
        scanner = reply.scanner(submission.text or "", request.token_ids.tobytes(), sampling.seed)
    return OutputState(
        request,
        submission.mailbox,
        submission.text,
        front.detokenizer(sampling, frozenset() if reply is None else reply.visible),
        decode,
        front.program_wait,
        scanner=scanner,
        structured=covered_by(submission, token_ids, front),
        writer=_writer_of(request, front, doors),
    )


def _writer_of(request: Request, front: Front, doors: Doors) -> CaptureWriter | None:
    """Return the writer of a request that captures into a folder."""
    tapped = request.tapped
    if tapped is None or tapped.backlog is None:
        return None
    length = request.prompt_length + max(0, request.sampling.max_tokens - 1)
    return CaptureWriter(CaptureFiles(tapped, length, quiet=front.config.quiet), tapped.backlog, doors)


async def _begin_captures(writer: CaptureWriter, mailbox: Mailbox, doors: Doors) -> None:
    """Make the folder for a sequence's captures. Raises `InvalidRequest` if it can't be made within `PATIENCE`, and
    `Busy` if the folders of other requests do not answer for as long."""
    patience = anyio.current_time() + PATIENCE
    while not doors.try_enter(writer):
        if doors.stuck(PATIENCE) or anyio.current_time() > patience:
            raise doors.refusal(PATIENCE)
        with anyio.move_on_after(_LOOK_SECONDS):
            await doors.place()
        _check_abandoned(mailbox)
    reply = writer.begin()
    while not reply.filled:
        with anyio.move_on_after(_LOOK_SECONDS):
            await reply.get()
        _check_abandoned(mailbox)
        if not reply.filled and anyio.current_time() > patience:
            problem = f"has not answered for {PATIENCE:.0f} s"
            raise InvalidRequest("capture", writer.folder, problem, NAME_A_FOLDER)
    await reply.get()
    doors.leave(writer)


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
    """Raise `PromptTooLong` for a text whose beginning alone has more than `max_model_len` tokens."""
    limit = front.config.max_model_len
    if limit is None or len(text) <= 2 * _PROBED * limit + LONG_TEXT:
        return
    length = _PROBED * limit
    count = len(front.tokenizer.encode(text[:length], add_special_tokens=False))
    if count > limit + _AT_A_CUT:
        raise _too_long(
            text, f"has {count:,} tokens in the first {length:,} of its {len(text):,} characters", limit, front
        )


def _too_long(text: str, problem: str, limit: int, front: Front) -> PromptTooLong:
    problem = f"{problem}, and max_model_len is {limit:,}"
    return PromptTooLong("prompt", text[:80], problem, how_to_fit(limit, front.longest))


def prepare(
    submission: Submission,
    token_ids: IntArray,
    front: Front,
    seeds: random.Random,
    grammar: GrammarLike | None = None,
) -> list[Request]:
    """Return one request for each of the n sequences; sequence i of a seeded submission has seed + i."""
    sampling, vocab = submission.sampling, front.vocab_size
    if front.embedder.alone and submission.pooling is None:
        problem, fix = "is for embed only: its texts have no next token", "Use session.embed, or POST /v1/embeddings"
        raise InvalidRequest("model", front.model, problem, fix)
    if not len(token_ids):
        raise InvalidRequest("prompt", submission.text, "has no tokens", "Pass at least one character or token id")
    for field, ids in (
        ("prompt", token_ids),
        ("stop_token_ids", np.asarray(sampling.stop_token_ids, np.int64)),
        ("logit_bias", np.asarray(list(sampling.logit_bias), np.int64)),
        ("logprob_token_ids", np.asarray(sampling.logprob_token_ids, np.int64)),
        ("allowed_token_ids", np.asarray(sampling.allowed_token_ids or (), np.int64)),
    ):
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
            wrong = ids[(ids < 0) | (ids >= vocab)][0].item()
            raise InvalidRequest(field, wrong, "is not a token id of this model", f"Use ids from 0 to {vocab - 1}")
    for name in sampling.processors:
        if name not in front.processors:
            known = ", ".join(map(repr, front.processors)) or "none"
            fix = f"Give it to open(processors=[…]); known: {known}"
            raise InvalidRequest("processors", name, "is not a processor of this session", fix)
    adapter, altered = None, tuple[str, ...]()
    if sampling.adapter is not None:
        if front.adapters is None:
            fix = "Use a session of one device, opened with rekindle.open"
            raise InvalidRequest("adapter", sampling.adapter, "can't be used here", fix)
        adapter, altered = front.adapters.find(sampling.adapter)
    tapped = tapped_of(sampling, len(token_ids), front)
    if tapped is not None:
        altered = (*altered, *tapped.altered)
    policy = front.config.policy
    if sampling.priority and policy != "priority":
        raise InvalidRequest(
            "priority", sampling.priority, f"means nothing under policy={policy!r}", 'Open with policy="priority"'
        )
    seed = sampling.seed if sampling.seed is not None else seeds.getrandbits(32)
    eos_ids = frozenset() if sampling.ignore_eos else frozenset(front.tokenizer.eos_ids)
    rules = None
    if sampling.restricted:
        from rekindle._src.structured.token_rules import rules_of  # few requests need it

        rules = rules_of(sampling, front.tokenizer, vocab)
    return [
        Request(
            id=submission.id if sampling.n == 1 else f"{submission.id}.{index}",
            token_ids=token_ids,
            sampling=dataclasses.replace(sampling, seed=(seed + index) % 2**63),
            stop_ids=frozenset(sampling.stop_token_ids),
            eos_ids=eos_ids,
            arrival=submission.arrival,
            group=submission.id,
            index=index,
            pooling=submission.pooling,
            guide=guide_of(grammar, rules, submission, token_ids, front, eos_ids),
            caller=submission.caller,
            messages=submission.messages,
            adapter=adapter,
            altered=altered,
            tapped=with_backlog(tapped),
        )
        for index in range(sampling.n)
    ]


def with_backlog(tapped: RequestTaps | None) -> RequestTaps | None:
    """Return the taps of one sequence, with a backlog of its own if what it captures goes into files."""
    if tapped is None or tapped.into is None or not tapped.keys:
        return tapped
    return dataclasses.replace(tapped, backlog=Backlog())


def tapped_of(sampling: Sampling, prompt_length: int, front: Front) -> RequestTaps | None:
    """Return what a request reads and changes inside the model. Raise `InvalidRequest` for what can't be had."""
    if not sampling.looks_inside:
        return None
    return resolve(sampling.capture, sampling.steer, sampling.patch, prompt_length, front.taps, sampling.taps)


PATIENCE = 10.0  # seconds that a request waits for its grammar to begin to compile
_LOOK_SECONDS = 0.25  # between two checks whether a waiting request was cancelled
_NEAR = 8  # tokens at a prompt's end in which a template closes the reasoning that it turns off


def compiled(submission: Submission, front: Front) -> bool:
    """True if a submission can be taken in without waiting for its grammar."""
    structure = submission.structure
    return structure is None or front.grammars is None or front.grammars.find(structure.spec) is not None


async def grammar_of(submission: Submission, front: Front) -> GrammarLike | None:
    """Return the compiled grammar of a submission. Raises as `compiled_grammar` does."""
    if submission.structure is None:
        return None
    spec: Spec = submission.structure.spec
    if front.grammars is None:
        raise InvalidRequest(spec.kind, spec.text, "needs a model with a tokenizer", "Open one with tokenizer.json")
    mailbox = submission.mailbox
    caller = submission.caller or submission.sampling.salt or ""
    return await compiled_grammar(front.grammars, spec, caller=caller, is_live=lambda: not mailbox.abandoned)


async def compiled_grammar(
    grammars: GrammarsLike, spec: Spec, *, caller: str = "", is_live: Callable[[], bool] = lambda: True
) -> GrammarLike:
    """Return a compiled grammar, without a thread that waits for it.

    Raises `InvalidRequest` for one that can't be followed, `Busy` if others take all places, and `RequestAborted` once
    `is_live` returns False.
    """
    match = grammars.find(spec)
    if match is not None:
        return match
    reply: OneShot[GrammarLike] = OneShot()

    def on_done(future: Future[GrammarLike]) -> None:
        error = CancelledError() if future.cancelled() else future.exception()
        if error is None:
            reply.put(future.result())
        else:
            reply.fail(error)

    job = grammars.begin(spec, caller)
    try:
        job.future.add_done_callback(on_done)
        patience = anyio.current_time() + PATIENCE
        while True:
            with anyio.move_on_after(_LOOK_SECONDS):
                return await reply.get()
            if not is_live():
                raise RequestAborted("the request was cancelled before it was queued")
            if not job.started and anyio.current_time() > patience:
                from rekindle._src.structured.grammar import wait_error

                raise wait_error(PATIENCE)
    finally:
        grammars.leave(job)


def guide_of(
    grammar: GrammarLike | None,
    rules: TokenRules | None,
    submission: Submission,
    ids: IntArray,
    front: Front,
    eos: Collection[int],
) -> GuideLike | None:
    """Return a guide for one sequence; None if its tokens are free."""
    sampling = submission.sampling
    # A token that may not come, or only later, could be the one that ends the text.
    steered = rules is None and not (sampling.ignore_eos or sampling.min_tokens or sampling.processors)
    longest = front.config.max_model_len
    assert longest is not None, "the config is resolved"
    budget = min(sampling.max_tokens, longest - len(ids)) if steered else None
    inner = None if grammar is None else _guide_of(grammar, submission, ids, front, eos, budget)
    if rules is None:
        return inner
    from rekindle._src.structured.token_rules import RestrictedGuide  # few requests need it

    return RestrictedGuide(rules, inner)


def _guide_of(
    grammar: GrammarLike, submission: Submission, ids: IntArray, front: Front, eos: Collection[int], budget: int | None
) -> GuideLike:
    """Make a guide for one structured sequence of at most `budget` tokens.

    It goes on after the part of the prompt that the grammar covers. If that part is complete, only an end token may
    follow.
    """
    base = len(ids) - submission.covered
    reasoning = _reasoning(ids[:base].tolist(), front, chat=submission.render is not None)
    guide = grammar.guide(eos, reasoning, budget)
    for token in ids[base:].tolist():
        if guide.consume(token).problem:
            raise InvalidRequest(
                "edit",
                front.tokenizer.decode(ids[base:].tolist()),
                f"does not follow the {grammar.spec.kind} of what is forked, or nothing may follow it",
                f"Change it, fork earlier, or pass {grammar.spec.kind}=None",
            )
    guide.consumed, guide.ended = 0, False
    return guide


def _reasoning(prompt: list[int], front: Front, *, chat: bool) -> Reasoning | None:
    """Return the reasoning before the answer: the prompt ends within it, or a chat's reply may begin with it."""
    if front.think_ids is None:
        return None
    from rekindle._src.structured.grammar import Reasoning  # few requests need it

    opens, closes = front.think_ids
    place = max((at for at, token in enumerate(prompt) if token in (opens, closes)), default=None)
    if place is not None and prompt[place] == opens:
        return Reasoning(opens, closes, inside=True)
    turned_off = place is not None and place >= len(prompt) - _NEAR
    return Reasoning(opens, closes) if chat and not turned_off else None


def covered_by(submission: Submission, ids: IntArray, front: Front) -> TextStructure | None:
    """Return the parser of a structured text, with the part of the prompt that the structure covers."""
    if submission.structure is None:
        return None
    before = ids[len(ids) - submission.covered :].tolist()
    closes = None if front.think_ids is None else front.tokenizer.decode(front.think_ids[1:], skip_special_tokens=False)
    return TextStructure(submission.structure, before, front.tokenizer.decode, closes)


class Turns:
    """Lets `places` tasks of one loop work at a time. Waiting callers take turns, each with its oldest task first."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[str, deque[anyio.Event]] = {}  # the caller whose turn is next stands first

    @asynccontextmanager
    async def turn(self, caller: str = "") -> AsyncIterator[None]:
        """Work within the block, when there is a place. A task that is cancelled while it waits leaves the line."""
        await self._enter(caller)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, caller: str) -> None:
        if self._free:
            self._free -= 1
            return
        begin = anyio.Event()
        line = self._waiting.setdefault(caller, deque())
        line.append(begin)
        try:
            await begin.wait()
        except BaseException:
            if begin.is_set():  # its turn came in the meantime
                self._leave()
            else:
                line.remove(begin)
                if not line and self._waiting.get(caller) is line:
                    del self._waiting[caller]
            raise

    def _leave(self) -> None:
        if not self._waiting:
            self._free += 1
            return
        caller = next(iter(self._waiting))
        line = self._waiting.pop(caller)
        line.popleft().set()
        if line:
            self._waiting[caller] = line  # to the end of the line, after all other callers
