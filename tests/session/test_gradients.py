"""`session.gradients`: numbers, errors, and what goes on meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rekindle
from golden.make import PROMPT
from helpers import adapters, checkpoints
from helpers.sessions import eventually, result_of
from helpers.small import MODEL, OPTIONS, opening, plain, prompt
from helpers.tapping import relative
from helpers.thorough import by_default
from rekindle import Steer
from rekindle._src.capabilities.adapters.request import AdapterLike
from rekindle._src.capabilities.gradients.adapted import AdapterArrays
from rekindle._src.capabilities.gradients.owner import GRADIENTS
from rekindle._src.capabilities.gradients.request import Point, ResolvedObjective
from rekindle._src.capabilities.gradients.step import GradientKey, arguments_of, program_of
from rekindle._src.models import differentiable as wide
from rekindle._src.models.base import Graph, LoadedModel, graph_of
from rekindle._src.models.placement import random_model
from rekindle._src.models.precision import Precision
from rekindle._src.models.registry import config_from_hf
from rekindle._src.session.session import client_of
from rekindle.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
IDS = prompt(3, 11)
LAST = MODEL.config.num_layers - 1


@pytest.mark.anyio
async def test_a_gradient_says_how_the_value_changes() -> None:
    """Small changes by `steer`, at the stream and inside of layers, against the gradient; twice, with one program."""
    async with opening(precompile="lazy") as session:
        owner = GRADIENTS.of(client_of(session).front)
        assert owner is not None
        of = rekindle.logit_difference(5, 7)
        sites: dict[str, object] = {"residual": "all", "attention": 0, "mlp": 0, "residual_before": [0, LAST]}
        g = await session.gradients(IDS, of=of, at={**sites, "heads": [0], "embedding": True, "norm": True})
        assert g["heads", 0].shape == (len(IDS), MODEL.config.num_heads, MODEL.config.head_dim)
        assert g.token_ids == tuple(IDS) and g["residual", -1].shape == (len(IDS), MODEL.config.hidden_size)
        np.testing.assert_array_equal(g["residual_before", LAST], g["residual", LAST - 1])
        assert not g["residual", -1][:-1].any() and g["residual", 0][:-1].any(), "later layers read the last token"
        rng = np.random.default_rng(0)
        for site, layer in (("residual", 0), ("attention", 0), ("mlp", 0), ("residual_before", 0)):
            way = rng.standard_normal(MODEL.config.hidden_size).astype(np.float32)
            values = []
            for scale in (0.02, -0.02):
                steer: Any = Steer(layer, way, scale=scale, positions=[4], site=site)  # type: ignore[arg-type]
                values.append((await session.gradients(IDS, of=of, at={"norm": True}, steer=steer)).value)
            assert relative((values[0] - values[1]) / 0.04, g[site, layer][4] @ way) < 0.01, site
        made = owner.compilations
        again = await session.gradients(
            IDS[:9], of=rekindle.logit_difference(8, 9), at={**sites, "heads": [0], "embedding": True, "norm": True}
        )
        assert owner.compilations == made and again["residual", 0].shape[0] == 9


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_value_is_the_log_probability_of_a_generation() -> None:
    async with opening(precompile="lazy") as session:
        done = await session.generate(IDS, max_tokens=1, logprobs=1)
        assert done.logprobs is not None
        g = await session.gradients(IDS, of=rekindle.logprob(done.token_ids[0]), at={"residual": 0})
        assert abs(g.value - done.logprobs[0].logprob) < 1e-4


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_function_of_logits_and_captures() -> None:
    """It sees no padding, also as a stored program. The gradient of half a square is the array itself."""

    def of(logits: jax.Array, captures: Mapping[Any, jax.Array]) -> jax.Array:
        return jnp.sum(captures["residual", LAST] ** 2) / 2 * logits.shape[0]

    async with opening(precompile="lazy") as session:
        g = await session.gradients(IDS, of=of, at={"residual": LAST})
        done = await session.generate(IDS, max_tokens=1, capture=rekindle.Capture({"residual": LAST}))
        assert (
            done.captured is not None
            and relative(g["residual", LAST] / len(IDS), done.captured["residual", LAST]) < 1e-4
        )


@pytest.mark.anyio
async def test_streams_go_on_and_a_caller_may_leave() -> None:
    ids = prompt(9, 12)
    async with opening(precompile="lazy") as session:
        owner = GRADIENTS.of(client_of(session).front)
        assert owner is not None
        tokens: list[int] = []

        async def stream() -> None:
            async for delta in session.stream(ids, max_tokens=24, ignore_eos=True):
                tokens.extend(delta.token_ids)

        async with anyio.create_task_group() as group:
            group.start_soon(stream)
            for _ in range(3):
                await session.gradients(IDS, of=rekindle.logprob(5), at={"residual": 0})
        assert tuple(tokens) == plain(ids, 24)
        async with anyio.create_task_group() as group:
            group.start_soon(result_of, session.gradients(IDS, of=rekindle.logprob(5), at={"mlp": 0}))
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        await anyio.to_thread.run_sync(eventually, lambda: owner.threads.busy == 0)
        session.check_integrity()
        assert (await session.gradients(IDS, of=rekindle.logprob(5), at={"mlp": 0})).value < 0


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"at": {"residue": 1}}, "'residue': is not a site"),
        ({"at": {"residual": 99}}, "at=99: is not among"),
        ({"at": {"gates": 0}}, "in no layer"),
        ({"at": {}}, "map sites to layers"),
        ({"at": {"residual": []}}, "names no layers"),
        ({"of": 5}, "can't be differentiated"),
        ({"of": rekindle.logprob(10**6)}, "is not a token id"),
        ({"of": rekindle.logprob(5, position=50)}, "outside of the prompt's 11 tokens"),
        ({"of": lambda logits, captures: logits}, "returned float32"),
        ({"of": lambda logits, captures: captures["q", 0]}, "raised KeyError"),
        ({"prompt": [10**6]}, "is not a token id"),
        ({"prompt": [5] * 65}, "must have 1 to 64 tokens"),
        ({"adapter": "kind"}, "adapter='kind': is not an adapter of this session"),
        ({"prompt": [IDS, IDS[:4]], "of": [rekindle.logprob(5)]}, "has 1 numbers for 2 prompts"),
        ({"prompt": [IDS, [10**6]]}, "is not a token id"),
        ({"images": ["a.png"]}, "images="),
        ({"max_tokens": 4}, "max_tokens=4: is not an option of gradients"),
    ],
)
async def test_refused(changes: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"prompt": IDS, "of": rekindle.logprob(5), "at": {"residual": 0}, **changes}
    async with opening(precompile="lazy") as session:
        with pytest.raises(InvalidRequest, match=words):
            await session.gradients(**options)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_prompts_of_one_length_share_a_program_and_a_pass() -> None:
    """Each has the gradients that it has alone, also with numbers and positions of its own, and with changes."""
    prompts = [prompt(seed, length) for seed, length in ((1, 9), (2, 12), (3, 16), (4, 20), (5, 11))]
    numbers: list[Any] = [rekindle.logit_difference(9 + row, 8, position=-1 - row % 2) for row in range(5)]
    changes: dict[str, Any] = {"steer": Steer(0, np.ones(MODEL.config.hidden_size, np.float32), positions=[4])}
    at = {"residual": [0], "heads": [LAST], "embedding": True}
    async with opening(precompile="lazy") as session:
        owner = GRADIENTS.of(client_of(session).front)
        assert owner is not None
        many = await session.gradients(prompts, of=numbers, at=at, **changes)
        assert owner.compilations <= 2, "one for up to 16 tokens, one for up to 32; or they are stored"
        assert [one.token_ids for one in many] == [tuple(ids) for ids in prompts]
        for ids, of, one in zip(prompts, numbers, many, strict=True):
            alone = await session.gradients(ids, of=of, at=at, **changes)
            assert abs(one.value - alone.value) < 1e-4 and {*one} == {*alone}
            for key in one:
                assert relative(one[key], alone[key]) < 1e-4, key
        same = await session.gradients(prompts[:2], of=lambda logits, captures: logits[-1, 5] - logits[-1, 8], at=at)
        first = await session.gradients(prompts[0], of=rekindle.logit_difference(5, 8), at=at)
        assert relative(same[0]["residual", 0], first["residual", 0]) < 1e-4
        assert await session.gradients([], of=rekindle.logprob(5), at=at) == []


@pytest.mark.parametrize(
    "name", by_default(["llama", "qwen3-moe", "falcon-h1", "gpt2"], lambda name: name == "qwen3-moe")
)
def test_an_adapter_has_the_gradients_of_the_model_that_it_is_merged_into(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With products of several ranks, also of experts. Another adapter of its shape is served by the same program."""
    model = checkpoints.model(raw := checkpoints.CASES[name], checkpoints.tensors(raw, seed=7))
    experts = ("gate_up_proj", "down_proj") if name == "qwen3-moe" else ()
    folders = [
        adapters.write(tmp_path / str(seed), model.config, seed=seed, experts=experts, rank_pattern={"o_proj": 2})
        for seed in (1, 2)
    ]
    options: dict[str, Any] = {**OPTIONS, "precompile": "lazy", "max_adapter_rank": 64}
    own: dict[str, Any] = {
        "of": rekindle.logit_difference(5, 7),
        "at": {"residual": [0], "mlp": [0], "embedding": True},
    }
    ids = PROMPT[:11]
    with rekindle.open_sync(model, **options, adapters={"a": folders[0], "b": folders[1]}) as session:
        owner = GRADIENTS.of(client_of(session).front)
        assert owner is not None
        found = [session.gradients(ids, adapter=adapter, **own).result_sync() for adapter in (None, "a", "b")]
        assert owner.compilations <= 2
        made, arrays_of = list[object](), owner.adapter_arrays

        def counting(adapter: AdapterLike) -> AdapterArrays:
            made.append(adapter)
            return arrays_of(adapter)

        monkeypatch.setattr(owner, "adapter_arrays", counting)
        many = session.gradients([ids, ids[:9]], adapter="b", **own).result_sync()
        assert len(made) == 1, "a thousand prompts share one copy of an adapter"
        a = session.attribute(ids, of=own["of"], at={"mlp": [0]}, adapter="a").result_sync()
        done = session.generate(ids, max_tokens=1, adapter="a", capture=rekindle.Capture({"mlp": 0})).result_sync()
    expected = [found[0]]
    for folder in folders:
        with rekindle.open_sync(model, **options, merge=folder) as session:
            expected.append(session.gradients(ids, **own).result_sync())
    for one, right in zip((*found, many[0]), (*expected, expected[-1]), strict=True):
        assert abs(one.value - right.value) < 1e-3 * max(1.0, abs(right.value))
        for key in right:
            assert relative(one[key], right[key]) < 1e-3, key
    assert (
        relative(found[1]["embedding"], found[0]["embedding"]) > 0.05 < relative(found[2]["mlp", 0], found[1]["mlp", 0])
    )
    assert a.value == found[1].value or abs(a.value - found[1].value) < 1e-4
    assert done.captured is not None
    assert relative(a["mlp", 0], (done.captured["mlp", 0] * found[1]["mlp", 0]).sum(axis=-1)) < 1e-3


