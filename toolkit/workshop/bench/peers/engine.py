"""What every engine of the comparison does: answer a batch of token prompts greedily, and say when each token came.

Nothing here imports an engine; each one lives in `with_NAME.py`, whose `open` and `convert` are looked up by name and
run by the Python of that engine's own virtual environment.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

ENGINES = ("rekindle", "rekindle_int8", "llama_cpp", "llama_server", "openvino", "transformers")
CONVERTED = ("openvino",)  # that read weights in a format of their own
QUANTIZE = {16: None, 8: "int8", 4: "int4-32"}  # what rekindle calls so many bits of a weight
Prompt = list[int]
Moments = Sequence[float]  # in seconds


@dataclasses.dataclass(frozen=True)
class Setting:
    """What an engine is opened with."""

    folder: str  # a Hugging Face checkpoint with bfloat16 weights
    bits: int  # of a weight: 16, 8 or 4
    threads: int
    scratch: str  # the engine's own folder for converted weights
    cache: str  # and for what it keeps between processes, such as compiled programs
    first_token: bool = False  # opened for one short request, as a fresh process is
    file: str = ""  # a GGUF file that the engine opens as it is, in place of the folder
    program: str = ""  # that llama_server starts
    requests: int = 32  # at once, at most

    @property
    def weights(self) -> Path:
        """Where `convert` puts this precision's weights."""
        return Path(self.scratch) / f"{self.bits}bit"


@dataclasses.dataclass
class Answer:
    """Of one batch, on a clock that began when the batch was handed over. Every list has one entry per request."""

    wall: float
    times: list[list[float]]  # of every token; empty if the engine doesn't say
    ids: list[list[int]]


class Engine(Protocol):
    notes: str  # settings that matter, for the report

    def generate(
        self, prompts: Sequence[Prompt], outputs: Sequence[int], *, keep: bool = False, at: Moments | None = None
    ) -> Answer:
        """`outputs[i]` tokens for prompt i, whatever they are; all prompts at once, or prompt i after `at[i]` seconds.

        With `keep`, what was computed for the prompts stays for the next batch to reuse, if the engine can.
        """
        ...

    def forget(self) -> None:
        """Drop every cached prefix."""
        ...

    def close(self) -> None: ...


class Arrivals:
    """The requests of a batch as they come, for a loop that owns the engine; the batch's clock begins here."""

    def __init__(self, count: int, at: Moments | None) -> None:
        self._at = at or [0.0] * count
        self._coming = deque(sorted(range(count), key=self._at.__getitem__))
        self._start = time.perf_counter()

    def __bool__(self) -> bool:
        """Whether some are still to come."""
        return bool(self._coming)

    def now(self) -> float:
        return time.perf_counter() - self._start

    def due(self, *, idle: bool) -> list[int]:
        """Those that have come since the last call. Who has nothing else to do sleeps until there is one."""
        while idle and self._coming and (wait := self._at[self._coming[0]] - self.now()) > 0:
            time.sleep(wait)
        now = self.now()
        found = []
        while self._coming and self._at[self._coming[0]] <= now:
            found.append(self._coming.popleft())
        return found


def module(name: str) -> Any:
    """`open(setting) -> Engine`, and `convert(setting) -> None` where the checkpoint needs another format."""
    return importlib.import_module(f"with_{name.removesuffix('_int8')}")


def shared_length(prompts: Sequence[Prompt]) -> int:
    """Tokens that all prompts begin with."""
    shortest = min(map(len, prompts))
    return next((i for i in range(shortest) if len({prompt[i] for prompt in prompts}) > 1), shortest)
