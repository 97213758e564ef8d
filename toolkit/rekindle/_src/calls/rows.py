"""`session.map`: a prompt for each row of a table, with progress, errors by row, and a file that survives a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from rekindle._src.calls.call import Call
from rekindle._src.calls.chats import ChatRequests
from rekindle._src.calls.content import (
    PromptOptions,
    RequestOptions,
    RowContent,
    message_content,
    refuse_with_messages,
    split,
)
from rekindle._src.calls.handle import Handle, one_ended
from rekindle._src.calls.prompts import from_column, is_missing, parse_one
from rekindle._src.calls.requests import Pace, Requests, sampling_of, structured_text
from rekindle._src.core import words
from rekindle._src.core.activity import Activity, State
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.drawable import Record
from rekindle._src.core.json_lines import Entry, JsonLines
from rekindle._src.core.names import nearest
from rekindle._src.core.options import takes_options
from rekindle._src.core.own_failure import interrupted
from rekindle._src.core.records import Completion, FinishReason
from rekindle._src.core.reply import DeferredParse, ParseResult
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.threads import fresh
from rekindle._src.views import html
from rekindle.errors import (
    InvalidRequest,
    MissingExtra,
    NotParsed,
    RekindleError,
    RequestAborted,
    RequestFailed,
    abbreviated,
)

if TYPE_CHECKING:
    from pandas import DataFrame


_SHOWN, _COLUMNS = 50, 4  # rows of the table in a notebook, and columns of their own
_LONGEST_ERROR = 240  # characters of an error in a repr
# Fields of errors that all rows share: the options of the call, and a model that writes no text.
_SHARED = frozenset({*(field.name for field in dataclasses.fields(Sampling)), "model"})


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RowAnswer(Record):
    """The answer to one row, or the error that stands in its place."""

    row: int  # its number, from 0
    text: str = ""
    finish_reason: FinishReason | None = None  # None for an error
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: RekindleError | None = None
    parsed: Any = None  # the object that schema=, choice= and the like make of the text; None if it is no object
    parse_error: NotParsed | None = None  # the reason why `parsed` is None although the request has a structure
    resumed: bool = False  # read from the file that an earlier call wrote
    id: str = dataclasses.field(default="", compare=False)  # of its request, for `session.explain`; empty without one

    def __str__(self) -> str:
        return self.text if self.error is None else _named(self.error)

    def __repr__(self) -> str:
        return Record.__repr__(self) if self.error is None else f"<RowAnswer {self.row}: {_named(self.error)}>"


class RowAnswers(list[RowAnswer]):
    """A list of answers in the order of the rows; `errors`, `texts` and `to_pandas()` are views of it.

    Its repr counts the errors and names the first.
    """

    def __init__(self, answers: Any = (), *, rows: Any = None) -> None:
        super().__init__(answers)
        self._rows = rows  # the DataFrame or the sequence of mappings that was answered

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # pickled as a plain list, so that it is read without this class

    @property
    def texts(self) -> list[str]:
        """The texts, in the order of the rows; empty where there is an error."""
        return [answer.text for answer in self]

    @property
    def errors(self) -> dict[int, RekindleError]:
        """The errors by the number of their row."""
        return {answer.row: answer.error for answer in self if answer.error is not None}

    def to_pandas(self) -> DataFrame:
        """Return a DataFrame of the rows' own columns, followed by the columns of the answers.

        These are text, finish_reason, prompt_tokens, completion_tokens and error, and parsed if the request has a
        structure. A name that the rows already have gets the prefix `answer_`. The index is taken from the rows'
        DataFrame. Rows that came from an iterator are not kept: their columns are missing.
        """
        try:
            import pandas
        except ImportError:
            raise MissingExtra("pandas", "notebook") from None
        columns: dict[str, Any] = {
            "text": [answer.text if answer.error is None else None for answer in self],
            "finish_reason": [None if answer.finish_reason is None else str(answer.finish_reason) for answer in self],
            "prompt_tokens": [answer.prompt_tokens for answer in self],
            "completion_tokens": [answer.completion_tokens for answer in self],
            "error": [_problem(answer) for answer in self],
        }
        if any(answer.parsed is not None or answer.parse_error is not None for answer in self):
            columns["parsed"] = pandas.Series([answer.parsed for answer in self], dtype=object).to_numpy()
        frame = self._answered(pandas)
        for name, values in columns.items():
            while name in frame.columns:
                name = f"answer_{name}"
            frame[name] = values
        return frame

    def _answered(self, pandas: Any) -> Any:
        """Return the answered rows as a DataFrame of their own columns."""
        places = [answer.row for answer in self]
        if hasattr(self._rows, "iloc"):
            return self._rows.iloc[places].copy()
        if hasattr(self._rows, "iter_rows"):  # polars
            return pandas.DataFrame(self._rows[places].to_dict(as_series=False), index=range(len(places)))
        taken = [self._rows[place] if self._rows is not None else {} for place in places]
        return pandas.DataFrame(
            [dict(row) if isinstance(row, Mapping) else {} for row in taken], index=range(len(taken))
        )

    def _summary(self) -> tuple[str, ...]:
        resumed, errors = sum(answer.resumed for answer in self), self.errors
        first = next(iter(errors), 0)
        return (
            words.count(len(self), "row"),
            words.count(sum(answer.completion_tokens for answer in self), "token"),
            words.count(len(errors), "error") if errors else "",
            f"{resumed:,} of them were answered before" if resumed else "",
            f"the first error at row {first}: {_named(errors[first])}" if errors else "",
        )

    def __repr__(self) -> str:
        return f"<RowAnswers: {', '.join(part for part in self._summary() if part)}>"

    def _repr_html_(self) -> str:
        own = [self._own(one.row) for one in self[:_SHOWN]]
        names = list(dict.fromkeys(str(name) for row in own for name in row))[:_COLUMNS]
        rows: list[tuple[object, ...]] = [
            (
                str(one.row),
                *(_cell(row.get(name, "")) for name in names),
                words.shorten(one.text, 200) if one.error is None else f"{type(one.error).__name__}: {one.error}",
                one.completion_tokens,
                "failed" if one.finish_reason is None else str(one.finish_reason),
            )
            for one, row in zip(self, own, strict=False)
        ]
        table = html.table(["row", *names, "answer", "tokens", "ended by"], rows)
        more = html.line(f"and {len(self) - len(own):,} more") if len(self) > len(own) else ""
        return str(html.block(html.line(*self._summary()), table, more))

    def _own(self, place: int) -> Mapping[str, Any]:
        """Return the columns of an answered row; empty if the rows are not kept."""
        rows = self._rows
        if rows is None:
            return {}
        if hasattr(rows, "iter_rows"):  # polars
            return dict(rows.row(place, named=True))
        row = rows.iloc[place].to_dict() if hasattr(rows, "iloc") else rows[place]
        return {str(name): value for name, value in row.items()} if isinstance(row, Mapping) else {}


def _cell(value: Any) -> object:
    """Return a value of a row for the table."""
    if isinstance(value, str):
        return words.shorten(value, 80)
    if is_missing(value):
        return ""
    return value if isinstance(value, bool | int | float) else abbreviated(value, 80)


def _problem(answer: RowAnswer) -> str | None:
    """Return the reason why a row has no answer, or its answer no object."""
    problem = answer.error or answer.parse_error
    return None if problem is None else str(problem)


def _named(error: RekindleError) -> str:
    """Return an error's type and message, shortened to a line."""
    return words.shorten(f"{type(error).__name__}: {error}".replace("\n", " "), _LONGEST_ERROR)


