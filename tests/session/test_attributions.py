"""`session.attribute`: numbers against other ways to them, errors, and what goes on meanwhile."""

from __future__ import annotations

import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rekindle
from golden.make import PROMPT
from helpers import checkpoints
from helpers.sessions import eventually, result_of
from helpers.small import MODEL, OPTIONS, opening, plain, prompt
from helpers.tapping import relative
from rekindle._src.capabilities.gradients.corrections import HeadArrays, corrected
from rekindle._src.capabilities.gradients.owner import GRADIENTS
from rekindle._src.evaluation.attribution import Attribution
from rekindle._src.models.config import AttentionSpec
from rekindle._src.session.session import client_of
from rekindle.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
IDS = prompt(3, 11)
SOURCE = [*IDS[:4], 9, *IDS[5:]]  # another token at position 4
OF = rekindle.logit_difference(5, 7)
LAST = MODEL.config.num_layers - 1


@pytest.mark.anyio
async def test_gradients_times_inputs() -> None:
    """Each head of a site is scored by its own part of the array. The inputs come from captures."""
    async with opening(precompile="lazy") as session:
        a = await session.attribute(IDS, of=OF, method="gradient_x_input", at={"v": 0, "mlp": [LAST]})
        g = await session.gradients(IDS, of=OF, at={"v": 0, "mlp": LAST})
        sites = {"v": 0, "mlp": LAST}
        done = await session.generate(IDS, max_tokens=1, capture=rekindle.Capture(sites))
        assert done.captured is not None and a.value == pytest.approx(g.value, abs=1e-5)
        for site, layer in sites.items():
            expected = (done.captured[site, layer] * g[site, layer]).sum(axis=-1)
            assert relative(a[site, layer], expected) < 1e-4
        assert a["v", 0].shape == (len(IDS), MODEL.config.num_kv_heads) and a.convergence is None
        assert a.map("v").shape == (MODEL.config.num_layers, MODEL.config.num_kv_heads)


def of_torch(folder: Path, ids: list[int], baseline: int, steps: int) -> tuple[Any, float]:
    """Integrated gradients as captum computes them: x = b + α (e − b), and the mean of gradients times e − b."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    table = model.get_input_embeddings()
    e, b = (table(torch.tensor([each])).detach() for each in (ids, [baseline] * len(ids)))

    def value(x: Any) -> Any:
        logits = model(inputs_embeds=x).logits[0, -1]
        return logits[5] - logits[7]

    places, weights = np.polynomial.legendre.leggauss(steps)
    total = torch.zeros_like(e)
    for place, weight in zip((1 + places) / 2, weights / 2, strict=True):
        x = (b + float(place) * (e - b)).requires_grad_()
        value(x).backward()
        total += float(weight) * x.grad
    scores = (total * (e - b)).sum(dim=-1)[0]
    return scores.numpy(), float(scores.sum() - (value(e) - value(b)))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.filterwarnings("ignore")  # transformers deprecates as it likes
async def test_integrated_gradients_are_those_of_torch() -> None:
    """The scores of tokens, and the convergence, by a loop over PyTorch's gradients."""
    pytest.importorskip("torch")
    raw = checkpoints.CASES["llama"]
    checkpoints.needs_transformers(raw)
    state = checkpoints.tensors(raw, seed=7)
    with tempfile.TemporaryDirectory() as folder:
        expected, convergence = of_torch(checkpoints.write(Path(folder), raw, state), list(PROMPT), 3, 6)
    model = checkpoints.model(raw, state)
    async with rekindle.open(model, **{**OPTIONS, "precompile": "lazy"}) as session:
        a = await session.attribute(PROMPT, of=OF, method="integrated", baseline=3, steps=6, at={"mlp": 0})
        assert relative(a.scores, expected) < 1e-3
        assert a.convergence == pytest.approx(convergence, abs=1e-3)
        zeros = await session.attribute(PROMPT, of=OF, method="integrated", baseline="zeros", steps=6, at={"mlp": 0})
        assert zeros.other_value == pytest.approx(0, abs=1e-5), "of zeros nothing follows"
        finer = await session.attribute(PROMPT, of=OF, method="integrated", baseline=3, steps=48, at={"mlp": 0})
        assert abs(finer.convergence or 1) < 1e-3 < abs(a.value - (a.other_value or 0))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.thorough
