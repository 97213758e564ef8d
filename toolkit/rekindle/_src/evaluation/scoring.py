"""`session.score`: how likely a model finds given continuations of a prompt, which is computed once for all of them."""

# A str is a sequence of strings: these overlaps are meant, and the overload that is taken stands first.
# mypy: disable-error-code="overload-overlap"
# pyright: reportOverlappingOverload=false

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex, TypeVar, Unpack, overload

import numpy as np

from rekindle._src.calls.call import Call
from rekindle._src.calls.content import KeyedOptions, attach, content_of, encoded, split
from rekindle._src.calls.embedding import texts_shown, usage_so_far
from rekindle._src.calls.handle import Batch, Handle
from rekindle._src.calls.prompts import Prompt, PromptLike, from_column, is_ids, parse, parse_one
from rekindle._src.core import words
from rekindle._src.core.drawable import Record
from rekindle._src.core.options import check_batch, refuse_keywords, takes_keywords
from rekindle._src.core.records import Completion, IntArray, Usage
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.host import Host
from rekindle._src.dispatch.intake import LONG_TEXT, check_beginning, check_characters
from rekindle._src.dispatch.threads import OneShot
from rekindle._src.views import html, style
from rekindle.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    from pandas import DataFrame

T = TypeVar("T")
Measure = Literal["logprob", "per_token", "per_byte"]
MEASURES = ("logprob", "per_token", "per_byte")
ROWS_SHOWN = 20


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Score(Record):
    """The log-probability of one choice after its prompt."""

    id: str  # of its request, for `session.explain`
    text: str  # of the choice; empty where it was passed as token ids
    token_ids: tuple[int, ...]  # the tokens that were scored
    logprobs: tuple[float, ...]  # of each of them, after all before it
    greedy: bool  # each is the most likely token at its place, so that greedy text begins with this choice
    prompt_tokens: int  # before the first of them
    cached_tokens: int  # of these, taken from the cache

    @property
    def logprob(self) -> float:
        """The log-probability of the whole choice."""
        return math.fsum(self.logprobs)

    @property
    def per_token(self) -> float:
        """The log-probability, divided by the number of tokens."""
        return self.logprob / len(self.logprobs)

    @property
    def per_byte(self) -> float:
        """The log-probability, divided by the bytes of the choice's text."""
        return self.logprob / max(1, len(self.text.encode()))


class Scores(list[Score]):
    """The scores of a prompt's choices, in the order of the choices; a list in every respect."""

    def rank(self, by: Measure = "logprob") -> list[int]:
        """Return the places of the choices, the best one first. `per_token` and `per_byte` do not favour short ones."""
        _check_measure(by)
        if by == "per_byte" and not all(score.text for score in self):
            raise InvalidRequest("by", by, "needs the choices' texts", "Pass them as text, or rank by 'per_token'")
        return sorted(range(len(self)), key=lambda place: -float(getattr(self[place], by)))

    def choose(self, by: Measure = "logprob") -> Score:
        """Return the score of the best choice; of equal ones, the first."""
        return self[self.rank(by)[0]]

    def __reduce__(self) -> tuple[type[Scores], tuple[list[Score]]]:
        return Scores, (list(self),)

    def __repr__(self) -> str:
        best = f", the best is {words.shorten(self.choose().text, 60)!r}" if self else ""
        return f"<Scores of {words.count(len(self), 'choice')}{best}>"

    def _repr_html_(self) -> str:
        best = self.choose() if self else None
        weights = [math.exp(score.logprob - best.logprob) if best is not None else 0.0 for score in self]
        rows = [
            (
                words.shorten(score.text, 100),
                html.gauge(weight / sum(weights), colour=style.BLUE if score is best else style.GREY),
                f"{score.logprob:.3f}",
                f"{score.per_token:.3f}",
                len(score.token_ids),
                "yes" if score.greedy else "",
            )
            for score, weight in zip(self, weights, strict=True)
        ]
        heads = ("choice", "share", "log-probability", "per token", "tokens", "greedy")
        prompt = f"prompt of {words.count(self[0].prompt_tokens, 'token')}" if self else ""
        likeliest = "" if best is None else words.shorten(best.text, 100)
        choices = html.line(words.count(len(self), "choice"), prompt)
        return str(html.block(html.table(heads, rows), choices, title=likeliest))


