"""Adapters: many over one base, in one batch, each with its own cache; every text is that of merged weights."""

from __future__ import annotations

import errno
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import jax
import numpy as np
import pytest

import rekindle
from helpers import adapters, checkpoints
from helpers.embedders import EMBEDS
from helpers.small import MODEL, OPTIONS, PAGE, plain, prompt
from helpers.thorough import by_default, one_event_loop  # noqa: F401  the fixture
from rekindle._src.models.adapters.adapter import combined
from rekindle._src.models.adapters.reading import read_adapter
from rekindle._src.models.loading import tensor_files
from rekindle._src.models.placement import random_model
from rekindle._src.opening.programs import SessionPrograms
from rekindle.errors import CheckpointError, ConfigError, InvalidRequest

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
anyio_test = pytest.mark.anyio
NEW = 8
GREEDY: dict[str, Any] = {"max_tokens": NEW, "ignore_eos": True}
# Different targets, ranks, scales and layers.
KINDS: tuple[dict[str, Any], ...] = (
    {"rank": 4},
    {"rank": 8, "targets": ("q_proj", "v_proj"), "use_rslora": True},
    {"rank": 2, "targets": ("down_proj", "o_proj", "k_proj"), "lora_alpha": 6},
    {"rank": 24, "targets": ("gate_proj",)},
    {"rank": 4, "layers": (1,)},
    {"rank": 4, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"q_proj": 3}},
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [adapters.write(root / str(seed), MODEL.config, seed=seed, **kind) for seed, kind in enumerate(KINDS)]


@functools.cache
def expected(folder: Path | None, ids: tuple[int, ...]) -> list[int]:
    return list(plain(ids, NEW)) if folder is None else adapters.plain(MODEL, folder, ids, NEW)


def opening(**changes: Any) -> Any:
    return rekindle.open(
        MODEL, **{**OPTIONS, "precompile": "lazy", "max_adapters": 4, "max_adapter_rank": 16} | changes
    )


def same(done: Any, folder: Path | None, ids: Sequence[int]) -> None:
    assert list(done.token_ids) == expected(folder, tuple(ids))


@anyio_test
async def test_rows_with_different_adapters_and_with_none_share_a_batch(folders: list[Path]) -> None:
    names = {f"a{index}": folder for index, folder in enumerate(folders)}
    async with opening(adapters=names, max_adapters=8) as session:
        assert session.adapters == tuple(names)
        prompts = [prompt(seed, 5 + 4 * seed, shared=5) for seed in range(len(names) + 1)]
        handles = [
            session.submit(ids, adapter=name, **GREEDY) for ids, name in zip(prompts, (*names, None), strict=True)
        ]
        done = [await handle for handle in handles]
        for one, folder, ids in zip(done, (*folders, None), prompts, strict=True):
            same(one, folder, ids)
        texts = {tuple((await session.generate(prompts[0], adapter=name, **GREEDY)).token_ids) for name in names}
        assert len(texts) > 3, "the adapters change little"
        whole = await session.generate(prompts[0], adapter="a0", logprobs=40, **GREEDY)  # letters have one order
        same(whole, folders[0], prompts[0])
        session.check_integrity()


@pytest.mark.thorough
@anyio_test
async def test_long_prompts_are_computed_unit_by_unit(folders: list[Path]) -> None:
    """Short ones are by whole chunks: see `programs.adapters`."""
    names = {f"a{index}": folder for index, folder in enumerate(folders)}
    async with opening(adapters=names, max_adapters=8, max_tokens_per_step=128, max_model_len=128) as session:
        ids = prompt(3, 100)
        many = [session.submit(ids, adapter=name, max_tokens=2) for name in (*names, None)]
        for handle, folder in zip(many, (*folders, None), strict=True):
            assert list((await handle).token_ids) == adapters.plain(MODEL, folder, ids, 2)


