"""Sessions with `deterministic`: a text depends on its prompt and its seed, and on nothing that runs along with it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rekindle
from helpers import checkpoints
from helpers.driving import tiny_model
from helpers.thorough import anyio_backend, by_default  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import abstract_model, merge
from rekindle._src.models.config import ModelConfig, MoeSpec
from rekindle._src.models.nn.layers import LayerNorm
from rekindle._src.models.nn.linear import rms_norm
from rekindle._src.models.registry import config_from_hf, family
from rekindle._src.opening.resolve import reason_against, reason_against_norms
from rekindle._src.programs.logprobs import logprobs_of, model_logprobs
from rekindle.errors import ConfigError
from rekindle_kernels import unavailable_reason

pytestmark = [
    pytest.mark.skipif(unavailable_reason("cpu") is not None, reason="numba is not installed"),
    pytest.mark.usefixtures("shared_programs"),
]
PROMPT = "Once upon a time there was a little girl called Anna. One day she went"
OTHERS = ("The cat", "Tom and Anna saw a bird in the tree. It was", "One cold day", "Two")
LONG = "The dog and the cat walked home. "
OPTIONS: dict[str, Any] = {
    "deterministic": True, "disk_memory": 0, "quiet": True, "seed": 0, "precompile": "lazy", "max_tokens_per_step": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=by_default([None, "int8", "int4"]), ids=["bfloat16", "int8", "int4"])
def quantize(request: pytest.FixtureRequest) -> str | None:
    quantize: str | None = request.param
    return quantize


@pytest.fixture(scope="module")
def session(cache_dir: Path, quantize: str | None) -> Iterator[Session]:
    with rekindle.open_sync("tiny", quantize=quantize, cache_dir=cache_dir, **OPTIONS) as made:
        assert made.config.deterministic
        yield made


async def text(session: Session, seed: int, tokens: int, prompt: Any = PROMPT) -> tuple[int, ...]:
    """The tokens that a seed draws."""
    done = await session.generate(prompt, seed=seed, max_tokens=tokens, temperature=0.8, ignore_eos=True)
    return done.token_ids


async def compare(session: Session, seeds: int, tokens: int) -> None:
    """Compare every seed alone and cold, cached, along with four others, and in a full batch while prompts come in."""
    alone = {}
    for seed in range(seeds):
        await session.cache.clear(tier="memory")
        alone[seed] = await text(session, seed, tokens)
    assert len(set(alone.values())) > 1, "the seeds draw different texts"
    for seed in range(seeds):
        assert await text(session, seed, tokens) == alone[seed], f"seed {seed}, cached"
    found: dict[int, tuple[int, ...]] = {}

    async def one(seed: int) -> None:
        found[seed] = await text(session, seed, tokens)

    async def prompts() -> None:
        for index in range(max(4, seeds // 4)):
            await session.generate(f"Number {index}. " + LONG * (3 + index % 9), max_tokens=2)

    for seed in range(seeds):
        async with anyio.create_task_group() as tasks:
            for other in OTHERS:
                tasks.start_soon(functools.partial(session.generate, other, max_tokens=tokens, seed=seed))
            tasks.start_soon(one, seed)
        assert found[seed] == alone[seed], f"seed {seed}, in a batch of 5"
    await session.cache.clear(tier="memory")
    async with anyio.create_task_group() as tasks:
        for seed in range(seeds):
            tasks.start_soon(one, seed)
        tasks.start_soon(prompts)
    assert found == alone, "in a batch of 16 with a prefill"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # arithmetic: the loop has no say in it
@pytest.mark.anyio
async def test_a_text_does_not_depend_on_the_batch_or_the_cache(session: Session) -> None:
    await compare(session, seeds=18, tokens=12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.anyio
async def test_two_hundred_seeds(session: Session) -> None:
    await compare(session, seeds=200, tokens=60)


@pytest.mark.anyio
async def test_generated_tokens_are_the_same_from_the_cache_and_as_a_prompt(session: Session) -> None:
    tokens = session.tokenizer.encode(PROMPT)
    first = await text(session, 1, 60, tokens)
    longer = [*tokens, *first]
    cached = await text(session, 2, 20, longer)  # its pages were computed token by token
    await session.cache.clear(tier="memory")
    assert await text(session, 2, 20, longer) == cached


@pytest.mark.thorough
@pytest.mark.anyio
async def test_chunks_and_guesses_change_nothing(session: Session, cache_dir: Path, quantize: str | None) -> None:
    prompt = PROMPT + ". " + LONG * 12
    whole = await text(session, 5, 24, prompt)
    options = {**OPTIONS, "max_requests": 4, "max_tokens_per_step": 23, "prompt_lookup": 3}
    async with rekindle.open("tiny", quantize=quantize, cache_dir=cache_dir, **options) as chunked:
        assert await text(chunked, 5, 24, prompt) == whole


def test_norms_of_heads_are_native() -> None:
    """After a cut, XLA's norms of [T, heads, size] gave 30 of 40 log-probabilities of a HunYuan different last bits."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3, 32)), jnp.float32)
    weight = jnp.linspace(0.5, 2.0, 32)

    def norm(x: jax.Array, *, deterministic: bool) -> jax.Array:
        return rms_norm(x, weight, 1e-6, None, deterministic=deterministic)

    fixed, plain = (functools.partial(norm, deterministic=deterministic) for deterministic in (True, False))
    assert "ffi_call" in str(jax.make_jaxpr(fixed)(x))
    np.testing.assert_allclose(fixed(x), plain(x), rtol=1e-6)


