"""Checks of sessions on a mesh, for a process with simulated devices of its own: `python mesh_checks.py FOLDER NAME…`.

Each check compares with one device. `tests/session/test_mesh.py` runs them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("toolkit", "kernels", "tests")]
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

import rekindle  # noqa: E402
from helpers import adapters, checkpoints, mesh_models, picture_models, tapping  # noqa: E402
from helpers.mesh_models import OPTIONS, PROMPT, case, difference, generated  # noqa: E402
from helpers.sessions import writer_of  # noqa: E402
from rekindle._src.capabilities.captures.request import TAPS  # noqa: E402
from rekindle._src.core.config import EngineConfig  # noqa: E402
from rekindle._src.core.mesh_shape import checked_mesh  # noqa: E402
from rekindle._src.core.taps import SITES  # noqa: E402
from rekindle._src.drafts import resting  # noqa: E402
from rekindle._src.models.loading import checkpoint, prepared  # noqa: E402
from rekindle._src.models.placement import placement_of  # noqa: E402
from rekindle._src.opening.resolve import resolve  # noqa: E402
from rekindle._src.programs.programs import Programs  # noqa: E402
from rekindle._src.scheduling.drafting.costs import StepCosts  # noqa: E402
from rekindle._src.scheduling.drafting.drafter import DraftCounts  # noqa: E402
from rekindle._src.session.session import Session  # noqa: E402
from rekindle.models import random_model  # noqa: E402

CLOSE = 1e-5
EXPERTS = {"expert": 2, "model": 1}
DATA, BOTH = {"data": 2}, {"data": 2, "model": 2}
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 10, "logprobs": 3},
    {"max_tokens": 10, "logprobs": 3, "temperature": 0.8, "seed": 7, "top_k": 20, "top_p": 0.9},
]
CHECKS: dict[str, Callable[[Path], None]] = {}  # by name


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS[function.__name__] = function
    return function


def compare(name: str, *meshes: Any, kv_heads: int = 4, close: float = CLOSE, **options: Any) -> None:
    model = case(name, kv_heads)
    expected = generated(model, None, **options)
    for mesh in meshes:
        found = difference(expected, generated(model, mesh, **options))
        print(f"{name} with {kv_heads} kv heads on {mesh} {options or ''}: {found:.1e}", flush=True)
        assert found < close, (name, mesh, found)


def opened(model: Any, mesh: Any, **options: Any) -> Session:
    return rekindle.open_sync(model, mesh=mesh, **OPTIONS | options)


def several(count: int) -> list[list[int]]:
    """Prompts of different lengths."""
    rng = np.random.default_rng(1)
    return [rng.integers(3, 150, int(rng.integers(2, 20))).tolist() for _ in range(count)]


@check
def some_families(folder: Path) -> None:
    """Biases and a padded vocabulary, norms over all heads, and experts on different devices."""
    compare("gpt2", 2)
    compare("olmo2", 2)
    compare("qwen3-moe", EXPERTS)
    compare("qwen3.5", 2)
    compare("falcon-h1-norm-behind-gate", 4)


@check
def sums_of_a_step(folder: Path) -> None:
    """Two sums a layer and one of the embedding, one gathering of logits; pages stay in their place."""
    for name, mesh, more in (
        ("llama", 4, 0),
        ("gpt2", 2, 0),
        ("gemma2", 2, 0),
        ("mixtral", EXPERTS, 0),
        ("olmo2", 2, 1),
        ("llama", BOTH, 0),
    ):
        model = case(name)
        placement = placement_of(checked_mesh(mesh), model.graph)
        config = resolve(EngineConfig(**OPTIONS), model.config, placement=placement)
        programs = Programs(model.config, model.graph, placement.shapes(model.leaves), config, placement=placement)
        decode = next(bucket for bucket in programs.lattice.ahead if not bucket.tokens)
        lowered = programs.compiler.build(decode)
        text = lowered.as_text()
        layers = model.config.num_layers
        assert text.count("stablehlo.all_reduce") == 1 + (2 + more) * layers, name
        assert text.count("stablehlo.all_gather") == 1, name
        assert placement.report(0).sums == 1 + (2 + more) * layers
        compiled = lowered.compile()
        assert not any(f" {kind}(" in compiled.as_text() for kind in ("all-to-all", "collective-permute")), name
        whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(programs.recipes.kv))
        pages = whole // len(placement.devices)
        assert compiled.memory_analysis().alias_size_in_bytes >= pages, "pages are copied"


@check
def every_family(folder: Path) -> None:
    """All cases on two devices, experts in groups, and one case of each family on four and eight."""
    wide = {"llama", "gpt2", "olmo2", "gemma2", "gemma3", "qwen2-window", "qwen3", "phi3", "mistral-window", "mixtral"}
    wide |= {"qwen3-moe", "smollm3"}
    for name in sorted(set(checkpoints.CASES) - mesh_models.LEFT_OUT):
        meshes: list[Any] = [2, 4, 8] if name in wide else [2]
        if any(case(name).config.moe):
            meshes += [EXPERTS, {"expert": 2, "model": 4}, {"expert": 4, "model": 2}]
        compare(name, *meshes)


@check
def repeated_kv_heads(folder: Path) -> None:
    """More devices than kv heads: several have the same ones."""
    for name in ("llama", "olmo2", "qwen3", "gemma2"):
        compare(name, 4, 8, kv_heads=2)


@check
def kernels_of_xla(folder: Path) -> None:
    """Compare without the native kernels of attention, then also without those of products, norms and chains."""
    for name in ("llama", "gpt2", "mixtral"):
        compare(name, 2, kernels="xla")
        plain = mesh_models.without_kernels(case(name))
        found = difference(generated(plain, None, kernels="xla"), generated(plain, 2, kernels="xla"))
        print(f"{name} without any native kernel: {found:.1e}", flush=True)
        assert found < CLOSE, (name, found)


@check
def quantised(folder: Path) -> None:
    """Weights in 8 bits are the same on a mesh. Where activations are rounded too, each device rounds its own part."""
    path = checkpoints.write(folder / "checkpoint", mesh_models.raw("llama"))
    moe = checkpoints.write(folder / "experts", mesh_models.raw("qwen3-moe"))
    for model, mesh in ((path, 2), (path, 8), (moe, EXPERTS)):
        expected = generated(model, None, quantize="int8-weight")
        found = difference(expected, generated(model, mesh, quantize="int8-weight"))
        whole, parts = (generated(model, where, quantize="int8")[0].logprobs or () for where in (None, mesh))
        rounded = abs(whole[0].logprob - parts[0].logprob)
        print(f"{mesh}: {found:.1e} with rounded weights, {rounded:.1e} with rounded activations", flush=True)
        assert found < 1e-4 and rounded < 0.3


@check
def four_bits(folder: Path) -> None:
    """Parts of 4-bit matrices mean the same on a mesh, including experts' matrices.

    XLA's products show it: they round nothing. Native products round rows to 8 bits: a number between two steps goes to
    the other one after a sum in another order, and everything computed after it is rounded anew.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 16, "moe_intermediate_size": 64}
    both = {"expert": 2, "model": 2}
    for name, meshes in (("llama", (2, 4)), ("qwen3-moe", (EXPERTS, 2, both))):
        path = checkpoints.write(folder / name, mesh_models.raw(name) | sizes)
        native = rekindle.models.load(path, dtype="float32", quantize="mlp=int4-32,attention=int4-32")
        plain = mesh_models.without_kernels(native)
        expected, near = generated(plain, None), generated(native, None)
        for mesh in meshes:
            found = difference(expected, generated(plain, mesh))
            whole, parts = (each[0].logprobs or () for each in (near, generated(native, mesh)))
            rounded = abs(whole[0].logprob - parts[0].logprob)
            print(f"{name} on {mesh}: {found:.1e} of their values, {rounded:.1e} with rounded activations", flush=True)
            assert found < CLOSE and rounded < 0.3


