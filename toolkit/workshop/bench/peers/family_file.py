"""A GGUF file of random weights in the shape of a newer family, made by llama.cpp's own converter and quantiser.

    REKINDLE_LLAMA_CPP=FOLDER python peers/family_file.py qwen3.5-0.8b --out model.gguf
    python peers/run.py --file model.gguf --engines rekindle llama_cpp --workloads W1 W2

It needs torch, transformers, gguf and llama_cpp. Shapes were not compared with the published config.json files. "cut"
says what is smaller, so that a file takes a few minutes. Of a vocabulary there are the bytes alone: all other tokens
are never read.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [*(str(HERE.parents[3] / name) for name in ("tests", "toolkit", "kernels"))]

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from with_llama_cpp import quantise  # noqa: E402

from helpers.checkpoints import fused  # noqa: E402
from helpers.real_checkpoints import llama_cpp_source  # noqa: E402
from rekindle._src.models.base import abstract_model  # noqa: E402
from rekindle._src.models.registry import config_from_hf, manifest  # noqa: E402

Q4_K_M, MXFP4_MOE = 15, 38  # llama.cpp's numbers
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 248320,
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6, "tie_word_embeddings": True,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    # Cut: 64k of 256k tokens.
    "gemma-4-e2b": {
        "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "vocab_size": 65536,
        "vocab_size_per_layer_input": 65536, "hidden_size": 1536, "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144, "use_double_wide_mlp": True, "num_hidden_layers": 35, "num_kv_shared_layers": 20,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "sliding_window": 512,
        "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "vocab_size": 65536, "hidden_size": 2048,
        "intermediate_size": 8192, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "tie_word_embeddings": True,
        "layer_types": [
            "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
        ],
        "max_position_embeddings": 32768, "norm_eps": 1e-5, "rope_theta": 1e6,
    },
    # Cut: 2 of 24 layers, and 32k of 201k tokens.
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 32768, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "swiglu_limit": 7.0, "attention_bias": True, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    },
}  # fmt: skip


def write_folder(folder: Path, raw: dict[str, Any]) -> None:
    """Write a folder of random weights in bfloat16 for the converter."""
    config = config_from_hf(raw)
    graph, shapes = abstract_model(config)
    sources, rng = manifest(config).sources, np.random.default_rng(0)
    state: dict[str, Any] = {}
    for path, leaf in sorted(zip(graph.paths, shapes, strict=True)):
        for part in sources[path].parts(leaf.shape):
            values = rng.standard_normal(part.shape, np.float32)
            if ("norm" in path and path.endswith("weight")) or path.endswith("scalar"):
                values = 1.0 - sources[path].add + 0.1 * values
            else:
                values *= 0.02 if path.endswith("bias") else config.hidden_size**-0.5
            state[part.name] = values.astype(ml_dtypes.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**raw, "torch_dtype": "bfloat16"}))
    vocabulary = {f"<|{number}|>": number for number in range(raw["vocab_size"])}  # Gemma's converter counts them
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    save_file(fused(raw, state), folder / "model.safetensors", metadata={"format": "pt"})


def convert(folder: Path, raw: dict[str, Any], out: Path) -> None:
    """Make a GGUF file in 16 bits of a folder, by llama.cpp's converter."""
    source = llama_cpp_source()
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import gguf
    import torch
    from conversion import base, get_model_class

    base.ModelBase.no_mtp = True
    with torch.inference_mode():
        model = get_model_class(raw["architectures"][0])(folder, gguf.LlamaFileType.MOSTLY_F16, out)
        inner = getattr(model, "impl", model)

        def set_vocab() -> None:
            writer = inner.gguf_writer
            letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_list([*letters, "ab", *(f"<|{number}|>" for number in range(257, raw["vocab_size"]))])
            writer.add_token_types([1] * 257 + [4] * (raw["vocab_size"] - 257))
            writer.add_token_merges(["a b"])
            writer.add_bos_token_id(257)
            writer.add_eos_token_id(258)

        model.set_vocab = inner.set_vocab = set_vocab
        model.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    raw = SHAPES[options.shape]
    with tempfile.TemporaryDirectory(dir=options.out.parent) as name:
        scratch = Path(name)
        write_folder(scratch / "folder", raw)
        convert(scratch / "folder", raw, scratch / "wide.gguf")
        quantise(str(scratch / "wide.gguf"), str(options.out), MXFP4_MOE if raw["model_type"] == "gpt_oss" else Q4_K_M)


if __name__ == "__main__":
    main()