Template = str | Callable[[Mapping[str, Any]], Any]
Messages = list[dict[str, Any]]
_MAPPINGS = "Use dicts such as {'text': '…'}"


class Rows:
    """Rows as mappings, one after the other: of a pandas or polars DataFrame, or of an iterable of mappings."""

    def __init__(self, rows: Any) -> None:
        self.total: int | None = len(rows) if isinstance(rows, Sized) else None
        self._frame = hasattr(rows, "columns") and (hasattr(rows, "iter_rows") or hasattr(rows, "itertuples"))
        if not self._frame and (isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable)):
            raise InvalidRequest(
                "rows", rows, "are no rows", "Pass a DataFrame, a list of dicts or any iterable of mappings"
            )
        entries: Any = from_column(rows)
        looked_into = isinstance(entries, Sequence | np.ndarray) and not self._frame and len(entries) > 0
        if looked_into and not any(isinstance(entry, Mapping) for entry in entries):
            fix = _MAPPINGS if entries is rows else f"Pass the DataFrame that has the column. {_MAPPINGS}"
            raise InvalidRequest("rows[0]", entries[0], "is not a mapping", fix)
        self._rows: Any = rows
        self._read = False

    @property
    def source(self) -> Any:
        """The DataFrame or the sequence of the rows; None if they can be read only once."""
        return self._rows if self._frame or isinstance(self._rows, Sequence) else None

    def check_names(self, names: Iterable[str], field: str = "template", shown: str = "{{{}}}") -> None:
        """Raise `InvalidRequest` for a field's name that no row has, as far as that is known before rows are read."""
        if self._frame:
            known = dict.fromkeys(str(name) for name in self._rows.columns)
        elif isinstance(self._rows, Sequence) and self._rows and all(isinstance(row, Mapping) for row in self._rows):
            known = dict.fromkeys(str(name) for row in self._rows for name in row)
        else:
            return
        for name in names:
            if name not in known:
                similar = nearest(name, known)
                listed = ", ".join(map(repr, known)) or "none"
                fix = f"Did you mean {similar!r}?" if similar else f"The columns are {listed}"
                raise InvalidRequest(field, shown.format(name), "names a column that no row has", fix)

    def __iter__(self) -> Iterator[Any]:
        if self._read and isinstance(self._rows, Iterator):
            fix = "Pass a list, or call map with a new iterator and out= to go on"
            raise InvalidRequest("rows", self._rows, "was read before and can't be read again", fix)
        self._read = True
        if not self._frame:
            return iter(self._rows)
        if hasattr(self._rows, "iter_rows"):  # polars
            return iter(self._rows.iter_rows(named=True))
        names = [str(name) for name in self._rows.columns]
        return (dict(zip(names, values, strict=True)) for values in self._rows.itertuples(index=False, name=None))


