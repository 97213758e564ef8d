"""`session.map`: a prompt for each row of a table, with progress, errors by row, and a file that survives a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rekindle._src.core import html
from rekindle._src.core.activity import Activity, State
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.interrupts import interrupted
from rekindle._src.core.parsing import Parsed, Parsing
from rekindle._src.core.records import Completion, FinishReason
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.mailbox import fresh
from rekindle._src.session.batch_progress import Pace, compiled_in
from rekindle._src.session.call import Call
from rekindle._src.session.chats import ChatRequests
from rekindle._src.session.handle import Handle, one_ended
from rekindle._src.session.new_handle import structure_in
from rekindle._src.session.requests import Requests
from rekindle._src.session.row_answers import RowAnswer, RowAnswers
from rekindle._src.session.row_prompts import RowPrompts, Rows, Template
from rekindle._src.session.rows_file import RowsFile, row_key
from rekindle._src.session.sampling_defaults import sampling_of
from rekindle._src.session.signatures import takes_options
from rekindle.errors import InvalidRequest, NotParsed, RequestAborted, RequestFailed

if TYPE_CHECKING:
    from typing import Unpack

    from rekindle._src.core.options import SamplingOptions

_OF_A_ROW = (InvalidRequest, RequestAborted, RequestFailed)  # errors that leave the other rows as they are


@dataclasses.dataclass(frozen=True, slots=True)
class RowRequest:
    """A row whose request is running."""

    row: int
    key: str
    handle: Handle[Completion]


class RowMap(Call[RowAnswers]):
    """The call that `session.map` returns: await it for the answers. `answers` holds the answers so far."""

    # Any: only map() makes one, and the signature of a public class names no private type.
    def __init__(
        self, session: Any, config: Any, rows: Any, prompts: Any, sampling: Sampling, options: str, out: Any, chat: Any,
        parse: Any, compiling: Any,
    ) -> None:  # fmt: skip
        self._session: RowMapping = session
        self._config: EngineConfig = config
        self._rows: Rows = rows
        self._prompts: RowPrompts = prompts
        self._sampling, self._options = sampling, options
        self._out: RowsFile | None = None if out is None else RowsFile(out)
        self._chat_options: Mapping[str, Any] = chat
        self._parse: Callable[[str], Any] | None = parse
        self._compiling: Callable[[], str] = compiling
        self._answers: dict[int, RowAnswer] = {}
        self._live: list[RowRequest] = []
        self._tokens = 0  # tokens of answers that ended
        self._complete = False

    @property
    def answers(self) -> RowAnswers:
        """The answers so far, in the order of the rows; they stay when the call is interrupted."""
        return RowAnswers((self._answers[row] for row in sorted(self._answers)), rows=self._rows.source)

    @property
    def _awaited(self) -> str:
        return "await session.map(…)"

    async def _result(self) -> RowAnswers:
        if not self._complete:
            with (
                Activity(self._progress(), quiet=self._config.quiet),
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
                self._live.append(entry)
                if len(self._live) >= most:
                    await self._wait()
            while self._live:
                await self._wait()
        except BaseException as error:
            for entry in self._live:
                if not isinstance(error, Exception) and entry.handle.done and entry.handle.error is None:
                    self._answered(entry, entry.handle.completion())  # it ended just before the interrupt
                entry.handle.cancel()
            self._live = []
            outcome = "stopped before the first row was answered"
            if self._answers and not isinstance(error, Exception):
                self._session.last = self.answers
                total = "" if self._rows.total is None else f" of {self._rows.total:,}"
                outcome = f"stopped after {len(self._answers):,}{total} rows; their answers are kept as session.last"
            error.__traceback__ = None
            interrupted(error, outcome)
            raise

    def _ask(self, row: int, values: Any) -> RowRequest | None:
        """Make the request of a row. Return None if its answer is known, or if it has an error already."""
        if row in self._answers and self._answers[row].error is None:
            return None  # the call was interrupted, and is awaited again
        try:
            prompt = self._prompts.fill(row, values)
        except InvalidRequest as error:
            self._keep(RowAnswer(row, error=error))
            return None
        key = row_key(self._options, prompt)
        line = self._out.find(row, key) if self._out is not None else None
        if line is not None:
            tokens = line.get("prompt_tokens", 0), line.get("completion_tokens", 0)
            text, reason = line["text"], FinishReason(line["finish_reason"])
            parsed = self._parsed(text, line.get("not_parsed"))
            self._keep(
                RowAnswer(row, text, reason, *tokens, parsed=parsed.value, parse_error=parsed.problem, resumed=True)
            )
            return None
        try:
            if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
                messages: Any = prompt
                return RowRequest(row, key, self._session.chat(messages, self._sampling, **self._chat_options))
            plain: Any = prompt
            return RowRequest(row, key, self._session.generate(plain, self._sampling))
        except InvalidRequest as error:
            self._failed(row, key, error)
            return None

    async def _wait(self) -> None:
        """Wait until a row is answered, and keep all answers that are there."""
        live = self._live
        await one_ended([entry.handle for entry in live])
        ended = [entry for entry in live if entry.handle.done]
        self._live = [entry for entry in live if not entry.handle.done]
        for entry in ended:
            error = entry.handle.error
            if error is None:
                self._answered(entry, entry.handle.completion())
            elif isinstance(error, _OF_A_ROW):
                self._failed(entry.row, entry.key, error)
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
        self._tokens += usage.completion_tokens
        self._keep(answer)

    def _parsed(self, text: str, problem: Any) -> Parsed:
        """Return the object of a text that was read from the file, or the problem that was stored with it."""
        if self._parse is None:
            return Parsed()
        return Parsing(text, self._parse, None if problem is None else NotParsed(*problem)).get()

    def _failed(self, row: int, key: str, error: Any) -> None:
        if self._out is not None:
            self._out.add(row, key, error={"type": type(error).__name__, "message": str(error)})
        self._keep(RowAnswer(row, error=error))

    def _keep(self, answer: RowAnswer) -> None:
        self._answers[answer.row] = answer

    def _progress(self) -> Any:
        pace, before = Pace(self._compiling), len(self._answers)

        def look() -> State:
            ended, total, answers = len(self._answers), self._rows.total, tuple(self._answers.values())
            tokens = self._tokens + sum(len(entry.handle.token_ids) for entry in tuple(self._live))
            resumed = before + sum(answer.resumed for answer in answers[before:])  # these took no time
            share = None if total is None else (ended - resumed) / max(1, total - resumed)
            words = [
                f"{ended:,} of {total:,} rows" if total is not None else f"{ended:,} rows",
                *pace.look(tokens, share),
            ]
            if errors := sum(answer.error is not None for answer in answers):
                words.append(html.count(errors, "error"))
            return State(", ".join(words), ended / total if total else None)

        return look

    def __repr__(self) -> str:
        total = "" if self._rows.total is None else f" of {self._rows.total:,}"
        return f"<RowMap: {len(self._answers):,}{total} rows answered>"


class RowMapping(Requests, ChatRequests):
    """The part of a session that maps rows."""

    @takes_options(Sampling)
    def map(
        self,
        rows: Iterable[Any],
        template: Template,
        sampling: Sampling | None = None,
        /,
        *,
        out: str | os.PathLike[str] | None = None,
        chat: bool = False,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> RowMap:
        """Await it for one answer for each row: `await session.map(rows, "Summarise: {text}", max_tokens=64)`.

        `rows` is a DataFrame, a list of dicts or any iterable of mappings. `template` is a format string whose names
        are fields of a row, or a function that makes a row into a prompt or into messages. With `chat` the text is
        the user's message, after `system` if that is given; `template_options` are variables of the chat template.

        A name in the template that no row has raises an error at once. A row that fails has its error in the result,
        and the others go on. With `out` each answer is written to that file as it comes, a line of JSON for each row:
        called again after a kill with the same file, only rows that have no answer yet, or whose prompt, options or
        model changed, are computed. Rows are read as they are needed, and a few more than run at once wait in the
        session's queue.
        """
        merged = sampling_of(self._engine, sampling, options)
        if merged.n != 1:
            raise InvalidRequest("n", merged.n, "is more than one answer for a row", "Leave it out, or repeat the rows")
        self._host.check()
        if chat and self._engine.chat is None:
            raise InvalidRequest("chat", chat, "needs a chat template, and the model brings none", "Leave it out")
        values = {field.name: getattr(merged, field.name) for field in dataclasses.fields(merged)}
        changed = {name: value for name, value in values.items() if value is not None and name != "priority"}
        structure = structure_in(self._engine, merged)
        if structure is not None:  # a type is the same if its schema is
            changed["schema"] = structure.spec.text
        extra = {} if template_options is None else {"template_options": dict(template_options)}
        options_text = json.dumps([self._engine.model, changed, extra], sort_keys=True, default=str)
        prompts = RowPrompts(template, chat=chat, system=system)
        table = Rows(rows)
        table.check_names(prompts.fields)
        parse = None if structure is None else structure.parse
        compiling = compiled_in(self._engine)
        return RowMap(self, self._engine.config, table, prompts, merged, options_text, out, extra, parse, compiling)

    @takes_options(Sampling)
    def map_sync(
        self,
        rows: Iterable[Any],
        template: Template,
        sampling: Sampling | None = None,
        /,
        *,
        out: str | os.PathLike[str] | None = None,
        chat: bool = False,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> RowAnswers:
        """Run `map` from code without an event loop: blocks this thread until the answers are there."""
        call = self.map(
            rows, template, sampling, out=out, chat=chat, system=system, template_options=template_options, **options
        )
        return call.result_sync()
