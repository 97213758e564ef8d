"""Heads that draft tokens, against transformers' own: the first draft after each token, and those that follow it."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from golden.make import PROMPT
from helpers import checkpoints
from helpers.draft_heads import chains, drafts, with_head
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading import checkpoint, known_models
from rekindle._src.models.loading.gguf.blocks import F32
from rekindle._src.models.loading.gguf.export import OutgoingTensor, write_gguf
from rekindle._src.models.loading.gguf.source import llama_cpp_name
from rekindle._src.models.registry import config_from_hf, gguf_form, manifest

HEADS = ("qwen3.5", "qwen3.5-tied-biases", "qwen3.5-moe", "glm4-moe-lite", "ling3")
TOLERANCE = 2e-4  # of the logits' standard deviation


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpLayer"):
        pytest.skip("this version of transformers has no heads that draft tokens")
    raw = with_head(name)
    state = checkpoints.tensors(raw, seed=7)
    ours = drafts(checkpoints.model(raw, state), PROMPT)
    own = set(of_head(raw))
    trunk = {key: value for key, value in state.items() if key not in own}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints.write(tmp_path, checkpoints.CASES[name], trunk), attn_implementation="eager", dtype=torch.float32
    )
    config = copy.deepcopy(theirs.config)
    config.layer_types, config.num_hidden_layers = ["full_attention"], 1
    if hasattr(config, "mlp_layer_types"):
        config.mlp_layer_types = ["sparse"]
    block, norm = type(theirs.model.layers[0]), type(theirs.model.norm)
    head = layers.MtpLayer(config, block, norm, 0).eval()
    block_names = {
        ".enorm.": "enorm.",
        ".hnorm.": "hnorm.",
        ".eh_proj.": "eh_proj.",
        ".shared_head.norm.": "post_norm.",
        ".final_layernorm.": "post_norm.",
    }
    last = f"model.layers.{raw['num_hidden_layers']}"
    renamed = {
        "mtp.fc.": "eh_proj.", "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.",
        "mtp.norm.": "post_norm.", "mtp.layers.0.": "mtp_block.",
        **{f"{last}{name}": new for name, new in block_names.items()}, f"{last}.": "mtp_block.",
        ".attention.dense.": ".self_attn.o_proj.", ".attention.": ".self_attn.",
        "expert_bias": "e_score_correction_bias",
    }  # fmt: skip
    stacked = any(key.endswith("experts.gate_up_proj") for key in head.state_dict())
    fused = checkpoints.fused(raw, {key: state[key] for key in own}, always=stacked)
    for old, new in renamed.items():
        fused = {key.replace(old, new): value for key, value in fused.items()}
    head.load_state_dict({key: torch.tensor(value) for key, value in fused.items()})

    def run(states: Any, tokens: Any) -> Any:
        positions = torch.arange(1, len(tokens) + 1)[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        embedded = theirs.get_input_embeddings()(tokens[None])
        ropes = theirs.model.rotary_emb(embedded, positions)
        return head(embedded, states, ropes, mask, positions, None)

    with torch.no_grad():
        ids = torch.tensor(PROMPT)
        states, tokens = theirs.model(ids[None]).last_hidden_state[:, :-1], ids[1:]
        first = run(states, tokens)
        logits = theirs.lm_head(first)[0]
        expected, out = [logits.numpy()], first
        for _ in range(3):  # each reads the head's own state and token
            states = torch.cat([states, out[:, -1:]], 1)
            tokens = torch.cat([tokens, theirs.lm_head(out)[0, -1:].argmax(-1)])
            out = run(states, tokens)
            expected.append(theirs.lm_head(out)[0, -1].numpy())
    last = len(PROMPT) - 1
    chain = chains(checkpoints.model(raw, state), PROMPT, [last], 4)[last]
    np.testing.assert_allclose(chain[0], ours[0][-1], atol=TOLERANCE * ours[0].std())
    for found, wanted in zip((*ours, *chain[1:]), (*expected[:2], *expected[1:]), strict=True):
        assert np.abs(found - wanted).max() / wanted.std() <= TOLERANCE


def of_head(raw: dict[str, Any]) -> list[str]:
    """The names of the tensors of a model's head."""
    sources = manifest(config_from_hf(raw)).sources
    return [name for path, source in sources.items() if path.startswith("drafter.") for name in source.names]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_read_from_folders_where_it_is_asked_for(name: str, tmp_path: Path) -> None:
    raw = with_head(name)
    state = checkpoints.tensors(raw, seed=7)
    folder = checkpoints.write(tmp_path, checkpoints.CASES[name], state)
    asked = checkpoints.described(folder, dtype="float32", drafts=True)
    checkpoints.assert_same(checkpoint.read(asked), checkpoints.model(raw, state))
    kept = json.dumps(known_models.encode_graph(asked.graph), default=dataclasses.asdict)
    assert known_models.decode_graph(json.loads(kept)) == asked.graph
    plain = checkpoints.described(folder, dtype="float32")
    assert plain.found.config.draft_head is None and not any("drafter" in path for path in plain.graph.paths)
    assert plain.fingerprint != asked.fingerprint
    assert plain.found.config.computes_as(checkpoints.case(name).config)


EQUAL = {"linear_num_key_heads": 4}  # as many as of values, so that the file has them in the same order


