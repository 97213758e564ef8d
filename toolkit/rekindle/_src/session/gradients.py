"""Gradients of an open session: a prompt is checked, its program made in a thread, and run between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from rekindle._src.calls.prompts import PromptLike
from rekindle._src.capabilities.captures.request import TAPS
from rekindle._src.capabilities.captures.tapped import RequestTaps
from rekindle._src.capabilities.gradients.owner import GRADIENTS, GradientPrograms, ProgramKey
from rekindle._src.capabilities.gradients.request import points_of, resolved
from rekindle._src.capabilities.gradients.step import (
    GradientOutputs,
    GradientPrompt,
    public_key,
    size_for,
)
from rekindle._src.core.captured import Captured, Key
from rekindle._src.core.records import IntArray
from rekindle._src.core.taps import SteerLike
from rekindle._src.session.client import Client
from rekindle.errors import CompileError, InvalidRequest, RequestAborted

T = TypeVar("T")
Operands = TypeVar("Operands")
Outputs = TypeVar("Outputs")
_ANOTHER = "Open a generating model on one device with rekindle.open"


class Gradients(Captured):
    """The gradients of a number at sites of the model, `gradients["residual", 8]`, a line for each prompt token.

    `value` is the number. The other properties are those of `Captured`.
    """

    __slots__ = ("token_ids", "value")

    def __init__(self, value: float, token_ids: IntArray, arrays: Mapping[Any, NDArray[Any]], layers: int) -> None:
        super().__init__(np.arange(len(token_ids), dtype=np.int32), arrays, layers)
        self.value: float = value
        self.token_ids: tuple[int, ...] = tuple(int(token) for token in token_ids)


def check_options(unknown: Mapping[str, object], call: str) -> None:
    """Raise `InvalidRequest` for an option that a call such as `Session.gradients` does not have."""
    for name, value in unknown.items():
        if name == "adapter":
            raise InvalidRequest(name, value, "has no gradients yet", "Open a session with merge=… and leave it out")
        if name == "images":
            raise InvalidRequest(name, value, "have no gradients yet", "Pass a prompt of text alone")
        fix = f"help(session.{call}) has them; nothing is sampled here"
        raise InvalidRequest(name, value, f"is not an option of {call}", fix)


def _owner(client: Client) -> GradientPrograms:
    owner, taps = GRADIENTS.of(client.front), TAPS.of(client.front)
    if owner is None or taps is None or not client.engine.device.has_weights or client.front.embedder.alone:
        raise InvalidRequest("session", client.front.model, "has no gradients", _ANOTHER)
    return owner


def prepared(
    client: Client,
    prompt: PromptLike,
    of: object,
    steer: SteerLike | Sequence[SteerLike],
    patch: Captured | None,
) -> GradientPrompt:
    """Check a prompt, the number after it and its changes. Raise `InvalidRequest` for others."""
    client.host.check()
    owner, facts = _owner(client), TAPS.of(client.front)
    assert facts is not None, "a session with gradients has taps"
    request = client.keyed_request(prompt, steer=steer, patch=patch)
    tokens, taps = request.token_ids, request.extensions.get(RequestTaps)
    longest = client.front.config.max_model_len
    if not 0 < len(tokens) <= longest:
        raise InvalidRequest("prompt", f"{len(tokens)} tokens", f"must have 1 to {longest} tokens", "Pass another one")
    if tokens.max() >= client.front.vocab_size:
        fix = f"Pass ids below {client.front.vocab_size}"
        raise InvalidRequest("prompt", int(tokens.max()), "is not a token id", fix)
    objective = resolved(of, len(tokens), client.front.vocab_size, client.front.tokenizer)
    exact = objective.function is not None
    size = size_for(len(tokens), exact=exact)
    owner.check(size, whole=exact)
    return GradientPrompt(facts, tokens, objective, () if taps is None else taps.edits, size)


async def computed(
    client: Client,
    key: ProgramKey[Operands, Outputs],
    operands: Operands,
    taken: Callable[[Outputs], T],
) -> T:
    """Run a program between two steps, with the weights of then, and return what `taken` keeps of its outputs.

    The program is made first, in a thread.
    """

    def late(seconds: float) -> CompileError:
        return CompileError(f"The program of a gradient was not made within {seconds:g} s. Pass a shorter prompt.")

    owner = _owner(client)
    program = await owner.threads.run(lambda wanted: owner.program(key), late)
    wanted = [True]

    def run() -> T:
        if not wanted:
            raise RequestAborted("the caller of a gradient has left")
        if client.asleep:
            raise InvalidRequest("session", client.front.model, "sleeps", "Await session.wake() first")
        return taken(jax.block_until_ready(program(client.engine.device.model.leaves, operands)))

    try:
        return await client.exclusive(run, lambda result: None)
    finally:
        wanted.clear()


async def gradients(
    client: Client,
    prompt: PromptLike,
    of: object,
    at: object,
    steer: SteerLike | Sequence[SteerLike],
    patch: Captured | None,
) -> Gradients:
    """Compute the gradients of a number of a prompt; see `Session.gradients`."""
    checked = prepared(client, prompt, of, steer, patch)
    points, length = points_of(at, checked.facts), len(checked.tokens)

    def taken(outputs: GradientOutputs) -> tuple[float, dict[Key, NDArray[np.float32]]]:
        arrays = {
            public_key(point): np.array(outputs.gradients[str(index)][:length]) for index, point in enumerate(points)
        }
        return float(outputs.value), arrays

    value, arrays = await computed(client, checked.key(points), checked.arguments, taken)
    return Gradients(value, checked.tokens, arrays, checked.facts.layers)
