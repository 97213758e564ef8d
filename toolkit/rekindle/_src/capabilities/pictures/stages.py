"""The threads that decode and encode pictures, and the callers' turns at them.

Pictures are decoded in two lanes of a thread each, so that a small picture waits for no large one, and encoded in a
third. Each lane serves one caller's picture after another's. A picture leaves its lane when its encoding begins, so at
most two decoded pictures wait for the encoder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TypeVar

from rekindle._src.core.pictures import EncodedRows
from rekindle._src.dispatch.intake import Turns
from rekindle._src.dispatch.threads import OneShot
from rekindle._src.images.processor import PicturePatches

T = TypeVar("T")
SMALL = 1 << 27  # nanoseconds of work, an eighth of a second: a file of 1920 × 1080 pixels and 1 MB has 0.11 s


class _PictureThread:
    """A thread of its own, and the turns that callers take at it."""

    def __init__(self, name: str) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"rekindle pictures {name}")
        self.turns = Turns(1)

    async def run(self, work: Callable[[], T]) -> T:
        """Call `work` in the thread. Drop it, and all that it holds, if the task is cancelled before it begins."""
        reply, jobs = OneShot[T](), [work]
        self._worker.submit(_begin, reply, jobs)
        try:
            return await reply.get()
        finally:
            jobs.clear()

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)


def _begin(reply: OneShot[T], jobs: list[Callable[[], T]]) -> None:
    with contextlib.suppress(IndexError):
        reply.run(jobs.pop())


class PictureStages:
    """Runs the decoding and encoding of pictures. Its methods belong to one event loop, but for `close`."""

    def __init__(self) -> None:
        self._small, self._large = _PictureThread("small"), _PictureThread("large")
        self._encoder = _PictureThread("encoder")

    async def rows(
        self,
        caller: str,
        work: int,
        decode: Callable[[], EncodedRows | PicturePatches],
        encode: Callable[[PicturePatches], EncodedRows],
    ) -> EncodedRows:
        """Return the rows that `decode` returns, or else encode its patches to rows.

        `work` is about how many nanoseconds `decode` takes. Both run in threads.
        """
        lane = self._small if work <= SMALL else self._large
        async with AsyncExitStack() as encoding:
            async with lane.turns.turn(caller):
                decoded = await lane.run(decode)
                if isinstance(decoded, EncodedRows):
                    return decoded
                await encoding.enter_async_context(self._encoder.turns.turn(caller))
            return await self._encoder.run(lambda: encode(decoded))

    def close(self) -> None:
        """End the threads after the work that they do."""
        for lane in (self._small, self._large, self._encoder):
            lane.close()
