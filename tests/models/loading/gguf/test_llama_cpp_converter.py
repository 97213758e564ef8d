"""A file that llama.cpp's own converter made of a checkpoint is the same model: to the bit, where it rounds nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import checkpoints, quantized_checkpoints, vocabularies
from helpers.python import run_python
from helpers.real_checkpoints import llama_cpp_source
from rekindle._src.models.loading.checkpoint import load, read
from rekindle._src.models.loading.gguf.header import read_header
from rekindle._src.models.registry import config_from_hf
from workshop import reference

pytestmark = pytest.mark.slow
pytest.importorskip("torch")
pytest.importorskip("transformers")
GEMMA4 = {"vocab_size": 272, "vocab_size_per_layer_input": 272}  # the converter cuts off what the tokenizer has not
EPS = {"rms_norm_eps": 1e-6}
# It divides by a size that is in no config, and knows MLPs of a model with experts by their experts alone.
NEMOTRON = {
    "mamba_d_head": 12, "rms_norm_eps": 1e-5, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
}  # fmt: skip
# The converter reads one key of Cohere's that transformers no longer writes.
CASES: dict[str, dict[str, Any]] = {
    "llama": {}, "llama3-rope": {}, "qwen2": {}, "qwen3": {}, "qwen3-moe": {}, "smollm3": {}, "olmo2": {}, "olmo3": {},
    "granite": {}, "arcee": {}, "seed-oss": {}, "glm4": {}, "cohere": {}, "cohere2": {"rotary_pct": 1.0},
    "apertus": {}, "exaone4": {}, "exaone4-no-window": {}, "ernie4.5": {}, "ernie4.5-moe": {}, "qwen2-moe": {},
    "olmoe": {}, "ministral3": {}, "gpt-oss": {}, "starcoder2": {},
    "gemma4-shared-pages-and-embeddings-of-layers": GEMMA4,
    "gemma4-values-of-keys": GEMMA4, "gemma4-moe": GEMMA4,
    "qwen3.5": {}, "qwen3.5-tied-biases": {}, "qwen3.5-moe": {}, "lfm2": {}, "lfm2-moe": {}, "granite4": EPS,
    "granite4-experts": EPS, "nemotron-h-experts-in-groups": NEMOTRON, "nemotron-h-experts-of-latent-vectors": NEMOTRON,
    "falcon-h1": {},
    "falcon-h1-norm-behind-gate": {"tie_word_embeddings": False, "rope_theta": 1e4},  # a tied head has no factor there
    "deepseek-v2": {}, "deepseek-v2-queries-of-a-vector": {}, "glm4-moe-lite": {"n_group": 1},
    "ling3": {"routed_scaling_factor": 2.5},
}  # fmt: skip
HEADS = ("ling3",)  # cases whose checkpoints here have a layer that drafts
# Keys that the converter alone reads. It would read transformers' config if its model_type were known there.
OF_CONVERTER: dict[str, dict[str, Any]] = {
    "ling3": {
        "model_type": "bailing_moe_v3", "architectures": ["BailingMoeV3ForCausalLM"], "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise", "score_function": "sigmoid", "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
    },
}  # fmt: skip
PROMPT = [3, 9, 27, 81, 11, 5, 7]
# The converter knows tokenizers by their results; this one's are those of GPT-2's kind. One process converts all,
# since it imports torch and transformers for longer than it converts.
CONVERT = """
import json, sys, traceback
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
import gguf, torch
from pathlib import Path
from conversion import base, get_model_class
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
for folder in map(Path, sys.argv[2:]):
    raw = json.loads((folder / "config.json").read_text())
    architecture = raw["architectures"][0]
    base.ModelBase.no_mtp = not raw.get("draft_head")
    try:
        with torch.inference_mode():
            model = get_model_class(architecture)(folder, gguf.LlamaFileType.ALL_F32, folder / "model.gguf")
            inner = getattr(model, "impl", model)
            model.set_vocab = inner.set_vocab = lambda: inner._set_vocab_gpt2()
            model.write()
    except Exception:
        (folder / "error").write_text(traceback.format_exc())
"""
FOUR_BITS = "four bits"


def logits(path: Path) -> np.ndarray[Any, Any]:
    model = load(path, dtype="float32")
    return np.asarray(reference.prefill(model, PROMPT, reference.empty_cache(model, 16))[0])


def raw_of(case: str) -> dict[str, Any]:
    if case == FOUR_BITS:
        return quantized_checkpoints.MXFP4_RAW | {"vocab_size": 512}
    head = {"draft_head": True, "num_nextn_predict_layers": 1} if case in HEADS else {}
    return checkpoints.CASES[case] | {"vocab_size": 512} | CASES[case] | head


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of all cases, each with the file that the converter made of it, or with what it raised."""
    source, root, folders = llama_cpp_source(), tmp_path_factory.mktemp("folders"), {}
    for case in (*CASES, FOUR_BITS):
        folders[case] = root / case
        if case == FOUR_BITS:
            folders[case].mkdir()
            quantized_checkpoints.write_mxfp4(folders[case], raw=raw_of(case))
        else:
            checkpoints.write(folders[case], raw_of(case))
            settings = json.loads((folders[case] / "config.json").read_text()) | OF_CONVERTER.get(case, {})
            (folders[case] / "config.json").write_text(json.dumps(settings))
        vocabularies.write(folders[case], vocabularies.byte_level(), bos_token="<s>", eos_token="</s>")
    run_python("-c", CONVERT, str(source), *map(str, folders.values()))
    for case in OF_CONVERTER:
        (folders[case] / "config.json").write_text(json.dumps(raw_of(case)))
    return folders


@pytest.mark.parametrize("case", [*CASES, FOUR_BITS])
def test_the_file_is_the_model_of_the_folder(case: str, converted: dict[str, Path]) -> None:
    folder, error = converted[case], converted[case] / "error"
    assert not error.exists(), error.read_text()[-2000:]
    # Rates of decay are stored as exp(x), and the factors of Falcon-H1 are in its matrices: last bits differ,
    # and four layers make 1.5e-5 of them (nothing, where they are the folder's).
    rounded = any(spec is not None and spec.heads for spec in config_from_hf(raw_of(case)).states)
    expected = logits(folder)
    room = 5e-5 * float(expected.std()) if rounded else 0.0
    np.testing.assert_allclose(logits(folder / "model.gguf"), expected, rtol=0, atol=room)
    if case in HEADS:
        both = [
            read(checkpoints.described(path, dtype="float32", drafts=True)) for path in (folder, folder / "model.gguf")
        ]
        heads = [each.config.draft_head for each in both]
        assert heads[0] is not None and heads[1] is not None and heads[0].computes_as(heads[1])
        for path, leaf, wanted in zip(both[0].graph.paths, both[1].leaves, both[0].leaves, strict=True):
            np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-6, err_msg=path)
    if case == FOUR_BITS:
        kinds = {tensor.kind.name for tensor in read_header(folder / "model.gguf").tensors}
        assert "MXFP4" in kinds, "they are rearranged, and not widened"
