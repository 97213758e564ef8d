"""Layers and positions as callers name them: numbers, several, or words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsIndex

from rekindle.errors import InvalidRequest

Positions = int | Sequence[int] | slice | Literal["prompt", "output"] | None
Layers = int | Sequence[int] | Literal["all"]
Run = tuple[int, int]  # positions, half-open

END = 2**31 - 1


def layer_of(name: str, layer: object, count: int | None) -> int:
    """Return a layer's number, counted from 0."""
    number: Any = layer
    try:
        number = number.__index__()
    except AttributeError:
        raise InvalidRequest(name, layer, "is not a layer's number", "Pass an int") from None
    if count is not None and not -count <= number < count:
        raise InvalidRequest(name, layer, f"is not among the model's {count} layers", f"Use 0 to {count - 1}")
    return int(number % count) if count is not None else int(number)


def position_of(name: str, position: object, prompt_length: int | None) -> int:
    if not isinstance(position, SupportsIndex):
        raise InvalidRequest(name, position, "is no position", "Pass ints, a slice, 'prompt' or 'output'")
    number = int(position.__index__())
    if prompt_length is None or number >= 0:
        return number
    if number < -prompt_length:
        problem = f"is before the prompt, which has {prompt_length} tokens"
        raise InvalidRequest(name, number, problem, f"Use {-prompt_length} or more")
    return number + prompt_length


def runs_of(name: str, positions: Positions, prompt_length: int | None) -> tuple[Run, ...]:
    """Return positions as runs, in their order. Without a prompt they are only checked for their form."""
    length = 1 if prompt_length is None else prompt_length
    match positions:
        case None:
            return ((0, END),)
        case "prompt":
            return ((0, length),)
        case "output":
            return ((length, END),)
        case slice():
            if positions.step not in (None, 1):
                raise InvalidRequest(name, positions, "has a step", "Pass the positions as numbers")
            start = 0 if positions.start is None else position_of(name, positions.start, prompt_length)
            stop = END if positions.stop is None else position_of(name, positions.stop, prompt_length)
            return ((start, stop),) if start < stop else ()
    numbers = [positions] if hasattr(positions, "__index__") else positions
    if isinstance(numbers, str | bytes | Mapping) or not isinstance(numbers, Iterable):
        fix = "Pass ints, a slice, 'prompt' or 'output'"
        raise InvalidRequest(name, positions, "are no positions", fix)
    runs: list[Run] = []
    for number in sorted({position_of(name, position, prompt_length) for position in numbers}):
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return tuple(runs)