@check
def int8_pages(folder: Path) -> None:
    """Quantised pages have scales, which are divided too. Values between two steps may be rounded either way."""
    compare("llama", 2, 4, kv_dtype="int8", close=1e-3)
    compare("llama", 2, kv_dtype="int8-int4", close=0.1)
    compare("llama", 2, page_size=8, attention_budget=16)


@check
def restarts(folder: Path) -> None:
    """Programs of a mesh are stored and loaded without tracing, and no session takes another mesh's."""
    options = {"cache_dir": str(folder / "cache")}
    model = case("llama", 2)
    expected = generated(model, 2, **options)
    for mesh, loads in ((2, True), (None, False), (4, False), (4, True), ({"expert": 1, "model": 2}, True)):
        with opened(model, mesh, **options) as session:
            found = session.generate_sync(PROMPT, max_tokens=10, logprobs=3)
            stats = session.stats()
        assert difference(expected[:1], [found]) < CLOSE
        assert (stats.traces == 0 and stats.compilations == 0) == loads, (mesh, stats.traces, stats.compilations)


@check
def snapshots(folder: Path) -> None:
    """What one mesh saved another restores: pages are laid out alike, also where kv heads are repeated."""
    options = {"cache_dir": str(folder / "snapshots"), "disk_memory": 1 << 26}
    model = case("llama", 2)
    prompt = [(7 * index) % 150 + 3 for index in range(33)]
    saved = None
    for mesh in (None, 4, 2, None):
        with opened(model, mesh, restore=saved, **options) as session:
            done = session.generate_sync(prompt, max_tokens=6, logprobs=3)
            assert done.usage.cached_tokens == (32 if saved else 0), (mesh, done.usage)
            if saved is None:
                first = done
            saved = f"from {mesh}".replace(" ", "-")
            session.save(saved).result_sync()
        assert difference([first], [done]) < CLOSE, mesh


