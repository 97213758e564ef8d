"""The entry to an opening, on the session's thread: imports, work that needs no JAX, and then `build`."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle._src.capabilities import complete
from rekindle._src.core.memory import check_address_space, gc_paused
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.threads import capture_contexts
from rekindle._src.opening.open_request import OpenRequest

if TYPE_CHECKING:
    from rekindle._src.opening.head_start import HeadStart

log = logging.getLogger("rekindle.engine")
_opened: list[bool] = []  # not empty once this process has opened a session: then JAX has its threads


def open_front(request: OpenRequest, import_caller: Callable[[], object]) -> Front:
    """Open a model. `import_caller` imports what will use it, while JAX's library is loaded."""
    # Modules are imported on the session's thread: `import rekindle` and the caller's loop stay quick.
    first, ahead = "jax" not in sys.modules, None
    if not _opened:
        check_address_space()
    try:
        # Until the session is open: once what imports made counts as old, the next run would scan it, 0.1 s.
        with gc_paused(stays=first):
            if first:
                ahead = begin(request)
            import_caller()  # before JAX: its library is loaded meanwhile
            from rekindle._src.opening.build import build
            from rekindle._src.programs.user_functions import check_processors

            processors, additions = check_processors(request.processors), complete(request.additions)
            contexts = capture_contexts()
            front = build(
                dataclasses.replace(request, processors=processors, additions=additions, contexts=contexts, ahead=ahead)
            )
            _opened.append(True)
            log.info("opened %s", request.shown.times())
            return front
    finally:
        if ahead is not None:
            ahead.close()


def begin(request: OpenRequest) -> HeadStart | None:
    """Begin the work on a checkpoint that needs no JAX. Return None where several devices share a model."""
    model, config = request.model, request.config
    if config.processes > 1 or config.mesh is not None or not isinstance(model, str | Path):
        return None
    from rekindle._src.opening.head_start import HeadStart

    return HeadStart(model, config)
