"""What every engine of the comparison does: answer a batch of token prompts greedily, and say when each token came.

Nothing here imports an engine; each one lives in `with_NAME.py`, whose `open` and `convert` are looked up by name and
run by the Python of that engine's own virtual environment.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

ENGINES = ("rekindle", "llama_cpp", "openvino", "transformers")
CONVERTED = ("llama_cpp", "openvino")  # that read weights in a format of their own
Prompt = list[int]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What an engine is opened with."""

    folder: str  # a Hugging Face checkpoint with bfloat16 weights
    eight_bit: bool
    threads: int
    scratch: str  # the engine's own folder for converted weights
    cache: str  # and for what it keeps between processes, such as compiled programs
    first_token: bool = False  # opened for one short request, as a fresh process is

    @property
    def weights(self) -> Path:
        """Where `convert` puts this precision's weights."""
        return Path(self.scratch) / ("8bit" if self.eight_bit else "16bit")


@dataclasses.dataclass
class Answer:
    """Of one batch, on a clock that began when the batch was handed over. Every list has one entry per request."""

    wall: float
    times: list[list[float]]  # of every token; empty if the engine doesn't say
    ids: list[list[int]]


class Engine(Protocol):
    notes: str  # settings that matter, for the report

    def generate(self, prompts: Sequence[Prompt], outputs: Sequence[int], *, keep: bool = False) -> Answer:
        """All prompts at once, `outputs[i]` tokens for prompt i, whatever they are.

        With `keep`, what was computed for the prompts stays for the next batch to reuse, if the engine can.
        """
        ...

    def forget(self) -> None:
        """Drop every cached prefix."""
        ...

    def close(self) -> None: ...


def module(name: str) -> Any:
    """`open(setting) -> Engine`, and `convert(setting) -> None` where the checkpoint needs another format."""
    return importlib.import_module(f"with_{name}")


def shared_length(prompts: Sequence[Prompt]) -> int:
    """Tokens that all prompts begin with."""
    shortest = min(map(len, prompts))
    return next((i for i in range(shortest) if len({prompt[i] for prompt in prompts}) > 1), shortest)


def hf_config(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text())
