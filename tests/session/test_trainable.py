"""`session.trainable`: a trainer's function and parameters, whose result the session serves as the plain loop would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rekindle
from helpers import adapters, checkpoints
from helpers.plain_loop import plain_loop
from helpers.small import CONTEXT, MODEL, opening, plain, prompt
from helpers.thorough import by_default
from rekindle._src.models.adapters.adapted import merged
from rekindle._src.models.adapters.reading import read_adapter
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.placement import random_model
from rekindle._src.models.plain import trainable
from rekindle._src.models.registry import config_from_hf
from rekindle._src.opening.weights import replace_weights
from rekindle.errors import CheckpointError, InvalidRequest

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
TEXT = np.asarray([prompt(1, 16), prompt(2, 16)], np.int32)


def losses(compute: Any, params: Mapping[str, jax.Array], rate: float) -> tuple[list[float], Any]:
    """The loss of each of four plain steps of gradient descent, and the parameters after them."""
    text = jnp.asarray(TEXT % len(params["embed.weight"]))

    def loss(params: Any) -> jax.Array:
        every = jax.nn.log_softmax(compute(params, text[:, :-1]), axis=-1)
        return -jnp.take_along_axis(every, text[:, 1:, None], axis=-1).mean()

    @jax.jit(donate_argnums=0)
    def step(params: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda old, change: old - jnp.asarray(rate, old.dtype) * change, params, gradient)

    values = []
    for _ in range(4):
        value, params = step(params)
        values.append(float(value))
    return values, params


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_steps_lower_the_loss_and_the_session_serves_the_result() -> None:
    """With the tokens of the plain loop over the new weights; the session's own are not those that are donated."""
    ids = prompt(7, 12)
    async with opening(precompile="lazy") as session:
        compute, params = session.trainable()
        run = jax.jit(compute)
        logits = np.asarray(run(params, jnp.asarray([ids])))
        assert logits.dtype == np.float32 and int(logits[0, -1].argmax()) == plain(ids, 1)[0]
        values, params = losses(compute, params, 0.3)
        assert values == sorted(values, reverse=True) and values[-1] < 0.8 * values[0], values
        assert (await session.generate(ids, max_tokens=8)).token_ids == plain(ids, 8), "it has its own weights still"
        assert await session.swap_weights(params) == 1
        trained = replace_weights(MODEL, params)
        expected = plain_loop(trained, ids, 8, context=CONTEXT)
        assert (await session.generate(ids, max_tokens=8)).token_ids == tuple(expected) != plain(ids, 8)
        again, params = session.trainable()
        for path, leaf in zip(trained.graph.paths, trained.leaves, strict=True):
            np.testing.assert_array_equal(params[path], leaf)
        short = {path: array for path, array in params.items() if path != "norm.weight"}
        for wrong, words in ((short, "norm.weight.*is missing"), ({**params, "a": TEXT}, "'?a'?: is no parameter")):
            with pytest.raises(InvalidRequest, match=words):
                again(wrong, TEXT)
        await session.sleep()
        with pytest.raises(InvalidRequest, match="sleeps"):
            session.trainable()
        assert not np.array_equal(run(params, jnp.asarray([ids])), logits), "it needs no session"
        await session.wake()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("mixtral", "bfloat16"),  # a session holds its experts as integers
        ("qwen3.5", "float32"),
        ("gpt-oss", "bfloat16"),
        ("deepseek-v2", "float32"),
        ("gemma4-moe", "bfloat16"),
    ],
)
def test_other_families_learn_too(case: str, dtype: Any) -> None:
    model: LoadedModel = random_model(config_from_hf(checkpoints.CASES[case]), dtype=dtype)
    compute, params = trainable(model)
    assert {jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in params.values()} == {True}
    values, params = losses(compute, params, 0.1)
    assert values[-1] < values[0], values
    trained = replace_weights(model, params)
    assert [leaf.dtype for leaf in trained.leaves] == [leaf.dtype for leaf in model.leaves]


def test_weights_that_have_no_derivatives_are_refused(tmp_path: Path) -> None:
    """Integers, and an adapter that would be added a second time."""
    options: dict[str, Any] = {"disk_memory": 0, "precompile": "lazy", "quiet": True, "max_model_len": 64}
    model = random_model(MODEL.config, dtype="float32", quantize="int8")
    with rekindle.open_sync(model, **options) as session, pytest.raises(InvalidRequest, match="arrays are integers"):
        session.trainable()
    folder = adapters.write(tmp_path / "adapter", MODEL.config)
    with opening(merge=folder, **options).result_sync() as session, pytest.raises(InvalidRequest, match="merge"):
        session.trainable()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.thorough
