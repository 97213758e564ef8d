"""Adds a correction to Python's own errors in a notebook, where no object of this package could answer.

Errors of other libraries' objects get none. The expression that failed is read from its source, and its names are
looked up in the frame that failed, without calling anything of the user's: no property, `__getattr__` or `__str__`.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import linecache
import sys
from types import FrameType, FunctionType, TracebackType
from typing import Any

_NESTED = ("asyncio.run() cannot be called from a running event loop", "This event loop is already running")
_AWAITED = "can't be used in 'await' expression"
HINT = "rekindle: a notebook runs its own event loop. Write `await main()` in the cell, in place of asyncio.run(main())"
CALLED = "rekindle: `await` takes a call with its arguments. Write `done = await session.generate(prompt)`"
SYNC = "rekindle: calls with names that end in _sync wait by themselves. Leave out `await`, or leave out _sync"
MODULE_CALLED = (
    "rekindle: the package is not called itself. Write session = await rekindle.open(model), then "
    "done = await session.generate(prompt)"
)
TEXT_CALLED = "rekindle: texts of a reply are attributes. Write reply.text or reply.content, without ()"
TEXT_PARTS = "rekindle: the content of a reply is its text. Write reply.content"
JSON = "rekindle: a completion is not a string. Write json.loads(done.text), or done.parsed after a call with schema=…"
_CALLS = ("generate", "chat", "embed", "say")  # methods whose call is awaited
_REPLIES = (*_CALLS, "generate_sync", "result_sync")  # methods whose result is an object of this package
_TEXTS = ("text", "content", "reasoning")
_MESSAGE = 1_000  # characters of an error that are looked at; Python's own have fewer
_EXPRESSION = 10_000  # characters of an expression that are looked at
_explained: list[object] = []  # shells whose cells are followed


def explain_cell_errors() -> None:
    """Print a correction after cells of this notebook that fail in known ways. Called once and more."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)  # another thread may be importing it
    shell = None if get_ipython is None else get_ipython()
    if shell is None or any(shell is other for other in _explained) or not hasattr(shell, "events"):
        return
    _explained.append(shell)
    shell.events.register("post_run_cell", _explain)


def _explain(result: Any) -> None:
    with contextlib.suppress(Exception):  # IPython would print a second traceback below the user's own
        error = getattr(result, "error_in_exec", None)
        if error is not None and (line := _line(error)):
            print(line, file=sys.stderr)


def _line(error: BaseException) -> str:
    """Return the correction of an error in a cell, or "" if there is none."""
    kind, text = type(error), _message(error)  # the kind itself: classes of the user's may do anything
    if kind is RuntimeError:
        return HINT if text in _NESTED else ""
    if kind is ModuleNotFoundError:
        name = getattr(error, "name", None)
        return _of_module(name) if type(name) is str and name.startswith("rekindle.") else ""
    if kind is AttributeError:
        return _of_text(error) if type(getattr(error, "obj", None)) is str else ""
    return _of_call(error, text) if kind is TypeError else ""


def _message(error: BaseException) -> str:
    """Return the message of one of Python's own errors, or ""."""
    text = error.args[0] if len(error.args) == 1 else None
    return text if type(text) is str and len(text) <= _MESSAGE else ""


def _of_call(error: BaseException, text: str) -> str:
    """Return the correction of a TypeError, or "" if there is none."""
    if text.endswith("not Completion") and "JSON" in text:
        frame, _ = _innermost(error)  # of json.loads(s)
        return JSON if _is_ours(frame.f_locals.get("s")) else ""
    match _failed(error):
        case ast.Await(value=ast.Call(func=function)), frame if text.endswith(_AWAITED):
            return SYNC if _is_sync(function, frame) else ""
        case ast.Await(value=ast.Attribute(attr=name)), _ if text.endswith(_AWAITED):
            return CALLED if text.startswith("object method") and name in _CALLS else ""
        case ast.Call(func=ast.Name() as name), frame if text == "'module' object is not callable":
            return MODULE_CALLED if _is_package(name, frame) else ""
        case ast.Call(func=ast.Attribute(value=owner, attr=name)), frame if text == "'str' object is not callable":
            if name == "model":
                return _of_model("generate") if _is_ours(_value(owner, frame)) else ""
            return TEXT_CALLED if name in _TEXTS and _makes_ours(owner, frame) else ""
    return ""