class RowPrompts:
    """A template to be filled with rows. Errors name the row."""

    def __init__(self, template: Any, *, chat: bool, system: str | None) -> None:
        if not isinstance(template, str) and not callable(template):
            raise InvalidRequest(
                "template",
                template,
                "is neither text nor a function",
                'Pass "Summarise: {text}", or a function of a row',
            )
        if system is not None and not isinstance(system, str):
            raise InvalidRequest("system", system, "is not text", "Pass a str, or leave it out")
        if system is not None and not chat:
            raise InvalidRequest("system", system, "is for chats", "Pass chat=True as well")
        self._template, self._chat, self._system = template, chat, system
        self.fields: tuple[str, ...] = _fields(template) if isinstance(template, str) else ()

    def fill(self, index: int, row: Any, content: PromptOptions) -> str | list[int] | Messages:
        """Return the prompt of a row: text, token ids, or the messages of a chat, which have the row's content."""
        field = f"rows[{index}]"
        if not isinstance(row, Mapping):
            raise InvalidRequest(field, row, "is not a mapping", _MAPPINGS)
        if isinstance(self._template, str):
            missing = [name for name in self.fields if name not in row]
            if missing:
                names = ", ".join(map(repr, row)) or "none"
                raise InvalidRequest(
                    field, dict(row), f"has no {missing[0]!r}, which the template names", f"Its fields are {names}"
                )
            empty = [name for name in self.fields if is_missing(row[name])]
            if empty:
                fix = "Drop such rows, fill their cells, or pass a function of a row as template"
                raise InvalidRequest(field, dict(row), f"has nothing in {empty[0]!r}, which the template names", fix)
        filled: Any
        try:
            filled = self._template.format_map(row) if isinstance(self._template, str) else self._template(row)
        except Exception as error:
            wrong = InvalidRequest(field, dict(row), f"does not fit the template: {error!r}", "Change one of the two")
            wrong.__cause__ = error
            raise wrong from error
        if isinstance(filled, Sequence) and not isinstance(filled, str) and filled and isinstance(filled[0], Mapping):
            refuse_with_messages(content)
            return self._messages([dict(message) for message in filled])
        if self._chat and isinstance(filled, str):
            return self._messages([{"role": "user", "content": message_content(filled, content)}])
        try:
            prompt = parse_one(filled)
        except InvalidRequest as error:
            fix = "Return text, token ids or messages"
            raise InvalidRequest(field, filled, "was made into something that is no prompt", fix) from error
        if prompt.text is not None:
            return prompt.text
        assert prompt.token_ids is not None, "a prompt has text or token ids"
        return [int(token) for token in prompt.token_ids]

    def _messages(self, messages: Messages) -> Messages:
        return messages if self._system is None else [{"role": "system", "content": self._system}, *messages]


