"""Adapters and everything else in a session: restarts, sleep, other weights, captures, and a trainer's nnx state."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import anyio
import jax
import numpy as np
import pytest
from flax import nnx

import rekindle
from helpers import adapters, checkpoints
from helpers.driving import tiny_model
from helpers.small import MODEL, OPTIONS, PAGE, plain, prompt
from helpers.tapping import Plain, difference
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle._src.capabilities.adapters.step import CHUNK
from rekindle._src.models.adapters.adapted import merged
from rekindle._src.models.adapters.reading import read_adapter
from rekindle._src.models.loading.checkpoint import load

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_programs", "large_steps")]
NEW = 8
GREEDY: dict[str, Any] = {"max_tokens": NEW, "ignore_eos": True}
ROOM: dict[str, Any] = {"max_adapters": 4, "max_adapter_rank": 16}  # the shapes of other tests' programs
IDS = prompt(7, 30)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [adapters.write(root / str(seed), MODEL.config, seed=seed, rank=4) for seed in range(2)]


def opening(**changes: Any) -> Any:
    return rekindle.open(MODEL, **{**OPTIONS, **ROOM, "precompile": "lazy"} | changes)


async def tokens(session: Any, ids: list[int] = IDS, **options: Any) -> list[int]:
    return list((await session.generate(ids, **GREEDY | options)).token_ids)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        config = MODEL.config
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = nnx.LoRA(config.hidden_size, 4, rows, rngs=rngs)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = Attention(rngs)


class Trained(nnx.Module):
    """LoRA layers at the paths of the model, as `nnx` has them."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Layer(rngs) for _ in range(MODEL.config.num_layers)])
        for seed, layer in enumerate(self.layers):
            product = layer.attention.qkv
            random = np.random.default_rng(seed).standard_normal(product.lora_b[...].shape, np.float32)
            product.lora_b[...] = jax.numpy.asarray(random * 0.3)


async def test_an_nnx_module_and_its_state_are_adapters() -> None:
    module = Trained()
    named = {
        f"layers.{index}.attention.qkv.{name}": np.asarray(getattr(layer.attention.qkv, name)[...])
        for index, layer in enumerate(module.layers)
        for name in ("lora_a", "lora_b")
    }
    want = adapters.plain(MODEL, named, IDS, NEW)
    assert want != list(plain(IDS, NEW))
    async with opening() as session:
        for source in (module, nnx.state(module), nnx.state(module, nnx.LoRAParam), named):
            await session.load_adapter("trained", source)
            assert await tokens(session, adapter="trained") == want


