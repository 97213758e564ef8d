"""`session.embed` on real models: the numbers of a plain forward loop, in whatever batch and however many chunks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import rekindle
from helpers import checkpoints
from helpers.driving import tiny_model
from helpers.sessions import wait_until_idle
from helpers.thorough import by_default, one_event_loop  # noqa: F401  the fixture
from rekindle._src.core.records import Pooling
from rekindle._src.models.base import Graph, LoadedModel, merge
from rekindle._src.models.plain import AttendOwn
from rekindle.errors import InvalidRequest, OutOfPages, PromptTooLong
from workshop import reference

pytestmark = pytest.mark.usefixtures("large_steps")
OPTIONS: dict[str, Any] = {
    "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 128, "page_size": 16, "device_pages": 64,
    "precompile": "lazy", "dtype": "float32", "seed": 0,
}  # fmt: skip
LENGTHS = (1, 2, 31, 32, 33, 100, 128)


def prompts(vocab: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(3, vocab, length).tolist() for length in lengths]


@functools.partial(jax.jit, static_argnums=0)
def _dense(graph: Graph, leaves: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
    module, positions = merge(graph, leaves), jnp.arange(len(tokens))

    def attention(q: Any, k: Any, v: Any, spec: Any, sinks: Any) -> Any:
        return reference.attention(q, k, v, positions, spec, sinks)

    return module(tokens, positions, AttendOwn(graph.config, attention), lengths=jnp.full(len(tokens), length))


def plain_states(model: LoadedModel, tokens: list[int]) -> NDArray[np.float32]:
    """Hidden states of a dense forward pass, without pages, steps or a cache."""
    padded = jnp.asarray(tokens + [0] * (128 - len(tokens)), jnp.int32)  # one program; no token sees a later one
    states = _dense(model.graph, model.leaves, padded, jnp.int32(len(tokens)))
    return np.asarray(states, np.float32)[: len(tokens)]


SLOW = ("mistral-window", "qwen3", "gemma3", "gpt2", "qwen3-moe")


POOLINGS = ("mean", "last", "cls")
FAMILIES = [
    ("small", ("mean",)),  # whose programs are those of other tests here
    pytest.param("llama", POOLINGS, marks=pytest.mark.thorough),
    *(pytest.param(name, POOLINGS, marks=pytest.mark.slow) for name in SLOW),
]


@pytest.mark.parametrize(("family", "poolings"), FAMILIES)
def test_it_equals_a_plain_forward_pass_beside_generation(family: str, poolings: Sequence[str], cache_dir: str) -> None:
    model = tiny_model() if family == "small" else checkpoints.case(family)
    texts = prompts(model.config.vocab_size)
    with rekindle.open_sync(model, cache_dir=cache_dir, **OPTIONS) as session:
        alone = session.generate_sync(texts[3][:20], max_tokens=40).token_ids
        for pooling in poolings:
            beside = [session.submit(texts[3][:20], max_tokens=40) for _ in range(2)]
            vectors = session.embed_sync(texts, pooling=pooling, normalize=False)
            assert [handle.result_sync().token_ids for handle in beside] == [alone, alone]
            assert vectors.shape == (len(texts), model.config.hidden_size) and vectors.dtype == np.float32
            for tokens, vector in zip(texts, vectors, strict=True):
                states = plain_states(model, tokens)
                one = {"last": states[-1], "cls": states[0]}.get(pooling)
                expected = states.astype(np.float64).mean(axis=0) if one is None else one
                np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(states).max())))
        wait_until_idle(session)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.anyio
async def test_one_text_is_a_row_and_rows_have_length_one(cache_dir: str) -> None:
    texts = prompts(320)
    async with rekindle.open(tiny_model(), cache_dir=cache_dir, **OPTIONS) as session:
        call = session.embed(texts)
        vectors = await call
        assert call.usage.prompt_tokens == sum(LENGTHS) and call.done
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
        one = await session.embed(texts[4])
        assert one.shape == (32,)
        np.testing.assert_allclose(one, vectors[4], atol=1e-6)
        short = await session.embed(texts[4], dimensions=8)
        np.testing.assert_allclose(short, one[:8] / np.linalg.norm(one[:8]), atol=1e-6)
        assert (await session.embed([])).shape == (0, 32)
        # Nothing of a text is cached, and nothing is compiled once its programs are there.
        assert session.stats().scheduler.pages_cached == 0
        compiled = session.stats().compilations
        await session.embed(texts)
        assert session.stats().compilations == compiled
        # A vector of the last token takes the pages of a prompt that was generated from; a mean takes none.
        cold = [await session.embed(texts[6], pooling=pooling) for pooling in ("last", "mean")]
        await session.generate(texts[6], max_tokens=0)
        for pooling, before, cached in (("last", cold[0], 127), ("mean", cold[1], 0)):
            call = session.embed(texts[6], pooling=pooling)
            np.testing.assert_allclose(await call, before, atol=1e-6)
            assert call.usage.cached_tokens == cached


@pytest.mark.anyio
@pytest.mark.parametrize("pooling", by_default(["mean", "last", "cls"]))
async def test_kept_states_spare_a_common_beginning(pooling: Pooling, cache_dir: str) -> None:
    beginning, *ends = prompts(320, (96, 5, 32, 1))
    texts = [*([*beginning, *end] for end in ends), prompts(320)[-1]]
    async with rekindle.open(tiny_model(), cache_dir=cache_dir, **OPTIONS) as session:
        expected = await session.embed(texts, pooling=pooling)
        for cached in ([0, 96, 96, 0], [96, 127, 96, 127]):
            for text, vector, tokens in zip(texts, expected, cached, strict=True):
                call = session.embed(text, pooling=pooling, keep=True)
                np.testing.assert_allclose(await call, vector, atol=1e-6)
                assert call.usage.cached_tokens == tokens
        captures = session.cache.stats().captures
        assert captures is not None and captures.reused == 2 * 96 + 127 + 96 + 127 + 96
        with pytest.raises(InvalidRequest, match="keep"):
            session.embed(texts, keep=1)  # type: ignore[call-overload]


@pytest.mark.thorough
@pytest.mark.anyio
async def test_preempted_texts_have_the_same_vectors(cache_dir: str) -> None:
    """Texts and long generations that don't fit at the same time: some are preempted partway through their chunks."""
    texts = prompts(320, [120] * 12)
    options = OPTIONS | {"device_pages": 20, "policy": "fcfs"}
    async with rekindle.open(tiny_model(), cache_dir=cache_dir, **options) as session:
        one_by_one = [await session.embed(text, normalize=False) for text in texts]
        handles = [session.submit(texts[0][:30], max_tokens=90, ignore_eos=True) for _ in range(6)]
        together = await session.embed(texts, normalize=False)
        same = {(await handle).token_ids for handle in handles}
        assert len(same) == 1
        np.testing.assert_allclose(together, np.stack(one_by_one), atol=1e-5)


