"""Encodes texts in a separate process, for tokenizers with regexes that could run for hours or with growing texts.

Nothing in a process can stop the tokenizers library; a process can be ended. It is started for the first text, keeps
the tokenizer, and is started again after it was ended.

Run as a program, this file is that process. Apart from Python's own modules it imports only the tokenizers library and
`rekindle_kernels.system`.
"""

from __future__ import annotations

import array
import contextlib
import os
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO, Any

from rekindle_kernels import system

SECONDS, CHARACTERS_PER_SECOND = 5.0, 20_000  # per text; tokenizers in use encode fifty times as fast
MEMORY = 2 << 30  # bytes of addresses in addition to the tokenizer's own, where that can be limited
TOKENS = 64, 1024  # most tokens of a text: for each character, and in addition
_TEXT, _ANSWER = struct.Struct("<?dQ"), struct.Struct("<?Q")


def limit(text: str) -> float:
    """Return the seconds that a text may take."""
    return SECONDS + len(text) / CHARACTERS_PER_SECOND


class EncodingFailed(Exception):
    """A text could not be encoded. The message says why."""


class EncodingProcess:
    """A tokenizer in a process of its own. It encodes one text at a time; other threads wait."""

    def __init__(self, definition: Callable[[], bytes]) -> None:
        """Keep the function that returns the tokenizer.json to make the process's tokenizer from."""
        self._definition = definition
        self._process: Any = None
        self._lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text. Raises `EncodingFailed` if it took too long or too much memory."""
        seconds = limit(text)
        with self._lock:
            process = self._running()
            watch = threading.Timer(seconds, process.kill)
            watch.start()
            try:
                content = text.encode("utf-8", "surrogatepass")
                process.stdin.write(_TEXT.pack(add_special_tokens, seconds, len(content)) + content)
                process.stdin.flush()
                fine, answer = _read_answer(process.stdout, text)
            except (EOFError, OSError):
                ran_out = not watch.is_alive()
                self._end()
                problem = (
                    f"it took over {seconds:.0f} s" if ran_out else "it took too much memory, or ended its process"
                )
                raise EncodingFailed(problem) from None
            except BaseException:
                self._end()
                raise
            finally:
                watch.cancel()
        if not fine:
            raise EncodingFailed(answer.decode(errors="replace"))
        return memoryview(answer).cast("i").tolist()

    def _running(self) -> Any:
        if self._process is None or self._process.poll() is not None:
            program = [sys.executable, "-c", _CODE.format(path=sys.path, file=__file__)]
            self._process = subprocess.Popen(
                program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            weakref.finalize(self, _end_process, self._process)
            content = self._definition()
            self._process.stdin.write(struct.pack("<Q", len(content)) + content)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        _end_process(process)


def _read_answer(stream: IO[bytes], text: str) -> tuple[bool, bytes]:
    fine, size = _ANSWER.unpack(_exactly(stream, _ANSWER.size))
    each, extra = TOKENS
    if size > 4 * (each * len(text) + extra):
        raise EOFError
    return fine, _exactly(stream, size)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


def _end_process(process: Any) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            stream.close()


_CODE = "import sys, runpy; sys.path[:] = {path!r}; runpy.run_path({file!r}, run_name='__main__')"


def main() -> None:
    """Answer texts until its input ends."""
    reading, writing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # text printed by a library is no answer, and has no reader
        os.dup2(nowhere, descriptor)
    import tokenizers

    backend = tokenizers.Tokenizer.from_buffer(_exactly(reading, *struct.unpack("<Q", _exactly(reading, 8))))
    system.limit_memory(MEMORY)
    while True:
        try:
            special, seconds, size = _TEXT.unpack(_exactly(reading, _TEXT.size))
        except EOFError:
            return
        text = _exactly(reading, size).decode("utf-8", "surrogatepass")
        system.end_after(2 * seconds)  # should the process that ends this one be gone
        try:
            fine, answer = True, array.array("i", backend.encode(text, add_special_tokens=special).ids).tobytes()
        except BaseException as error:  # a panic of the library is one
            fine, answer = False, f"the tokenizers library failed: {str(error)[:200]}".encode()
        system.end_after(0)
        writing.write(_ANSWER.pack(fine, len(answer)) + answer)
        writing.flush()


if __name__ == "__main__":
    main()
