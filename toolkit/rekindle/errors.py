"""Every error that rekindle raises on purpose; all are names of `rekindle`, too.

    RekindleError
    ├── ConfigError(ValueError)            an option of open() is wrong or unknown
    ├── InvalidRequest(ValueError)         an argument of a request is wrong or unknown
    │   └── PromptTooLong                  the prompt does not fit into max_model_len
    ├── NotParsed(ValueError)              why a structured text became no object; `Completion.parse_error`
    ├── QueueFull                          the bounded intake is full and the caller chose not to wait
    ├── Busy                               other requests hold a resource that the request needs
    ├── RequestAborted                     the request was cancelled before it finished
    ├── RequestFailed                      the request could not be finished
    │   ├── StepFailed                     the device step that carried it raised; the cause is attached
    │   ├── NoTokenLeft                    its own options leave no token that may come next
    │   ├── OutOfPages                     one sequence alone needs more KV pages than the pool has
    │   └── ReplicaLost                    the replicas of a fleet that it ran on died, one after another
    │       └── RequestQuarantined         apparently because of it: it is sent to no other replica
    ├── ToolServerError                    a tool server, or one of its tools, failed or was declined
    ├── SessionClosed                      the session was closed, or crashed; the cause is attached
    ├── NotPicklable(TypeError)            a session or an object of it was pickled or copied
    ├── SessionForked                      used or opened in a forked child of a process with a session
    ├── ProcessLost                        a process that shares the model is gone, or does not answer
    ├── ProcessRefused                     a process may not join: another secret, version, model or option
    ├── CheckpointError(ValueError)        a checkpoint folder is missing, broken or incomplete
    │   └── UnsupportedModel               its config.json asks for something rekindle does not implement
    ├── CompileError                       a step program failed to compile at open()
    ├── OutOfMemory(MemoryError)           the model or its pages do not fit into memory
    ├── StoreError                         a persisted program, page, snapshot or chat can't be used or written
    │   └── SnapshotRefused                it belongs to other weights, dtype, page size or version
    └── MissingExtra(ImportError)          an optional dependency is not installed

A message says what happened, with numbers, and one fix. A notebook shows it below the user's line that
raised it; `%xmode Verbose` brings all frames back, and `%debug` always has them.
"""

from __future__ import annotations

import linecache
import pathlib
import sys
import sysconfig
import traceback
import types
import typing
from collections import abc
from typing import Literal

NotParsedReason = Literal["max_tokens", "max_model_len", "stop", "ended", "invalid"]

_T = typing.TypeVar("_T")  # its class is no error


class RekindleError(Exception):
    """Base of every error that rekindle raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback."""
        get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)  # another thread may be importing it
        shell = None if get_ipython is None else get_ipython()
        formatter = getattr(shell, "InteractiveTB", None)
        if shell is None or getattr(formatter, "mode", "") in ("Verbose", "Docs"):
            exception = traceback.TracebackException.from_exception(self)
            return [line for part in exception.format() for line in part.rstrip("\n").split("\n")]
        name, message = type(self).__name__, str(self)
        cause, lines = self.__cause__, [f"\x1b[31m{name}\x1b[0m: {message}"]
        first = str(cause).strip().split("\n")[0] if cause is not None else ""
        if first and first not in message:
            lines.append(f"caused by {type(cause).__name__}: {first}")
        return [*_where(self.__traceback__, shell), *lines]


_OWN = str(pathlib.Path(__file__).parent)
_INSTALLED = tuple({*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))})


def _where(trace: types.TracebackType | None, shell: object) -> list[str]:
    """Return the place and the line of the innermost frame that belongs to the user."""
    users = [
        (frame, line)
        for frame, line in traceback.walk_tb(trace)
        if not frame.f_code.co_filename.startswith((_OWN, *_INSTALLED, "<frozen"))
        and not str(frame.f_globals.get("__name__")).startswith("rekindle.")  # the constructors of dataclasses
    ]
    if not users:
        return []
    frame, line = users[-1]
    file = frame.f_code.co_filename
    naming = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = naming(file) if naming is not None else None
    where = " ".join(cell) if cell else f"File {file}"
    source = linecache.getline(file, line).strip()
    return [f"\x1b[32m{where}\x1b[0m, line {line}", *([f"----> {line} {source}"] if source else [])]


def abbreviated(value: object, most: int = 80) -> str:
    """Return at most `most` characters of a value's repr; of a large value, no more is looked at than is shown."""
    text = _beginning(value, most)
    return text if len(text) <= most else text[: most - 3] + "..."


def _beginning(value: object, room: int) -> str:
    """Return the repr of a value, or more than `room` characters of its beginning."""
    if type(value) is str or type(value) is bytes:
        return repr(value[: max(0, room) + 1])
    if type(value) is list:
        return f"[{_joined(value, room, _beginning)}]"
    if type(value) is tuple:
        return f"({_joined(value, room, _beginning)}{',' * (len(value) == 1)})"
    if type(value) is dict:
        return "{" + _joined(value.items(), room, _pair) + "}"
    try:
        text = repr(value)
        return " ".join(text.split()) if "\n" in text else text  # a message is one line
    except Exception:  # an int of more than 4,300 digits, or an object that can't show itself
        return f"<{type(value).__name__}>"