async def test_estimates_next_to_exact_patches() -> None:
    """Exact patches are those of `patch`, and the estimate of what the number is linear in is exact."""
    async with opening(precompile="lazy") as session:
        at = {"mlp": [0], "attention": [0], "heads": [0], "norm": True}
        a = await session.attribute(IDS, of=OF, method="patching", source=SOURCE, at=at, exact="all")
        assert a.other_value is not None and len(a.patched) == len(a.strongest(10**4))
        by_node = {(node.site, node.position, node.head): node for node in a.patched}
        end = by_node["norm", len(IDS) - 1, None]
        assert end.exact == pytest.approx(a.other_value - a.value, abs=1e-4)
        assert end.score == pytest.approx(a.other_value - a.value, abs=1e-4)
        done = await session.generate(SOURCE, max_tokens=1, capture=rekindle.Capture({"mlp": 0, "attention": 0}))
        assert done.captured is not None
        for site in ("mlp", "attention"):
            own = rekindle.Captured(done.captured.positions, {(site, 0): done.captured[site, 0]}, LAST + 1)
            g = await session.gradients(IDS, of=OF, at={"norm": True}, patch=own.select(positions=[4]))
            assert by_node[site, 4, None].exact == pytest.approx(g.value - a.value, abs=1e-4), site
        assert all(by_node["embedding", place, None].exact == pytest.approx(0, abs=1e-6) for place in (0, 10))
        heads = [by_node["heads", 4, head].score for head in range(MODEL.config.num_heads)]
        assert sum(heads) == pytest.approx(by_node["attention", 4, None].score, abs=1e-4), "the output is their sum"
        inner = [node for node in a.patched if node.site == "heads"]
        scores, exact = (np.array([getattr(node, name) for node in inner]) for name in ("score", "exact"))
        assert np.corrcoef(scores, exact)[0, 1] > 0.95
        assert [node.exact is not None for node in a.strongest(3)] == [True] * 3


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.thorough
async def test_dropped_layers_pass_no_gradient() -> None:
    """Without the second of two layers, a gradient before it is that after it; AtP* is the mean of such sizes."""
    assert LAST == 1
    async with opening(precompile="lazy") as session:
        sites = ("embedding", "heads", "mlp")
        star = await session.attribute(
            IDS, of=OF, method="atp_star", source=SOURCE, at={"mlp": "all", "heads": "all"}, exact=4
        )
        plain_one = await session.attribute(IDS, of=OF, method="patching", source=SOURCE, at={"mlp": "all"})
        g = await session.gradients(IDS, of=OF, at={"residual": LAST})
        done = [
            await session.generate(ids, max_tokens=1, capture=rekindle.Capture({"mlp": [0, 1]}))
            for ids in (IDS, SOURCE)
        ]
        change = done[1].captured["mlp", 0] - done[0].captured["mlp", 0]  # type: ignore[index]
        only = (change * g["residual", LAST]).sum(axis=-1)
        assert relative(np.abs(star["mlp", 0]), np.abs(only)) < 1e-3, "the other layer is dropped"
        assert relative(star["mlp", LAST], plain_one["mlp", LAST]) < 1e-4, "no layer that follows reads it"
        assert {site for site, *_ in (key if isinstance(key, tuple) else (key,) for key in star)} == set(sites)
        assert (np.sign(star["mlp", 0]) * plain_one["mlp", 0]).min() > -1e-6
        assert all(node.exact is not None for node in star.patched) and len(star.patched) == 4


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("scale", [0.7, 30.0])  # with the larger one, attention is saturated
def test_the_softmax_is_computed_again(scale: float, window: int | None, cap: float | None) -> None:
    """Queries and keys are replaced one by one, with heads that share keys."""
    rng = np.random.default_rng(0)
    T, H, K, D = 7, 4, 2, 8
    q, other_q, slope = (rng.standard_normal((T, H, D), np.float32) for _ in range(3))
    k, v, other_k = (rng.standard_normal((T, K, D), np.float32) for _ in range(3))
    spec = AttentionSpec(scale=scale, sliding_window=window, soft_cap=cap)

    def value(q: Any, k: Any) -> Any:
        logits = np.einsum("thd,shd->hts", q, np.repeat(k, 2, axis=1)) * spec.scale
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        place = np.arange(T)
        logits = np.where(spec.sees(place[:, None] - place), logits, -np.inf)
        heads = np.einsum("hts,shd->thd", jax.nn.softmax(jnp.asarray(logits), axis=-1), np.repeat(v, 2, axis=1))
        return float((heads * slope).sum())

    found = corrected(HeadArrays(q, k, v, slope), {"q": other_q, "k": other_k}, spec)
    base = value(q, k)
    for place in range(T):
        for head in range(H):
            patched = q.copy()
            patched[place, head] = other_q[place, head]
            assert found["q"][place, head] == pytest.approx(value(patched, k) - base, abs=1e-4)
        for head in range(K):
            patched = k.copy()
            patched[place, head] = other_k[place, head]
            # Queries of later positions each see the new key alone.
            assert found["k"][place, head] == pytest.approx(value(q, patched) - base, abs=1e-4)


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
            a = await session.attribute(IDS, of=OF, method="integrated", steps=20)
        assert tuple(tokens) == plain(ids, 24)
        made = owner.compilations
        async with anyio.create_task_group() as group:
            group.start_soon(result_of, session.attribute(IDS, of=OF, method="integrated", steps=400))
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        await anyio.to_thread.run_sync(eventually, lambda: owner.threads.busy == 0)
        session.check_integrity()
        again = await session.attribute(IDS[:9], of=OF, method="integrated", steps=20)
        assert owner.compilations == made and again.scores.shape == (9,) and a.scores.shape == (11,)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "saliency"}, "method='saliency': is not a method"),
        ({"method": "patching"}, "source=None: is missing"),
        ({"source": IDS}, "source=.*: is for patching"),
        ({"method": "patching", "source": IDS[:5]}, "has 5 tokens, and the prompt 11"),
        ({"method": "patching", "source": [10**6] * 11}, "source=1000000: is not a token id"),
        ({"method": "patching", "source": IDS, "baseline": 5}, "baseline=5: is for integrated"),
        ({"baseline": True}, "baseline=True: is not a token"),
        ({"baseline": 10**6}, "baseline=1000000: is not a token id"),
        ({"baseline": 1.5}, "baseline=1.5: is not a token"),
        ({"exact": 3}, "exact=3: patches nodes from a source"),
        ({"method": "patching", "source": IDS, "exact": -1}, "exact=-1: is not a number of nodes"),
        ({"steps": 0}, "steps=0: is not a number of steps"),
        ({"steps": 10**6}, "Pass a number from 1 to 512"),
        ({"method": "atp_star", "source": IDS, "steps": 4}, "has no meaning"),
        ({"at": {"heads": 99}}, "at=99"),
        ({"adapter": "kind"}, "is not an adapter of this session"),
        ({"n_steps": 4}, "is not an option of attribute"),
    ],
)
async def test_refused(changes: dict[str, Any], words: str) -> None:
    async with opening(precompile="lazy") as session:
        with pytest.raises(InvalidRequest, match=words):
            await session.attribute(IDS, **{"of": OF, "method": "integrated", **changes})


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_view_explains_the_likeliest_next_token() -> None:
    async with opening(precompile="lazy") as session:
        view = await session.view.attribution(IDS, method="gradient_x_input")
        done = await session.generate(IDS, max_tokens=1, logprobs=0)
        assert done.logprobs is not None and view.value == pytest.approx(done.logprobs[0].logprob, abs=1e-4)
        assert view.number == f"logprob({done.token_ids[0]})"
        chosen = await session.view.attribution(IDS, of=OF, method="gradient_x_input")
        assert chosen.number == "logit_difference(5, 7)" and "0%" in chosen._repr_html_()


