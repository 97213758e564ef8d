"""Per family: how fast a random checkpoint loads, at which peak of memory, and what quantising does to its logits.

    python tests/bench/families.py [--tokens 256] [--only llama gemma2 ...]

Each family runs in a process of its own. Agreement is top-1 against float32, KL is in nats, averaged over positions of
random text. `+e` quantises embedding and head too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
GPT2 = {"vocab_size": 8192, "n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 2048}
MORE: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"moe_intermediate_size": 352, "num_experts": 8},
    "gemma2": {
        "query_pre_attn_scalar": 64, "sliding_window": 128,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3": {"query_pre_attn_scalar": 64, "sliding_window": 128},
}  # fmt: skip
CASES = (
    "llama", "smollm2", "mistral-window", "mixtral", "qwen2", "qwen3", "qwen3-moe", "gemma2", "gemma3", "phi3",
    "smollm3", "gpt2", "olmo2",
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8", "quantize_embeddings": False},
    "int8+e": {"quantize": "int8"},
    "int8-weight": {"quantize": "int8-weight", "quantize_embeddings": False},
    "int8-weight+e": {"quantize": "int8-weight"},
}


def measure(case: str, tokens: int) -> None:
    """In a process of its own: prints one line of JSON."""
    import jax
    import numpy as np
    from checkpoint_load import peak

    import checkpoints
    from rekindle import reference
    from rekindle.models import LoadedModel, checkpoint

    raw = checkpoints.CASES[case]
    raw = {**raw, **(GPT2 if raw["model_type"] == "gpt2" else SIZES), **MORE.get(case, {})}

    def logits(model: LoadedModel) -> np.ndarray:
        return np.asarray(reference.prefill(model, text, reference.empty_cache(model, tokens))[0])

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / case
        program = (
            "import sys, json, pathlib, checkpoints as c; c.write(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]))"
        )
        subprocess.run([sys.executable, "-c", program, str(folder), json.dumps(raw)], check=True)
        text = np.random.default_rng(1).integers(0, 8192, tokens).tolist()
        jax.devices()
        before, start = peak(), time.perf_counter()
        model = checkpoint.load(folder, dtype="float32")
        answer: dict[str, Any] = {
            "mb": model.nbytes / 1e6,
            "rate": model.nbytes / 1e6 / (time.perf_counter() - start),
            "ratio": (peak() - before) / model.nbytes,
        }
        exact = logits(model)
        log_p = np.asarray(jax.nn.log_softmax(exact))
        for variant, options in VARIANTS.items():
            other = logits(checkpoint.load(folder, **options))
            log_q = np.asarray(jax.nn.log_softmax(other))
            agreement = float(np.mean(exact.argmax(-1) == other.argmax(-1)))
            answer[variant] = (agreement, float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()))
    print(json.dumps(answer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", nargs="*", default=CASES)
    options = parser.parse_args()
    print(f"| family | MB | load MB/s | peak / weights | {' | '.join(f'{v}: top-1, KL' for v in VARIANTS)} |")
    print("|" + "---|" * (4 + len(VARIANTS)))
    for case in options.only:
        command = [sys.executable, __file__, "measure", case, str(options.tokens)]
        answer = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        cells = [f"{100 * answer[v][0]:.1f} %, {answer[v][1]:.1e}" for v in VARIANTS]
        print(
            f"| {case} | {answer['mb']:.0f} | {answer['rate']:.0f} | {answer['ratio']:.2f} | {' | '.join(cells)} |",
            flush=True,
        )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2], int(sys.argv[3]))
    else:
        main()