class ScoreTable(list[Scores]):
    """The scores of several prompts, in their order: a list of `Scores`, and a table with a row for each prompt."""

    def __init__(self, scores: Any = (), *, prompts: Any = (), index: Any = None) -> None:
        super().__init__(scores)
        self._prompts: list[str | None] = [*prompts] or [None] * len(self)  # None for one of token ids
        self._index = index  # of the column that the prompts were

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(ScoreTable, prompts=self._prompts, index=self._index), (list(self),)

    def to_pandas(self, by: Measure = "logprob") -> DataFrame:
        """Return a DataFrame with a row for each prompt, indexed like the prompts' own column.

        Its columns are prompt, choice and place (the best choice's text, and its place from 0), its score by the
        measure, the margin to the second best (NaN where there is one choice), and scores, a tuple of all choices'.
        Texts are None where token ids were passed.
        """
        try:
            import pandas
        except ImportError:
            raise MissingExtra("pandas", "notebook") from None
        places = [scores.rank(by) for scores in self]
        values = [tuple(float(getattr(score, by)) for score in scores) for scores in self]
        columns: dict[str, Any] = {
            "prompt": self._prompts,
            "choice": [scores[order[0]].text or None for scores, order in zip(self, places, strict=True)],
            "place": [order[0] for order in places],
            "score": [one[order[0]] for one, order in zip(values, places, strict=True)],
            "margin": [
                one[order[0]] - one[order[1]] if len(order) > 1 else math.nan
                for one, order in zip(values, places, strict=True)
            ],
            "scores": values,
        }
        return pandas.DataFrame(columns, index=self._index)

    def accuracy(self, expected: Any, by: Measure = "logprob") -> float:
        """Return the share of prompts for which the best choice is the expected one.

        `expected` is a column or list with an entry for each prompt, in their order: the choice's text as it was
        passed, or its place, from 0.
        """
        if isinstance(column := from_column(expected), np.ndarray):
            expected = column.tolist()
        if isinstance(expected, str | bytes) or not isinstance(expected, Sequence):
            raise InvalidRequest("expected", expected, "is not a column", "Pass a text or a place for each prompt")
        if len(expected) != len(self) or not self:
            problem = f"has {len(expected):,} entries for {words.count(len(self), 'prompt')}"
            raise InvalidRequest("expected", expected, problem, "Pass one for each prompt, and at least one")
        wanted = [_expected(entry, row, scores) for row, (entry, scores) in enumerate(zip(expected, self, strict=True))]
        return sum(scores.rank(by)[0] in places for scores, places in zip(self, wanted, strict=True)) / len(self)

    def __repr__(self) -> str:
        return f"<ScoreTable of {words.count(len(self), 'prompt')}>"

    def _repr_html_(self) -> str:
        rows = [
            (words.shorten(prompt or "", 100), words.shorten(best.text, 60), f"{best.logprob:.3f}", len(scores))
            for prompt, scores in zip(self._prompts[:ROWS_SHOWN], self[:ROWS_SHOWN], strict=True)
            if (best := scores.choose())
        ]
        more = f"the first {ROWS_SHOWN} are shown" if len(self) > ROWS_SHOWN else ""
        heads = ("prompt", "best choice", "log-probability", "choices")
        return str(html.block(html.line(words.count(len(self), "prompt"), more), html.table(heads, rows)))


def _expected(entry: object, row: int, scores: Scores) -> frozenset[int]:
    """Return the places of the expected choice: all places with its text, or the named place."""
    field = f"expected[{row}]"
    if isinstance(entry, str):
        places = frozenset(place for place, score in enumerate(scores) if score.text == entry)
        if not places:
            texts = [score.text for score in scores if score.text]
            near = next((text for text in texts if text.strip() == entry.strip()), None)
            known = (
                f"It has {', '.join(repr(words.shorten(text, 40)) for text in texts[:4])}" if texts else "Pass places"
            )
            fix = known if near is None else f"Did you mean {near!r}?"
            raise InvalidRequest(field, entry, "is no choice of this prompt", fix)
        return places
    if isinstance(entry, bool) or not isinstance(entry, SupportsIndex):
        fix = "Pass the choice's text, or its place as an int"
        raise InvalidRequest(field, entry, "is neither text nor a place", fix)
    place = entry.__index__()
    if not 0 <= place < len(scores):
        raise InvalidRequest(field, place, f"is no place among {len(scores)} choices", "Count from 0")
    return frozenset({place})


class Scoring(Call[T]):
    """The call that `session.score` returns: await it for the scores. After that, `usage` counts its tokens."""

    _awaited = "await session.score(…)"

    def __init__(
        self, prepare: Callable[[], Batch[Completion]], finish: Callable[[list[Completion]], T], *, long: bool = False
    ) -> None:
        self._prepare, self._finish = prepare, finish
        self._long = long  # encoding the texts takes so long that a thread of its own does it
        self._batch: Batch[Completion] | None = None
        self._cancelled = False

    async def _result(self) -> T:
        if self._batch is None:
            batch = await apart(self._prepare) if self._long else self._prepare()
            self._batch = self._batch or batch  # the same call may be awaited twice at once
            if self._cancelled:
                self._batch.cancel()
        return self._finish(await self._batch)

    def cancel(self) -> None:
        """Abort the choices that have not been scored, from any thread."""
        self._cancelled = True
        if self._batch is not None:
            self._batch.cancel()

    @property
    def done(self) -> bool:
        """True once all choices have been scored, or have failed."""
        return self._batch is not None and self._batch.done

    @property
    def usage(self) -> Usage:
        """The tokens of the choices scored so far, including their prompts."""
        return usage_so_far([] if self._batch is None else self._batch.handles)

    def __repr__(self) -> str:
        handles = [] if self._batch is None else self._batch.handles
        return f"<Scoring: {sum(handle.done for handle in handles)} of {words.count(len(handles), 'choice')} scored>"