def test_objectives_are_checked_and_shown() -> None:
    assert repr(rekindle.logit_difference(" he", " she", position=3)) == "logit_difference(' he', ' she', position=3)"
    for token in (1.5, None, True):
        with pytest.raises(InvalidRequest, match="is not a token"):
            rekindle.logprob(token)  # type: ignore[arg-type]


def computed(model: LoadedModel, graph: Graph, leaves: Any, points: tuple[Point, ...]) -> Any:
    key = GradientKey(16, points, (), difference=True)
    objective = ResolvedObjective((5, 7), len(IDS) - 1, difference=True)
    operands = arguments_of(np.asarray(IDS), objective, (), model.config.hidden_size, key.size)
    value, gradients = jax.jit(program_of(graph, key))(leaves, operands)
    return float(value), [np.asarray(gradients[str(index)]) for index in range(len(points))]


@pytest.mark.parametrize(
    ("name", "kind", "tiles"),
    by_default(
        [
            ("llama", "int4", True),
            ("llama", "int8-weight", False),
            ("mixtral", "int4", False),
            ("mixtral", "int8", True),
        ],
        2,
    ),
)
def test_quantised_weights_have_the_gradients_of_their_floats(
    name: str, kind: str, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a matrix is widened in parts."""
    if tiles:
        monkeypatch.setattr(wide, "AT_ONCE", 1 << 12)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = config_from_hf({**checkpoints.CASES[name], **sizes, "head_dim": 16})
    model = random_model(config, seed=1, dtype="float32", quantize=kind)
    leaves = dict(zip(model.graph.paths, model.leaves, strict=True))
    graph, shapes = graph_of(config, Precision.of("float32"))
    floats = []
    for path, shape in zip(graph.paths, shapes, strict=True):
        parts = (leaves.get(path.removesuffix("weight") + part) for part in ("scale", "minimum"))
        stored = wide.StoredMatrix(leaves[path], *(parts if path.endswith("weight") else (None, None)))
        floats.append(wide.widened(stored, "float32"))
        assert floats[-1].shape == shape.shape
    points: tuple[Point, ...] = ("embedding", 0), ("residual", 0), ("v", 0), ("mlp", 0)
    value, gradients = computed(model, model.graph, model.leaves, points)
    expected, others = computed(model, graph, floats, points)
    assert abs(value - expected) < 1e-4 * max(1.0, abs(expected))
    for point, gradient, other in zip(points, gradients, others, strict=True):
        assert relative(gradient, other) < 1e-4, point


@pytest.mark.parametrize("name", by_default(["llama", "mixtral"]))
def test_sites_inside_of_layers_by_finite_differences(name: str) -> None:
    model = checkpoints.case(name)
    sites = ("q", "k", "v", "heads", "gates") if model.config.moe else ("q", "k", "v", "heads")
    points: tuple[Point, ...] = tuple((site, 0) for site in sites)
    _, gradients = computed(model, model.graph, model.leaves, points)
    graph, tokens = wide.differentiable(model.graph), jnp.asarray(IDS)

    @jax.jit
    def value(added: Any) -> jax.Array:
        module = wide.module_of(graph, model.leaves)
        hidden = wide.recomputing_pass(module, tokens, jnp.int32(len(IDS)), points, added).hidden
        logits = module.logits(hidden)[-1]
        return logits[5] - logits[7]

    rng = np.random.default_rng(0)
    for point, gradient in zip(points, gradients, strict=True):
        zeros = {each: np.zeros_like(other[: len(IDS)]) for each, other in zip(points, gradients, strict=True)}
        way = rng.standard_normal(zeros[point].shape).astype(np.float32)
        step = 2e-3
        up, down = (float(value({**zeros, point: scale * way})) for scale in (step, -step))
        error = (up - down) / (2 * step) - float(np.sum(gradient[: len(IDS)] * way))
        assert abs(error) < 0.02 * np.linalg.norm(gradient), point  # a random way's derivative is about as large