@pytest.mark.parametrize("vocab", [160, 2048])
def test_log_probabilities_do_not_depend_on_the_number_of_rows(vocab: int) -> None:
    """XLA's sums gave up to 5 of 37 rows other last bits, and a soft cap that joined the subtraction one of 72."""
    config = replace(tiny_model().config, vocab_size=vocab, hidden_size=64, final_soft_cap=30.0)
    graph, shapes = abstract_model(config)
    draw = np.random.default_rng(vocab)
    leaves = [jnp.asarray(draw.standard_normal(leaf.shape), leaf.dtype) for leaf in shapes]
    graph = replace(graph, precision=replace(graph.precision, deterministic=True))
    hidden = draw.standard_normal((37, 64)).astype(np.float32)
    tokens = np.arange(37, dtype=np.int32)

    @jax.jit
    def together(hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = merge(graph, leaves).logits(hidden)
        return logprobs_of(logits, tokens, deterministic=True)[:, 0]

    @jax.jit
    def apart(hidden: jax.Array) -> jax.Array:
        return merge(graph, leaves).logits(hidden)

    whole = np.asarray(together(hidden, tokens))
    for rows in (1, 2, 6):
        found = [np.asarray(together(hidden[at : at + rows], tokens[at : at + rows])) for at in range(0, 36, rows)]
        np.testing.assert_array_equal(np.concatenate(found), whole[:36], err_msg=f"{rows} rows")
    scores = jax.jit(functools.partial(model_logprobs, deterministic=True))(apart(hidden))
    chosen = np.take_along_axis(np.asarray(scores), tokens[:, None], axis=1)[:, 0]
    np.testing.assert_array_equal(chosen.view(np.int32), whole, err_msg="logits of another program")


MODEL = replace(tiny_model().config, head_dim=16, hidden_size=64)


def test_families_say_whether_they_have_layer_norms() -> None:
    """XLA computes these, and their bits change with the number of rows."""
    for model_type in checkpoints.OF_FAMILY:
        model = merge(*abstract_model(config_from_hf(checkpoints.OF_FAMILY[model_type][0])))
        has = any(isinstance(module, LayerNorm) for _, module in nnx.iter_graph(model))
        assert has == family(model_type).layer_norms, model_type


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (MODEL, {"kernels": "xla"}, "kernels='xla' add in an order"),
        (replace(MODEL, head_dim=24), {}, "head size 24 is not a multiple of 16"),
        (replace(MODEL, model_type="gpt2"), {}, "layer norms"),
        (replace(MODEL, hidden_size=40), {}, "hidden size 40 is not a multiple of 32"),
        (replace(MODEL, layer_embedding=16), {}, "size 16 of the layers' embeddings is not a multiple of 32"),
        (
            replace(
                MODEL,
                moe=(MoeSpec(num_experts=4, top_k=2, intermediate_size=32, normalize=True),) * MODEL.num_layers,
            ),
            {},
            "experts",
        ),
    ],
)
def test_why_not(model: ModelConfig, options: dict[str, Any], words: str) -> None:
    assert reason_against(MODEL, EngineConfig()) is None
    assert words in (reason_against(model, EngineConfig(**options)) or "")


def test_norms_of_heads_that_are_xlas_are_refused() -> None:
    case = checkpoints.CASES["qwen3"] | {"hidden_size": 64}
    for head_dim in (16, 32):
        graph, _ = abstract_model(config_from_hf(case | {"head_dim": head_dim}))
        wanted = None if head_dim == 32 else "norms of heads of 16, not a multiple of 32, are XLA's"
        assert reason_against_norms(graph) == wanted


@pytest.mark.anyio
async def test_what_can_not_be_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"deterministic=True: can't be kept: kernels='xla'.*Leave it out"):
        async with rekindle.open("tiny", deterministic=True, kernels="xla"):
            pass


@pytest.mark.anyio
async def test_without_kernels_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_NATIVE", "0")
    with pytest.raises(ConfigError, match="it needs the native kernels, and REKINDLE_NATIVE=0"):
        async with rekindle.open("tiny", deterministic=True):
            pass