async def test_a_snapshot_keeps_adapters_apart(folders: list[Path], tmp_path: Path) -> None:
    kept: dict[str, Any] = {"cache_dir": str(tmp_path), "disk_memory": 1 << 24}
    want = {name: adapters.plain(MODEL, folders[name == "b"], IDS, NEW) for name in "ab"}
    async with opening(**kept) as session:
        for name, folder in zip("ab", folders, strict=True):
            await session.load_adapter(name, folder)
        assert await tokens(session, adapter="a") == want["a"]
        await session.save("adapters")
    async with opening(**kept, restore="adapters") as session:
        for name, folder in zip("ba", folders, strict=True):  # a's weights have the name b
            await session.load_adapter(name, folder)
        for name, count in ((None, 0), ("a", 0), ("b", len(IDS) // PAGE * PAGE)):
            done = await session.generate(IDS, adapter=name, **GREEDY)
            assert done.usage.cached_tokens == count, name
            assert list(done.token_ids) == (want["b" if name == "a" else "a"] if name else list(plain(IDS, NEW)))
        session.check_integrity()


@pytest.mark.thorough
async def test_pinned_pages_go_with_their_adapter(folders: list[Path]) -> None:
    async with opening(adapters={"a": folders[0]}) as session:
        for load in (True, False):
            await tokens(session, adapter="a")
            assert session.pin(IDS, adapter="a") == session.pin(IDS, adapter="a") == len(IDS) // PAGE * PAGE
            if load:
                await session.load_adapter("a", folders[1])
            else:
                await session.unload_adapter("a")
            cache = session.stats().cache
            assert cache is not None and (cache.pinned_pages, session.cache.tree().total_pages) == (0, 0)
            session.check_integrity()


@pytest.mark.thorough
async def test_the_base_is_the_same_to_the_bit_when_an_adapter_is_loaded(folders: list[Path]) -> None:
    wanted: dict[str, Any] = {"capture": {"norm": True, "residual": "all"}}
    async with opening() as session:
        before = (await session.generate(IDS, salt="before", **GREEDY, **wanted)).captured
        await session.load_adapter("a", folders[0])
        assert await tokens(session, adapter="a") != list(plain(IDS, NEW))
        after = (await session.generate(IDS, salt="after", **GREEDY, **wanted)).captured
        pairs = list(zip(before.items(), after.items(), strict=True))
        assert len(pairs) > 1
        for (key, one), (other_key, other) in pairs:
            assert key == other_key
            np.testing.assert_array_equal(one, other)


@pytest.mark.thorough
async def test_captures_of_rows_with_adapters_are_those_of_merged_weights(folders: list[Path]) -> None:
    wanted: dict[str, Any] = {"capture": {"residual": "all", "residual_before": 0, "norm": True}}
    models = [MODEL, *(merged(MODEL, read_adapter(folder, "it", MODEL.config)) for folder in folders)]
    async with opening(adapters=dict(zip("ab", folders, strict=True))) as session:
        handles = [session.submit(IDS, adapter=name, **GREEDY, **wanted) for name in (None, "a", "b")]
        for handle, model in zip(handles, models, strict=True):
            done = await handle
            seen = [*IDS, *done.token_ids][:-1]
            inside = Plain(model).inside(seen)
            for key, array in done.captured.items():
                assert difference(array, inside.of(key)[-len(array) :]) < 2e-5, key


def stacks() -> int:
    """Bytes of arrays that look like the stacks of adapters."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if array.ndim == 2 and array.shape[0] % CHUNK == 0)


@pytest.mark.thorough
async def test_a_session_that_sleeps_has_no_adapters_on_the_device(folders: list[Path]) -> None:
    others = stacks()
    async with opening(adapters={"a": folders[0]}) as session:
        want = await tokens(session, adapter="a")
        assert stacks() > others
        await session.sleep()
        assert stacks() <= others
        await session.wake()
        assert await tokens(session, adapter="a") == want
        await session.sleep()
        await session.load_adapter("b", folders[1])
        await session.wake()
        assert await tokens(session, adapter="b") == adapters.plain(MODEL, folders[1], IDS, NEW)
        assert await tokens(session, adapter="a") == want
        session.check_integrity()


@pytest.mark.thorough
async def test_other_weights_get_the_merged_adapter_too(folders: list[Path], tmp_path: Path) -> None:
    other = tiny_model(seed=6)
    async with opening(merge=folders[0]) as session:
        assert await tokens(session) == adapters.plain(MODEL, folders[0], IDS, NEW)
        await session.swap_weights(other)
        assert await tokens(session) == adapters.plain(other, folders[0], IDS, NEW)
        await session.sleep()
        await session.wake(weights=MODEL)
        assert await tokens(session) == adapters.plain(MODEL, folders[0], IDS, NEW)
    folder = checkpoints.write(tmp_path / "model", checkpoints.CASES["llama"])
    model = load(folder, dtype="float32")
    own = adapters.write(tmp_path / "own", model.config, seed=3)
    ids = [token % 150 for token in IDS]
    async with rekindle.open(str(folder), merge=own, **{**OPTIONS, "precompile": "lazy"}) as session:
        want = adapters.plain(model, own, ids, NEW)
        assert await tokens(session, ids) == want
        await session.sleep(weights="drop")  # they are read again, and are those that it had
        await session.wake()
        assert await tokens(session, ids) == want


@pytest.mark.thorough
async def test_other_weights_come_while_adapters_are_loaded_and_trained_again(folders: list[Path]) -> None:
    other, running = tiny_model(seed=6), 24
    async with opening(adapters={"a": folders[0]}) as session:
        handles = [session.submit(IDS, adapter=name, **GREEDY | {"max_tokens": running}) for name in ("a", None)]

        async def swap() -> None:
            await session.swap_weights(other)

        async def train() -> None:
            await session.load_adapter("b", folders[0])
            await session.load_adapter("b", folders[1])

        async with anyio.create_task_group() as group:
            group.start_soon(swap)
            group.start_soon(train)
        for handle, source in zip(handles, (folders[0], None), strict=True):  # those that run have their own adapter
            done = await handle
            versions = list(done.weights_versions)
            first = versions.count(0)
            assert versions == [0] * first + [1] * (running - first)
            seen = list(done.token_ids)
            assert seen[:first] == (adapters.plain(MODEL, source, IDS, first) if first else [])
            assert seen[first:] == adapters.plain(other, source, [*IDS, *seen[:first]], running - first)
        for name, source in (("a", folders[0]), ("b", folders[1]), (None, None)):
            assert await tokens(session, adapter=name) == adapters.plain(other, source, IDS, NEW)
        session.check_integrity()