def _of_module(name: str) -> str:
    """Return the correction of `import rekindle.llm` and of other modules that do not exist."""
    from rekindle._src.core.foreign_calls import MODULE, of_module

    fix = of_module(name.removeprefix("rekindle.").partition(".")[0], ()) or f". {MODULE['load']}"
    return f"rekindle: no module is named {name}{fix}"


def _of_text(error: BaseException) -> str:
    """Return the correction of an attribute that no string has."""
    match _failed(error):
        case ast.Attribute(value=text, attr=missing), frame:
            while isinstance(text, ast.Subscript):  # reply.content[0].text
                text = text.value
            match text:
                case ast.Attribute(value=owner, attr="model"):
                    return _of_model(missing) if _is_ours(_value(owner, frame)) else ""
                case ast.Attribute(value=owner, attr=name) if name in _TEXTS:
                    return TEXT_PARTS if _makes_ours(owner, frame) else ""
    return ""


def _of_model(name: str) -> str:
    from rekindle._src.core.foreign_calls import MODEL_NAME

    return f"rekindle: session.model is the model's name. {MODEL_NAME[name]}" if name in MODEL_NAME else ""


# -- the expression that failed, and its objects


def _innermost(error: BaseException) -> tuple[FrameType, TracebackType]:
    """Return the frame that raised an error, and its place in the traceback."""
    trace = error.__traceback__
    if trace is None:
        raise LookupError("the error was never raised")
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame, trace


def _failed(error: BaseException) -> tuple[ast.expr | None, FrameType]:
    """Return the expression of a cell that raised an error, and its frame; None if it is not a cell's."""
    frame, trace = _innermost(error)
    entry = linecache.cache.get(frame.f_code.co_filename)
    if entry is None or len(entry) != 4 or entry[1] is not None:  # a file has a time; a cell has none
        return None, frame
    place = next(itertools.islice(frame.f_code.co_positions(), trace.tb_lasti // 2, None))
    first, last, begin, end = place
    if first is None or last is None or begin is None or end is None:
        return None, frame
    lines = [line.encode() for line in entry[2][first - 1 : last]]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    source = b"".join(lines).decode()
    return (ast.parse(f"({source})", mode="eval").body if len(source) <= _EXPRESSION else None), frame


def _value(node: ast.expr, frame: FrameType) -> object:
    """Return the object of a name, or of an attribute that lies in an object's own dictionary; None for others."""
    match node:
        case ast.Name(id=name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value=owner, attr=name):
            return inspect.getattr_static(_value(owner, frame), name, None)
    return None


def _makes_ours(node: ast.expr, frame: FrameType) -> bool:
    """True for an object of this package, for an entry of one, and for the result of one's call."""
    match node:
        case ast.Await(value=inner) | ast.Subscript(value=inner):
            return _makes_ours(inner, frame)
        case ast.Call(func=ast.Attribute(value=owner, attr=name)):
            return name in _REPLIES and _makes_ours(owner, frame)
    return _is_ours(_value(node, frame))


def _is_sync(function: ast.expr, frame: FrameType) -> bool:
    """True for a function or method of this package with a name that ends in _sync."""
    match function:
        case ast.Attribute(value=owner, attr=name) if name.endswith("_sync"):
            return _is_package(owner, frame) or _makes_ours(owner, frame)
        case ast.Name(id=name) if name.endswith("_sync"):
            value = _value(function, frame)
            return type(value) is FunctionType and value.__module__.startswith("rekindle.")
    return False


def _is_package(node: ast.expr, frame: FrameType) -> bool:
    return _value(node, frame) is sys.modules["rekindle"]


def _is_ours(value: object) -> bool:
    """True if the class of an object, or one that it is derived from, is this package's."""
    kinds = type.__dict__["__mro__"].__get__(type(value))
    modules = (type.__dict__["__module__"].__get__(kind) for kind in kinds)
    return any(type(module) is str and module.startswith("rekindle.") for module in modules)