@check
def tiers_and_preemption(folder: Path) -> None:
    """More requests than pages: sequences are preempted, pages leave and come back, and the texts are right.

    Where there are data shards, they come back to their own or to another one, which shares the tiers.
    """
    model, rng = case("llama", 2), np.random.default_rng(0)
    stem = rng.integers(3, 150, 17).tolist()
    prompts = [stem[: int(rng.integers(0, 18))] + rng.integers(3, 150, 9).tolist() for _ in range(32)]
    greedy: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    asked: list[dict[str, Any]] = [greedy, greedy, {**greedy, "temperature": 0.8, "seed": 7, "top_p": 0.9}]
    more: dict[str, Any] = {"max_requests": 4, "max_tokens_per_step": 32, "max_queue": 64}
    twice = more | {"max_requests": 8, "max_tokens_per_step": 64}
    with opened(model, None, device_pages=200, **more) as session:
        expected = [[session.generate_sync(prompt, **ask).token_ids for prompt in prompts] for ask in asked]
    for mesh, options in ((2, more), (4, more), (8, more), (DATA, twice), (BOTH, twice)):
        with opened(model, mesh, device_pages=13, **options) as session:
            for ask, wanted in zip(asked, expected, strict=True):
                once(session, prompts, ask, wanted, mesh)
            stats = session.stats()
            print(f"{mesh}: {stats.preemptions} preemptions, {stats.pages_out} pages out, {stats.pages_in} in")
            assert stats.preemptions and stats.pages_out and stats.pages_in


def once(session: Any, prompts: Any, ask: Any, expected: Any, mesh: Any) -> None:
    """Compare texts of a session that copies pages whatever that costs."""
    tiers = writer_of(session).tiers
    assert tiers is not None
    tiers.costs.mode = "always"
    assert [one.token_ids for one in session.generate_sync(prompts, **ask)] == expected, (mesh, ask)
    session.check_integrity()


@check
def windows(folder: Path) -> None:
    """Pages before a window are given back on a mesh, too: chats go on, from host memory and a snapshot as well."""
    options = mesh_models.raw("gemma4-shared-pages-and-embeddings-of-layers") | {"sliding_window": 12}
    options["max_position_embeddings"] = 256
    model = checkpoints.model(options, checkpoints.tensors(options))
    sizes = {"max_requests": 4, "max_model_len": 192, "cache_dir": str(folder), "disk_memory": 1 << 26}
    prompts = [np.random.default_rng(count).integers(3, 150, count).tolist() for count in (70, 90, 50, 60, 33)]
    greedy: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    with opened(model, None, **sizes | {"device_pages": 200}) as session:
        expected = [session.generate_sync(prompt, **greedy).token_ids for prompt in prompts]
    for mesh in (None, 2):
        with opened(model, mesh, **sizes | {"device_pages": 34}) as session:
            for _ in range(2):  # cold, and from the cache
                once(session, prompts, greedy, expected, mesh)
            stats = session.stats()
            assert stats.preemptions and stats.pages_out and stats.pages_in and stats.cache.states_restored, mesh
            session.generate_sync(prompts[1], **greedy)
            session.save("chat").result_sync()
        with opened(model, 2 if mesh is None else None, **sizes | {"device_pages": 200}, restore="chat") as session:
            chat = [*prompts[1], *expected[1]]
            done = session.generate_sync(chat[:129], **greedy)
            assert done.usage.cached_tokens == 128, (mesh, done.usage)
            assert list(done.token_ids[:1]) == chat[129:130]


