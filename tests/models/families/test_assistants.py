"""Assistants of Gemma 4, against transformers' own: what they draft of the other model's keys and hidden states."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from golden.make import PROMPT
from helpers import assistants, checkpoints
from rekindle._src.models.base import merge
from rekindle._src.models.loading import checkpoint, known_models
from rekindle.errors import CheckpointError, UnsupportedModel

MODELS = ("gemma4-shared-pages-and-embeddings-of-layers", "gemma4-values-of-keys", "gemma4-unified")
DRAFTS = 4
TOLERANCE = 2e-4  # of the logits' standard deviation


def oracle(target: str, assistant: str, prompt: list[int]) -> tuple[list[int], Any, Any, dict[str, Any]]:
    """Transformers' drafts after a prompt and a token; their logits, what the assistant read, and the keys it saw."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    how: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(target, **how)
    drafter = transformers.AutoModelForCausalLM.from_pretrained(assistant, **how)
    embed = model.get_input_embeddings()
    with torch.no_grad():
        out = model(torch.tensor([prompt]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        hidden, token = out.hidden_states[-1][:, -1:], out.logits[:, -1:].argmax(-1)
        pages = dict(out.shared_kv_states)
        window = model.config.get_text_config().sliding_window
        pages["sliding_attention"] = tuple(each[:, :, 1 - window :] for each in pages["sliding_attention"])
        first, tokens, logits = (embed(token)[0].numpy(), hidden[0].numpy()), [int(token)], []
        for _ in range(DRAFTS):
            done = drafter(
                inputs_embeds=torch.cat([embed(token), hidden], -1), position_ids=torch.tensor([[len(prompt)]]),
                shared_kv_states=pages,
            )  # fmt: skip
            hidden, token = done.last_hidden_state, done.logits.argmax(-1)
            tokens.append(int(token))
            logits.append(done.logits[0, 0].numpy())
    keys = {kind: [np.asarray(each[0].transpose(0, 1)) for each in both] for kind, both in pages.items()}
    return tokens, np.stack(logits), first, keys


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_those_of_transformers(name: str, clusters: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.gemma4_assistant")
    raw = checkpoints.CASES[name]
    own = assistants.raw_of(raw, **(assistants.CLUSTERS if clusters else {}))
    target = str(checkpoints.write(tmp_path / "model", raw))
    folder = assistants.write(tmp_path / "assistant", own)
    tokens, expected, (embedded, hidden), keys = oracle(target, folder, PROMPT)
    model = checkpoint.load(target, dtype="float32")
    assistant = checkpoint.load(folder, dtype="float32")
    embed: Any = merge(model.graph, model.leaves)
    drafter: Any = merge(assistant.graph, assistant.leaves)
    np.testing.assert_allclose(embed.embedded(jnp.array(tokens[:1])), embedded, rtol=1e-5)

    def attend(layer: int, q: Array, k: None, v: None) -> Array:
        slides = assistant.config.attention[layer].sliding_window is not None
        seen, values = keys["sliding_attention" if slides else "full_attention"]
        groups = q.shape[1] // seen.shape[1]
        scores = jnp.einsum("nhd,thd->nht", q, jnp.repeat(seen, groups, 1))
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        return jnp.einsum("nht,thd->nhd", weights / weights.sum(-1, keepdims=True), jnp.repeat(values, groups, 1))

    state, position = jnp.array(hidden), jnp.array([len(PROMPT)])
    for place, wanted in enumerate(expected):
        embedding = embed.embedded(jnp.array(tokens[place : place + 1]))
        drafted, state = drafter(embedding, state, position, attend)
        logits = np.asarray(drafter.logits(drafted)[0])
        assert np.abs(logits - wanted).max() / wanted.std() <= TOLERANCE, place
        assert int(logits.argmax()) == tokens[place + 1]


def test_checkpoints_that_differ_are_refused(tmp_path: Path) -> None:
    own = assistants.raw_of(checkpoints.CASES[MODELS[0]], **assistants.CLUSTERS)
    state = assistants.tensors(own)
    graph = checkpoints.described(assistants.write(tmp_path / "right", own, state), dtype="float32").graph
    kept = json.dumps(known_models.encode_graph(graph), default=dataclasses.asdict)
    assert known_models.decode_graph(json.loads(kept)) == graph
    floats = state | {"masked_embedding.token_ordering": state["masked_embedding.token_ordering"].astype(np.float32)}
    assert checkpoint.load(assistants.write(tmp_path / "floats", own, floats), dtype="float32").config.assists
    lacking = {name: value for name, value in state.items() if name != "pre_projection.weight"}
    with pytest.raises(CheckpointError, match=r"missing: pre_projection\.weight \[24, 96\]"):
        checkpoint.load(assistants.write(tmp_path / "lacking", own, lacking))
    with pytest.raises(UnsupportedModel, match="num_centroids=7"):
        checkpoint.load(assistants.write(tmp_path / "clusters", own | {"num_centroids": 7}, state))


@pytest.mark.parametrize("name", MODELS)
def test_an_assistant_is_read_from_gguf(name: str, tmp_path: Path) -> None:
    raw = assistants.raw_of(checkpoints.CASES[name])
    state = assistants.tensors(raw)
    expected = checkpoint.load(assistants.write(tmp_path / "folder", raw, state), dtype="float32")
    file = tmp_path / "assistant.gguf"
    found = checkpoint.load(assistants.write_file(file, raw, state), dtype="float32")
    assert found.graph.paths == expected.graph.paths
    for path, leaf, wanted in zip(found.graph.paths, found.leaves, expected.leaves, strict=True):
        np.testing.assert_array_equal(leaf, wanted, err_msg=path)
    own, folder = found.config, expected.config
    assert own.assists == folder.assists
    assert [own.pages_of(layer) for layer in range(2)] == [folder.pages_of(layer) for layer in range(2)]
    for mine, wanted in zip(own.attention, folder.attention, strict=True):
        assert (mine.sliding_window, mine.rope) == (wanted.sliding_window, wanted.rope)
    file.write_bytes(file.read_bytes().replace(b"embedding_length_out", b"embedding_length_xxx"))
    with pytest.raises(CheckpointError, match="embedding_length_out"):
        checkpoint.load(file, dtype="float32")