@pytest.mark.thorough
@anyio_test
async def test_more_adapters_than_slots_take_turns_and_nothing_is_compiled(folders: list[Path]) -> None:
    names = {f"a{index}": folder for index, folder in enumerate(folders)}
    async with opening(max_adapters=2, max_adapter_rank=16, adapters=names, precompile="all") as session:
        compiled = session.stats().runner.compilations
        for first in range(2):
            handles = [
                (index, seed, session.submit(prompt(seed, 9 + seed), adapter=f"a{index}", **GREEDY))
                for seed in range(first, first + 3)
                for index in range(len(folders))
            ]
            plain_one = session.submit(prompt(1, 20), **GREEDY)
            for index, seed, handle in handles:
                same(await handle, folders[index], prompt(seed, 9 + seed))
            same(await plain_one, None, prompt(1, 20))
            for index in range(len(folders)):
                await session.unload_adapter(f"a{index}")
                await session.load_adapter(f"a{index}", folders[index])
        assert session.stats().runner.compilations == compiled
        session.check_integrity()


@pytest.mark.thorough
@anyio_test
async def test_pages_belong_to_weights_and_not_to_names(folders: list[Path]) -> None:
    ids = prompt(7, 30)
    async with opening() as session:
        await session.load_adapter("x", folders[0])
        cold = await session.generate(ids, adapter="x", **GREEDY)
        warm = await session.generate(ids, adapter="x", **GREEDY)
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 30 // PAGE * PAGE)
        assert cold.token_ids == warm.token_ids
        assert (await session.generate(ids, **GREEDY)).usage.cached_tokens == 0
        await session.load_adapter("y", folders[0])  # the same weights under another name
        assert (await session.generate(ids, adapter="y", **GREEDY)).usage.cached_tokens == 24
        assert session.cache.explain(ids, adapter="y").device_tokens == 24
        await session.load_adapter("x", folders[1])  # trained again
        again = await session.generate(ids, adapter="x", **GREEDY)
        assert again.usage.cached_tokens == 0
        same(again, folders[1], ids)
        same(await session.generate(ids, adapter="y", **GREEDY), folders[0], ids)
        # A salt divides the pages of an adapter as it does those of the base.
        assert (await session.generate(ids, adapter="y", salt="s", **GREEDY)).usage.cached_tokens == 0
        assert (await session.generate(ids, adapter="y", salt="s", **GREEDY)).usage.cached_tokens == 24
        pages = session.cache.tree(limit=1000).total_pages
        await session.unload_adapter("y")
        assert session.cache.tree(limit=1000).total_pages <= pages - 2 * 3
        with pytest.raises(InvalidRequest, match=r"adapter='y': is not an adapter.*load_adapter"):
            await session.generate(ids, adapter="y", **GREEDY)
        await session.load_adapter("y", folders[0])
        assert session.cache.explain(ids, adapter="y").device_tokens == 0
        assert (await session.generate(ids, adapter="y", **GREEDY)).usage.cached_tokens == 0
        same(await session.generate(ids, **GREEDY), None, ids)
        session.check_integrity()


@pytest.mark.thorough
@anyio_test
async def test_loads_unloads_and_swaps_while_requests_run_mix_nothing_up(folders: list[Path]) -> None:
    rng = np.random.default_rng(0)
    async with opening(max_adapters=2, device_pages=24) as session:
        await session.load_adapter("a", folders[0])
        versions = {"a": folders[0]}
        running: list[tuple[Any, Path | None, list[int]]] = []
        for round_ in range(12):
            name = str(rng.choice(["a", "b", "c"]))
            match int(rng.integers(4)):
                case 0:
                    versions[name] = folders[int(rng.integers(len(folders)))]
                    await session.load_adapter(name, versions[name])
                case 1 if name in versions and len(versions) > 1:
                    del versions[name]
                    await session.unload_adapter(name)
            for _ in range(2):
                chosen = str(rng.choice([*versions]))
                ids = prompt(int(rng.integers(3)), 12 + round_ % 5, shared=8)
                running.append((session.submit(ids, adapter=chosen, **GREEDY), versions[chosen], ids))
            ids = prompt(round_ % 4, 10, shared=8)
            running.append((session.submit(ids, **GREEDY), None, ids))
            await anyio.sleep(0.002 * int(rng.integers(3)))
            # What its name means is fixed when a request is taken in.
            with anyio.fail_after(60):
                while any(not handle.prompt_token_ids for handle, _, _ in running):  # noqa: ASYNC110  no event says it
                    await anyio.sleep(0.001)
            if round_ % 6 == 5:
                for handle, folder, ids in running:
                    same(await handle, folder, ids)
                running.clear()
        session.check_integrity()