@check
def states(folder: Path) -> None:
    """States are divided by heads: texts and log-probabilities, chats with too few pages, snapshots of other meshes."""
    for name in ("lfm2", "falcon-h1-norm-behind-gate", "nemotron-h-experts-in-groups", "granite4-experts"):
        compare(name, 2, 4, 8)
    options = mesh_models.raw("qwen3.5") | {"max_position_embeddings": 256}
    model = checkpoints.model(options, checkpoints.tensors(options))
    sizes = {"max_requests": 4, "max_model_len": 224, "max_tokens_per_step": 128, "disk_memory": 1 << 26}
    prompts = [np.random.default_rng(count).integers(3, 150, count).tolist() for count in (70, 140, 50, 90, 33)]
    greedy: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    saved: list[str] = []
    with pytest.raises(rekindle.ConfigError, match="several data shards or processes, which the states"):
        opened(model, {"data": 2, "model": 2})
    with opened(model, None, **sizes | {"device_pages": 200}) as session:
        expected = [session.generate_sync(prompt, **greedy).token_ids for prompt in prompts]
    for mesh in (None, 4, 8, 2):
        with opened(model, mesh, cache_dir=str(folder), **sizes | {"device_pages": 44}) as session:
            for _ in range(2):  # cold, and from the cache
                once(session, prompts, greedy, expected, mesh)
            assert session.stats().preemptions, mesh
            session.generate_sync(prompts[1], **greedy)
            saved.append(f"from-{mesh}".lower())
            session.save(saved[-1]).result_sync()
        for snapshot in saved:
            with opened(model, mesh, cache_dir=str(folder), restore=snapshot, **sizes | {"device_pages": 200}) as other:
                done = other.generate_sync([*prompts[1], *expected[1]], **{**greedy, "max_tokens": 20})
                assert done.usage.cached_tokens == 192, (mesh, snapshot, done.usage)
                cold = other.generate_sync([*prompts[1], *expected[1]], **{**greedy, "max_tokens": 20}, salt="cold")
                assert done.token_ids == cold.token_ids, (mesh, snapshot)
    StepCosts.best = lambda self, rows, gains, free, measured=True: len(gains)  # type: ignore[method-assign]
    repeating = greedy | {"logit_bias": {20: 60.0, 21: 60.0}}
    with opened(model, None, **sizes | {"device_pages": 200}) as session:
        expected = [session.generate_sync(prompt, **repeating).token_ids for prompt in prompts]
    for mesh in (4, 8):
        with opened(model, mesh, drafts="suffix", **sizes | {"device_pages": 200}) as session:
            assert [done.token_ids for done in session.generate_sync(prompts, **repeating)] == expected, mesh
            alone = [session.generate_sync(prompt, **repeating).token_ids for prompt in prompts[:2]]
            assert alone == expected[:2], mesh  # with room for drafts in each step
            assert session.stats().drafted_tokens > 0, mesh


@check
def drafters(folder: Path) -> None:
    """Drafts of texts and of a small model, which each of two devices has whole."""
    small = mesh_models.raw("llama")
    twin = str(checkpoints.write(folder / "small", small, checkpoints.tensors(small)))
    each: dict[str, dict[str, Any]] = {
        "model": {"drafts": twin}, "lookup": {"prompt_lookup": 3}, "suffix": {"drafts": "suffix"},
    }  # fmt: skip
    counts = compare_drafts(folder, "llama", each)
    model = checkpoints.model(small, checkpoints.tensors(small))
    sizes: dict[str, Any] = {"max_requests": 8, "max_model_len": 64, "device_pages": 64}
    with opened(model, None, drafts=twin, **sizes, cache_dir=str(folder / "cache")) as session:
        _, on_one = alone(session, "model")
    assert counts["model"] == on_one and on_one.accepted == on_one.drafted > 15, (counts["model"], on_one)


@check
def draft_heads(folder: Path) -> None:
    """Drafts of the model's own head, which is divided as the model is, over pages, states and latent pages."""
    for name in ("qwen3.5", "glm4-moe-lite"):
        compare_drafts(folder, name, {"mtp": {"drafts": "mtp"}})
    raw = mesh_models.raw("glm4-moe-lite") | {"draft_head": True}
    model, small = checkpoints.model(raw, checkpoints.tensors(raw)), mesh_models.raw("llama")
    for drafts in (str(checkpoints.write(folder / "small", small)), "mtp"):
        with pytest.raises(rekindle.ConfigError, match="several data shards or processes"):
            opened(model, DATA, drafts=drafts)


