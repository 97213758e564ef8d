"""Drives a real ipykernel, as a notebook does."""

from __future__ import annotations

import dataclasses
import gc
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

TESTS = Path(__file__).parents[1]
PATHS = (TESTS, TESTS.parent / "toolkit", TESTS.parent / "kernels")


@dataclasses.dataclass
class Cell:
    """What running a cell gave."""

    status: str
    text: str  # everything it printed, and its value
    error: str  # class of the exception, if it raised
    traceback: str
    seconds: float
    updates: tuple[str, ...] = ()  # what displays were replaced by, as plain text


class Kernel:
    """One running kernel."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.connect()

    def connect(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def run(self, code: str, *, during: Callable[[], object] | None = None, timeout: float = 60) -> Cell:
        """Run a cell; `during` is called in another thread once it has printed something."""
        start = time.perf_counter()
        message = self.client.execute(code)
        text, updates, error, trace, status = [], [], "", "", ""
        deadline = start + timeout
        while True:
            try:
                reply = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.perf_counter()))
            except queue.Empty:
                raise AssertionError(f"the cell did not end in {timeout} s; so far: {text}") from None
            if reply["parent_header"].get("msg_id") != message:
                continue
            kind, content = reply["msg_type"], reply["content"]
            if kind == "stream":
                text.append(content["text"])
                if during is not None:
                    threading.Thread(target=during).start()
                    during = None
            elif kind in ("execute_result", "display_data"):
                text.append(content["data"].get("text/plain", ""))
            elif kind == "update_display_data":
                updates.append(content["data"].get("text/plain", ""))
            elif kind == "error":
                error, trace = content["ename"], "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                break
        status = "error" if error else "ok"
        return Cell(status, "".join(text), error, trace, time.perf_counter() - start, tuple(updates))

    def ok(self, code: str, **options: Any) -> str:
        """Run a cell that must not raise, and return its printed output."""
        cell = self.run(code, **options)
        assert cell.status == "ok", f"{cell.error}\n{cell.traceback}"
        return cell.text.strip()

    def interrupt_after(self, seconds: float, times: int = 1) -> Callable[[], None]:
        def interrupt() -> None:
            for _ in range(times):
                time.sleep(seconds)
                self.interrupted = time.time()
                self.manager.interrupt_kernel()

        return interrupt

    def restart(self, *, now: bool) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=now)
        self.connect()


@contextmanager
def kernel() -> Iterator[Kernel]:
    """A kernel of this environment's Python, or of $REKINDLE_KERNEL_PYTHON."""
    python = os.environ.get("REKINDLE_KERNEL_PYTHON", sys.executable)
    manager = KernelManager()
    manager.kernel_spec.argv[0] = python
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS)), "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTEST_CURRENT_TEST", None)  # where it is set, a kernel leaves descriptors 1 and 2 as they were
    environment["IPYTHONDIR"] = str(Path(environment.get("TMPDIR", "/tmp")) / f"ipython-{os.getpid()}")
    manager.start_kernel(env=environment, cwd=str(TESTS))
    running = Kernel(manager)
    try:
        yield running
    finally:
        running.client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
        del running, manager
        with warnings.catch_warnings():  # jupyter_client leaves event loops and sockets to the garbage collector
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
