"""Adds a correction to Python's own errors in a notebook, where no object of this package could answer."""

from __future__ import annotations

import sys
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
JSON = "rekindle: a completion is no text. Write json.loads(done.text), or done.parsed after a call with schema=…"
_CALLS = (".generate", ".chat", ".embed", ".say")  # methods whose call is awaited
_TEXTS = ("text", "content", "reasoning")
_CELL = 100_000  # characters of a cell that are looked at
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
    error = getattr(result, "error_in_exec", None)
    cell = getattr(getattr(result, "info", None), "raw_cell", "")
    if error is not None and isinstance(cell, str) and (line := _line(error, cell[:_CELL])):
        print(line, file=sys.stderr)


def _line(error: BaseException, cell: str) -> str:
    """Return the correction of an error in a cell, or "" if there is none."""
    text = str(error)
    match error:
        case RuntimeError():
            return HINT if text in _NESTED else ""
        case ImportError(name=str(name)) if name.startswith("rekindle."):
            return _of_module(name)
        case AttributeError(obj=str(), name=str(name)):
            return _of_text(name, cell)
        case TypeError() if text.endswith(_AWAITED):
            if "_sync(" in cell:
                return SYNC
            return CALLED if text.startswith("object method") and any(name in cell for name in _CALLS) else ""
        case TypeError() if text == "'module' object is not callable":
            return MODULE_CALLED if "rekindle(" in cell else ""
        case TypeError() if text == "'str' object is not callable":
            if ".model(" in cell:
                return _of_model("generate")
            return TEXT_CALLED if any(f".{name}(" in cell for name in _TEXTS) else ""
        case TypeError() if text.endswith("not Completion") and "JSON" in text:
            return JSON
    return ""


def _of_module(name: str) -> str:
    """Return the correction of `import rekindle.llm` and of other modules that do not exist."""
    from rekindle._src.core.foreign_calls import MODULE, of_module

    fix = of_module(name.removeprefix("rekindle.").partition(".")[0], ()) or f". {MODULE['load']}"
    return f"rekindle: there is no module {name}{fix}"


def _of_text(name: str, cell: str) -> str:
    """Return the correction of an attribute that no string has."""
    if f".model.{name}" in cell:
        return _of_model(name)
    return TEXT_PARTS if f".{name}" in cell and any(f".{part}{end}" in cell for part in _TEXTS for end in "[.") else ""


def _of_model(name: str) -> str:
    from rekindle._src.core.foreign_calls import MODEL_NAME

    return f"rekindle: session.model is the model's name. {MODEL_NAME[name]}" if name in MODEL_NAME else ""
