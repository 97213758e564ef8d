"""Every family names its sites and takes deltas: a new block can't lose its taps or its adapters in silence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.capabilities.captures.step import tap_facts
from rekindle._src.core.taps import LOGITS
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.base import abstract_model, merge
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.hooks import STREAM_SITES, Listener, keeping
from rekindle._src.models.nn.forward import ForwardPass, RopeTables
from rekindle._src.models.nn.linear import Linear, RMSNorm, matrices
from rekindle._src.models.plain import PlainAttention
from rekindle._src.models.registry import config_from_hf
from rekindle_kernels import gated

CASES = dict(checkpoints.CASES)
for entry in checkpoints.FAMILY_CASES.values():
    CASES |= entry.embeds
EACH = [*checkpoints.ONE_EACH.values(), *(CASES.keys() - checkpoints.CASES.keys())]
QUICK = {*EACH, *(name for name in CASES if "gemma4" in name)}
# By default those whose blocks differ: each traces its model.
DEFAULT = {*checkpoints.UNLIKE, "gemma4-moe"}
CASE = pytest.mark.parametrize(
    "name",
    by_default(
        [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
        lambda name: type(name) is str and (name in DEFAULT or name not in checkpoints.CASES),
    ),
)
OUTPUTS = ("attention", "mlp", "mlp_experts", "layer_embedding")  # what layers add to the stream
ONE_TENSOR = ("granitemoe", "granitemoeshared", "granitemoehybrid")  # of all experts, which can have no adapter
INPUTS = ("attention_input", "mlp_input", "mlp_experts_input", "layer_embedding_input")  # of halves of layers
PRIVATE = ("embedding", "mlp_experts", "layer_embedding", *INPUTS)  # no request captures these

USUAL = "q k v attention mlp"
EXPERTS = f"{USUAL} gates experts"
SITES = {  # of all layers of a family together, where they are not the usual ones
    **dict.fromkeys(("bailing_hybrid", "deepseek_v2", "glm4_moe_lite"), "q k attention mlp gates experts"),
    **dict.fromkeys(
        ("ernie4_5_moe", "gpt_oss", "granitemoe", "granitemoeshared", "lfm2_moe", "mixtral", "olmoe", "qwen2_moe"),
        EXPERTS,
    ),
    **dict.fromkeys(("qwen3_moe", "qwen3_5_moe_text"), EXPERTS),
    "gemma4_text": f"{USUAL} layer_embedding",
}


class Recorder:
    """A delta that adds nothing, and knows that it was asked."""

    needed: Any = True

    def __init__(self, inputs: int, outputs: int) -> None:
        self._sizes, self.asked = (inputs, outputs), 0

    def add(self, y: Array, x: Array, gate: str | None = None, norm: RMSNorm | None = None) -> Array:
        self.asked += 1
        assert (x.shape[-1], y.shape[-1]) == self._sizes
        return y if gate is None else gated(y, gate)

    def add_to_rows(self, y: Array, x: Array, sizes: Array, tokens: Array) -> Array:
        return self.add(y, x)


class Pass(NamedTuple):
    """A pass of a model with zeros in the place of every output that it names."""

    config: ModelConfig
    sites: dict[str, list[int]]  # the layers that named each site
    deltas: dict[str, Recorder]
    reaching: set[str]  # the leaves that reach the result
    matrices: set[str]  # of the layers


@functools.cache
def traced(name: str) -> Pass:
    config = config_from_hf(CASES[name])
    graph, leaves = abstract_model(config)
    asked: set[tuple[str, int]] = set()
    found: set[str] = set()
    deltas = {site.path: Recorder(site.inputs, site.outputs) for site in sites_of(config).sites}

    def listener(site: str, layer: int) -> Callable[[Array], Array] | None:
        asked.add((site, layer))
        return jnp.zeros_like if site in OUTPUTS else None

    def run(leaves: Any, tokens: Array) -> Array:
        model = merge(graph, leaves, deltas)
        found.update(path for path in matrices(model) if path.startswith("layers."))  # type: ignore[arg-type]
        return model(tokens, tokens, PlainAttention(model, len(tokens)), tokens, [listener])

    jaxpr = jax.make_jaxpr(run)(leaves, jnp.arange(4, dtype=jnp.int32))
    needed = {*jaxpr.jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(variable for variable in equation.invars if not hasattr(variable, "val"))
    inputs = zip(graph.paths, jaxpr.jaxpr.invars, strict=False)  # after the leaves come the tokens
    sites = {site: sorted(layer for other, layer in asked if other == site) for site, _ in asked}
    return Pass(config, sites, deltas, {path for path, variable in inputs if variable in needed}, found)


@CASE
def test_layers_name_the_sites_that_sessions_offer(name: str) -> None:
    config, found, *_ = traced(name)
    facts = tap_facts(config, processes=1)
    assert facts is not None
    assert found["residual_before"] == [0], "before another layer it is the residual of the one before"
    offered = {site: [*layers] for site, layers in facts.sites.items() if layers and site != LOGITS}
    assert {site: layers for site, layers in found.items() if site not in PRIVATE} == offered | {"residual_before": [0]}
    if name in EACH:
        assert found["embedding"] == [0] and {*found} - {*STREAM_SITES, *INPUTS, "embedding"} == {
            *SITES.get(config.model_type, USUAL).split()
        }


@CASE
def test_what_a_layer_adds_to_the_stream_has_a_name(name: str) -> None:
    """With zeros in the place of every named output, no weight of a layer reaches the stream."""
    reaching = traced(name).reaching
    assert "embed.weight" in reaching
    # But norms of outputs, which read zeros, and Gemma's factor of the stream itself.
    of_layers = {path for path in reaching if path.startswith("layers.")}
    assert not {path for path in of_layers if not path.endswith(("norm.weight", "scalar"))}


@CASE
def test_all_matrices_of_layers_take_deltas(name: str) -> None:
    found = traced(name)
    assert not [path for path, delta in found.deltas.items() if not delta.asked]
    without = found.matrices - {*found.deltas}
    assert {*found.deltas} <= found.matrices
    if without:
        assert found.config.model_type in ONE_TENSOR and all(
            path.endswith(("mlp.gate_up", "mlp.down")) for path in without
        )


def test_a_half_adds_the_stream_itself_where_nobody_listens() -> None:
    residuals: list[Array | None] = []

    def half(x: Array, step: ForwardPass, residual: Array | None = None, norm: RMSNorm | None = None) -> Array:
        residuals.append(residual)
        return 2 * x if residual is None else residual + 2 * x

    def attends(*_: Any) -> Array:
        raise AssertionError("the half attends to nothing")

    x, kept = jnp.ones(3), dict[tuple[str, int], Array]()
    fused = functools.partial(ForwardPass, RopeTables.of({}), attends)
    listeners = [keeping(kept, ["mlp"]), lambda site, layer: (lambda y: y + layer) if site == "mlp" else None]
    for step, apart, result in (
        (fused(), False, 3.0), (fused([keeping(kept, STREAM_SITES)]), False, 3.0), (fused(listeners).of(4), True, 7.0)
    ):  # fmt: skip
        assert step.add("mlp", half, x).tolist() == [result] * 3
        assert (residuals.pop() is None) == apart
    assert {key: array.tolist() for key, array in kept.items()} == {("mlp", 4): [2.0] * 3}, "listeners are in order"


@pytest.mark.thorough
def test_a_listener_that_adds_zeros_has_the_gradient_at_its_site() -> None:
    model, tokens, layer = checkpoints.case("llama"), jnp.arange(5, dtype=jnp.int32), 0

    def at_the_site(zeros: Array) -> Array:
        module = merge(model.graph, model.leaves)
        at: Listener = lambda site, number: zeros.__add__ if (site, number) == ("residual", layer) else None  # noqa: E731
        return module(tokens, tokens, PlainAttention(module, 5), tokens, [at])[-1].sum()

    def of_the_rest(x: Array, *, first: bool) -> Array:
        module = merge(model.graph, model.leaves)
        embedded, tables = module.begin(tokens, tokens, tokens)
        step = ForwardPass(tables, PlainAttention(module, 5))
        if first:
            return module.layers[layer](embedded, step.of(layer))
        for number, block in enumerate(module.layers):
            x = x if number <= layer else block(x, step.of(number))
        return module.end(x)[-1].sum()

    @jax.jit
    def both() -> tuple[Array, Array]:
        x = of_the_rest(jnp.zeros(0), first=True)
        return jax.grad(at_the_site)(jnp.zeros_like(x)), jax.grad(functools.partial(of_the_rest, first=False))(x)

    found, expected = both()
    assert jnp.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_matrix_without_a_declared_delta_takes_none() -> None:
    graph, leaves = abstract_model(config_from_hf(CASES["llama"]))
    assert Linear.delta is None
    with pytest.raises(AssertionError, match=r"layers\.0\.mlp_norm declares no delta"):
        merge(graph, leaves, {"layers.0.mlp_norm": Recorder(1, 1)})