class ScoreRequests:
    """The part of a session that scores."""

    _host: Host
    _front: Front

    @overload
    def score(
        self,
        prompt: PromptLike,
        choices: Sequence[PromptLike],
        *,
        priority: int = 0,
        **options: Unpack[KeyedOptions],
    ) -> Scoring[Scores]: ...
    @overload
    def score(
        self,
        prompt: Sequence[PromptLike],
        choices: Sequence[PromptLike] | Sequence[Sequence[PromptLike]],
        *,
        priority: int = 0,
        **options: Unpack[KeyedOptions],
    ) -> Scoring[ScoreTable]: ...
    @takes_keywords(KeyedOptions)
    def score(
        self,
        prompt: PromptLike | Sequence[PromptLike],
        choices: Sequence[PromptLike] | Sequence[Sequence[PromptLike]],
        *,
        priority: int = 0,
        **options: Any,
    ) -> Scoring[Scores] | Scoring[ScoreTable]:
        """Await it for the log-probabilities of several continuations of a prompt, as `Scores`.

            scores = await session.score("The capital of France is", [" Paris", " Rome"])
            scores.choose().text, scores[0].logprob, scores.rank(by="per_token")

        The prompt is computed once: its choices share its pages and run together, as do prompts with a common
        beginning. For a list of prompts, `choices` belong to all of them, or are a list for each, and the result is a
        `ScoreTable`: a list of `Scores` with `to_pandas()` and `accuracy(expected)`. Prompts and choices are text or
        token ids.

        Texts are encoded together, as the model would meet them. Where a choice changes the last tokens of its prompt
        (as a word after a prompt that ends with a space does), the tokens from there on are scored, of all choices of
        this prompt. Numbers come from the model's own distribution, before any sampling option, and with `adapter`
        (a name, or names with their weights, as in `generate`) from the model with this adapter. With `images`, as
        in `generate`, prompts have pictures.
        """
        refuse_keywords(options, ScoreRequests.score)
        content, keyed = split(options)
        sampling = Sampling.of(None, {"max_tokens": 0, "prompt_logprobs": 1, "priority": priority, **keyed})
        self._host.check()
        prompts, many = parse(prompt)
        prompts = attach(self._front, prompts, content, many=many)
        lists = _choices(choices, prompts, many)
        questions = [_Question(one, entries) for one, entries in zip(prompts, lists, strict=True)]
        check_batch(sum(len(question.choices) for question in questions))
        encodings: list[_EncodedChoices] = []

        def prepare() -> Batch[Completion]:
            encodings[:] = [_encode(question, self._front) for question in questions]
            handles: list[Handle[Completion]] = [
                Handle(
                    self._host,
                    self,
                    Prompt(None, tokens, extensions=question.prompt.extensions),
                    dataclasses.replace(sampling, logprob_start=encoding.start),
                )
                for question, encoding in zip(questions, encodings, strict=True)
                for tokens in encoding.tokens
            ]
            return Batch(handles, progress=texts_shown(self._front))

        def finish(results: list[Completion]) -> Any:
            ended = iter(results)
            scores = [
                Scores(
                    _score(next(ended), choice.text or "", ids[encoding.start :])
                    for choice, ids in zip(question.choices, encoding.tokens, strict=True)
                )
                for question, encoding in zip(questions, encodings, strict=True)
            ]
            if not many:
                return scores[0]
            column: Any = prompt
            index = column.index if hasattr(column, "iloc") else None  # of pandas
            return ScoreTable(scores, prompts=[one.shown or one.text for one in prompts], index=index)

        long = sum(question.characters for question in questions) >= LONG_TEXT
        call: Scoring[Any] = Scoring(prepare, finish, long=long)
        return call

    @overload
    def score_sync(
        self,
        prompt: PromptLike,
        choices: Sequence[PromptLike],
        *,
        priority: int = 0,
        **options: Unpack[KeyedOptions],
    ) -> Scores: ...
    @overload
    def score_sync(
        self,
        prompt: Sequence[PromptLike],
        choices: Sequence[PromptLike] | Sequence[Sequence[PromptLike]],
        *,
        priority: int = 0,
        **options: Unpack[KeyedOptions],
    ) -> ScoreTable: ...
    def score_sync(self, prompt: Any, choices: Any, **options: Any) -> Scores | ScoreTable:
        """Run `score` from code without an event loop: blocks this thread until the scores are there."""
        call: Scoring[Any] = self.score(prompt, choices, **options)
        scores: Scores | ScoreTable = call.result_sync()
        return scores


