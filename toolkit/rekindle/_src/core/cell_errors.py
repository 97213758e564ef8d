"""Adds a correction to Python's own errors in a notebook, for code written as in a script."""

from __future__ import annotations

import sys
from typing import Any

_NESTED = ("asyncio.run() cannot be called from a running event loop", "This event loop is already running")
HINT = "rekindle: a notebook runs its own event loop. Write `await main()` in the cell, in place of asyncio.run(main())"
_explained: list[object] = []  # shells whose cells are followed


def explain_cell_errors() -> None:
    """Print a line after a cell of this notebook that failed because it starts an event loop. Called once and more."""
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