def made() -> Attribution:
    rng = np.random.default_rng(1)
    texts = [" Tom", " <b>", "\n", *(f" t{at}" for at in range(20))]
    arrays: dict[Any, Any] = {"embedding": rng.standard_normal(23).astype(np.float32)}
    for layer in range(3):
        arrays["heads", layer] = rng.standard_normal((23, 4)).astype(np.float32)
        arrays["mlp", layer] = rng.standard_normal(23).astype(np.float32)
    return Attribution("integrated", "logprob(' <i>')", -0.5, -9.0, range(23), texts, arrays, 3)


def test_it_shows_itself_without_scripts() -> None:
    page = made()._repr_html_()
    assert page.count("<svg") == 2 and "<script" not in page
    assert "<b>" not in page and "<i>" not in page and "of the strongest" in page
    assert "layer 2, heads 3: " in page and "mlp at ·Tom: " in page
    assert "it is -0.5, and -9 for the baseline; the tokens&#x27; sum misses the difference by" in page
    assert "the strongest nodes" in page and type(page) is str


def test_a_saved_figure_is_plain_xml_for_any_program(tmp_path: Path) -> None:
    text = made().save(tmp_path / "figure.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert all(word not in text for word in ("var(", "rgba(", "<script", "href"))
    names = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "·Tom" in names and any("heads: layers by heads" in str(name) for name in names)
    with pytest.raises(InvalidRequest, match=r"has no scores by layer\. There are: 'heads', 'mlp'"):
        made().map("residual")