async def test_a_trained_adapter_is_named_by_its_parameters_paths() -> None:
    """Three minutes of training ended in 240 errors, and square matrices could have been meant either way."""
    ids, rng = prompt(7, 12), np.random.default_rng(0)
    async with opening(precompile="lazy", max_adapters=1, max_adapter_rank=8) as session:
        compute, params = session.trainable()
        paths = [path for path, leaf in params.items() if path.startswith("layers.") and leaf.ndim == 2]
        assert any(params[path].shape[0] == params[path].shape[1] for path in paths)
        lora = {}
        for path in paths:
            outputs, inputs = params[path].shape
            lora[f"{path}.lora_a"] = jnp.asarray(rng.standard_normal((outputs, 4)) * 0.3, jnp.float32)
            lora[f"{path}.lora_b"] = jnp.asarray(rng.standard_normal((4, inputs)) * inputs**-0.5, jnp.float32)

        def sums(lora: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            return params | {path: params[path] + lora[f"{path}.lora_a"] @ lora[f"{path}.lora_b"] for path in paths}

        gradient = jax.grad(lambda lora: compute(sums(lora), jnp.asarray([ids])).std())(lora)
        lora = jax.tree.map(lambda old, change: old + 0.01 * change, lora, gradient)
        expected = np.asarray(compute(sums(lora), jnp.asarray([ids])))[0, -1]
        await session.load_adapter("mine", lora)
        done = await session.generate(ids, adapter="mine", max_tokens=1, logprobs=1)
        assert done.token_ids[0] == int(expected.argmax()) != plain(ids, 1)[0]
        await session.load_adapter("mine", lora, alpha=8)  # of rank 4
        twice = sums({name: array * (2 if name.endswith("_a") else 1) for name, array in lora.items()})
        expected = np.asarray(compute(twice, jnp.asarray([ids])))[0, -1]
        done = await session.generate(ids, adapter="mine", max_tokens=1)
        assert done.token_ids[0] == int(expected.argmax())
        path = paths[0]
        with pytest.raises(CheckpointError, match=rf"{path}: has shapes .*, expected \[{params[path].shape[0]}, r\]"):
            await session.load_adapter("it", {f"{path}.{end}": lora[f"{path}.{end}"].T for end in ("lora_a", "lora_b")})
        bare = path.removesuffix(".weight")
        turned = {f"{bare}.lora_a": lora[f"{path}.lora_b"].T, f"{bare}.lora_b": lora[f"{path}.lora_a"].T}
        both = turned | {f"{path}.{end}": lora[f"{path}.{end}"] for end in ("lora_a", "lora_b")}
        with pytest.raises(CheckpointError, match="is the second pair of its layer"):
            await session.load_adapter("it", both)
        await session.load_adapter("it", turned)
        one = await session.generate(ids, adapter="it", max_tokens=8, ignore_eos=True)
        await session.load_adapter("it", {f"{path}.{end}": lora[f"{path}.{end}"] for end in ("lora_a", "lora_b")})
        other = await session.generate(ids, adapter="it", max_tokens=8, ignore_eos=True)
        assert one.token_ids == other.token_ids


FAMILIES = (
    "llama", "gemma3", "qwen3.5", "qwen3-moe", "lfm2", "gpt2", "deepseek-v2", "gpt-oss", "falcon-h1", "phi3",
    "nemotron-h",
)  # fmt: skip


@pytest.mark.parametrize("case", by_default(FAMILIES, 2))
def test_products_trained_next_to_the_parameters_of_any_family_load_as_they_are(case: str) -> None:
    """A training lowers the loss, and the model with the loaded adapter has the sums that were trained."""
    model = random_model(config_from_hf(checkpoints.CASES[case]), dtype="float32")
    compute, params = trainable(model)
    paths = [p for p, leaf in params.items() if leaf.ndim == 2 and p.startswith("layers.") and p.endswith(".weight")]
    paths = [path for path in paths if "norm" not in path]
    rng = np.random.default_rng(0)
    lora = {}
    for path in paths:
        outputs, inputs = params[path].shape
        lora[f"{path}.lora_a"] = jnp.zeros((outputs, 2), jnp.float32)
        lora[f"{path}.lora_b"] = jnp.asarray(rng.standard_normal((2, inputs)) * inputs**-0.5, jnp.float32)
    text = jnp.asarray(TEXT % len(params["embed.weight"]))

    def sums(lora: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return params | {path: params[path] + lora[f"{path}.lora_a"] @ lora[f"{path}.lora_b"] for path in paths}

    @jax.jit
    def step(lora: Any) -> Any:
        def loss(lora: Any) -> jax.Array:
            every = jax.nn.log_softmax(compute(sums(lora), text[:, :-1]), axis=-1)
            return -jnp.take_along_axis(every, text[:, 1:, None], axis=-1).mean()

        value, gradient = jax.value_and_grad(loss)(lora)
        return value, jax.tree.map(lambda old, change: old - 0.1 * change, lora, gradient)

    losses = []
    for _ in range(4):
        value, lora = step(lora)
        losses.append(float(value))
    assert losses[-1] < losses[0], losses
    served = trainable(merged(model, read_adapter(lora, "mine", model.config)))[1]
    assert served.keys() == params.keys()
    for path, array in sums(lora).items():
        np.testing.assert_allclose(served[path], array, rtol=1e-5, atol=1e-6, err_msg=path)
        assert (path in paths) == bool(np.any(served[path] != params[path])), path


def test_a_product_next_to_a_norm_is_refused_by_its_path() -> None:
    model = random_model(config_from_hf(checkpoints.CASES["qwen3"]), dtype="float32")
    params = trainable(model)[1]
    path = next(path for path, leaf in params.items() if path.endswith("norm.weight") and leaf.ndim == 2)
    outputs, inputs = params[path].shape
    lora = {f"{path}.lora_a": np.zeros((outputs, 2)), f"{path}.lora_b": np.zeros((2, inputs))}
    with pytest.raises(CheckpointError, match=rf"{path}.lora_a: is no lora_a or lora_b of a linear layer"):
        read_adapter(lora, "mine", model.config)
