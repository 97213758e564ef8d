"""Tiny random checkpoints of every family, as Hugging Face folders or in memory, with and without torch."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from helpers import families
from rekindle._src.models.base import LoadedModel, abstract_model
from rekindle._src.models.loading.checkpoint import CheckpointPlan, WeightForm, describe
from rekindle._src.models.loading.manifest import FusedExperts, Source
from rekindle._src.models.loading.stored import look
from rekindle._src.models.registry import FAMILIES, config_from_hf, manifest

Tensors = dict[str, NDArray[Any]]
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

FAMILY_CASES = {model_type: families.FAMILY_CASES[model_type] for model_type in FAMILIES}
CASES: dict[str, dict[str, Any]] = {name: raw for it in FAMILY_CASES.values() for name, raw in it.cases.items()}
GENERATING = tuple(model_type for model_type, it in FAMILY_CASES.items() if it.cases)  # the others embed only
OF_FAMILY = {model_type: tuple((it.cases or it.embeds).values()) for model_type, it in FAMILY_CASES.items()}  # configs
# Options of Ling with which no token is given to other experts because a router's input was rounded.
EVERY_EXPERT = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8}
ONE_EACH = {raw["model_type"]: name for name, raw in reversed(CASES.items())}  # a case of each family
# Each has arithmetic that those before it lack.
UNLIKE = (
    "llama", "gpt2", "qwen2", "cohere", "olmo2", "glm", "gemma2", "mixtral", "deepseek-v2", "gpt-oss", "lfm2",
    "granite4", "qwen3.5", "gemma4-shared-pages-and-embeddings-of-layers",
)  # fmt: skip
# Those, and families whose files have their matrices in other forms: already joined, transposed or stacked.
READ = {*UNLIKE, "phi3", "granite-moe", "qwen3-moe", "falcon-h1", "nemotron-h", "glm4-moe-lite", "lfm2-moe"}


def one_each(*others: str) -> list[Any]:
    """Return all cases; variants of a family's options are marked slow, except `others`."""
    import pytest  # which benchmarks do without

    quick = {*ONE_EACH.values(), *others}
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def needs_transformers(raw: Mapping[str, Any]) -> None:
    """Skip a test where transformers is older than the family."""
    import pytest

    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    if raw["model_type"] not in auto.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers does not know {raw['model_type']}")


def assemble(source: Source, shape: tuple[int, ...], dtype: Any, read: Callable[[str], NDArray[Any]]) -> NDArray[Any]:
    """A whole parameter, as the loader makes it in pieces."""
    result = np.empty(shape, dtype)
    for part in source.parts(shape):
        tensor = np.asarray(read(part.name))
        assert tensor.shape == part.shape, f"{part.name} has shape {tensor.shape}, expected {part.shape}"
        if source.transpose:
            tensor = tensor.T
        result[part.place] = tensor + np.float32(source.add) if source.add else tensor
    return result


def tensors(raw: Mapping[str, Any], seed: int = 0) -> Tensors:
    """A random state under Hugging Face's names: matrices [out, in] (GPT-2's transposed), float32."""
    config = config_from_hf(raw)
    graph, shapes = abstract_model(config)
    rng = np.random.default_rng(seed)
    state: Tensors = {}
    sources = manifest(config).sources
    for path, leaf in sorted(zip(graph.paths, shapes, strict=True)):
        source = sources[path]
        for part in source.parts(leaf.shape):
            values = rng.standard_normal(part.shape).astype(np.float32)
            if ("norm" in path and path.endswith("weight")) or path.endswith("scalar"):
                values = 1.0 - source.add + 0.2 * values
            elif path.endswith("mlp.limit"):  # of xIELU, which leaps at zero by as much
                values = np.full(part.shape, -1e-6)
            elif path.endswith("bias"):
                values *= 0.2
            else:  # wide enough that greedy decoding wanders, narrow enough that it does not repeat its input
                values *= 1.6 * config.hidden_size**-0.5 / (config.embed_scale if path == "embed.weight" else 1.0)
            state[part.name] = values.astype(np.float32)
    return state


