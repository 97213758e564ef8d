"""The part of a session that records profiles."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rekindle._src.dispatch.host import Host
from rekindle.errors import InvalidRequest


class Profiling:
    """Traces of the work of device and host."""

    _host: Host

    @contextlib.contextmanager
    def profile(self, folder: str | os.PathLike[str], *, python_calls: bool = False) -> Iterator[Path]:
        """Record the work of the device and the host within a `with` block, which may contain `await`.

        `xprof --logdir FOLDER` (`pip install xprof`) then shows programs, kernels and their parts, such as "attention"
        and "sample". Everything in this process is recorded, other sessions too. `python_calls` adds calls of Python
        functions, which slows the host down. Yields the folder.
        """
        import jax

        self._host.check()
        path = Path(folder).expanduser()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(python_calls)
        try:
            jax.profiler.start_trace(str(path), profiler_options=options)
        except RuntimeError as error:
            fix = "One is recorded at a time in a process: end that one first"
            raise InvalidRequest("folder", str(folder), f"no profile was begun: {error}", fix) from None
        try:
            yield path
        finally:
            jax.profiler.stop_trace()
