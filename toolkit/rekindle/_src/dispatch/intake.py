"""Intake: turns submissions into validated, tokenized requests with their seeds drawn."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import numpy as np
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rekindle._src.core.contracts import TokenizerLike
from rekindle._src.core.own_failure import own_failure
from rekindle._src.core.records import IntArray, Request
from rekindle._src.dispatch.detokenize import Output, OutputState
from rekindle._src.dispatch.guided_intake import compiled, covered_by, grammar_of, guide_of
from rekindle._src.dispatch.messages import Control, Drain, Engine, ScheduleMessage, Submission, next_waiting
from rekindle._src.dispatch.turns import Turns
from rekindle._src.scheduling.limits import how_to_fit
from rekindle.errors import InvalidRequest, PromptTooLong, RequestAborted

if TYPE_CHECKING:
    from rekindle._src.structured.grammar import Grammar

LONG_TEXT = 20_000  # characters; encoding more takes over 5 ms, which a worker thread spends rather than the loop
AT_ONCE = 2  # long prompts that are rendered and encoded at a time
_PROBED = 8  # characters per token of the limit: a beginning that shows that a text is far too long
_AT_A_CUT = 256  # extra tokens that a cut within a word may give a text's beginning


async def run(
    inbox: MemoryObjectReceiveStream[Submission | Control],
    outbox: MemoryObjectSendStream[ScheduleMessage],
    engine: Engine,
    outputs: dict[str, Output],
) -> None:
    """Hand requests and controls on to schedule until the inbox ends, then tell it to drain."""
    seeds = random.Random(engine.config.seed)
    apart, turns = Apart(), Turns(AT_ONCE)
    async with inbox, outbox:
        async with anyio.create_task_group() as group:
            async for first in inbox:
                message: Submission | Control | None = first
                # Everything that waits is handed on before schedule runs again, so that it can run in one step.
                while message is not None:
                    if not isinstance(message, Submission):
                        await apart.wait_all()  # a control never overtakes a submission
                        outbox.send_nowait(message)
                    elif _at_once(message, engine):
                        await _hand_on(message, outbox, engine, outputs, seeds, turns)
                    else:
                        apart.begin()
                        group.start_soon(_hand_on_apart, message, outbox, engine, outputs, seeds, turns, apart)
                    message = next_waiting(inbox)
        outbox.send_nowait(Drain())


def _at_once(submission: Submission, engine: Engine) -> bool:
    """True if a submission is taken in before the next one. An error here is raised again when it is taken in."""
    try:
        return compiled(submission, engine) and not _is_long(submission)
    except Exception:
        return False


def _is_long(submission: Submission) -> bool:
    """True if rendering or encoding the prompt takes so long that other submissions go on meanwhile."""
    return submission.long or (submission.text is not None and len(submission.text) >= LONG_TEXT)


class Apart:
    """Counts the submissions that are taken in apart from the others, because of their grammars or long prompts."""

    def __init__(self) -> None:
        self._count = 0
        self._none = anyio.Event()

    def begin(self) -> None:
        self._count += 1

    def end(self) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()
            self._none = anyio.Event()

    async def wait_all(self) -> None:
        """Wait until there are none."""
        while self._count:
            await self._none.wait()


async def _hand_on_apart(
    submission: Submission,
    outbox: MemoryObjectSendStream[ScheduleMessage],
    engine: Engine,
    outputs: dict[str, Output],
    seeds: random.Random,
    turns: Turns,
    apart: Apart,
) -> None:
    """Take in one submission while others go on."""
    try:
        await _hand_on(submission, outbox, engine, outputs, seeds, turns)
    finally:
        apart.end()


async def _hand_on(
    submission: Submission,
    outbox: MemoryObjectSendStream[ScheduleMessage],
    engine: Engine,
    outputs: dict[str, Output],
    seeds: random.Random,
    turns: Turns,
) -> None:
    mailbox = submission.mailbox
    try:
        async with turns.turn(submission.caller) if _is_long(submission) else contextlib.nullcontext():
            submission = await _render(submission)
            token_ids = await tokenize(submission, engine)
        mailbox.prompt_ids = token_ids
        grammar = await grammar_of(submission, engine)
        requests = prepare(submission, token_ids, engine, seeds, grammar)
        decode = text_of_tokens(engine.tokenizer)
        states = [_output(request, submission, token_ids, engine, decode) for request in requests]
    except BaseException as error:
        mailbox.complete_all(own_failure(error, "the prompt could not be taken in"))
        return
    if mailbox.abandoned:
        mailbox.complete_all(RequestAborted("the request was cancelled before it was queued"))
        return
    # No await from here on, so an abort was either seen above or comes after the requests in schedule's inbox.
    for output in states:
        outputs[output.request.id] = output
        mailbox.request_ids.append(output.request.id)
        outbox.send_nowait(output.request)


async def _render(submission: Submission) -> Submission:
    """Return the submission with its prompt's text. Raises `RequestAborted` if it was cancelled."""
    _check_waited_for(submission)
    if submission.render is None:
        return submission
    submission.mailbox.prompt = await anyio.to_thread.run_sync(submission.render)
    _check_waited_for(submission)
    return submission._replace(text=submission.mailbox.prompt)


