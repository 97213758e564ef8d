"""Requests over time for the simulation of a fleet: synthetic, or read from a recorded trace."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rekindle._src.core.records import IntArray
from rekindle.errors import ConfigError

VOCABULARY = 50_000
Text = tuple[tuple[int, int], ...]  # a prompt in blocks: a name for the block's content, and its tokens


class SimulatedRequest(NamedTuple):
    """One request."""

    at: float  # seconds
    prompt: Text
    output: int  # tokens
    opening: bytes  # names its system prompt
    conversation: bytes

    @property
    def length(self) -> int:
        return sum(size for _, size in self.prompt)

    def tokens(self) -> IntArray:
        """Return the token ids; equal blocks have equal ids."""
        return np.concatenate([_block(name, size) for name, size in self.prompt]).astype(np.int32)


def _block(name: int, size: int) -> np.ndarray:
    return np.random.default_rng(name).integers(1, VOCABULARY, size)


def chats(
    draw: random.Random,
    requests: int,
    rate: float,
    *,
    systems: int = 8,
    system_tokens: int = 512,
    turns: int = 4,
    question: int = 60,
    output: int = 80,
    pause: float = 4.0,
) -> list[SimulatedRequest]:
    """Return conversations under shared system prompts: each turn repeats the text before it, after a reading pause.

    Few system prompts are much more popular than the others. Sizes are means.
    """
    asks: list[SimulatedRequest] = []
    names = iter(range(1, 1 << 62))
    openings = [((next(names), _about(draw, system_tokens)),) for _ in range(systems)]
    at, number = 0.0, 0
    while len(asks) < requests:
        at += draw.expovariate(rate / turns)
        index = min(systems - 1, int(systems ** draw.random()) - 1)
        text: Text = openings[index]
        now, number = at, number + 1
        for _ in range(max(1, round(draw.gauss(turns, 1)))):
            text = (*text, (next(names), _about(draw, question)))
            answer = _about(draw, output)
            asks.append(SimulatedRequest(now, text, answer, b"s%d" % index, b"c%d" % number))
            text = (*text, (next(names), answer))
            now += draw.expovariate(1 / pause) + 0.02 * answer
    return sorted(asks[:requests])


def questions(
    draw: random.Random, requests: int, rate: float, *, systems: int = 24, system_tokens: int = 768
) -> list[SimulatedRequest]:
    """Return requests with shared system prompts, each followed by one question."""
    return chats(draw, requests, rate, systems=systems, system_tokens=system_tokens, turns=1)


def floods(draw: random.Random, requests: int, rate: float) -> list[SimulatedRequest]:
    """Return chats, and among them long prompts that are new to every cache."""
    short = chats(draw, requests - requests // 10, rate)
    last = short[-1].at
    long = [
        SimulatedRequest(
            draw.uniform(0, last), ((-1 - number, _about(draw, 3000)),), 32, b"f%d" % number, b"f%d" % number
        )
        for number in range(requests // 10)
    ]
    return sorted([*short, *(ask._replace(prompt=((1 << 62 | -ask.prompt[0][0], ask.prompt[0][1]),)) for ask in long)])


LOADS: dict[str, Callable[[random.Random, int, float], list[SimulatedRequest]]] = {
    "chats": chats, "questions": questions, "floods": floods,
}  # fmt: skip


def _about(draw: random.Random, mean: int) -> int:
    return max(4, min(4 * mean, round(draw.lognormvariate(0.0, 0.4) * mean)))


def read_trace(path: Path) -> list[SimulatedRequest]:
    """Return a trace in the format of Mooncake: an object on each line, with `timestamp` in milliseconds and tokens in
    `input_length` and `output_length`. `hash_ids` name the prompt's blocks, all of one size except the last."""
    asks = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            names = [int(name) for name in entry["hash_ids"]]
            length, output = int(entry["input_length"]), int(entry["output_length"])
            if not names or min(names) < 0 or length < 1 or output < 1:
                raise ValueError("a request has at least one block, one token of prompt and one of output")
            size = -(-length // len(names))
            sizes = [max(1, min(size, length - at * size)) for at in range(len(names))]
            opening = b"%d" % names[0]
            conversation = b"%d" % names[min(1, len(names) - 1)]
            prompt = tuple(zip(names, sizes, strict=True))
            asks.append(SimulatedRequest(float(entry["timestamp"]) / 1e3, prompt, output, opening, conversation))
        except (ValueError, KeyError, TypeError) as error:
            problem = f"line {number} is no request: {error!r}"
            raise ConfigError("trace", str(path), problem, "See `rekindle simulate --help` for the format") from None
    if not asks:
        raise ConfigError("trace", str(path), "has no requests", "Pass a file with a JSON object on each line")
    return sorted(asks)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