@anyio_test
@pytest.mark.thorough
async def test_scores_are_those_of_merged_weights_and_share_pages_with_their_own_alone(folders: list[Path]) -> None:
    """Prompts of two adapters, of a sum of them, and of the base run at once over one beginning."""
    ids, choices, shared = prompt(1, 20), [prompt(2, 1), prompt(4, 3)], 16
    found: dict[str, Any] = {}
    async with opening(adapters={"a": folders[0], "b": folders[4]}) as session:

        async def score(name: str, adapter: Any) -> None:
            found[name] = await session.score(ids, choices, adapter=adapter)

        for cached in ((0, shared), (shared, shared)):  # cold, then warm
            async with anyio.create_task_group() as group:
                for name, (adapter, _) in mixed(folders).items():
                    group.start_soon(score, name, adapter)
            for name, (_, source) in mixed(folders).items():
                for one, choice, tokens in zip(found[name], choices, cached, strict=True):
                    logprobs = jax.nn.log_softmax(
                        adapters.plain_states(MODEL, source, [*ids, *choice])[1][len(ids) - 1 : -1]
                    )
                    expected = [row[token] for row, token in zip(np.asarray(logprobs), choice, strict=True)]
                    assert one.logprobs == pytest.approx(expected, abs=5e-5), name
                    assert one.greedy == (np.argmax(logprobs, axis=-1).tolist() == choice)
                    assert one.cached_tokens == tokens, name
        # Scores take the pages of texts with the same weights, whatever these are called, and no others.
        text = prompt(8, 17)
        await session.generate(text, max_tokens=1, adapter="a")
        hits = [(await session.score(text, choices[:1], adapter=name))[0].cached_tokens for name in ("b", None, "a")]
        assert hits == [0, 0, 16]
        await session.load_adapter("a", folders[4])
        (again, _), (other,) = await session.score([ids, text], [choices, choices[:1]], adapter="a")
        assert again.logprobs == pytest.approx(found["b"][0].logprobs, abs=1e-5)
        assert (again.cached_tokens, other.cached_tokens) == (shared, 16), "b's pages are the same weights'"
        for call in (session.score, session.score_sync):
            with pytest.raises(InvalidRequest, match="adapter=3: is neither a name nor a mapping"):
                call(ids, choices, adapter=3)  # type: ignore[call-overload]
        with pytest.raises(InvalidRequest, match="adapter='c': is not an adapter of this session; known: 'a', 'b'"):
            await session.score(ids, choices, adapter="c")
        session.check_integrity()


