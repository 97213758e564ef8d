"""llama.cpp through the server that it comes with, for who has its programs and not the package llama-cpp-python.

A batch of one has the server's own times, in which there is no HTTP; of larger ones only the whole is known, which is
measured here. Servers are started when they are first needed, which is in the warm-up, with a place for each request.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import Answer, Moments, Prompt, Setting

sys.path.append(str(Path(__file__).parents[1]))
from llama_server import LlamaServer

# llama.cpp's defaults for the tokens of a call, as with the package; no answer is kept for later requests.
OPTIONS = ("-b", "2048", "-ub", "512", "--cache-ram", "0")


def open(setting: Setting) -> Server:
    return Server(setting)


class Server:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._running = contextlib.ExitStack()
        self._servers: dict[tuple[int, int], LlamaServer] = {}  # by places and the tokens of each
        self.notes = f"batch 2048, chunk 512, f16 KV, {Path(setting.program).name}"

    def generate(
        self, prompts: Sequence[Prompt], outputs: Sequence[int], *, keep: bool = False, at: Moments | None = None
    ) -> Answer:
        if keep or at is not None:
            raise NotImplementedError("the server is asked for whole batches; the package llama-cpp-python does more")
        longest = max(len(prompt) + new for prompt, new in zip(prompts, outputs, strict=True))
        server = self._server(len(prompts), -(-longest // 256) * 256)
        common = {"temperature": 0.0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True}
        asked = [{"prompt": prompt, "n_predict": new, **common} for prompt, new in zip(prompts, outputs, strict=True)]
        start = time.perf_counter()
        answers = server.answers(asked)
        wall = time.perf_counter() - start
        ids = [answer["tokens"] for answer in answers]
        if len(prompts) > 1:
            return Answer(wall, [[] for _ in prompts], ids)
        times = moments(answers[0]["timings"], len(ids[0]))
        return Answer(times[-1], [times], ids)

    def _server(self, places: int, context: int) -> LlamaServer:
        """The one for so many requests."""
        fitting = [server for (rows, length), server in self._servers.items() if rows == places and length >= context]
        if not fitting:
            program, file = Path(self._setting.program), Path(self._setting.file)
            server = LlamaServer(program, file, rows=places, context=context, options=OPTIONS)
            self._servers[places, context] = self._running.enter_context(server)
            return server
        return fitting[0]

    def forget(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        self._running.close()


def moments(timings: dict[str, Any], count: int) -> list[float]:
    """When each of so many tokens came: the first at the end of the prompt, the others at even distances."""
    first = timings["prompt_ms"] / 1e3
    gap = timings["predicted_ms"] / 1e3 / max(1, count - 1)
    return [first + gap * index for index in range(count)]