def _fields(template: str) -> tuple[str, ...]:
    """Return the names in a format string, each once."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise InvalidRequest(
            "template", template, f"is no format string: {error}", "Write {{ and }} for braces that are text"
        ) from None
    fields = [name.split(".")[0].split("[")[0] for name in names]
    if any(not name or name.isdigit() for name in fields):
        raise InvalidRequest(
            "template",
            template,
            "has braces without a field's name",
            "Write {text}, and {{ or }} for braces in the text",
        )
    return tuple(dict.fromkeys(fields))


def row_key(options: str, prompt: Any) -> str:
    """Return a digest of everything that a row's answer depends on."""
    text = json.dumps([options, prompt], ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class RowsFile:
    """The answers of earlier calls; new answers are appended."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._offsets: dict[int, tuple[str, int]] = {}  # by row: its key, and where its line begins
        self._lines = JsonLines(path, start='{"row": ', writer="session.map", on_entry=self._index)

    def __enter__(self) -> Self:
        self._offsets.clear()
        self._lines.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._lines.__exit__(*details)

    def find(self, row: int, key: str) -> Entry | None:
        """Return the line of a row that was answered with this key, or None."""
        stored, offset = self._offsets.get(row, ("", 0))
        return self._lines.entry(offset) if stored == key else None

    def add(self, row: int, key: str, **fields: Any) -> None:
        """Write a row's line."""
        self._lines.add({"row": row, "key": key, **fields})

    def _index(self, entry: Entry, offset: int) -> bool:
        row, key = entry.get("row"), entry.get("key")
        if not isinstance(row, int) or not isinstance(key, str):
            return False
        if "error" in entry:
            self._offsets.pop(row, None)
            return True
        self._offsets[row] = key, offset
        return isinstance(entry.get("text"), str) and isinstance(entry.get("finish_reason"), str)


_OF_A_ROW = (InvalidRequest, RequestAborted, RequestFailed)  # errors that leave the other rows as they are


@dataclasses.dataclass(frozen=True, slots=True)
class RowRequest:
    """A row and its running request."""

    row: int
    key: str
    handle: Handle[Completion]


class RowsSoFar:
    """The answers of a call so far, and its requests that run: what its progress says."""

    def __init__(self) -> None:
        self.answers: dict[int, RowAnswer] = {}
        self.live: list[RowRequest] = []
        self.tokens: int = 0  # of answers that ended

    def keep(self, answer: RowAnswer) -> None:
        self.answers[answer.row] = answer

    def progress(self, total: int | None, compiling: Callable[[], str]) -> Callable[[], State]:
        """Return a function that says how many of `total` rows are answered, the rate of tokens and the time left."""
        pace, before = Pace(compiling), len(self.answers)

        def look() -> State:
            ended, answers = len(self.answers), tuple(self.answers.values())
            live = [len(entry.handle.token_ids) for entry in tuple(self.live)]
            tokens = self.tokens + sum(live)
            resumed = before + sum(answer.resumed for answer in answers[before:])  # these took no time
            computed, share = ended - resumed, None
            if total is not None and computed > 0:  # running rows count by the mean length of ended ones
                mean = max(1.0, self.tokens / computed)
                share = min(1.0, (computed + sum(min(1.0, count / mean) for count in live)) / max(1, total - resumed))
            parts = [
                f"{ended:,} of {total:,} rows" if total is not None else f"{ended:,} rows",
                *pace.look(tokens, share),
            ]
            if errors := sum(answer.error is not None for answer in answers):
                parts.append(words.count(errors, "error"))
            return State(", ".join(parts), ended / total if total else None)

        return look


class RowMap(Call[RowAnswers]):
    """The call that `session.map` returns: await it for the answers. `answers` holds the answers so far."""

    _awaited = "await session.map(…)"

    def __init__(
        self, session: RowMapping, config: EngineConfig, rows: Rows, prompts: RowPrompts, sampling: Sampling,
        options: str, out: str | os.PathLike[str] | None, chat: Mapping[str, Any],
        parse: Callable[[str], object] | None, compiling: Callable[[], str], content: RowContent,
    ) -> None:  # fmt: skip
        self._session, self._config, self._rows, self._prompts = session, config, rows, prompts
        self._sampling, self._options = sampling, options
        self._out: RowsFile | None = None if out is None else RowsFile(out)
        self._chat_options, self._parse, self._compiling, self._content = chat, parse, compiling, content
        self._so_far = RowsSoFar()
        self._complete = False

    @property
    def answers(self) -> RowAnswers:
        """The answers so far, in the order of the rows; they stay when the call is interrupted."""
        return RowAnswers((self._so_far.answers[row] for row in sorted(self._so_far.answers)), rows=self._rows.source)

    async def _result(self) -> RowAnswers:
        if not self._complete:
            with (
                Activity(self._so_far.progress(self._rows.total, self._compiling), quiet=self._config.quiet),
                self._out if self._out is not None else contextlib.nullcontext(),
            ):
                await self._run()
            self._complete = True
        return self.answers

    async def _run(self) -> None:
        most = min(2 * self._config.max_requests, self._config.max_queue + self._config.max_requests)
        try:
            for row, values in enumerate(self._rows):
                entry = self._ask(row, values)
                if entry is None:
                    continue
                await entry.handle.admit()
                self._so_far.live.append(entry)
                if len(self._so_far.live) >= most:
                    await self._wait()
            while self._so_far.live:
                await self._wait()
        except BaseException as error:
            for entry in self._so_far.live:
                if not isinstance(error, Exception) and entry.handle.done and entry.handle.error is None:
                    self._answered(entry, entry.handle.completion())  # it ended just before the interrupt
                entry.handle.cancel()
            self._so_far.live = []
            outcome = "stopped before the first row was answered"
            if self._so_far.answers and not isinstance(error, Exception):
                self._session.last = self.answers
                total = "" if self._rows.total is None else f" of {self._rows.total:,}"
                answered = f"{len(self._so_far.answers):,}{total} rows"
                outcome = f"stopped after {answered}; their answers are kept as session.last"
            error.__traceback__ = None
            interrupted(error, outcome)
            raise

    def _ask(self, row: int, values: Any) -> RowRequest | None:
        """Make the request of a row. Return None if its answer is known, or if it has an error already."""
        if row in self._so_far.answers and self._so_far.answers[row].error is None:
            return None  # the call was interrupted, and is awaited again
        try:
            content = self._content.of(row, values)
            prompt, identity = self._content.identified(self._prompts.fill(row, values, content), content)
            key = row_key(self._options, identity)
        except InvalidRequest as error:
            if not isinstance(values, Mapping) and not self._so_far.answers:
                raise  # rows of an iterator, which was not looked into before: the first is no row
            self._so_far.keep(RowAnswer(row, error=error))
            return None
        line = self._out.find(row, key) if self._out is not None else None
        if line is not None:
            tokens = line.get("prompt_tokens", 0), line.get("completion_tokens", 0)
            text, reason = line["text"], FinishReason(line["finish_reason"])
            parsed = self._parsed(text, line.get("not_parsed"))
            self._so_far.keep(
                RowAnswer(row, text, reason, *tokens, parsed=parsed.value, parse_error=parsed.problem, resumed=True)
            )
            return None
        try:
            if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
                return RowRequest(row, key, self._session.chat(prompt, self._sampling, **self._chat_options))
            return RowRequest(row, key, self._session.generate(prompt, self._sampling, **content))
        except InvalidRequest as error:
            self._failed(row, key, error)
            return None

    async def _wait(self) -> None:
        """Wait until a row is answered, and keep all answers that are there."""
        live = self._so_far.live
        await one_ended([entry.handle for entry in live])
        ended = [entry for entry in live if entry.handle.done]
        self._so_far.live = [entry for entry in live if not entry.handle.done]
        for entry in ended:
            error = entry.handle.error
            if error is None:
                self._answered(entry, entry.handle.completion())
            elif isinstance(error, _OF_A_ROW):
                self._failed(entry.row, entry.key, error, entry.handle.id)
            else:
                raise fresh(error)

    def _answered(self, request: RowRequest, completion: Completion) -> None:
        usage, problem = completion.usage, completion.parse_error
        answer = RowAnswer(
            request.row,
            completion.content,
            completion.finish_reason,
            usage.prompt_tokens,
            usage.completion_tokens,
            parsed=completion.parsed,
            parse_error=problem,
            id=completion.id,
        )
        if self._out is not None:
            self._out.add(
                request.row,
                request.key,
                text=completion.content,  # of a chat, without its reasoning
                finish_reason=str(completion.finish_reason),
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                **({} if problem is None else {"not_parsed": [problem.reason, str(problem)]}),
            )
        self._so_far.tokens += usage.completion_tokens
        self._so_far.keep(answer)

    def _parsed(self, text: str, problem: Any) -> ParseResult:
        """Return the object of a text that was read from the file, or the problem that was stored with it."""
        if self._parse is None:
            return ParseResult()
        return DeferredParse(text, self._parse, None if problem is None else NotParsed(*problem)).get()

    def _failed(self, row: int, key: str, error: Any, request_id: str = "") -> None:
        shared = isinstance(error, InvalidRequest) and error.field in _SHARED
        if shared and all(answer.error is not None for answer in self._so_far.answers.values()):
            raise fresh(error)
        if self._out is not None:
            self._out.add(row, key, error={"type": type(error).__name__, "message": str(error)})
        self._so_far.keep(RowAnswer(row, error=error, id=request_id))

    def __repr__(self) -> str:
        total = "" if self._rows.total is None else f" of {self._rows.total:,}"
        return f"<RowMap: {len(self._so_far.answers):,}{total} rows answered>"


class RowMapping(Requests, ChatRequests):
    """The part of a session that maps rows."""

    @takes_options(Sampling, also=PromptOptions)
    def map(
        self,
        rows: Iterable[object],
        template: Template,
        sampling: Sampling | None = None,
        /,
        *,
        out: str | os.PathLike[str] | None = None,
        chat: bool = False,
        system: str | None = None,
        template_options: Mapping[str, object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> RowMap:
        """Await it for one answer for each row: `await session.map(rows, "Summarise: {text}", max_tokens=64)`.

        `rows` is a DataFrame, a list of dicts or any iterable of mappings. `template` is a format string with fields
        of a row as names, or a function that makes a row into a prompt or into messages. With `chat` the text is
        the user's message, after `system` if that is given; `template_options` are variables of the chat template.

        `images` is the name of the column that has each row's picture or list of pictures, or a column or list with an
        entry for each row; None is no picture. `<image>` in the template marks a picture's place, as in `generate`.

        A mistake that affects all rows raises an error before any is computed: a name in the template that no row
        has, rows that are no mappings, an option such as a schema that can't be followed. A row that fails alone has
        its error in the result, and the others go on.

        With `out` each answer is written to that file as it comes, a line of JSON for each row. Its folder must exist.
        Called again after a kill with the same file, only rows that have no answer yet, or a changed prompt, options or
        model changed, are computed. Rows are read as they are needed, and a few more than run at once wait in the
        session's queue.
        """
        content, others = split(options)
        merged = sampling_of(self._front, sampling, others)
        if merged.n != 1:
            raise InvalidRequest("n", merged.n, "is more than one answer for a row", "Leave it out, or repeat the rows")
        self._host.check()
        if chat and self._front.chat is None:
            raise InvalidRequest("chat", chat, "needs a chat template, and the model brings none", "Leave it out")
        values = {field.name: getattr(merged, field.name) for field in dataclasses.fields(merged)}
        changed = {name: value for name, value in values.items() if value is not None and name != "priority"}
        text = structured_text(self._front, merged)
        if text is not None:  # a type is the same if its schema is
            changed["schema"] = text.structure.spec.text
        extra = {} if template_options is None else {"template_options": dict(template_options)}
        options_text = json.dumps([self._front.model, changed, extra], sort_keys=True, default=str)
        prompts = RowPrompts(template, chat=chat, system=system)
        table = Rows(rows)
        table.check_names(prompts.fields)
        parse = None if text is None else text.structure.parse
        return RowMap(
            self,
            self._front.config,
            table,
            prompts,
            merged,
            options_text,
            out,
            extra,
            parse,
            self._front.program_wait.describe,
            RowContent(self._front, content, table),
        )

    @takes_options(Sampling, also=PromptOptions)
    def map_sync(
        self,
        rows: Iterable[object],
        template: Template,
        sampling: Sampling | None = None,
        /,
        *,
        out: str | os.PathLike[str] | None = None,
        chat: bool = False,
        system: str | None = None,
        template_options: Mapping[str, object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> RowAnswers:
        """Run `map` from code without an event loop: blocks this thread until the answers are there."""
        call = self.map(
            rows,
            template,
            sampling,
            out=out,
            chat=chat,
            system=system,
            template_options=template_options,
            **options,
        )
        return call.result_sync()
