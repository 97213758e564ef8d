"""Adds a correction to Python's own errors in a notebook, for code written as in a script."""

from __future__ import annotations

import sys
from typing import Any

_NESTED = ("asyncio.run() cannot be called from a running event loop", "This event loop is already running")
_AWAITED = "can't be used in 'await' expression"
HINT = "rekindle: a notebook runs its own event loop. Write `await main()` in the cell, in place of asyncio.run(main())"
CALLED = "rekindle: `await` takes a call with its arguments. Write `done = await session.generate(prompt)`"
SYNC = "rekindle: calls with names that end in _sync wait by themselves. Leave out `await`, or leave out _sync"
_CALLS = (".generate", ".chat", ".embed", ".say")  # methods whose call is awaited
_explained: list[object] = []  # shells whose cells are followed


def explain_cell_errors() -> None:
    """Print a line after a cell of this notebook that starts an event loop or awaits too much. Called once and more."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)  # another thread may be importing it
    shell = None if get_ipython is None else get_ipython()
    if shell is None or any(shell is other for other in _explained) or not hasattr(shell, "events"):
        return
    _explained.append(shell)
    shell.events.register("post_run_cell", _explain)


def _explain(result: Any) -> None:
    error = getattr(result, "error_in_exec", None)
    if isinstance(error, RuntimeError) and str(error) in _NESTED:
        print(HINT, file=sys.stderr)
    elif isinstance(error, TypeError) and str(error).endswith(_AWAITED):
        cell = getattr(getattr(result, "info", None), "raw_cell", "")
        if isinstance(cell, str) and "_sync(" in cell:
            print(SYNC, file=sys.stderr)
        elif isinstance(cell, str) and str(error).startswith("object method") and any(name in cell for name in _CALLS):
            print(CALLED, file=sys.stderr)