def fused(
    raw: Mapping[str, Any], state: Mapping[str, NDArray[Any]], *, always: bool = False
) -> dict[str, NDArray[Any]]:
    """The state with all experts of a layer in one tensor, where transformers' checkpoints have them so, or always."""
    how = manifest(config_from_hf(raw)).fused or (FusedExperts() if always else None)
    if how is None:
        return dict(state)
    result: dict[str, NDArray[Any]] = {}
    experts: dict[tuple[str, str], dict[tuple[int, str], NDArray[Any]]] = {}
    for name, value in state.items():
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)", name)
        if match is None:
            result[name] = value
        else:
            experts.setdefault((match[1], match[4]), {})[int(match[2]), match[3]] = value
    for (prefix, kind), parts in experts.items():
        numbers = range(len(parts) // 3)
        gate, up, down = (np.stack([parts[number, part] for number in numbers]) for part in ("gate", "up", "down"))
        if how.interleaved:
            both = np.stack([gate, up], axis=2).reshape(len(numbers), -1, *gate.shape[2:])
        else:
            both = np.concatenate([gate, up], axis=1)
        for name, value in (("gate_up_proj", both), ("down_proj", down)):
            stored = value.swapaxes(1, 2) if how.transposed and kind == "weight" else value
            result[f"{prefix}.{name}{'_bias' * (kind == 'bias')}"] = stored
    return result


def write(
    folder: Path, raw: Mapping[str, Any], state: Mapping[str, NDArray[Any]] | None = None, *, seed: int = 0,
    dtype: str = "float32", shards: int = 1,
) -> Path:  # fmt: skip
    """A checkpoint folder: config.json and one or several safetensors files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**raw, "torch_dtype": dtype}))
    state = fused(raw, tensors(raw, seed) if state is None else state)
    state = {name: np.asarray(value.astype(DTYPES[dtype]), order="C") for name, value in state.items()}
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    index: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in sorted(state)[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = sum(value.nbytes for value in state.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return folder


def described(
    path: str | Path, *, dtype: str = "auto", quantize: Any = None, divided: bool = False, drafts: bool = False,
    **options: Any,
) -> CheckpointPlan:  # fmt: skip
    """Describe a checkpoint in a form; other options are those of `checkpoint.describe`."""
    form = WeightForm.of(dtype, quantize)._replace(divided=divided)
    return describe(look(path, drafts=drafts), form, **options)


def model(raw: Mapping[str, Any], state: Mapping[str, NDArray[Any]]) -> LoadedModel:
    """The float32 model of a state in memory, without any file."""
    config = config_from_hf(raw)
    graph, shapes = abstract_model(config)
    sources = manifest(config).sources
    leaves = tuple(
        jnp.asarray(assemble(sources[path], leaf.shape, leaf.dtype, state.__getitem__))
        for path, leaf in zip(graph.paths, shapes, strict=True)
    )
    return LoadedModel(config, graph, leaves, fingerprint=f"test-{config.digest()}")


@functools.cache
def case(name: str) -> LoadedModel:
    """The model of one of the CASES."""
    return model(CASES[name], tensors(CASES[name]))


def leaves(model: LoadedModel) -> Tensors:
    """The leaves of a model by path."""
    return {path: np.asarray(leaf) for path, leaf in zip(model.graph.paths, model.leaves, strict=True)}


def assert_same(found: LoadedModel, expected: LoadedModel) -> None:
    """Both have the same leaves: paths, dtypes and numbers."""
    ours, theirs = leaves(found), leaves(expected)
    assert [*ours] == [*theirs]
    for path, array in ours.items():
        assert array.dtype == theirs[path].dtype, path
        np.testing.assert_array_equal(array, theirs[path], err_msg=path)