@pytest.mark.thorough
@anyio_test
@pytest.mark.parametrize("keep", by_default([False, True]))
@pytest.mark.parametrize("pooling", by_default(["mean", "last", "cls"]))
async def test_vectors_are_those_of_merged_weights_and_share_pages_with_their_own_alone(
    folders: list[Path], pooling: Any, keep: bool
) -> None:
    """Texts of two adapters, of a sum of them, and of the base run at once, along with a generated one."""
    texts, found = [prompt(seed, 9 + 20 * seed, shared=9) for seed in range(3)], dict[str, Any]()
    expected = {}
    for name, (_, source) in mixed(folders).items():
        states = [adapters.plain_states(MODEL, source, ids)[0] for ids in texts]
        expected[name] = [{"last": one[-1], "cls": one[0]}.get(pooling, one.mean(axis=0)) for one in states]
    assert np.abs(expected["a"][0] - expected["none"][0]).max() > 0.1, "the adapters change little"
    async with opening(adapters={"a": folders[0], "b": folders[4]}) as session:

        async def embed(name: str, adapter: Any) -> None:
            found[name] = await session.embed(texts, pooling=pooling, normalize=False, adapter=adapter, keep=keep)

        for _ in range(2):  # the second time, host memory has kept states of whole pages
            beside = session.submit(texts[0], adapter="b", **GREEDY)
            async with anyio.create_task_group() as group:
                for name, (adapter, _) in mixed(folders).items():
                    group.start_soon(embed, name, adapter)
            for name, vectors in expected.items():
                np.testing.assert_allclose(found[name], vectors, rtol=0, atol=5e-5, err_msg=name)
            same(await beside, folders[4], texts[0])
        captures = session.cache.stats().captures
        assert not keep or (captures is not None and captures.reused > 0)
        # A vector of the last token takes the pages of a text with the same adapter, and no others.
        text = prompt(8, 17)
        await session.generate(text, max_tokens=1, adapter="a")
        for adapter, tokens in (("b", 0), (None, 0), ("a", 16)):
            call = session.embed(text, pooling="last", adapter=adapter)
            await call
            assert call.usage.cached_tokens == tokens, adapter
        with pytest.raises(InvalidRequest, match=r"adapter=\{\}: is neither a name nor a mapping"):
            session.embed(text, adapter={})
        with pytest.raises(InvalidRequest, match="adapter='c': is not an adapter of this session; known: 'a', 'b'"):
            await session.embed(text, adapter="c")
        (error,) = await session.embed([text], adapter="c", errors="return")
        assert isinstance(error, InvalidRequest) and error.field == "adapter"
        session.check_integrity()


def mixed(folders: list[Path]) -> dict[str, tuple[Any, Any]]:
    """Return options of requests by name, each with the adapter to merge; "a" and "b" are the first and fifth one."""
    parts = [(read_adapter(folders[index], "it", MODEL.config), weight) for index, weight in ((0, 0.5), (4, -1.0))]
    return {
        "none": (None, None), "a": ("a", folders[0]), "b": ("b", folders[4]),
        "sum": ({"a": 0.5, "b": -1.0}, combined(parts)),
    }  # fmt: skip


@pytest.mark.thorough
@anyio_test
async def test_an_encoder_may_have_adapters(tmp_path: Path) -> None:
    raw = EMBEDS["modernbert"]
    model, ids = checkpoints.model(raw, checkpoints.tensors(raw)), prompt(3, 40)
    folder = adapters.write(tmp_path / "a", model.config, seed=0)
    ids = [token % model.config.vocab_size for token in ids]
    async with rekindle.open(model, adapters={"a": folder}, **{**OPTIONS, "precompile": "lazy"}) as session:
        for adapter, source in (("a", folder), (None, None)):
            vectors = await session.embed([ids, ids[:9]], normalize=False, pooling="mean", adapter=adapter)
            for vector, tokens in zip(vectors, (ids, ids[:9]), strict=True):
                states, _ = adapters.plain_states(model, source, tokens, size=len(tokens))
                np.testing.assert_allclose(vector, states.mean(axis=0), rtol=0, atol=5e-5)


@pytest.mark.thorough
@anyio_test
async def test_the_lens_shows_the_model_with_its_adapter(folders: list[Path]) -> None:
    ids = prompt(3, 12)
    async with opening(adapters={"a": folders[0]}) as session:
        for adapter, source in (("a", folders[0]), (None, None)):
            lens = await session.view.lens(ids, adapter=adapter)
            logits = adapters.plain_states(MODEL, source, ids)[1]
            assert lens.token_ids[-1, :, 0].tolist() == logits.argmax(axis=-1).tolist()


