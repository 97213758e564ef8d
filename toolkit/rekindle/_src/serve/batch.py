"""Files of requests in OpenAI's batch format, answered without a server by the functions that answer HTTP requests.

A line is read as a body is: within the same bounds, and by the same kinds of fields. Its failure is its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import anyio

from rekindle._src.core.activity import Activity, State
from rekindle._src.core.json_lines import Entry, JsonLines
from rekindle._src.core.own_failure import own_failure, root_cause
from rekindle._src.serve.app import POSTS
from rekindle._src.serve.bodies import check_size, check_text, load, too_large
from rekindle._src.serve.errors import ApiError, refusal
from rekindle._src.serve.exchange import Exchange, Service, refusing
from rekindle._src.serve.fields import Anything, Endpoint, Field, OneOf, String
from rekindle._src.serve.life import Life
from rekindle._src.serve.models import Models
from rekindle.errors import InvalidRequest

URLS = {post[0].path: post for post in POSTS if post[0].path.startswith("/v1/")}
LINE = Endpoint(
    "a line of a batch",
    "One request of a batch",
    (
        Field(
            "custom_id", String(maximum=1024, minimum=1), "The name of the line, which its answer has.", required=True
        ),
        Field("method", OneOf(("POST",)), "The method of the request.", required=True),
        Field("url", OneOf(tuple(URLS)), "The path of the endpoint.", required=True),
        Field("body", Anything(), "The body of the request.", required=True),
    ),
)
_START = '{"id": "batch_req_'
_FULL = (429, 503)  # the queue is full, or compilers are busy: the line is retried after another one ends


class _Line(NamedTuple):
    """A line of the input file."""

    name: str  # id of its answer
    data: bytes | None  # None if it is longer than a body may be


class _Task(NamedTuple):
    """A line of the input file without an answer."""

    name: str  # id of its answer
    custom_id: str
    url: str
    body: Any
    size: int


class BatchRun:
    """Answers each line of a file, and appends the answers to an output file as they are ready.

    A line with an answer in the output file is skipped, unless that is a failure of the server: after a kill, the same
    call goes on. An answer names its line by `id`, a digest of the model, the line and its number, and by the line's
    `custom_id`.
    """

    def __init__(
        self,
        session: object,
        source: str | os.PathLike[str],
        out: str | os.PathLike[str],
        *,
        name: str | None = None,
        strict: bool = False,
    ) -> None:
        self._source = Path(source)
        self._service = Service(
            Models(session, name), Life(max_queued_tokens=1 << 62), strict=strict, request_memory=1 << 62
        )
        served = self._service.models.get(None)
        self._name, self._session = served.name, served.open()
        self._lines = JsonLines(out, start=_START, writer="rekindle run-batch", on_entry=self._resume, field="output")
        self._known: set[str] = set()
        self._custom_ids: set[str] = set()
        self._active = 0
        self._began = 0.0
        self.total = 0  # lines
        self.resumed = 0  # lines answered by an earlier run
        self.answered = 0
        self.failed = 0  # of them, those with an error
        self.tokens = 0  # generated

    async def run(self) -> None:
        """Answer every line. Raise `InvalidRequest` for files that can't be used."""
        try:
            file = self._source.open("rb")
        except OSError as error:
            raise InvalidRequest("input", str(self._source), f"can't be read: {error}", "Check the path") from None
        config = self._session.config
        places = anyio.Semaphore(min(2 * config.max_requests, config.max_queue + config.max_requests))
        with file, self._lines, Activity(self.look, quiet=config.quiet):
            self.total = sum(1 for _ in self._read(file))
            file.seek(0)
            self._began = time.monotonic()
            try:
                async with anyio.create_task_group() as group:
                    for line in self._read(file):
                        task = self._task_of(line)
                        if task is not None:
                            await places.acquire()
                            group.start_soon(self._answer, task, places)
            except BaseExceptionGroup as several:
                raise root_cause(several) from None

    def look(self) -> State:
        """Return the progress as one line and as a share."""
        count, seconds = self.resumed + self.answered, time.monotonic() - self._began
        line = f"{count:,} of {self.total:,} lines"
        line += f", {self.tokens / seconds:,.0f} tokens/s" if self.tokens and seconds > 0 else ""
        if self.answered:
            line += f", {seconds / self.answered * (self.total - count):,.0f} s left"
        line += f", {self.failed:,} with errors" if self.failed else ""
        return State(line, count / self.total if self.total else None)

    def _read(self, file: BinaryIO) -> Iterator[_Line]:
        """Yield the lines that are not blank. No more of a line is in memory than a body may have."""
        limit, number = self._service.body_limit, 0
        while data := file.readline(limit + 1):
            number += 1
            size, rest = len(data), data
            while not rest.endswith(b"\n") and (rest := file.readline(limit)):
                size += len(rest)
            data = data[:limit]
            if not data.strip():
                continue
            mark: list[object] = [self._name, number] if size <= limit + 1 else [self._name, number, size]
            text = json.dumps(mark).encode() + data.rstrip(b"\r\n")
            name = f"batch_req_{hashlib.blake2b(text, digest_size=16).hexdigest()}"
            yield _Line(name, data if size <= limit else None)

    def _task_of(self, line: _Line) -> _Task | None:
        """Return the request of a line. None: it has an answer, or is invalid and gets an error at once."""
        custom_id: str | None = None
        try:
            if line.data is None:
                raise too_large(self._service.body_limit, "line")
            check_size(line.data, self._service.body_limit)
            fields = load(line.data)
            custom_id = _readable(fields)
            check_text(fields)
            url, body = self._checked_task(fields)
        except BaseException as raised:
            refused = raised if isinstance(raised, ApiError) else refusal(own_failure(raised, "the line"), {})
            if line.name not in self._known:
                code = refused.code or ("invalid_url" if refused.param == "url" else "invalid_line")
                error = {"code": code, "message": refused.message}
                self._add({"id": line.name, "custom_id": custom_id, "response": None, "error": error})
            else:
                self.resumed += 1
            return None
        if line.name in self._known:
            self.resumed += 1
            return None
        return _Task(line.name, custom_id or "", url, body, len(line.data))

    async def _answer(self, task: _Task, places: anyio.Semaphore) -> None:
        try:
            while True:
                status, request_id, body = await self._own_call(task)
                if status not in _FULL or self._active == 0:
                    break
                await anyio.sleep(0.1)
            response = {"status_code": status, "request_id": request_id, "body": body}
            self._add({"id": task.name, "custom_id": task.custom_id, "response": response, "error": None})
        finally:
            places.release()

    def _add(self, entry: Entry) -> None:
        response = entry["response"]
        self.answered += 1
        if response is None or response["status_code"] != 200:
            self.failed += 1
        else:
            usage = response["body"].get("usage", {})
            self.tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        self._lines.add(entry)

    def _checked_task(self, fields: Any) -> tuple[str, Any]:
        task = LINE.read(fields, strict=self._service.strict, unknown=self._service.unknown)
        custom_id, body = task["custom_id"], task["body"]
        if custom_id in self._custom_ids:
            raise ApiError(400, f"custom_id={custom_id[:80]!r} names an earlier line, too. Use each once")
        self._custom_ids.add(custom_id)
        if isinstance(body, dict) and body.get("stream"):
            raise ApiError(400, "stream is not possible in a batch. Remove it from the body")
        return task["url"], body

    async def _own_call(self, task: _Task) -> tuple[int, str, Any]:
        """Call `_call`; an exception becomes the response of a failed server."""
        try:
            return await self._call(task)
        except BaseException as error:
            refused = refusal(own_failure(error, "the line could not be answered"), {})
            return refused.status, "", refused.body()

    async def _call(self, task: _Task) -> tuple[int, str, Any]:
        """Return status, request id and body of the response that a server would send."""
        endpoint, handler, dialect = URLS[task.url]
        parts: list[bytes] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            parts.append(message.get("body", b""))

        exchange = Exchange(self._service, {"type": "http", "path": task.url, "headers": []}, send)
        exchange.names, exchange.size = endpoint.names, task.size

        async def answer() -> None:
            fields = endpoint.read(task.body, strict=self._service.strict, unknown=self._service.unknown)
            fields.pop("request_id", None)
            await handler(exchange, fields)

        self._active += 1
        try:
            with exchange.account:
                status = await refusing(exchange, dialect, answer)
        finally:
            self._active -= 1
        return status, exchange.request_id, json.loads(b"".join(parts))

    def _resume(self, entry: Entry, offset: int) -> bool:
        name, response = entry.get("id"), entry.get("response")
        if not isinstance(name, str) or "custom_id" not in entry or not isinstance(response, dict | None):
            return False
        status = None if response is None else response.get("status_code")
        # Failures of the server are retried; a faulty line stays faulty.
        if response is None or (isinstance(status, int) and status < 499):
            self._known.add(name)
        else:
            self._known.discard(name)
        return True


def _readable(fields: Any) -> str | None:
    """Return the `custom_id` of a line, however wrong the rest is; None without a writable one."""
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    try:
        LINE.by_name["custom_id"].kind.check(custom_id, "custom_id")
        check_text(custom_id)
    except ApiError:
        return None
    return str(custom_id)
