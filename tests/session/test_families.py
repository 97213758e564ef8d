"""Every family: texts are the plain loop's, whatever is batched, cut, preempted, forked, cancelled and restored."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.counting import COMPILING, compiled_by_jax, counts
from helpers.plain_loop import plain_loop
from helpers.python import run_python
from helpers.sessions import writer_of
from rekindle import Session
from rekindle._src.models.config import Pages, SharedWith
from rekindle.errors import ConfigError
from workshop import reference

pytestmark = pytest.mark.usefixtures("large_steps")
# What a layer keeps decides what the engine does: these come with every run, the others differ in arithmetic. States of
# several kinds, windows with sinks and layers that share pages are left to CI.
STATES = ("qwen3.5",)
PAGES = ("gemma3",)
SHARED = "gemma4-shared-pages-and-embeddings-of-layers"
IN_CI = (SHARED, "deepseek-v2", "falcon-h1", "lfm2", "gpt-oss")
STATES_TOO = ("qwen3.5-tied-biases", "nemotron-h-experts-in-groups")
CONTEXT = 256
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": CONTEXT, "page_size": 16,
    "device_pages": 22, "host_memory": 1 << 24, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
PROMPTS = [np.random.default_rng(count).integers(3, 160, count).tolist() for count in (5, 24, 70, 130, 200, 33)]
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


def names() -> list[Any]:
    others = {*checkpoints.ONE_EACH.values(), *STATES_TOO} - {*STATES, *PAGES, *IN_CI}
    thorough = [pytest.param(name, marks=pytest.mark.thorough) for name in IN_CI]
    return [*STATES, *PAGES, *thorough, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(others))]


def of_context(name: str) -> Any:
    raw = checkpoints.CASES[name]
    length = "n_positions" if raw["model_type"] == "gpt2" else "max_position_embeddings"
    raw = {**raw, length: CONTEXT}
    return checkpoints.model(raw, checkpoints.tensors(raw))


@pytest.fixture(scope="module", params=names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return of_context(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    return tmp_path_factory.mktemp(name)


@pytest.fixture(scope="module")
def session(model: Any, folder: Path) -> Iterator[Session]:
    """One for all tests of a model, most of whose time is compiling; four of the longer texts are too much for it."""
    with rekindle.open_sync(model, **OPTIONS, cache_dir=str(folder)) as session:
        writer_of(session).tiers.costs.mode = "always"  # copying, whatever it costs here
        yield session


def plain(model: Any, prompt: list[int], count: int = 24) -> list[int]:
    return plain_loop(model, prompt, count, context=CONTEXT)


def test_a_batch_cut_into_steps_has_the_texts_of_the_plain_loop(session: Session, model: Any) -> None:
    many = session.generate_sync(PROMPTS, **GREEDY)
    assert [list(done.token_ids) for done in many] == [plain(model, prompt) for prompt in PROMPTS]
    again = session.generate_sync(PROMPTS[3], **GREEDY)  # its slot has had other requests
    assert again.usage.cached_tokens == 128
    assert list(again.token_ids) == plain(model, PROMPTS[3])
    done, source = session.generate_sync(PROMPTS[1], n=2, **GREEDY), plain(model, PROMPTS[1])
    assert [list(one.token_ids) for one in done] == [source, source]

    async def forks() -> None:
        forked = await session.fork(many[1], at=7)
        assert list(forked.token_ids) == source[7:]
        edited = await session.fork(many[1], at=7, edit=[9, 11])
        assert list(edited.token_ids) == plain(model, [*PROMPTS[1], *source[:7], 9, 11], 15)

    anyio.run(forks)
    session.check_integrity()


def test_preempted_requests_go_on(session: Session, model: Any) -> None:
    before = session.stats().preemptions
    expected = [plain(model, prompt, 80) for prompt in PROMPTS[:4]]
    for _ in range(100):  # fewer of them run at once until the programs for four are ready
        many = session.generate_sync(PROMPTS[:4], **{**GREEDY, "max_tokens": 80})
        assert [list(done.token_ids) for done in many] == expected
        if session.stats().preemptions > before:
            break
    assert session.stats().preemptions > before, "there was room for all of them"
    session.generate_sync(PROMPTS[4], **{**GREEDY, "max_tokens": 50})
    assert list(session.generate_sync(PROMPTS[3], **GREEDY).token_ids) == plain(model, PROMPTS[3])
    assert session.stats().cache.host_hit_pages > 0, "nothing came back from host memory"
    session.check_integrity()


def test_a_cancelled_request_leaves_nothing_behind(session: Session, model: Any) -> None:
    async def leave_early() -> None:
        handle = session.submit(PROMPTS[2], **{**GREEDY, "max_tokens": 150})
        async for _ in handle:
            break
        handle.cancel()

    anyio.run(leave_early)
    many = session.generate_sync([PROMPTS[0]] * 4, **GREEDY)  # as many as there are slots
    assert [list(done.token_ids) for done in many] == [plain(model, PROMPTS[0])] * 4
    session.check_integrity()


async def load(session: Session, model: Any) -> None:
    """Send more requests than there are pages for: they end, are drawn from, cancelled, left and forked."""
    draw = random.Random(1)

    async def one(number: int, count: int, end: str) -> None:
        count = min(count, CONTEXT - len(PROMPTS[number]))
        expected, options = plain(model, PROMPTS[number], count), {**GREEDY, "max_tokens": count}
        if end == "drawn":
            await session.generate(PROMPTS[number], **{**options, "temperature": 1.0, "n": 2, "seed": count})
        elif end == "cancelled":
            handle = session.submit(PROMPTS[number], **options)
            async for _ in handle:
                break
            handle.cancel()
        elif end == "left":
            with anyio.move_on_after(0.01):
                await session.generate(PROMPTS[number], **options)
        else:
            done = await session.generate(PROMPTS[number], **options)
            assert list(done.token_ids) == expected, f"prompt {number}, {count} tokens"
            if end == "forked" and count > 9:
                forked = await session.fork(done, at=9)
                assert list(forked.token_ids) == expected[9:], f"prompt {number}, forked"

    # More than there is room for: some of them are preempted.
    long = [session.submit(PROMPTS[number], **{**GREEDY, "max_tokens": 80}) for number in range(4)]
    async with anyio.create_task_group() as tasks:
        for _ in range(60):
            end = draw.choice(("ended", "ended", "drawn", "cancelled", "left", "forked"))
            tasks.start_soon(one, draw.randrange(len(PROMPTS)), draw.randrange(1, 90), end)
            await anyio.sleep(draw.choice((0.0, 0.0, 0.01)))
    for number, handle in enumerate(long):
        assert list((await handle).token_ids) == plain(model, PROMPTS[number], 80)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_load_with_too_few_pages_is_exact_and_compiles_nothing(model: Any, folder: Path, backend: str) -> None:
    for prompt in PROMPTS:
        plain(model, prompt, min(90, CONTEXT - len(prompt)))
    options = {**OPTIONS, "precompile": "all", "disk_memory": 0}
    with rekindle.open_sync(model, **options, cache_dir=str(folder)) as session:
        writer_of(session).tiers.costs.mode = "always"
        warm = counts(session)
        with compiled_by_jax() as events:
            anyio.run(load, session, model, backend=backend)
        session.check_integrity()
        stats = session.stats()
        assert stats.preemptions > 0 and stats.aborted > 0
        assert counts(session) == warm and not [event for event in events if event in COMPILING]
        session.cache.clear().result_sync()
        session.check_integrity()
        assert session.cache.stats().device_pages == 0


@pytest.mark.slow
def test_the_kernels_of_xla_agree(model: Any) -> None:
    with rekindle.open_sync(model, kernels="xla", disk_memory=0, **OPTIONS) as session:
        many = session.generate_sync(PROMPTS[:3], **GREEDY)
    assert [list(done.token_ids) for done in many] == [plain(model, prompt) for prompt in PROMPTS[:3]]


def test_sinks_decide() -> None:
    """Without them the plain loop, which the others are compared with, would say something else."""
    model = checkpoints.case("gpt-oss")
    leaves = [leaf - 50 if path.endswith("sinks") else leaf
              for path, leaf in zip(model.graph.paths, model.leaves, strict=True)]  # fmt: skip
    room = reference.empty_cache(model, 24)
    without = dataclasses.replace(model, leaves=tuple(leaves))
    logits, others = (np.asarray(reference.prefill(each, PROMPTS[1], room)[0]) for each in (model, without))
    assert np.abs(logits - others).max() > 0.1 * logits.std()


def test_a_page_has_the_bytes_of_the_layers_that_keep_some() -> None:
    options = {**OPTIONS, "max_tokens_per_step": 64, "cache_dir": None, "disk_memory": 0}
    model = checkpoints.case(SHARED)
    small, large, shared = Pages(1, 16, 16), Pages(1, 32, 32), SharedWith(2)
    kept = (small, large, small, shared, shared, SharedWith(1))
    assert tuple(cache.pages for cache in model.config.caches) == kept
    with rekindle.open_sync(model, **options) as session:
        assert session.config.device_memory == 22 * 2 * 16 * (16 + 32 + 16) * 4, "keys and values of 16 tokens"
    with rekindle.open_sync(checkpoints.case("deepseek-v2"), **options) as session:
        assert session.config.device_memory == 22 * 2 * 16 * (24 + 8) * 4, "one vector and one key for each token"


@pytest.mark.parametrize(
    ("case", "options", "reason"),
    [
        ("deepseek-v2", {"deterministic": True}, "deterministic=True.*(latent pages|experts)"),
    ],
)
def test_options_that_a_family_lacks_are_refused_by_name(case: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        rekindle.open_sync(checkpoints.case(case), **OPTIONS, cache_dir=None, **options)


CHILD = """
import json, sys
import rekindle
from session.test_families import GREEDY, OPTIONS, PROMPTS, of_context

name, folder = sys.argv[1:]
with rekindle.open_sync(of_context(name), **OPTIONS, cache_dir=folder, restore="all") as session:
    done = session.generate_sync(PROMPTS[3], **GREEDY)
    print(json.dumps([done.usage.cached_tokens, list(done.token_ids)]))
"""


def test_a_snapshot_is_restored(session: Session, model: Any, folder: Path) -> None:
    session.generate_sync(PROMPTS[3], **GREEDY)
    session.save("all").result_sync()
    with rekindle.open_sync(model, **OPTIONS, cache_dir=str(folder), restore="all") as other:
        done = other.generate_sync(PROMPTS[3], **GREEDY)
    assert done.usage.cached_tokens == 128
    assert list(done.token_ids) == plain(model, PROMPTS[3])


@pytest.mark.slow
def test_a_snapshot_is_restored_in_another_process(session: Session, model: Any, name: str, folder: Path) -> None:
    session.generate_sync(PROMPTS[3], **GREEDY)
    session.save("all").result_sync()
    printed = run_python("-c", CHILD, name, str(folder))
    assert json.loads(printed.splitlines()[-1]) == [128, plain(model, PROMPTS[3])]
