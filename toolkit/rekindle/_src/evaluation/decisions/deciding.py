"""Asks a model the questions: prompts are encoded in a thread, requests made, and results put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rekindle._src.calls.call import Call
from rekindle._src.calls.embedding import texts_shown, usage_so_far
from rekindle._src.calls.handle import Batch, Handle
from rekindle._src.calls.prompts import Prompt, from_column
from rekindle._src.core import words
from rekindle._src.core.options import check_batch
from rekindle._src.core.records import Completion, Status, Usage
from rekindle._src.core.sampling import MAX_LOGPROBS, Sampling
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.host import Host
from rekindle._src.evaluation.decisions.calibration import Calibration, fit
from rekindle._src.evaluation.decisions.questions import Question, questions_of, state_text
from rekindle._src.evaluation.decisions.reading import (
    OptionRead,
    OptionReader,
    OptionTokens,
    exclusive,
    first_reads,
    found,
    later_reads,
    token_bytes,
)  # fmt: skip
from rekindle._src.evaluation.decisions.results import Calibrations, Decisions, DecisionTable, decision_of
from rekindle._src.evaluation.scoring import apart
from rekindle.errors import InvalidRequest, RequestAborted

T = TypeVar("T")
Kept = dict[tuple[Any, ...], Calibration]  # by the key of a question, of one session
_LIKELY = MAX_LOGPROBS  # tokens that a request for several options reports at its place
_FEW = 16  # requests; of more, the first one runs alone where a server wants to know that they have begun


class Deciding(Call[T]):
    """The call of `decide`, `calibrate` or `rerank`: await it for the result. After that, `usage` counts its tokens."""

    def __init__(self, asking: Asking, finish: Callable[[list[OptionScores]], T], name: str) -> None:
        self._asking, self._finish = asking, finish
        self._awaited = f"await session.{name}(…)"

    async def _result(self) -> T:
        return self._finish(await self._asking.answers())

    def serve(self, caller: str, begun: Callable[[], object], hold: Callable[[int], object]) -> None:
        """Name the caller. `begun` is called after the first of many requests, on the event loop that awaits this.

        `hold` is called with the bytes of all prompts' tokens so far, in the thread that encodes them, and may raise.
        """
        self._asking.caller, self._asking.begun, self._asking.hold = caller, begun, hold

    async def encode(self) -> None:
        """Encode the prompts now, in a thread of their own. Without this call it is done when they are sent."""
        await self._asking.encode()

    def cancel(self) -> None:
        """Abort the requests that have not ended, from any thread."""
        self._asking.cancel()

    @property
    def done(self) -> bool:
        """True once all questions have been answered."""
        return self._asking.done

    @property
    def status(self) -> Status:
        """The state of its first request that has not ended."""
        handles = self._asking.handles
        running = next((one for one in handles if not one.done), None)
        if running is not None:
            return running.status
        return Status.FINISHED if self.done else Status.ABORTED if self._asking.cancelled else Status.QUEUED

    @property
    def usage(self) -> Usage:
        """The tokens of the requests so far, including their prompts."""
        return usage_so_far(self._asking.handles)

    def __repr__(self) -> str:
        handles = self._asking.handles
        return f"<Deciding: {sum(one.done for one in handles)} of {words.count(len(handles), 'request')} ended>"


class OptionScores(NamedTuple):
    """The numbers of one question about one state."""

    ids: tuple[str, ...]
    logprobs: list[float]
    prompt_tokens: int
    cached_tokens: int


@dataclasses.dataclass(eq=False, slots=True)
class _OpenQuestion:
    """A question about one state, and what has been read of its options."""

    encoded: OptionTokens
    logprobs: dict[int, float] = dataclasses.field(default_factory=dict)
    results: list[Completion] = dataclasses.field(default_factory=list)

    def answer(self) -> OptionScores:
        tokens = len(self.encoded.before)
        cached = min(tokens, self.results[0].usage.cached_tokens)
        ids = tuple(done.id for done in self.results)
        return OptionScores(ids, exclusive(self.encoded.options, self.logprobs), tokens, cached)


class QuestionPrompt(NamedTuple):
    """A question in messages, and the texts of its options."""

    messages: Sequence[Mapping[str, str]]
    options: Sequence[str]


class Asking:
    """Questions, each with its options, as requests of a session. They are encoded in a thread of their own."""

    def __init__(
        self, session: Any, host: Host, front: Front, questions: Iterable[QuestionPrompt], sampling: Mapping[str, Any]
    ) -> None:
        host.check()
        self._session, self._host, self._front, self._questions = session, host, front, questions
        self._sampling = Sampling(max_tokens=0, prompt_logprobs=0, **sampling)
        self._asked: list[_OpenQuestion] | None = None
        self._answers: list[OptionScores] | None = None
        self.cancelled: bool = False
        self.caller: str = ""
        self.begun: Callable[[], object] | None = None
        self.hold: Callable[[int], object] | None = None
        self.handles: list[Handle[Completion]] = []

    @property
    def done(self) -> bool:
        """True once all requests have ended."""
        return self._answers is not None

    def cancel(self) -> None:
        """Abort the requests that have not ended."""
        self.cancelled = True
        for handle in self.handles:
            handle.cancel()

    async def encode(self) -> list[_OpenQuestion]:
        """Return the questions with their tokens."""
        if self._asked is None:
            self._asked = await apart(self._encode)
        return self._asked

    async def answers(self) -> list[OptionScores]:
        """Return the scores of each question's options."""
        if self._answers is None:
            if self.cancelled:
                raise RequestAborted("the questions were cancelled, or one of them failed")
            try:
                asked = await self.encode()
                await self._run([(one, read) for one in asked for read in first_reads(one.encoded)])
                await self._run([(one, read) for one in asked for read in later_reads(one.encoded, one.logprobs)])
            except BaseException:
                self.cancel()
                raise
            self._answers = [one.answer() for one in asked]
        return self._answers

    def _encode(self) -> list[_OpenQuestion]:
        reader, asked, size = OptionReader(self._front, self._check), list[_OpenQuestion](), 0
        for messages, options in self._questions:
            self._check()
            prompt, is_chat = reader.prompt(messages)
            encoded = reader.tokens(prompt, options, is_chat=is_chat)
            asked.append(_OpenQuestion(encoded))
            size += token_bytes(encoded)
            if self.hold is not None:
                self.hold(size)
        return asked

    def _check(self) -> None:
        if self.cancelled:
            raise RequestAborted("the questions were cancelled")

    async def _run(self, reads: list[tuple[_OpenQuestion, OptionRead]]) -> None:
        """Run requests, and add the log-probabilities to their questions."""
        check_batch(len(reads))
        handles = [self._handle(one, read) for one, read in reads]
        self.handles += handles
        batch = Batch(handles, progress=texts_shown(self._front))
        if self.cancelled:
            batch.cancel()
        if self.begun is not None and len(handles) > _FEW:
            await Batch(handles[:1], keep_errors=True)
            if handles[0].error is not None:
                batch.cancel()  # the rest would be computed for nothing
                handles[0].completion()
            self.begun()
        for (one, read), done in zip(reads, await batch, strict=True):
            one.results.append(done)
            one.logprobs.update(found(one.encoded, read, done))

    def _handle(self, one: _OpenQuestion, read: OptionRead) -> Handle[Completion]:
        # With 20 likely tokens an entry takes 1.7 kB, without them 0.15: they are for requests that look among them.
        likely = _LIKELY if len(read.options) > 1 else 0
        sampling = dataclasses.replace(self._sampling, prompt_logprobs=likely, logprob_start=len(one.encoded.before))
        handle = Handle[Completion](self._host, self._session, Prompt(None, read.tokens), sampling)
        handle.caller = self.caller
        return handle