class _Question(NamedTuple):
    """A prompt with its choices."""

    prompt: Prompt
    choices: list[Prompt]

    @property
    def characters(self) -> int:
        """The number of characters to encode: each choice is encoded with its prompt."""
        before = len(self.prompt.text or "")
        return before + sum(before + len(choice.text or "") for choice in self.choices)


class _EncodedChoices(NamedTuple):
    """The tokens of a prompt with each of its choices."""

    tokens: list[IntArray]
    start: int  # of the tokens that are scored; those before are the same in all of them


def _choices(choices: Any, prompts: list[Prompt], many: bool) -> list[list[Prompt]]:
    """Return the choices of each prompt. Raise `InvalidRequest` for anything else than lists of them."""
    fix = "Pass a list of texts, or of lists of token ids"
    if isinstance(column := from_column(choices), np.ndarray):
        choices = column.tolist()
    if isinstance(choices, str | bytes) or is_ids(choices) or not isinstance(choices, Sequence):
        raise InvalidRequest("choices", choices, "is not a list of choices", fix)
    if not many or all(isinstance(entry, str) or is_ids(entry) for entry in choices):
        return [_parsed(choices)] * len(prompts)
    if len(choices) != len(prompts):
        problem = f"is a list of {len(choices)} lists for {len(prompts)} prompts"
        raise InvalidRequest("choices", choices, problem, "Pass one list of choices for each prompt, or one for all")
    for entry in choices:
        if isinstance(entry, str | bytes) or is_ids(entry) or not isinstance(entry, Sequence):
            raise InvalidRequest("choices", entry, "is not a list of choices", fix)
    return [_parsed(entry) for entry in choices]


def _parsed(choices: Sequence[Any]) -> list[Prompt]:
    if not choices:
        raise InvalidRequest("choices", choices, "is empty", "Pass at least one choice")
    parsed = []
    for choice in choices:
        try:
            parsed.append(parse_one(choice))
        except InvalidRequest as error:
            raise InvalidRequest("choices", choice, error.problem, error.fix) from None
        if choice == "":
            raise InvalidRequest("choices", choice, "has no tokens", "Pass at least one character or token id")
    return parsed


def _encode(question: _Question, front: Front) -> _EncodedChoices:
    """Encode a prompt together with each of its choices."""
    prompt, encode = question.prompt, front.tokenizer.encode
    text, content = prompt.text, content_of(prompt.extensions)
    if text is not None:
        check_characters(text, front)
        check_beginning(text, front)
    before = encoded(front, text, content) if text is not None else np.asarray(prompt.token_ids, np.int32)
    tokens, start = [], len(before)
    for choice in question.choices:
        if text is not None and choice.text is not None:
            whole = encoded(front, text + choice.text, content)
        else:
            end = encode(choice.text, add_special_tokens=False) if choice.text is not None else choice.token_ids
            whole = np.concatenate([before, np.asarray(end, np.int32)])
        tokens.append(whole)
        shared = min(start, len(whole))
        differs = np.flatnonzero(before[:shared] != whole[:shared])
        start = min(int(differs[0]) if len(differs) else shared, len(whole) - 1)
    if start < 1:
        raise InvalidRequest(
            "prompt", text, "has no token before the choices", "Begin it with a token that stands before texts"
        )
    return _EncodedChoices(tokens, start)


def _score(done: Completion, text: str, tokens: IntArray) -> Score:
    entries = done.prompt_logprobs or ()
    assert [entry.token_id for entry in entries] == tokens.tolist(), f"{done.id} was scored from another token on"
    return Score(
        id=done.id,
        text=text,
        token_ids=tuple(tokens.tolist()),
        logprobs=tuple(entry.logprob for entry in entries),
        greedy=all(entry.top_ids[0] == entry.token_id for entry in entries),
        prompt_tokens=len(done.prompt_token_ids) - len(tokens),
        cached_tokens=done.usage.cached_tokens,
    )


def _check_measure(by: object) -> None:
    if by not in MEASURES:
        raise InvalidRequest("by", by, "is not known", f"Use one of {', '.join(map(repr, MEASURES))}")


async def apart(function: Callable[[], T]) -> T:
    """Run a function in a thread of its own, so that the caller's event loop goes on."""
    reply: OneShot[T] = OneShot()
    threading.Thread(target=reply.run, args=(function,), name="rekindle scoring", daemon=True).start()
    return await reply.get()