@pytest.mark.thorough
@anyio_test
async def test_sums_of_adapters_have_their_weights(folders: list[Path]) -> None:
    ids = prompt(4, 15)
    parts = [(read_adapter(folders[index], "x", MODEL.config), weight) for index, weight in ((0, 0.5), (1, -1.0))]
    async with opening(adapters={"a": folders[0], "b": folders[1]}) as session:
        done = await session.generate(ids, adapter={"a": 0.5, "b": -1.0}, **GREEDY)
        assert list(done.token_ids) == adapters.plain(MODEL, combined(parts), ids, NEW)
        again = await session.generate(ids, adapter={"a": 0.5, "b": -1.0}, **GREEDY)
        other = await session.generate(ids, adapter={"a": 0.5, "b": -0.5}, **GREEDY)
        assert (again.usage.cached_tokens, other.usage.cached_tokens) == (8, 0)


@pytest.mark.thorough
@anyio_test
@pytest.mark.parametrize("quantize", by_default(["int8", "int8-weight", {"attention": "int4-32"}]))
async def test_a_quantised_base_has_adapters_of_floats(folders: list[Path], quantize: Any) -> None:
    ids, model = prompt(6, 15), random_model(MODEL.config, seed=5, quantize=quantize)
    named = adapters.tensors(MODEL.config, adapters.modules(MODEL.config), 0, {})
    zero = {name: value * np.float32("lora_A" in name) for name, value in named.items()}
    async with rekindle.open(model, **{**OPTIONS, "precompile": "lazy"}) as session:
        await session.load_adapter("zero", zero)
        await session.load_adapter("own", folders[0])
        handles = [session.submit(ids, adapter=name, **GREEDY) for name in (None, "zero", "own")]
        base, none, own = [await handle for handle in handles]
        assert none.token_ids == base.token_ids != own.token_ids
        alone = await session.generate(ids, adapter="own", **GREEDY)
        assert alone.token_ids == own.token_ids


@pytest.mark.thorough
@anyio_test
async def test_one_adapter_may_be_part_of_the_weights(folders: list[Path]) -> None:
    ids = prompt(6, 15)
    async with opening(merge=folders[0]) as session:
        same(await session.generate(ids, max_tokens=NEW, ignore_eos=True), folders[0], ids)
        assert not [name for name in session.stats().runner.programs if "adapters" in name], "it costs a program"
    assert list(plain(ids, NEW)) == adapters.plain(MODEL, None, ids, NEW), "the caller's weights have changed"


@pytest.mark.thorough
def test_adapters_are_loaded_without_an_event_loop(folders: list[Path]) -> None:
    ids = prompt(6, 15)
    with rekindle.open_sync(
        MODEL, **{**OPTIONS, "precompile": "lazy", "max_adapters": 4, "max_adapter_rank": 16}
    ) as it:
        it.load_adapter("a", folders[0]).result_sync()
        same(it.generate_sync(ids, adapter="a", **GREEDY), folders[0], ids)
        it.unload_adapter("a").result_sync()
        assert it.adapters == ()


@anyio_test
async def test_a_trainers_arrays_are_an_adapter_without_a_file() -> None:
    rng, E, ids = np.random.default_rng(3), MODEL.config.hidden_size, prompt(5, 15)
    rows = (MODEL.config.num_heads + 2 * MODEL.config.num_kv_heads) * MODEL.config.head_dim
    state = {
        "layers.0.attention.qkv.lora_a": rng.standard_normal((E, 4), np.float32),
        "layers.0.attention.qkv.lora_b": rng.standard_normal((4, rows), np.float32) * 0.2,
    }
    async with opening() as session:
        await session.load_adapter("trained", state)
        done = await session.generate(ids, adapter="trained", **GREEDY)
        assert list(done.token_ids) == adapters.plain(MODEL, state, ids, NEW) != list(plain(ids, NEW))
        named = adapters.tensors(MODEL.config, adapters.modules(MODEL.config, ("v_proj",)), 1, {})
        await session.load_adapter("trained", named, alpha=8)
        done = await session.generate(ids, adapter="trained", **GREEDY)
        assert list(done.token_ids) == adapters.plain(
            MODEL, {k: v * (2 if "_B" in k else 1) for k, v in named.items()}, ids, NEW
        )