def _check_waited_for(submission: Submission) -> None:
    if submission.mailbox.abandoned:
        raise RequestAborted("the request was cancelled before it was queued")


def _output(
    request: Request,
    submission: Submission,
    token_ids: IntArray,
    engine: Engine,
    decode: Callable[[Sequence[int]], str] | None,
) -> OutputState:
    reply, sampling = submission.reply, request.sampling
    visible = reply.visible if reply is not None else frozenset[str]()
    scanner = None
    if reply is not None:
        scanner = reply.scanner(submission.text or "", request.token_ids.tobytes(), sampling.seed)
    detokenizer = engine.detokenizer(sampling, visible)
    return OutputState(
        request,
        submission.mailbox,
        submission.text,
        detokenizer,
        decode,
        engine.program_wait,
        scanner=scanner,
        structured=covered_by(submission, token_ids, engine),
    )


def text_of_tokens(tokenizer: TokenizerLike) -> Callable[[Sequence[int]], str] | None:
    """Return a function from token ids to text with special tokens; None if the tokenizer knows only ids."""
    if not tokenizer.has_text:
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


async def tokenize(submission: Submission, engine: Engine) -> IntArray:
    """Return the prompt's token ids."""
    if submission.token_ids is not None:
        return submission.token_ids
    text, special = submission.text, submission.add_special_tokens
    assert text is not None, "a submission has text or token ids"

    def encode() -> IntArray:
        check_characters(text, engine)
        check_beginning(text, engine)
        return np.asarray(engine.tokenizer.encode(text, add_special_tokens=special), np.int32)

    quick = len(text) < LONG_TEXT and not engine.tokenizer.encodes_apart
    return encode() if quick else await anyio.to_thread.run_sync(encode)


def check_characters(text: str, engine: Engine) -> None:
    """Raise `PromptTooLong` for a text with more characters than `max_model_len` tokens can stand for."""
    limit = engine.config.max_model_len
    if limit is None or len(text) <= limit or engine.characters_per_token is None:
        return
    max_characters = limit * engine.characters_per_token()
    if len(text) > max_characters:
        raise PromptTooLong(
            "prompt",
            text[:80],
            f"has at least {-(-len(text) // engine.characters_per_token()):,} tokens, and max_model_len is {limit:,}",
            how_to_fit(limit, engine.longest),
        )


def check_beginning(text: str, engine: Engine) -> None:
    """Raise `PromptTooLong` for a text whose beginning alone has more than `max_model_len` tokens."""
    limit = engine.config.max_model_len
    if limit is None or len(text) <= 2 * _PROBED * limit + LONG_TEXT:
        return
    length = _PROBED * limit
    count = len(engine.tokenizer.encode(text[:length], add_special_tokens=False))
    if count > limit + _AT_A_CUT:
        raise PromptTooLong(
            "prompt",
            text[:80],
            f"has {count:,} tokens in the first {length:,} of its {len(text):,} characters, and max_model_len is "
            f"{limit:,}",
            how_to_fit(limit, engine.longest),
        )


def prepare(
    submission: Submission,
    token_ids: IntArray,
    engine: Engine,
    seeds: random.Random,
    grammar: Grammar | None = None,
) -> list[Request]:
    """Return one request for each of the n sequences; sequence i of a seeded submission has seed + i."""
    sampling, vocab = submission.sampling, engine.vocab_size
    if not len(token_ids):
        raise InvalidRequest("prompt", submission.text, "has no tokens", "Pass at least one character or token id")
    for field, ids in (
        ("prompt", token_ids),
        ("stop_token_ids", np.asarray(sampling.stop_token_ids, np.int64)),
        ("logit_bias", np.asarray(list(sampling.logit_bias), np.int64)),
        ("allowed_token_ids", np.asarray(sampling.allowed_token_ids or (), np.int64)),
    ):
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
            wrong = ids[(ids < 0) | (ids >= vocab)][0].item()
            raise InvalidRequest(field, wrong, "is not a token id of this model", f"Use ids from 0 to {vocab - 1}")
    for name in sampling.processors:
        if name not in engine.processors:
            known = ", ".join(map(repr, engine.processors)) or "none"
            raise InvalidRequest(
                "processors",
                name,
                "is not a processor of this session",
                f"Give it to open(processors=[…]); known: {known}",
            )
    policy = engine.config.policy
    if sampling.priority and policy != "priority":
        raise InvalidRequest(
            "priority", sampling.priority, f"means nothing under policy={policy!r}", 'Open with policy="priority"'
        )
    seed = sampling.seed if sampling.seed is not None else seeds.getrandbits(32)
    eos_ids = frozenset() if sampling.ignore_eos else frozenset(engine.tokenizer.eos_ids)
    rules = None
    if sampling.restricted:
        from rekindle._src.structured.token_rules import rules_of  # few requests need it

        rules = rules_of(sampling, engine.tokenizer, vocab)
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
            guide=guide_of(grammar, rules, submission, token_ids, engine, eos_ids),
            caller=submission.caller,
        )
        for index in range(sampling.n)
    ]
