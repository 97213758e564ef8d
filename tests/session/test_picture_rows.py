"""Rows of pictures in prompts: exact in any batch, chunk and cache state, and never another picture's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rekindle
from helpers.driving import tiny_model
from helpers.sessions import host_of
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.calls.handle import Handle
from rekindle._src.calls.prompts import parse_one
from rekindle._src.core.prompt_rows import UNNAMED, PromptRows, RowSpan, page_words
from rekindle._src.core.sampling import Sampling
from rekindle._src.models.base import LoadedModel, merge
from rekindle._src.models.config import PictureSpec
from rekindle._src.models.plain import PlainAttention

pytestmark = pytest.mark.usefixtures("large_steps")
anyio_test = pytest.mark.anyio
CONTEXT, PAGE, LEVELS = 64, 8, 2
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": CONTEXT, "page_size": PAGE,
    "device_pages": 40, "precompile": "lazy", "disk_memory": 0, "seed": 0,
}  # fmt: skip


@functools.cache
def model() -> LoadedModel:
    """The small model of other tests, with ropes of three coordinates, and two layers that take more of a picture."""
    plain = tiny_model(seed=5)
    attention = tuple(
        dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, sections=(3, 3, 2)))
        for spec in plain.config.attention
        if spec.rope is not None
    )
    config = dataclasses.replace(plain.config, pictures=PictureSpec(LEVELS), attention=attention)
    return dataclasses.replace(plain, config=config, graph=dataclasses.replace(plain.graph, config=config))


def picture(seed: int, size: int) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((1 + LEVELS, size, model().config.hidden_size), np.float32)
    rows[1:] *= 0.1
    return rows


def using(length: int, *pictures: tuple[int, int, int]) -> PromptRows:
    """Pictures as (start, rows, columns): the seed is the start's. Positions are Qwen's."""
    spans, rows, coordinates, position, place = [], [], np.zeros((length, 3), np.int32), 0, 0
    for seed, start, (height, width) in [(seed, start, divmod(grid, 100)) for seed, start, grid in pictures]:
        size = height * width
        coordinates[place:start] = (np.arange(place, start) - place + position)[:, None]
        position += start - place
        spans.append(RowSpan(start, start + size, seed.to_bytes(32, "little")))
        rows.append(picture(seed, size))
        grid = np.stack([np.zeros(size, int), np.arange(size) // width, np.arange(size) % width], axis=1)
        coordinates[start : start + size] = position + grid
        position += max(height, width)
        place = start + size
    coordinates[place:] = (np.arange(place, length) - place + position)[:, None]
    return PromptRows(tuple(spans), tuple(rows), coordinates, int(coordinates[-1, 0]) + 1 - length)


@functools.cache
def _forward() -> Any:
    def forward(leaves: Any, tokens: Any, coordinates: Any, rows: Any, there: Any) -> Any:
        module: Any = merge(model().graph, leaves)

        def listener(site: str, layer: int) -> Any:
            if site == "embedding":
                return lambda x: jnp.where(there[:, None], rows[0], x)
            if site == "residual" and layer < LEVELS:
                return lambda x: x + jnp.where(there[:, None], rows[layer + 1], 0)
            return None

        attend = PlainAttention(module, CONTEXT, 1)
        hidden = module(tokens, coordinates, attend, jnp.full(CONTEXT, CONTEXT), listeners=(listener,))
        return module.logits(hidden)

    return jax.jit(forward)


def plainly(ids: list[int], use: PromptRows, count: int) -> tuple[int, ...]:
    """The greedy continuation by whole forward passes."""
    tokens, coordinates = np.zeros(CONTEXT, np.int32), np.zeros((CONTEXT, 3), np.int32)
    rows = np.zeros((1 + LEVELS, CONTEXT, model().config.hidden_size), np.float32)
    there = np.zeros(CONTEXT, bool)
    for span, own in zip(use.spans, use.rows, strict=True):
        rows[:, span.start : span.stop], there[span.start : span.stop] = own, True
    assert use.coordinates is not None
    coordinates[: len(ids)] = use.coordinates
    coordinates[len(ids) :] = (np.arange(len(ids), CONTEXT) + use.offset)[:, None]
    tokens[: len(ids)] = ids
    for place in range(len(ids), len(ids) + count):
        logits = np.asarray(_forward()(model().leaves, tokens, coordinates, rows, there))
        tokens[place] = logits[place - 1].argmax()
    return tuple(tokens[len(ids) : len(ids) + count].tolist())


def asked(session: Session, ids: list[int], use: PromptRows | None, count: int = 8, **options: Any) -> Handle[Any]:
    sampling = Sampling(temperature=0.0, max_tokens=count, ignore_eos=True, **options)
    return Handle(host_of(session), session, parse_one(ids).plus(use), sampling)


def ids_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, model().config.vocab_size, length).tolist()


@anyio_test
async def test_texts_are_those_of_whole_forward_passes() -> None:
    ids, several = ids_of(1, 30), ids_of(2, 45)
    one, two = using(30, (7, 5, 304)), using(45, (8, 3, 203), (9, 12, 504))
    async with rekindle.open(model(), **OPTIONS) as session:
        expected = plainly(ids, one, 8)
        assert (await asked(session, ids, one)).token_ids == expected
        again = await asked(session, ids, one)
        assert again.token_ids == expected and again.usage.cached_tokens >= 24
        assert (await asked(session, several, two)).token_ids == plainly(several, two, 8), "in two chunks"
        handles = [asked(session, ids, one), asked(session, several, two), asked(session, ids_of(3, 20), None)]
        for handle in handles:
            handle.submit()
        texts = [(await handle).token_ids for handle in handles]
        assert texts[:2] == [expected, plainly(several, two, 8)]
        assert (
            texts[2] == (await session.generate(ids_of(3, 20), max_tokens=8, temperature=0, ignore_eos=True)).token_ids
        )


@anyio_test
async def test_a_picture_s_pages_are_its_own() -> None:
    ids = ids_of(1, 40)
    async with rekindle.open(model(), **OPTIONS) as session:
        await asked(session, ids, using(40, (7, 5, 304)))
        other = using(40, (11, 5, 304))
        done = await asked(session, ids, other)
        assert done.token_ids == plainly(ids, other, 8)
        assert done.usage.cached_tokens < PAGE, "the first page has part of the picture"
        text = await asked(session, ids, None)
        assert text.usage.cached_tokens < PAGE
        # A conversation goes on, with one more picture: what came before it is shared.
        longer = ids + ids_of(4, 16)
        both = using(56, (7, 5, 304), (12, 44, 203))
        done = await asked(session, longer, both, 6)
        assert done.usage.cached_tokens == 40 and done.token_ids == plainly(longer, both, 6)


@pytest.mark.thorough
@anyio_test
async def test_it_goes_on_after_a_preemption() -> None:
    options = OPTIONS | {"device_pages": 12, "max_requests": 3, "host_memory": 0}
    cases = [(ids_of(seed, 24), using(24, (seed, 3, 304))) for seed in range(20, 23)]
    async with rekindle.open(model(), **options) as session:
        handles = [asked(session, ids, use, 24) for ids, use in cases]
        for handle in handles:
            handle.submit()
        texts = [(await handle).token_ids for handle in handles]
        assert session.stats().preemptions > 0
    assert texts == [plainly(ids, use, 24) for ids, use in cases]


def test_names_of_pages() -> None:
    use = using(30, (7, 5, 304))
    tokens = np.arange(30, dtype=np.int32)
    names = use.names(tokens, 0, PAGE)
    assert (names[:24] < UNNAMED).sum() == 24 and names[24:].tolist() == [*range(24, 30)]
    assert (use.names(tokens[8:], 8, PAGE) == names[8:]).all()
    assert use.names(tokens[:6], 0, PAGE).tolist() == [0, 1, 2, 3, 4, UNNAMED]
    assert (use.names(tokens, 0, PAGE) == names).all()
    other = dataclasses.replace(use, spans=(RowSpan(5, 17, (1 << 255).to_bytes(32, "little")),), _page_names={})
    assert not np.array_equal(other.names(tokens, 0, PAGE)[:8], names[:8])
    assert page_words(names[:8], 0, ()).max() < UNNAMED