@anyio_test
async def test_what_can_not_be_is_refused_by_name(folders: list[Path], tmp_path: Path) -> None:
    async with opening(adapters={"a": folders[0]}) as session:
        with pytest.raises(InvalidRequest, match="known: 'a'"):
            await session.generate([1, 2], adapter="b")
        with pytest.raises(InvalidRequest, match="neither a name nor a mapping"):
            await session.generate([1, 2], adapter=3)  # type: ignore[call-overload]
        for weight in (1e39, -1e300):
            with pytest.raises(InvalidRequest, match=r"adapter={'a': .*that are not finite"):
                await session.generate([1, 2], adapter={"a": weight})
        with pytest.raises(CheckpointError, match="neither a folder"):
            await session.load_adapter("b", tmp_path / "none")
        big = adapters.write(tmp_path / "big", MODEL.config, rank=80)
        with pytest.raises(ConfigError, match=r"has rank 80.*room for 64.*max_adapter_rank"):
            await session.load_adapter("b", big)
        with pytest.raises(InvalidRequest, match="is not an adapter"):
            await session.unload_adapter("b")
        assert session.adapters == ("a",)
    half: dict[str, Any] = {**OPTIONS, "dtype": "float16", "precompile": "lazy"}
    async with rekindle.open(
        random_model(MODEL.config, dtype="float16"), adapters={"a": folders[0]}, **half
    ) as session:
        with pytest.raises(ConfigError, match=r"adapter=\{'a': 1000000.0\}: has numbers up to .* float16 holds"):
            await session.generate([1, 2], adapter={"a": 1e6})
        scaled = adapters.write(tmp_path / "scaled", MODEL.config, lora_alpha=1e6)
        with pytest.raises(ConfigError, match=r"adapter='b': has numbers up to .*dtype=\"bfloat16\""):
            await session.load_adapter("b", scaled)
    async with opening(max_adapters=0) as session:
        with pytest.raises(ConfigError, match="max_adapters=0"):
            await session.load_adapter("b", folders[0])


def test_a_folder_without_an_adapter_is_refused_before_anything_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionPrograms, "open", lambda *_: pytest.fail("programs take long"))
    for option in ({"adapters": {"mine": tmp_path}}, {"merge": tmp_path}):
        with pytest.raises(CheckpointError, match="adapter_config"):
            rekindle.open_sync(MODEL, **{**OPTIONS, **option})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", by_default(range(len(KINDS)), 2))
def test_what_is_saved_is_loaded_as_the_same(folders: list[Path], seed: int, tmp_path: Path) -> None:
    with rekindle.open_sync(MODEL, **OPTIONS | {"precompile": "lazy", "max_adapters": 4}) as session:
        session.load_adapter("mine", folders[seed]).result_sync()
        session.save_adapter("mine", tmp_path / "kept").result_sync()
        with pytest.raises(ConfigError, match="exists already"):
            session.save_adapter("mine", tmp_path / "kept").result_sync()
        with pytest.raises(ConfigError, match="can't be written"):
            session.save_adapter("mine", tmp_path / "no" / "such").result_sync()
        with pytest.raises(InvalidRequest, match="known: 'mine'"):
            session.save_adapter("main", tmp_path / "other").result_sync()
    first, second = (read_adapter(folder, "mine", MODEL.config) for folder in (folders[seed], tmp_path / "kept"))
    assert first.digest == second.digest and first.rank == second.rank


def test_a_folder_that_is_not_written_whole_is_not_there(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with rekindle.open_sync(MODEL, **OPTIONS | {"precompile": "lazy", "max_adapters": 4}) as session:
        session.load_adapter("mine", folders[0]).result_sync()
        with monkeypatch.context() as patch:
            patch.setattr(tensor_files, "write", full)
            with pytest.raises(ConfigError, match="No space left"):
                session.save_adapter("mine", tmp_path / "kept").result_sync()
        assert not (tmp_path / "kept").exists()
        session.save_adapter("mine", tmp_path / "kept").result_sync()