@pytest.mark.thorough
@pytest.mark.anyio
async def test_new_weights_amid_a_text_pool_new_states_only(cache_dir: str) -> None:
    """A text that is half computed when the weights change is computed again from its beginning."""
    text, other = prompts(320, [120])[0], tiny_model(seed=1)
    async with rekindle.open(tiny_model(), cache_dir=cache_dir, **OPTIONS) as session:
        handle: Any = session.embed(text, normalize=False)
        async with session.paused():
            handle._batch.handles[0].submit()
            assert await session.step() is not None
            await session.swap_weights(other)
        expected = plain_states(other, text).mean(axis=0)
        np.testing.assert_allclose(await handle, expected, atol=1e-5)


@pytest.mark.thorough
def test_the_longest_text_and_what_is_too_long(cache_dir: str) -> None:
    with rekindle.open_sync(tiny_model(), cache_dir=cache_dir, **OPTIONS) as session:
        assert session.embed_sync([5] * 128).shape == (32,)
        with pytest.raises(PromptTooLong, match="is longer than max_model_len, which is 128"):
            session.embed_sync([5] * 129)
        found = session.embed_sync([[5], [5] * 129, [999], [6]], errors="return")
        assert [type(one) for one in found] == [np.ndarray, PromptTooLong, InvalidRequest, np.ndarray]
        assert [getattr(one, "index", None) for one in found] == [None, 1, 2, None]
        with pytest.raises(InvalidRequest) as raised:
            session.embed_sync([[5], [999]])
        assert raised.value.index == 1
    with rekindle.open_sync(tiny_model(), cache_dir=cache_dir, **(OPTIONS | {"device_pages": 9})) as session:
        session.generate_sync([7] * 64, max_tokens=2)
        session.pin([7] * 64)
        with pytest.raises(OutOfPages):
            session.embed_sync([7] * 120)


@pytest.mark.thorough
def test_stored_programs_are_loaded(cache_dir: str, tmp_path: Path) -> None:
    for again in (False, True):
        with rekindle.open_sync(tiny_model(), cache_dir=str(tmp_path), **OPTIONS) as session:
            before = session.stats().compilations
            session.embed_sync([5] * 100)
            assert (session.stats().compilations == before) == again
            made = {program.name: program.origin for program in session.programs()}
            assert {name for name in made if name.endswith("+pooling")}
            assert not again or set(made.values()) == {"loaded"}


def test_a_text_whose_numbers_are_not_finite_fails_alone(cache_dir: str) -> None:
    """Its states are no part of its neighbours' sums, although they are in the same product."""
    model = tiny_model()
    path = next(index for index, name in enumerate(model.graph.paths) if name.startswith("embed"))
    leaves = list(model.leaves)
    leaves[path] = leaves[path].at[7].set(jnp.nan)
    with rekindle.open_sync(tiny_model(), cache_dir=cache_dir, **OPTIONS) as session:
        whole = session.embed_sync([[5, 6], [8] * 9])
        session.swap_weights(dict(zip(model.graph.paths, leaves, strict=True))).result_sync()
        found = session.embed_sync([[5, 6], [5, 7], [8] * 9], errors="return")
        assert "has no embedding" in str(found[1])
        np.testing.assert_allclose(np.stack([found[0], found[2]]), whole, atol=1e-6)  # type: ignore[list-item]


@pytest.mark.slow
def test_beside_answers_that_follow_a_structure(tmp_path: Path) -> None:
    """Guided rows split a step into two programs; the first one pools."""
    pytest.importorskip("llguidance", reason="structured output is an extra")
    options: dict[str, Any] = {"max_requests": 4, "max_model_len": 256, "dtype": "float32", "precompile": "lazy"}
    with rekindle.open_sync("tiny", cache_dir=str(tmp_path), **options) as session:
        texts = [f"Once upon a time number {number} went home. " * 4 for number in range(12)]
        alone = session.embed_sync(texts)
        choices = ["a long answer about dogs", "another long answer about cats"]
        asked = {"choice": choices, "max_tokens": 64}
        expected = session.generate_sync("Tom said:", **asked).text  # type: ignore[arg-type]
        handles = [session.submit("Tom said:", **asked) for _ in range(3)]  # type: ignore[arg-type]
        beside = session.embed_sync(texts)
        assert {handle.result_sync().text for handle in handles} == {expected} and expected in choices
        np.testing.assert_allclose(beside, alone, atol=1e-5)
        wait_until_idle(session)
