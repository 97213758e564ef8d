"""Errors as clients see them: a status, and the error object of the client's API."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from rekindle._src.core.sampling import STRUCTURES
from rekindle.errors import (
    Busy,
    CheckpointError,
    InvalidRequest,
    MissingExtra,
    NoTokenLeft,
    OutOfPages,
    PromptTooLong,
    QueueFull,
    RequestAborted,
    RequestFailed,
    RequestQuarantined,
    SessionClosed,
    UnsupportedModel,
    abbreviated,
)

# Patterns of the session's messages, which are written for Python callers, and their words for clients.
_WORDS = (
    (r"model='(?:[^']*[/\\\\])?([^'/\\\\]+)': has no chat template", r"model='\1': has no chat template"),
    (r"Use session\.generate\(prompt\), or pass a template of Jinja's as template=…", "Use /v1/completions"),
    (r"[Pp]ass lenient=True", "set strict to false"),
    (r", or raise max_model_len in open\(\)(, up to [\d,]+)?", ""),
    (r"Raise device_memory( or device_pages)?, or unpin prefixes", "Shorten the prompt"),
    (r'Open with (\w+)="(\w+)"', r"The server has to be started with \1 \2"),
    (r"Give it to open\((processors=\[…\]|steering=\{…\})\)", "The server has to be started with it"),
    (
        r"Pass rekindle\.Steer\(layer=…, vector=…\), or a name of open\(steering=\{…\}\)",
        "Name steering vectors that the server was started with",
    ),
    (r"Give processors to open\(\) and name them here", "Name processors that the server was started with"),
    (r"Pass a dict such as \{464: -100\.0\}", 'Pass an object such as {"464": -100}'),
    (r"Pass a dict, a dataclass or a pydantic model", "Pass an object"),
    (r"Pass a str\b", "Pass text"),
    (r"\{'role': \.\.\., 'content': \.\.\.\}", '{"role": "user", "content": "…"}'),
    (r"\bis (neither a function nor|not) a dict\b", "is not an object"),
)
_LONGEST_PLACE = 200  # characters of a field's path in an error
_PATTERN = re.compile("|".join(pattern for pattern, _ in _WORDS))


class ApiError(Exception):
    """An error instead of a request's result; `param` is the field by the client's name."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.retry_after = retry_after

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers besides the body's own."""
        headers = []
        if self.retry_after is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.status == 431:
            headers.append((b"connection", b"close"))
        return headers

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def wrong(param: str, value: object, problem: str, fix: str, *, code: str | None = None) -> ApiError:
    """Return the error for a field with a wrong value."""
    param = _place(param)
    return ApiError(400, f"{param}={abbreviated(value)}: {problem}. {fix}", param=param, code=code)


def missing(param: str, fix: str = "Add it") -> ApiError:
    """Return the error for a missing field."""
    param = _place(param)
    return ApiError(400, f"{param} is missing. {fix}", param=param)


def _place(path: str) -> str:
    """Return the path of a field for an error. Names in it are the client's, and may be as long as a body."""
    return path if len(path) <= _LONGEST_PLACE else f"{path[:_LONGEST_PLACE]}..."


def unavailable(message: str, *, retry_after: float | None = 5) -> ApiError:
    """Return the error of a server that can't take the request now: it loads, drains, or its session is closed."""
    return ApiError(503, message, type="server_error", code="unavailable", retry_after=retry_after)


def for_clients(message: str) -> str:
    """Return a message in words of JSON and HTTP instead of Python."""
    if _PATTERN.search(message):
        for pattern, words in _WORDS:
            message = re.sub(pattern, words, message)
    return message


def refusal(error: BaseException, names: Mapping[str, str]) -> ApiError:
    """Return any exception as the client's error; `names` maps our options to the client's fields."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            param = names.get(error.field, error.field)
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
            # Clients such as LiteLLM recognise these words of OpenAI's, and try a model with a larger context.
            advice = f"{error.fix}. This model's maximum context length is exceeded" if code else error.fix
            error = type(error)(error.field, error.value, error.problem, advice, error.index)
            if param == error.field and isinstance(error.field, str) and not isinstance(error.value, tuple):
                return ApiError(400, for_clients(str(error)), param=param, code=code)
            problem, fix = for_clients(error.problem), for_clients(error.fix)
            value = [*error.value] if isinstance(error.value, tuple) else error.value  # JSON has lists
            return wrong(param, value, problem, fix, code=code)
        case OutOfPages():
            return ApiError(400, for_clients(str(error)), code="context_length_exceeded")
        case QueueFull():
            message = "all places for requests are taken, and so is the queue. Send the request again in a while"
            return ApiError(429, message, type="rate_limit_error", code="queue_full", retry_after=1)
        case Busy():
            return unavailable(str(error), retry_after=error.retry_after)
        case RequestAborted():
            return ApiError(499, str(error), type="aborted", code="aborted")
        case SessionClosed():
            return unavailable(str(error), retry_after=None)
        case UnsupportedModel() | CheckpointError():
            return ApiError(400, str(error), code="unsupported_by_model")
        case MissingExtra():
            field = next((names[option] for option in STRUCTURES if option in names), None)
            return ApiError(400, f"the server can't do this: {error}", param=field, code="unsupported")
        case NoTokenLeft():
            return ApiError(400, str(error), code="no_token_left")
        case RequestQuarantined():  # clients would send it again after a 500
            return ApiError(400, str(error), code="request_quarantined")
        case RequestFailed():
            return ApiError(500, str(error), type="server_error", code="request_failed")
        case _:
            return ApiError(500, "the server failed; its log says why", type="server_error", code="internal_error")
