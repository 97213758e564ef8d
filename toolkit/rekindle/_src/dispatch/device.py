"""The one thread that touches the device: it enters the caller's JAX contexts once and runs jobs in turn."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from rekindle._src.dispatch.mailbox import OneShot

T = TypeVar("T")
Contexts = Callable[[], contextlib.AbstractContextManager[None]]


def capture_contexts() -> Contexts:
    """Return a function that enters the JAX contexts of this thread in another one; they are thread-local.

    Covers `jax.default_device`, `jax.default_matmul_precision` and `jax.set_mesh`. JAX is not imported for this: if it
    was not imported before, there is no context.
    """
    jax = sys.modules.get("jax")
    if jax is None:
        return contextlib.nullcontext
    device, precision = jax.config.jax_default_device, jax.config.jax_default_matmul_precision
    mesh = jax.sharding.get_mesh()

    @contextlib.contextmanager
    def enter() -> Any:
        with contextlib.ExitStack() as stack:
            if device is not None:
                stack.enter_context(jax.default_device(device))
            if precision is not None:
                stack.enter_context(jax.default_matmul_precision(precision))
            if not mesh.empty:
                stack.enter_context(jax.set_mesh(mesh))
            yield

    return enter


class DeviceThread:
    """Runs jobs one after another while its callers' loops stay free.

    A round trip takes 25 to 30 µs, with anyio.to_thread.run_sync 45 to 75 µs (medians on asyncio and uvloop).
    """

    def __init__(self, contexts: Contexts = contextlib.nullcontext, name: str = "rekindle device") -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], OneShot[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs, contexts), name=name, daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job`; return its result or raise its error. A job whose caller is cancelled still runs to its end."""
        reply: OneShot[T] = OneShot()
        self._jobs.put((job, reply))
        return await reply.get()

    def stop(self, timeout: float = 0.0) -> bool:
        """End after the queued jobs; true if the thread has ended within `timeout` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()


def _work(jobs: queue.SimpleQueue[tuple[Callable[[], Any], OneShot[Any]] | None], contexts: Contexts) -> None:
    with contexts():
        while (entry := jobs.get()) is not None:
            job, reply = entry
            reply.run(job)
            del entry, job, reply  # a job's result may be device memory; keep nothing while waiting for the next