def _pair(pair: tuple[object, object], room: int) -> str:
    name = _beginning(pair[0], room)
    return f"{name}: {_beginning(pair[1], room - len(name))}"


def _joined(values: abc.Iterable[_T], room: int, beginning: abc.Callable[[_T, int], str]) -> str:
    text = ""
    for value in values:
        if len(text) > room:
            break
        text += (", " if text else "") + (beginning(value, room - len(text) - 1) if room > len(text) else "…")
    return text


class _FieldError(RekindleError, ValueError):
    """An argument is wrong: `field` names it, `value` is its value, `problem` and `fix` are the reason and the remedy.

    `index` is the place of the prompt in a list of prompts, or None.
    """

    def __init__(self, field: str, value: object, problem: str, fix: str, index: int | None = None) -> None:
        self.field: str = field
        self.index: int | None = index
        self.value: object = value
        self.problem: str = problem
        self.fix: str = fix
        label = field if index is None else f"{field}[{index}]"
        super().__init__(f"{label}={abbreviated(value, 120)}: {problem}. {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.field, self.value, self.problem, self.fix, self.index)


class ConfigError(_FieldError):
    """An option of `open()` is wrong or unknown."""


class InvalidRequest(_FieldError):
    """An argument of a request is wrong or unknown."""


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for a single new token within `max_model_len`."""


class NotParsed(RekindleError, ValueError):
    """The reason why a structured text became no object: `Completion.parse_error` holds it, and may be raised.

    `reason` is "max_tokens" or "max_model_len" if that bound cut the text, "stop" if a stop string or token ended it,
    "ended" if the request ended otherwise, and "invalid" if the type refuses the text; its validator's error is
    then the `__cause__`.
    """

    def __init__(self, reason: NotParsedReason, message: str) -> None:
        self.reason: NotParsedReason = reason
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reason, str(self))


class QueueFull(RekindleError):
    """The bounded intake is full and the caller chose not to wait."""


class Busy(RekindleError):
    """Other requests hold a resource that the request needs; it may be sent again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        self.retry_after: float = retry_after
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.retry_after)


class RequestAborted(RekindleError):
    """The request was cancelled before it finished; its handle keeps the text so far."""


class RequestFailed(RekindleError):
    """The request could not be finished; the session goes on."""


class StepFailed(RequestFailed):
    """The device step that carried the request raised; the cause is attached."""


class NoTokenLeft(RequestFailed):
    """The request's own options, such as a grammar with a bias, leave no token that may come next."""


class OutOfPages(RequestFailed):
    """One sequence alone needs more KV pages than the pool has."""


class ReplicaLost(RequestFailed):
    """The replicas of a fleet that the request ran on died one after another, or none is left."""


class RequestQuarantined(ReplicaLost):
    """Replicas of a fleet died one after another, apparently of the request, so it is sent to no other."""


class ToolServerError(RekindleError):
    """A Model Context Protocol server failed: `tool` names its tool, or is None if it was not about one."""

    def __init__(self, server: str, tool: str | None, problem: str, fix: str) -> None:
        self.server: str = server
        self.tool: str | None = tool
        self.problem: str = problem
        self.fix: str = fix
        subject = f"the tool server {server}" if tool is None else f"the tool {tool} of the server {server}"
        super().__init__(f"{subject} {problem}. {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.server, self.tool, self.problem, self.fix)


class SessionClosed(RekindleError):
    """The session was closed, or crashed; a crash is attached as the cause."""


class SessionForked(RekindleError):
    """A session was used or opened in a child that `os.fork()` made of a process with a session.

    Start processes anew instead, such as by `multiprocessing.get_context("spawn")`.
    """


class NotPicklable(RekindleError, TypeError):
    """A session, or an object that lives in one, was pickled or copied. Each process opens its own session."""

    def __init__(self, what: str) -> None:
        self.what: str = what
        super().__init__(
            f"{what} can't be pickled or copied: it lives in this process, with programs, pages and threads. Open "
            "a session in each process, and send prompts and texts between them"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what,)


class ProcessLost(RekindleError):
    """A process that shares the model is gone, or does not answer; the session can't go on without it."""


class ProcessRefused(RekindleError):
    """A process may not join the others: it has another secret, version, model or option."""


class CheckpointError(RekindleError, ValueError):
    """A checkpoint folder is missing, broken or incomplete."""


class UnsupportedModel(CheckpointError):
    """The checkpoint's config.json asks for something rekindle does not implement."""


class CompileError(RekindleError):
    """A step program failed to compile while the session was being opened."""


class OutOfMemory(RekindleError, MemoryError):
    """The model or its pages do not fit into memory. The message has the sizes.

    What helps, in this order: fewer bits (`quantize="int8"` or `"int4"`, or a smaller GGUF file), a smaller
    `device_memory` or `max_model_len`, pages of 8 bits (`kv_dtype="int8"`), fewer `max_requests`, and closing sessions
    that are still open. On several devices, `mesh=` divides the weights.
    """


class StoreError(RekindleError):
    """A persisted program, page, snapshot or conversation can't be used or written."""


class SnapshotRefused(StoreError):
    """A snapshot belongs to other weights, another dtype, page size or version."""


class MissingExtra(RekindleError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.package: str = package
        self.extra: str = extra
        super().__init__(f"{package} is not installed; run: pip install 'rekindle[{extra}]'")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.package, self.extra)