def file_of(raw: dict[str, Any], state: dict[str, NDArray[Any]], file: Path) -> Path:
    """A state as llama.cpp's converter writes it, with the head as one block more."""
    config = config_from_hf(raw)
    prefix, ling = gguf_form(config.model_type).architecture, config.model_type == "bailing_hybrid"
    stored, stacks = dict[str, NDArray[Any]](), dict[str, list[NDArray[Any]]]()
    for source in manifest(config).sources.values():
        for name in source.names:
            value = state[name] + np.float32(source.add)
            if name.endswith("A_log"):
                value = np.exp(value).reshape(-1, 1) if ling else -np.exp(value)
            if name.endswith("conv1d.weight"):
                value = value[None] if ling else value.squeeze(1)
            place, _, expert = llama_cpp_name(name, config).partition("[")
            if place.endswith("ssm_g_a.weight") and len(value) == config.num_heads:
                place = place.replace("ssm_g_a", "attn_gate")  # of attention
            if expert:
                stacks.setdefault(place, []).append(value)
            else:
                stored[place] = value
    stored |= {place: np.stack(values) for place, values in stacks.items()}
    sizes = {
        "block_count": config.num_layers + 1, "nextn_predict_layers": 1, "embedding_length": config.hidden_size,
        "attention.head_count": config.num_heads, "attention.head_count_kv": config.num_kv_heads,
        "context_length": raw["max_position_embeddings"], "feed_forward_length": raw.get("intermediate_size", 0),
        **(latent_sizes(config) if config.latent else state_sizes(raw, config)),
    }  # fmt: skip
    if config.moe:
        spec = config.moe[-1]
        assert spec is not None
        sizes |= {"expert_count": spec.num_experts, "expert_used_count": spec.top_k}
        sizes |= {"expert_feed_forward_length": spec.intermediate_size}
        sizes |= {"expert_shared_feed_forward_length": spec.shared_size}
    numbers: dict[str, float] = {"attention.layer_norm_rms_epsilon": config.norm_eps, "rope.freq_base": 10_000.0}
    if config.latent:
        numbers["expert_weights_scale"] = raw.get("routed_scaling_factor", 2.5 if ling else 1.8)
    if ling:
        sizes |= delta_sizes(raw, config)
        numbers["kda.gate_lower_bound"] = raw["kda_lower_bound"]
    metadata = {"general.architecture": prefix} | {f"{prefix}.{key}": value for key, value in (sizes | numbers).items()}
    tensors = [OutgoingTensor(name, F32, value.shape) for name, value in stored.items()]
    write_gguf(file, metadata, tensors, iter(value.astype(np.float32) for value in stored.values()))
    return file


def state_sizes(raw: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    return {
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim // 4, "ssm.group_count": 4, "ssm.time_step_rank": 4,
        "ssm.state_size": raw["linear_key_head_dim"], "ssm.inner_size": 4 * raw["linear_value_head_dim"],
        "ssm.conv_kernel": 4,
    }  # fmt: skip


def latent_sizes(config: ModelConfig) -> dict[str, Any]:
    spec = config.latent
    assert spec is not None
    return {
        "attention.kv_lora_rank": spec.rank, "attention.q_lora_rank": spec.query_rank,
        "rope.dimension_count": spec.rotated_size, "attention.key_length_mla": spec.plain_size + spec.rotated_size,
        "attention.value_length_mla": spec.value_size, "leading_dense_block_count": 1,
        "expert_shared_count": config.moe[-1].shared_size // config.moe[-1].intermediate_size,  # type: ignore[union-attr]
        "expert_weights_norm": True,
    }  # fmt: skip


def delta_sizes(raw: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Those of Ling. The drafting block, too, has a number of heads in the list."""
    return {
        "attention.head_count_kv": [int(state is None) for state in (*config.states, None)],
        "kda.head_dim": raw["head_dim"], "kda.safe_gate": True, "ssm.conv_kernel": 4,
        "expert_group_count": raw["n_group"], "expert_group_used_count": raw["topk_group"],
    }  # fmt: skip


OTHERWISE = {"glm4-moe-lite": {"n_group": 1}, "ling3": {}}


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "glm4-moe-lite", "ling3"])
def test_a_head_is_read_from_gguf(name: str, tmp_path: Path) -> None:
    raw = with_head(name) | OTHERWISE.get(name, EQUAL)
    state = checkpoints.tensors(raw, seed=7)
    expected = checkpoints.model(raw, state)
    file = file_of(raw, state, tmp_path / "model.gguf")
    found = checkpoint.read(checkpoints.described(file, dtype="float32", drafts=True))
    assert found.config.draft_head is not None and found.graph.paths == expected.graph.paths
    for path, leaf, wanted in zip(found.graph.paths, found.leaves, expected.leaves, strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-5, err_msg=path)
    assert checkpoint.load(file, dtype="float32").config.draft_head is None
    if name == "ling3":
        return  # its head always has a norm
    file.write_bytes(file.read_bytes().replace(b"nextn.shared_head_norm", b"nextn.shared_head_xxxx"))
    again = checkpoint.read(checkpoints.described(file, dtype="float32", drafts=True))
    fallen = dict(zip(again.graph.paths, again.leaves, strict=True))
    np.testing.assert_array_equal(fallen["drafter.norm.weight"], fallen["norm.weight"])


def test_a_head_attends_after_a_last_layer_with_a_state() -> None:
    """Its block is like the model's last one but for that."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    raw = with_head("ling3")
    config = config_from_hf(raw | {"layer_types": kinds})
    assert config.draft_head == config_from_hf(raw).draft_head
    assert config.states[-1] is not None and config.draft_head is not None and config.draft_head.pages_of(0).latent


def test_a_config_alone_asks_for_no_head(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path, with_head("qwen3.5"), checkpoints.tensors(checkpoints.CASES["qwen3.5"]))
    for asked in (True, False):
        assert checkpoints.described(folder, dtype="float32", drafts=asked).found.config.draft_head is None
