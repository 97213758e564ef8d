"""The program of a guard: it does the jobs of a file until the process that sends them is gone.

It is run by itself. Until the first message has brought the path for imports, it has the standard library alone, and
must need no more. A message is its length in four bytes, then JSON. The first one has that path, the file of jobs, the
settings of its `prepare`, the bounds of memory and stack, and whether the process gives way to others. `prepare`
returns a function from a job to its answer. Each of the others has a job and its seconds of a processor. Each is
answered by an object, the first one by an empty one.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import struct
import sys
import threading
from typing import IO, Any

NO_MEMORY = 77  # status of a process that could not allocate


def send(stream: IO[bytes], message: Any) -> None:
    """Write a message as JSON, with its length before it."""
    data = json.dumps(message).encode()
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes], most: int | None = None) -> Any:
    """Read a message; None at the end of the stream, and for one of more than `most` bytes."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    if most is not None and length > most:
        return None
    data = stream.read(length)
    return json.loads(data) if len(data) == length else None


def main() -> None:
    """Read messages until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # text printed by a library is no answer, and has no reader
        os.dup2(nowhere, descriptor)
    first = receive(sys.stdin.buffer)
    if first is None:
        return
    sys.path[:] = first["path"]
    if first["gives_way"] and hasattr(os, "nice"):
        os.nice(5)
    threading.stack_size(first["stack"])
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_do_all, args=(first, jobs, answers), daemon=True).start()
    while (job := receive(sys.stdin.buffer)) is not None:
        jobs.put(job)
    os._exit(0)  # even within a job


def _do_all(first: Any, jobs: queue.SimpleQueue[Any], answers: IO[bytes]) -> None:
    """Do one job after the other, in a thread of its own: for its stack, and because the main thread reads."""
    status = 1
    try:
        import runpy

        from rekindle_kernels import system  # found by the path that the first message brought

        system.forbid_core_dumps()
        do = runpy.run_path(first["jobs"])["prepare"](first["settings"])
        system.limit_memory(first["memory"])
        send(answers, {})
        while True:
            message = jobs.get()
            system.end_after_processor_time(message["processor"])
            answer = do(message["job"])
            system.end_after_processor_time(0.0)
            send(answers, answer)
    except MemoryError:
        status = NO_MEMORY
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