def asks_of(texts: Sequence[str], questions: Sequence[Question], instructions: str | None) -> Iterator[QuestionPrompt]:
    """Make each of the questions about each of the states: those about the first one, and so on."""
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    for text in texts:
        for question in questions:
            message = {"role": "user", "content": f"{text}\n\n{question.prompt}"}
            yield QuestionPrompt([*system, message], [option.text for option in question.options])


def _texts(states: Sequence[object], questions: Sequence[Question], instructions: object, *, many: bool) -> list[str]:
    if instructions is not None and (not isinstance(instructions, str) or not instructions.strip()):
        raise InvalidRequest("instructions", instructions, "are not a text, or are empty", "Leave them out")
    check_batch(len(states) * len(questions))
    return [state_text(state, f"state[{place}]" if many else "state") for place, state in enumerate(states)]


def decide(
    session: Any, host: Host, front: Front, kept: Kept, state: object, questions: object, instructions: str | None,
    calibrated: bool, sampling: Mapping[str, Any],
) -> Deciding[Any]:  # fmt: skip
    """Return the call of `session.decide`."""
    asked = questions_of(questions)
    states, many = states_of(state)
    texts = _texts(states, asked, instructions, many=many)

    def finish(answers: list[OptionScores]) -> Any:
        read, decided = iter(answers), []
        for _ in states:
            row = Decisions()
            for question in asked:
                calibration = kept.get(_key(question, instructions, sampling)) if calibrated else None
                row[question.name] = decision_of(question, *next(read), calibration)
            decided.append(row)
        if not many:
            return decided[0]
        column: Any = state
        return DecisionTable(decided, states=states, index=column.index if hasattr(column, "iloc") else None)

    return Deciding(Asking(session, host, front, asks_of(texts, asked, instructions), sampling), finish, "decide")


