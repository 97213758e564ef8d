"""Gradients of an open session: prompts are checked, their program made in a thread, and run between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from rekindle._src.calls.content import Images, keyed
from rekindle._src.calls.prompts import PromptLike, from_column, parse, parse_one
from rekindle._src.capabilities.adapters.request import AdapterUse
from rekindle._src.capabilities.captures.request import TAPS
from rekindle._src.capabilities.captures.tapped import RequestTaps
from rekindle._src.capabilities.gradients.adapted import AdapterArrays
from rekindle._src.capabilities.gradients.owner import GRADIENTS, GradientPrograms, ProgramKey
from rekindle._src.capabilities.gradients.paths import rows_for
from rekindle._src.capabilities.gradients.request import Objective, Point, points_of, resolved
from rekindle._src.capabilities.gradients.step import (
    BatchKey,
    GradientKey,
    GradientOutputs,
    GradientPrompt,
    public_key,
    size_for,
)
from rekindle._src.capabilities.pictures.request import PICTURES, PromptPictures, placed
from rekindle._src.core.captured import Captured
from rekindle._src.core.records import IntArray
from rekindle._src.core.soft_prompt import SoftPrompt
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
        if name == "images":
            raise InvalidRequest(name, value, f"are not read by {call}", "Use session.gradients, or leave them out")
        fix = f"help(session.{call}) has them; nothing is sampled here"
        raise InvalidRequest(name, value, f"is not an option of {call}", fix)


def owner_of(client: Client) -> GradientPrograms:
    """Return the maker of a session's gradient programs. Raise `InvalidRequest` for a session without gradients."""
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
    adapter: str | Mapping[str, float] | None = None,
    images: Images = None,
    arrays: AdapterArrays | None = None,
) -> GradientPrompt:
    """Check a prompt, the number after it and its changes. Raise `InvalidRequest` for others.

    `arrays` are the adapter's, if another prompt of the call has them already.
    """
    client.host.check()
    owner, facts = owner_of(client), TAPS.of(client.front)
    assert facts is not None, "a session with gradients has taps"
    request = client.keyed_request(prompt, steer=steer, patch=patch, adapter=adapter, images=images)
    tokens, taps, use = request.token_ids, request.extensions.get(RequestTaps), request.extensions.get(AdapterUse)
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
    if arrays is None:
        arrays = {} if use is None else owner.adapter_arrays(use.adapter)
    return GradientPrompt(facts, tokens, objective, () if taps is None else taps.edits, size, arrays)


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

    owner = owner_of(client)
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
    prompt: PromptLike | Sequence[PromptLike],
    of: object,
    at: object,
    steer: SteerLike | Sequence[SteerLike],
    patch: Captured | None,
    adapter: str | Mapping[str, float] | None,
    images: Images,
) -> Gradients | list[Gradients]:
    """Compute the gradients of a number of a prompt, or of each of several; see `Session.gradients`."""
    if isinstance(prompt, SoftPrompt) or not parse(prompt)[1]:
        checked = prepared(client, prompt, of, steer, patch, adapter, images)  # type: ignore[arg-type]
        points = points_of(at, checked.facts)
        if images is not None:
            checked = await _seeing(client, checked, prompt, images)
        return await _of_one(client, checked, points)
    if images is not None:
        raise InvalidRequest("images", images, "are for one prompt", "Call gradients for each prompt with pictures")
    prompts = from_column(prompt)
    assert isinstance(prompts, Sequence | np.ndarray), "several prompts"
    numbers = list(of) if isinstance(of, list | tuple) and not isinstance(of, Objective) else [of] * len(prompts)
    if len(numbers) != len(prompts):
        problem = f"has {len(numbers)} numbers for {len(prompts)} prompts"
        raise InvalidRequest("of", of, problem, "Pass one for all, or one for each")
    many, arrays = list[GradientPrompt](), None
    for one, number in zip(prompts, numbers, strict=True):
        many.append(prepared(client, one, number, steer, patch, adapter, arrays=arrays))
        arrays = many[0].adapter  # one copy for all prompts
    return await _of_many(client, many, points_of(at, many[0].facts) if many else ())


async def _seeing(client: Client, checked: GradientPrompt, prompt: object, images: Images) -> GradientPrompt:
    """Return a prompt with the rows of its pictures, which are encoded if none are kept."""
    pictures, front = PICTURES.of(client.front), client.front
    given = keyed(front, parse_one(prompt), {"images": images}).extensions.get(PromptPictures)
    if given is None or pictures is None:
        return checked
    wanted = [True]
    try:
        rows = [
            await pictures.encoded(picture, lambda: bool(wanted), caller="", salt=None) for picture in given.pictures
        ]
    finally:
        wanted.clear()
    use = placed(checked.tokens, given.pictures, rows, pictures)
    return checked._replace(seen=owner_of(client).seen_rows(use, len(checked.tokens), checked.size))


async def _of_one(client: Client, prompt: GradientPrompt, points: tuple[Point, ...]) -> Gradients:
    def taken(outputs: GradientOutputs) -> Gradients:
        gradients = {index: np.asarray(array) for index, array in outputs.gradients.items()}
        return _result(prompt, points, float(outputs.value), gradients)

    return await computed(client, prompt.key(points), prompt.arguments, taken)


async def _of_many(client: Client, prompts: Sequence[GradientPrompt], points: tuple[Point, ...]) -> list[Gradients]:
    """Compute prompts of one size together, as many at a time as a program has rows."""
    groups: dict[GradientKey, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt.key(points), []).append(index)
    found: dict[int, Gradients] = {}
    for key, indices in groups.items():
        most = rows_for(key.size)
        for start in range(0, len(indices), most):
            part = indices[start : start + most]
            batch = BatchKey(key, min(most, 1 << (len(part) - 1).bit_length()))

            def taken(outputs: GradientOutputs, part: list[int] = part) -> list[Gradients]:
                gradients = {index: np.asarray(array) for index, array in outputs.gradients.items()}
                return [
                    _result(prompts[index], points, float(value), {name: each[row] for name, each in gradients.items()})
                    for row, (index, value) in enumerate(zip(part, np.asarray(outputs.value), strict=False))
                ]

            operands = batch.arguments([prompts[index] for index in part])
            found.update(zip(part, await computed(client, batch, operands, taken), strict=True))
    return [found[index] for index in range(len(prompts))]


def _result(
    prompt: GradientPrompt, points: Sequence[Point], value: float, gradients: Mapping[str, NDArray[np.float32]]
) -> Gradients:
    length = len(prompt.tokens)
    arrays = {public_key(point): np.array(gradients[str(index)][:length]) for index, point in enumerate(points)}
    return Gradients(value, prompt.tokens, arrays, prompt.facts.layers)