def compare_drafts(folder: Path, name: str, drafters: dict[str, dict[str, Any]]) -> dict[str, DraftCounts]:
    """Compare the tokens of two devices with drafts with those of one without, of guided and penalised rows, too.
    Return what each drafter has brought to a request that runs alone."""
    StepCosts.best = lambda self, rows, gains, free, measured=True: len(gains)  # type: ignore[method-assign]
    resting.PLAIN_STEPS = 0
    greedy: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0}
    asked: list[dict[str, Any]] = [
        greedy,
        greedy | {"temperature": 0.9, "seed": 3},
        greedy | {"logit_bias": {20: 60.0, 21: 60.0}, "frequency_penalty": 0.5},
        greedy | {"allowed_token_ids": list(range(20, 40))},
    ]
    prompts, counts = several(len(asked)), dict[str, DraftCounts]()
    sizes = {"max_requests": 8, "max_model_len": 64, "device_pages": 64, "cache_dir": str(folder / "cache")}

    def texts(session: Session) -> list[list[int]]:
        handles = [session.submit(prompt, **ask) for prompt, ask in zip(prompts, asked, strict=True)]
        return [list(handle.result_sync().token_ids) for handle in handles]

    raw = mesh_models.raw(name) | ({"draft_head": True} if "mtp" in drafters else {})
    model = checkpoints.model(raw, checkpoints.tensors(raw))
    with opened(model, None, drafts="none", **sizes) as session:
        expected = texts(session)
    for drafter, drafts in drafters.items():
        with opened(model, 2, **sizes, **drafts) as session:
            found, counts[drafter] = alone(session, drafter)
            assert found == expected[0], (name, drafter)
            assert texts(session) == expected, (name, drafter)
            session.sleep().result_sync()
            session.wake().result_sync()
            assert texts(session) == expected, (name, drafter)  # pages were in memory
            session.check_integrity()
            drafted = session.stats().drafters[drafter].drafted
        print(f"{drafter} of {name}: {counts[drafter]}, {drafted} drafted for all requests", flush=True)
        assert drafted > 10, (name, drafter, drafted)
    return counts


def alone(session: Session, drafter: str) -> tuple[list[int], DraftCounts]:
    """Return the tokens of a request that is a session's first, and the drafts for it.

    How many drafts several requests get depends on when programs are ready: rows wait for theirs meanwhile. A request
    alone waits for nothing, so that its drafts are the same each time."""
    done = session.generate_sync(several(1)[0], max_tokens=24, ignore_eos=True, temperature=0.0)
    return list(done.token_ids), session.stats().drafters.get(drafter, DraftCounts(0, 0))


@check
def loaded_weights(folder: Path) -> None:
    """A folder is read onto a mesh; weights kept for one mesh serve every other; others are swapped in."""
    prepared.MIN_BYTES = 0
    first = checkpoints.write(folder / "first", mesh_models.raw("llama"))
    second = checkpoints.write(folder / "second", mesh_models.raw("llama"), seed=1)
    options: dict[str, Any] = {"cache_dir": str(folder / "weights"), "quantize": "int8-weight"}
    expected = [generated(path, None, quantize="int8-weight") for path in (first, second)]
    for mesh in (4, 2, None):  # the first one keeps them
        assert difference(expected[0], generated(first, mesh, **options)) < 5e-3
        assert prepared.wait(60)
    kept = list((folder / "weights" / "weights").iterdir())
    assert len(kept) == 1, kept
    with opened(first, 2, **options) as session:
        before = session.generate_sync(PROMPT, max_tokens=10, logprobs=3)
        session.swap_weights(second).result_sync()
        after = session.generate_sync(PROMPT, max_tokens=10, logprobs=3)
        session.swap_weights(rekindle.models.load(first, dtype="float32", quantize="int8-weight")).result_sync()
        again = session.generate_sync(PROMPT, max_tokens=10, logprobs=3)
    assert difference(expected[0][:1], [before]) < 5e-3 and difference(expected[1][:1], [after]) < 5e-3
    assert difference([before], [again]) < CLOSE


