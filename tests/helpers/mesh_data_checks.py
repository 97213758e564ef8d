"""Checks of sessions with data shards. `mesh_checks.py` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from helpers import checkpoints, mesh_models
from helpers.mesh_checking import ASKED, BOTH, CLOSE, DATA, check, compare, opened, several
from helpers.mesh_models import case, difference, generated


@check
def data_shards(folder: Path) -> None:
    """Two data shards of two devices give what one device gives; both of them work."""
    model, prompts = case("llama"), several(8)
    with opened(model, None, max_requests=4) as session:
        expected = [session.generate_sync(prompts, **ask) for ask in ASKED]
    with opened(model, BOTH, max_requests=4, max_tokens_per_step=32) as session:
        for ask, wanted in zip(ASKED, expected, strict=True):
            found = difference(wanted, session.generate_sync(prompts, **ask))
            assert found < CLOSE, (ask, found)
        stats = session.stats()
        print(f"{BOTH}: {[shard.prompt_tokens for shard in stats.shards]} prompt tokens", flush=True)
        assert len(stats.shards) == 2 and all(shard.prompt_tokens for shard in stats.shards)
        assert stats.mesh is not None and stats.mesh.axes["data"] == 2 and "data 2" in str(stats)
        assert "<th" in stats._repr_html_() and "shard 1" in str(stats)
        session.check_integrity()


@check
def data_shards_of_families(folder: Path) -> None:
    """Experts in groups, norms over all heads, windows, repeated kv heads and int8 pages, in two data shards."""
    compare("qwen3-moe", {"data": 2, "expert": 2, "model": 2}, {"data": 4, "expert": 2})
    compare("olmo2", {"data": 2, "model": 4}, kv_heads=2)
    compare("gemma2", {"data": 8})
    compare("gpt2", BOTH)
    compare("llama", BOTH, kv_dtype="int8", close=1e-3)


@check
def data_shards_with_options(folder: Path) -> None:
    """What reads a slot's history, scores prompts, guides, drafts or embeds is of the row's own shard."""
    model, prompts = case("llama"), several(6)
    asked: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"logit_bias": {7: 3.0}, "min_tokens": 3, "temperature": 0.9, "seed": 5, "min_p": 0.02},
        {"prompt_logprobs": 2},
        {"allowed_token_ids": list(range(20, 60)), "temperature": 0.7, "seed": 3},
    ]
    found = []
    for mesh in (None, BOTH):
        with opened(model, mesh, max_requests=4, max_tokens_per_step=32, prompt_lookup=1) as session:
            each = [session.generate_sync(prompts, max_tokens=10, logprobs=3, **ask) for ask in asked]
            vectors = session.embed(prompts).result_sync()
            copies = session.generate_sync([[5, 6, 7, 8] * 4] * 4, max_tokens=12, logprobs=1)
            found.append((each, vectors, copies))
            print(f"{mesh}: {session.stats().drafted_tokens} drafts", flush=True)
    (wanted, vectors, copies), (texts, others, again) = found
    for ask, one, other in zip(asked, wanted, texts, strict=True):
        assert difference(one, other) < CLOSE, ask
        for a, b in zip(one, other, strict=True):
            pairs = zip(a.prompt_logprobs or (), b.prompt_logprobs or (), strict=True)
            assert max((abs(x.logprob - y.logprob) for x, y in pairs), default=0.0) < CLOSE
    assert difference(copies, again) < CLOSE
    assert np.abs(np.array(vectors) - np.array(others)).max() < CLOSE


@check
def data_shards_under_load(folder: Path) -> None:
    """Preemption, and pages that leave one shard and come back to it or to another, which shares the tiers."""
    model, rng = case("llama", 2), np.random.default_rng(0)
    stem = rng.integers(3, 150, 17).tolist()
    prompts = [stem[: int(rng.integers(0, 18))] + rng.integers(3, 150, 9).tolist() for _ in range(32)]
    more: dict[str, Any] = {"max_requests": 8, "max_tokens_per_step": 64, "max_queue": 64}
    ask: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    with opened(model, None, device_pages=200, **more) as session:
        expected = [session.generate_sync(prompt, **ask).token_ids for prompt in prompts]
    for mesh in (DATA, BOTH):
        with opened(model, mesh, device_pages=13, **more) as session:
            tiers = session._cache_writer.tiers
            assert tiers is not None
            tiers.costs.mode = "always"  # copying is preferred to computing
            for _ in range(2):
                found = session.generate_sync(prompts, **ask)
                assert [one.token_ids for one in found] == expected, mesh
            stats = session.stats()
            print(f"{mesh}: {stats.preemptions} preemptions, {stats.pages_out} pages out, {stats.pages_in} in")
            assert stats.preemptions and stats.pages_out and stats.pages_in
            session.check_integrity()


@check
def data_shards_restore(folder: Path) -> None:
    """Snapshots of data shards serve any other mesh, from memory and from disk; other weights are swapped in."""
    options = {"cache_dir": str(folder / "shards"), "disk_memory": 1 << 26}
    raw = mesh_models.raw("llama", 2)
    model, other = (checkpoints.write(folder / name, raw, seed=seed) for seed, name in enumerate(("first", "other")))
    prompts = [[(seed * index) % 150 + 3 for index in range(33)] for seed in (7, 11, 13)]
    saved: str | None = None
    for number, mesh in enumerate((None, DATA, BOTH, 2)):
        with opened(model, mesh, restore=saved, **options) as session:
            done = session.generate_sync(prompts, max_tokens=6, logprobs=3)
            assert [one.usage.cached_tokens for one in done] == [32 if saved else 0] * 3, mesh
            if saved is None:
                first = done
            saved = f"number-{number}"
            report = session.save(saved).result_sync()
            assert report.pages == 12 and (number == 0 or report.written == 0), (mesh, report)
            if mesh is BOTH:
                target = folder / "prefix"
                assert session.cache.export_prefix(prompts[0], target).result_sync() == 32
                session.cache.clear(tier="memory").result_sync()
                assert session.cache.import_prefix(target).result_sync() == 32
                assert session.generate_sync(prompts[0], max_tokens=6).usage.cached_tokens == 32
                session.swap_weights(other).result_sync()
                swapped = session.generate_sync(prompts, max_tokens=6, logprobs=3)
                assert not any(one.usage.cached_tokens for one in swapped)
        assert difference(first, done) < CLOSE, mesh
    with opened(other, None) as session:
        assert difference(session.generate_sync(prompts, max_tokens=6, logprobs=3), swapped) < CLOSE


@check
def data_shards_given_as_a_mesh(folder: Path) -> None:
    """A mesh of JAX whose axes come in any order; nothing is left on its devices when the session ends."""
    model = case("llama")
    expected = generated(model, None)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("model", "data"))
    before = len(jax.live_arrays())
    assert difference(expected, generated(model, mesh)) < CLOSE
    assert len(jax.live_arrays()) == before
    with opened(model, mesh) as session:
        told = session.stats().mesh
        assert told is not None and [told.devices[at] for at in (0, 1, 2, 3)] == [
            str(jax.devices()[at]) for at in (0, 2, 1, 3)
        ]