def calibrate(
    session: Any, host: Host, front: Front, kept: Kept, states: object, questions: object, expected: object,
    instructions: str | None, sampling: Mapping[str, Any],
) -> Deciding[Calibrations]:  # fmt: skip
    """Return the call of `session.calibrate`."""
    asked = questions_of(questions)
    rows, many = states_of(states)
    if not many or len(rows) < 2:
        raise InvalidRequest("states", states, "are not labelled rows", "Pass a list or a column of at least 2 states")
    texts = _texts(rows, asked, instructions, many=True)
    places = [_right(question, expected, len(rows)) for question in asked]

    def finish(answers: list[OptionScores]) -> Calibrations:
        fitted = Calibrations()
        for column, question in enumerate(asked):
            read = [answer.logprobs for answer in answers[column :: len(asked)]]
            fitted[question.name] = kept[_key(question, instructions, sampling)] = fit(read, places[column])
        return fitted

    return Deciding(Asking(session, host, front, asks_of(texts, asked, instructions), sampling), finish, "calibrate")


def _key(question: Question, instructions: str | None, sampling: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*question.key, instructions, repr(sampling.get("adapter")))


def states_of(state: Any) -> tuple[list[Any], bool]:
    """Return the states, and True if they came as a list or a column."""
    column: Any = from_column(state)
    if getattr(column, "ndim", 0):
        return column.tolist(), True
    return ([*state], True) if isinstance(state, list | tuple) else ([state], False)


def _right(question: Question, expected: Any, rows: int) -> list[int]:
    """Return the place of each row's right option."""
    field = f"expected[{question.name!r}]"
    try:
        values = states_of(expected[question.name])[0]
    except (KeyError, TypeError, IndexError):
        fix = 'Pass the right answers by question, such as {"urgent": [True, False, …]}'
        raise InvalidRequest("expected", expected, f"has no column {question.name!r}", fix) from None
    if len(values) != rows:
        raise InvalidRequest(field, f"{len(values):,} answers", f"are not {rows:,}, as many as states", "Pass one each")
    places = list[int]()
    for value in values:
        place = next((at for at, option in enumerate(question.options) if option.value == value), None)
        if place is None:
            known = ", ".join(_written(question)[:6])
            raise InvalidRequest(field, value, "is no option of this question", f"Pass one of {known}")
        places.append(place)
    return places


def _written(question: Question) -> list[str]:
    """Return the options' values as they are written in Python."""
    return [repr(option.value) for option in question.options]
