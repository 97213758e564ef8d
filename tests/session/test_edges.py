"""Edges of `session.attribute`: scores and exact patches against PyTorch, and against the scores of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from golden.make import PROMPT
from helpers import checkpoints
from helpers.small import OPTIONS, opening, prompt
from helpers.tapping import relative
from helpers.thorough import by_default
from rekindle._src.session import attributions
from rekindle.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("large_steps")
OF = rekindle.logit_difference(5, 7)
SOURCE = [9 if place == 4 else token for place, token in enumerate(PROMPT)]
SMALL = 1e-2  # of a change: a step for its derivative; norms of transformers are in float32


def place(name: str, *, writes: bool) -> int:
    """The place of a write, or of a read, in a pass."""
    if name == "embedding" or name == "output":
        return -1 if name == "embedding" else 1000
    _, layer, site, *_ = name.replace(",", "").split()
    return 4 * int(layer) + 2 * (site == "mlp") + writes


class TorchEdges:
    """A Llama of transformers in float64, with one change of one input of one node."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        models: Any = AutoModelForCausalLM
        self.torch = torch
        self.model = models.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()
        self.size = self.model.config.hidden_size // self.model.config.num_attention_heads
        self.stream, self.outputs = self._pass(PROMPT)
        _, others = self._pass(SOURCE)
        self.changes = {name: others[name] - array for name, array in self.outputs.items()}

    def _pass(self, ids: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The stream before each node's norm, and the writes of all nodes."""
        stream, outputs, hooks = dict[str, Any](), dict[str, Any](), list[Any]()

        def keep(place: dict[str, Any], name: str) -> Any:
            return lambda module, inputs: place.update({name: inputs[0].detach()})

        inner = self.model.model
        hooks.append(inner.norm.register_forward_pre_hook(keep(stream, "output")))
        heads: dict[str, Any] = {}
        for number, layer in enumerate(inner.layers):
            hooks += [
                layer.input_layernorm.register_forward_pre_hook(keep(stream, f"attention {number}")),
                layer.post_attention_layernorm.register_forward_pre_hook(keep(stream, f"layer {number}, mlp")),
                layer.self_attn.o_proj.register_forward_pre_hook(keep(heads, f"{number}")),
                layer.mlp.register_forward_hook(
                    lambda module, inputs, out, number=number: outputs.update({f"layer {number}, mlp": out.detach()})
                ),
            ]
        with self.torch.no_grad():
            self.model(self.torch.tensor([list(ids)]))
        for hook in hooks:
            hook.remove()
        outputs["embedding"] = stream["attention 0"]
        for number, layer in enumerate(inner.layers):
            weight = layer.self_attn.o_proj.weight
            for head in range(self.model.config.num_attention_heads):
                own = slice(head * self.size, (head + 1) * self.size)
                outputs[f"layer {number}, heads {head}"] = (heads[str(number)][..., own] @ weight[:, own].T).detach()
        return stream, outputs

    def value(self, source: str, target: str, scale: float) -> float:
        """The number with a part of the change of a source in the input of a target alone."""
        change, inner = self.changes[source] * scale, self.model.model
        if target == "output":
            hook = inner.norm.register_forward_pre_hook(lambda module, inputs: (inputs[0] + change,))
        elif target.endswith("mlp"):
            layer = inner.layers[int(target.split()[1].rstrip(","))]
            hook = layer.post_attention_layernorm.register_forward_pre_hook(
                lambda module, inputs: (inputs[0] + change,)
            )
        else:
            _, number, site, head = target.replace(",", "").split()
            layer = inner.layers[int(number)]
            own = slice(int(head) * self.size, (int(head) + 1) * self.size)
            matrix = getattr(layer.self_attn, f"{site}_proj")
            read = layer.input_layernorm(self.stream[f"attention {number}"] + change) @ matrix.weight.T

            def replace(module: Any, inputs: Any, out: Any) -> Any:
                out = out.clone()
                out[..., own] = read[..., own]
                return out

            hook = matrix.register_forward_hook(replace)
        with self.torch.no_grad():
            logits = self.model(self.torch.tensor([list(PROMPT)])).logits[0, -1]
        hook.remove()
        return float(logits[5] - logits[7])


@pytest.mark.filterwarnings("ignore")  # transformers deprecates as it likes
def test_scores_and_patches_of_all_edges_are_those_of_torch(tmp_path: Path) -> None:
    """A score is the derivative of a small part of the patch; the patch itself changes the input of one node."""
    pytest.importorskip("torch")
    raw = checkpoints.CASES["llama"]
    checkpoints.needs_transformers(raw)
    state = checkpoints.tensors(raw, seed=7)
    torch = TorchEdges(checkpoints.write(tmp_path, raw, state))
    with rekindle.open_sync(checkpoints.model(raw, state), **{**OPTIONS, "precompile": "lazy"}) as session:
        a = session.attribute(PROMPT, of=OF, method="patching", source=SOURCE, at={"mlp": 0}, edges=True).result_sync()
        assert a.edges is not None and not a.edges.patched
        scores, steps = a.edges.scores, {}
        for row, source in enumerate(a.edges.sources):
            for column, target in enumerate(a.edges.targets):
                parts = (SMALL, -SMALL) if place(source, writes=True) < place(target, writes=False) else ()
                ends = [torch.value(source, target, part) for part in parts] or [0.0, 0.0]
                steps[row, column] = (ends[0] - ends[1]) / (2 * SMALL)
        expected = np.reshape(list(steps.values()), scores.shape)
        assert np.count_nonzero(scores) > 60 and not scores[-1, :-1].any(), "the last MLP is read by the output alone"
        assert relative(scores, expected) < 1e-3
        found = session.attribute(
            PROMPT, of=OF, method="patching", source=SOURCE, at={"mlp": 0}, edges=True, exact=24
        ).result_sync()
    assert found.edges is not None and found.edges.strongest(24) == list(found.edges.patched)
    exact = [edge.exact for edge in found.edges.patched]
    right = [torch.value(edge.source, edge.target, 1.0) - found.value for edge in found.edges.patched]
    assert relative(np.array(exact), np.array(right)) < 1e-3
    assert len({edge[:2] for edge in found.edges.patched}) == 24


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_only_paths_that_exist_are_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of the strongest than there are leave out the reads that come before a write."""
    options: dict[str, Any] = {"of": OF, "method": "patching", "source": prompt(4, 11), "at": {"mlp": 0}, "edges": True}
    async with opening(precompile="lazy") as session:
        a = await session.attribute(prompt(3, 11), **options, exact=4096)
        assert a.edges is not None
        backward = [
            edge for edge in a.edges.patched if place(edge.source, writes=True) > place(edge.target, writes=False)
        ]
        assert not backward and 50 < len(a.edges.patched) < a.edges.scores.size
        monkeypatch.setattr(attributions, "MOST_PATCHES", len(a.edges.patched) - 1)
        with pytest.raises(InvalidRequest, match="edges, over"):
            await session.attribute(prompt(3, 11), **options, exact="all")


@pytest.mark.parametrize(
    "name",
    by_default(
        ["llama", "gpt2", "cohere", "gemma2", "granite", "falcon-h1", "qwen3.5", "deepseek-v2", "mixtral"],
        lambda name: name in ("cohere", "gemma2"),
    ),
)
def test_edges_of_a_node_add_up_to_its_score(name: str) -> None:
    """All that reads a node is among the targets: heads with norms, halves with a gate or a state, and experts."""
    raw = checkpoints.CASES[name]
    model = checkpoints.model(raw, checkpoints.tensors(raw, seed=7))
    with rekindle.open_sync(model, **{**OPTIONS, "precompile": "lazy"}) as session:
        options: Any = {"of": OF, "method": "patching", "source": SOURCE, "edges": True, "steps": 2}
        a = session.attribute(PROMPT, at={"attention": "all", "mlp": "all"}, **options).result_sync()
    edges = a.edges
    assert edges is not None
    total = dict(zip(edges.sources, edges.scores.sum(axis=1), strict=True))
    size = max(abs(score) for score in total.values())
    for key in a:
        if not isinstance(key, tuple):
            continue
        site, layer = key
        own = [score for source, score in total.items() if source.startswith(f"layer {layer}, {site}")]
        if site == "attention":
            own += [score for source, score in total.items() if source.startswith(f"layer {layer}, heads")]
        assert own and abs(sum(own) - a[key].sum()) < 2e-3 * size, key


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"edges": 1}, "edges=1: must be True or False"),
        ({"method": "atp_star"}, "edges=True: are patched from a source"),
        ({"steer": [rekindle.Steer(0, np.ones(64, np.float32))]}, "edges=True: are those of a model without changes"),
    ],
)
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_refused(changes: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"of": OF, "method": "patching", "source": prompt(4, 11), "edges": True, **changes}
    async with opening(precompile="lazy") as session:
        with pytest.raises(InvalidRequest, match=words):
            await session.attribute(prompt(3, 11), **options)