@check
def loaded_in_parts(folder: Path) -> None:
    """The parts read for each device equal its parts of a model that was loaded whole, for all ways to store it."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 16, "moe_intermediate_size": 64}
    both = {"expert": 2, "model": 2}
    for name, mesh, quantize in (
        ("llama", 8, None),
        ("gpt2", 4, "int8"),
        ("olmo2", BOTH, None),
        ("qwen3-moe", both, "int8-weight"),
        ("qwen3-moe", both, "mlp=int4-32,attention=int4-32"),
        ("llama", BOTH, "mlp=int4-32"),
    ):
        raw = mesh_models.raw(name) | (sizes if quantize and "int4" in quantize else {})
        path = checkpoints.write(folder / f"{name}-{mesh}-{quantize}".replace(" ", ""), raw)
        options: dict[str, Any] = {"dtype": "bfloat16", "quantize": quantize}
        described = checkpoints.described(path, **options)
        placement = placement_of(checked_mesh(mesh), described.graph)
        found = checkpoint.read(described, placement=placement)
        expected = placement.model(rekindle.models.load(path, **options))
        assert found.fingerprint == expected.fingerprint
        for leaf_path, one, other in zip(found.graph.paths, found.leaves, expected.leaves, strict=True):
            assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding), leaf_path
            for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
                assert a.device == b.device
                np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data), err_msg=leaf_path)


@check
def collectives_are_measured(folder: Path) -> None:
    """`stats()` tells what the collectives take alone; one device has none."""
    for mesh in (None, 2, BOTH):
        with opened(case("llama"), mesh) as session:
            session.generate_sync(PROMPT, max_tokens=10)
            stats = session.stats()
            if mesh is None:
                assert stats.collective_seconds is None and stats.collective_share is None
                assert "collective_seconds" not in stats.as_dict()
                continue
            seconds, share = stats.collective_seconds, stats.collective_share
            assert seconds is not None and share is not None
            print(f"{mesh}: {1e3 * seconds / stats.steps:.2f} ms a step, {share:.0%}", flush=True)
            assert seconds > 0 and share == seconds / stats.device_seconds
            assert "time in collectives" in stats._repr_html_() and "collective_share" in str(stats)
            done = session.generate_sync(PROMPT, max_tokens=2)
            why = session.explain(done).text
            assert stats.mesh is not None and f"its steps run on {stats.mesh.named}, with " in why, why
            assert "of the steps' time in collectives" in why and ("data shard" in why) == (mesh is BOTH), why
            dashboard = session.watch()
            drawn = dashboard.draw()
            dashboard.stop()
            assert f"{stats.mesh.size} devices" in drawn and "time in collectives" in drawn, drawn
            assert ("data shards" in drawn and "1: 0 running" in drawn) == (mesh is BOTH), drawn


@check
def random_models(folder: Path) -> None:
    """A random model that was made on a mesh is the one of one device, and its session has that mesh."""
    config = case("llama").config
    mesh = {"data": 2, "model": 2}
    expected = generated(random_model(config), None)
    model = random_model(config, mesh=mesh)
    assert len(model.leaves[0].sharding.device_set) == 4
    for given in (None, mesh):
        assert difference(expected, generated(model, given)) < CLOSE
    assert not any(leaf.is_deleted() for leaf in model.leaves), "they are the caller's"
    for given in (2, {"model": 4}):
        with pytest.raises(rekindle.ConfigError, match="differs from the model's mesh <Placement 2 devices"):
            opened(model, given)
    with opened(model, None) as session:
        before = session.generate_sync(PROMPT, max_tokens=10, logprobs=3)
        session.swap_weights(random_model(config, seed=1)).result_sync()
        assert difference([before], [session.generate_sync(PROMPT, max_tokens=10, logprobs=3)]) > CLOSE
        session.swap_weights(random_model(config)).result_sync()
        assert difference([before], [session.generate_sync(PROMPT, max_tokens=10, logprobs=3)]) < CLOSE


@check
def taps(folder: Path) -> None:
    """Captures and changes at every site match one device's: with data shards of two devices, each with changes of its
    own, and where two share a kv head.
    """
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((3, case("llama").config.hidden_size))
    steer = rekindle.Steer(0, vectors[0], 3.0)
    inside = (
        rekindle.Steer(0, vectors[1], 2.0, site="attention"),
        rekindle.Steer(1, scale=0.5, mode="scale", site="mlp"),
    )
    patches = rekindle.Steer(1, vectors, positions=[0, 3, 7], mode="replace"), steer
    tap = rekindle.Tap(lambda x, context: x * context.arrays, "more", layers=0, site="mlp", arrays=np.float32(-3))
    changes: list[dict[str, Any]] = [{}, {"steer": steer}, {"steer": inside}, {"steer": patches}, {"taps": "more"}]
    for model, mesh in ((case("llama"), BOTH), (case("llama", 1), 2)):
        sites = {site: "all" for site in SITES if site not in ("experts", "gates")}
        options: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "capture": sites}
        with opened(model, None, taps=[tap]) as session:
            expected = [session.generate_sync(PROMPT, **options, **change) for change in changes]
            weights = session.view.attention(PROMPT, layer=1).result_sync().weights
        plain = expected[0].captured["norm"][: len(PROMPT)]
        assert all(tapping.difference(done.captured["norm"][: len(PROMPT)], plain) > 0.1 for done in expected[1:])
        with opened(model, mesh, taps=[tap]) as session:
            many = [session.submit(PROMPT, **options, **change) for change in changes for _ in range(2)]
            for wanted, handles in zip(expected, zip(many[::2], many[1::2], strict=True), strict=True):
                for done in [handle.result_sync() for handle in handles]:
                    assert done.token_ids == wanted.token_ids, mesh
                    assert {*done.captured} == {*wanted.captured}
                    for key, array in done.captured.items():
                        assert tapping.difference(array, wanted.captured[key]) < 1e-4, (mesh, key)
            found = session.view.attention(PROMPT, layer=1).result_sync().weights
            np.testing.assert_allclose(found, weights, rtol=1e-3, atol=1e-5)
            keep = rekindle.Capture({"residual": "all", "k": 0, "norm": True}, keep=True)
            twice = [session.generate_sync(3 * PROMPT, max_tokens=1, capture=keep, salt="kept") for _ in range(2)]
            assert [bool(done.usage.cached_tokens) for done in twice] == [False, True]
            for key, array in twice[0].captured.items():
                assert tapping.difference(twice[1].captured[key], array) < 1e-4, (mesh, key)


@check
def with_adapters(folder: Path) -> None:
    """Rows with adapters, of experts too, give the tokens of one device on several, and padded parts change nothing."""
    for name, mesh in (("llama", 4), ("qwen3-moe", EXPERTS | {"model": 2}), ("gpt2", 2)):
        model = case(name)
        experts = ("gate_up_proj", "down_proj") if name.endswith("moe") else ()
        folders: dict[str, Path] = {
            str(seed): adapters.write(folder / f"{name}{seed}", model.config, seed=seed, experts=experts[seed:])
            for seed in range(2)
        }
        texts = []
        for where in (None, mesh):
            with opened(model, where, adapters=folders, max_adapters=2) as session:
                asked = (*folders, None) * 2
                handles = [session.submit(PROMPT, adapter=one, max_tokens=8, logprobs=1) for one in asked]
                done = [handle.result_sync() for handle in handles]
                session.sleep().result_sync()
                session.wake().result_sync()
                again = session.generate_sync(PROMPT, adapter="1", max_tokens=8)
                session.load_adapter("1", folders["0"]).result_sync()
                other = session.generate_sync(PROMPT, adapter="1", max_tokens=8)
                assert (again.token_ids, other.token_ids) == (done[1].token_ids, done[0].token_ids)
            texts.append([list(one.token_ids) for one in done])
            assert difference(done[:3], done[3:]) < CLOSE
        assert texts[0] == texts[1], (name, texts)
        assert len({*map(tuple, texts[0])}) == 3, "the adapters change little"
    with opened(case("llama"), {"data": 2}) as session, pytest.raises(rekindle.ConfigError, match="data shards"):
        session.load_adapter("a", folder / "llama0").result_sync()


@check
def samplers(folder: Path) -> None:
    """Every sampler draws the tokens of one device on two, and on two data shards, alone and in a batch."""
    chains: list[dict[str, Any]] = [
        {"typical_p": 0.7}, {"top_n_sigma": 1.0}, {"xtc_probability": 0.6, "xtc_threshold": 0.02},
        {"dynatemp_range": 0.5}, {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3}, {"adaptive_target": 0.3},
        {"dry_multiplier": 2.0, "dry_allowed_length": 1}, {"samplers": ["temperature", "top_p", "top_k"], "top_k": 5},
    ]  # fmt: skip
    asked = [{"temperature": 1.0, "seed": at, "max_tokens": 10} | chain for at, chain in enumerate(chains)]
    model, expected = case("llama"), list[Any]()
    for mesh in (None, 2, DATA):
        with opened(model, mesh) as session:
            alone = [session.generate_sync(PROMPT, **options).token_ids for options in asked]
            handles = [session.submit(PROMPT, **options) for options in asked]
            assert [handle.result_sync().token_ids for handle in handles] == alone
        expected = expected or alone
        assert alone == expected, mesh
    assert len({*expected}) > 4, "the samplers change the text"


@check
def pictures(folder: Path) -> None:
    """Prompts with pictures, together and from the cache, on two devices, there with stored programs, and on two data
    shards."""
    one, two = picture_models.picture(1, 96, 64), picture_models.picture(2, 96, 64)
    orders = [[one, two], [two, one], [one, one], None]
    options: dict[str, Any] = {"max_tokens_per_step": 48, "max_model_len": 128, "page_size": 16, "max_requests": 4}
    for name, meshes in (("qwen3-vl", (2, 2, DATA)), ("qwen3.5", (2,)), ("gemma3", (2, DATA))):
        made, expected = picture_models.written(name, folder / name), list[Any]()
        for mesh in (None, *meshes):
            with opened(made, mesh, **options) as session:
                for _ in range(2):
                    marks = (
                        "Here are two pictures for you. <image> What do you see in this picture? <image>",
                        "no picture",
                    )
                    asked = [(marks[images is None], images) for images in orders]
                    handles = [
                        session.submit(text, images=images, max_tokens=8, logprobs=1, ignore_eos=True)
                        for text, images in asked
                    ]
                    done = [handle.result_sync() for handle in handles]
                    expected = expected or done
                    found = difference(expected, done)
                    print(f"pictures of {name} on {mesh}: {found:.1e}", flush=True)
                    assert found < CLOSE, (name, mesh, found)
                assert sum(one.usage.cached_tokens for one in done) > 0
                session.check_integrity()
        assert min(difference(expected[:1], expected[1:2]), difference(expected[:1], expected[2:3])) > 100 * CLOSE


@check
def taps_of_families(folder: Path) -> None:
    """Captures and changes of a case of each family at every site match between one and two devices."""
    for name in sorted(set(checkpoints.ONE_EACH.values()) - mesh_models.LEFT_OUT):
        several = []
        for mesh in (None, 2):
            with opened(case(name), mesh) as session:
                facts = TAPS.of(session._front)
                assert facts is not None
                changed = {site: facts.sites[site][-1] for site in ("attention", "mlp") if facts.sites[site]}
                everything = dict.fromkeys(facts.sites, "all")
                options: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "capture": everything}
                steer = [rekindle.Steer(layer, scale=0.0, mode="scale", site=site) for site, layer in changed.items()]
                handles = [session.submit(PROMPT, **options, steer=change) for change in ((), steer)]
                several.append([handle.result_sync() for handle in handles])
        for one, two in zip(*several, strict=True):
            assert one.token_ids == two.token_ids, name
            assert {*one.captured} == {*two.captured} and len(one.captured.positions) == len(PROMPT) + 3, name
            for key, array in one.captured.items():
                if key[0] == "experts":
                    np.testing.assert_array_equal(two.captured[key], array)
                elif array.any():
                    assert (found := tapping.difference(two.captured[key], array)) < 1e-4, (name, key, found)
                else:
                    assert not two.captured[key].any(), (name, key)
        off = several[1][1].captured
        assert not any(off[place].any() for place in changed.items()), name
        print(f"{name}: {len(off)} arrays", flush=True)


@check
def memory_is_given_back(folder: Path) -> None:
    """No array of a closed session is left on any device."""
    model = case("llama")
    gc.collect()
    before = jax.live_arrays()  # held, so that none of their ids is used again
    generated(model, 2)
    assert not {*map(id, jax.live_arrays())} - {*map(id, before)}


@check
def beside_a_mesh_of_the_user(folder: Path) -> None:
    """A mesh given as one of JAX's, inside a `jax.set_mesh`, and its devices in the order that it has them."""
    model = case("llama")
    expected = generated(model, None)
    devices = np.array(jax.devices()[3:1:-1])
    mesh = jax.sharding.Mesh(devices, ("model",))
    with jax.set_mesh(mesh):
        assert difference(expected, generated(model, mesh)) < CLOSE
    with opened(model, mesh) as session:
        told = session.stats().mesh
        assert told is not None and told.devices == tuple(map(str, devices))
        assert repr(session) == "<rekindle.Session llama on 2 devices>"


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
            drafted = session.stats().drafted_tokens
            few = {"logit_bias": {7: 60.0, 9: 60.0}, "frequency_penalty": 0.5, "presence_penalty": 0.3}
            copies += session.generate_sync([[5, 6, 7, 8] * 4] * 2, max_tokens=20, logprobs=1, **few)
            found.append((each, vectors, copies))
            penalised = session.stats().drafted_tokens - drafted
            print(f"{mesh}: {drafted} drafts, {penalised} of rows that read their history", flush=True)
    (wanted, vectors, copies), (texts, others, again) = found
    for ask, one, other in zip(asked, wanted, texts, strict=True):
        assert difference(one, other) < CLOSE, ask
        for a, b in zip(one, other, strict=True):
            pairs = zip(a.prompt_logprobs or (), b.prompt_logprobs or (), strict=True)
            assert max((abs(x.logprob - y.logprob) for x, y in pairs), default=0.0) < CLOSE
    assert difference(copies, again) < CLOSE
    assert np.abs(np.array(vectors) - np.array(others)).max() < CLOSE


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
    """A mesh of JAX takes axes in any order; nothing is left on its devices when the session ends."""
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


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        CHECKS[wanted](Path(sys.argv[1]))
        print(f"{wanted}: done", flush=True)
