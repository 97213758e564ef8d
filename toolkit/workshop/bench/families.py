"""Per family: parity with transformers, how fast a checkpoint loads, at which peak of memory, what int8 does to it.

    python families.py [--tokens 256] [--only llama gemma2 ...]

Every measurement runs in a process of its own.

parity      largest difference of float32 logits, prefilled at once and in chunks, relative to their deviation, and
            whether 64 greedy tokens are the same, over all the family's cases of tests/helpers/families.py
load        a random float32 checkpoint of several hundred MB, read from the page cache; peak memory beyond that of the
            imports over the size of the weights
int8 …      top-1 agreement with float32 and KL in nats over random text. `+e` quantises embedding and head too

What these choices cost the embedded model on its held-out documents is in `quality.py`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import harness

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
LARGE = {
    "vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
LARGE_GPT2 = {"vocab_size": 16384, "n_embd": 1024, "n_head": 16}
LARGE_MORE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 3},
    "qwen3-moe": {"moe_intermediate_size": 704},
}
# The case that is measured, and the beginnings of the names of those whose parity counts.
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": ("llama", "llama-"), "llama3-rope": ("llama3",), "smollm2": ("smollm2",), "mistral-window": ("mistral",),
    "mixtral": ("mixtral",), "qwen2": ("qwen2",), "qwen3": ("qwen3", "qwen3-b"), "qwen3-moe": ("qwen3-moe",),
    "gemma2": ("gemma2",), "gemma3": ("gemma3",), "phi3": ("phi3",), "smollm3": ("smollm3",), "gpt2": ("gpt2",),
    "olmo2": ("olmo2",),
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8", "quantize_embeddings": False},
    "int8+e": {"quantize": "int8"},
    "int8-weight": {"quantize": "int8-weight", "quantize_embeddings": False},
    "int8-weight+e": {"quantize": "int8-weight"},
}


def grown(case: str, sizes: dict[str, Any], gpt2: dict[str, Any], more: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from helpers import checkpoints

    raw = checkpoints.CASES[case]
    return {**raw, **(gpt2 if raw["model_type"] == "gpt2" else sizes), **more.get(case, {})}


def write(folder: str, raw: dict[str, Any]) -> None:
    """In another process, whose memory doesn't count."""
    from helpers import checkpoints

    checkpoints.write(Path(folder), raw)


def cases_of(family: str) -> list[str]:
    from helpers import checkpoints

    starts = FAMILIES[family]
    named = [name for name in checkpoints.CASES if name == starts[0] or name.startswith(starts[1:] or starts)]
    kind = checkpoints.CASES[family]["model_type"]
    return [name for name in named if checkpoints.CASES[name]["model_type"] == kind]


def parity(family: str, folder: str, tokens: int) -> dict[str, Any]:
    import numpy as np

    from golden.make import NEW, PROMPT, run
    from helpers import checkpoints
    from workshop import reference

    worst, same, cases = 0.0, 0, cases_of(family)
    for name in cases:
        raw = checkpoints.CASES[name]
        state = checkpoints.tensors(raw, seed=7)
        expected = run(checkpoints.write(Path(folder, name), raw, state))
        model = checkpoints.model(raw, state)
        for chunk in (None, 8):
            logits, _ = reference.prefill(model, PROMPT, reference.empty_cache(model, len(PROMPT) + NEW), chunk)
            delta = np.abs(np.asarray(logits) - expected.logits).max() / expected.logits.std()
            worst = max(worst, float(delta))
        same += reference.generate(model, PROMPT, NEW) == expected.greedy
    return {"delta": worst, "greedy": f"{same}/{len(cases)}"}


def loading(case: str, folder: str, tokens: int) -> dict[str, Any]:
    import jax

    from rekindle._src.models.loading import checkpoint

    harness.child(write, folder, grown(case, SIZES | LARGE, GPT2 | LARGE_GPT2, MORE | LARGE_MORE))
    jax.devices()
    before, start = harness.memory(), time.perf_counter()
    model = checkpoint.load(folder, dtype="float32")
    jax.block_until_ready(model.leaves)
    seconds = time.perf_counter() - start
    return {
        "mb": model.nbytes / 1e6,
        "rate": model.nbytes / 1e6 / seconds,
        "ratio": (harness.memory() - before) / model.nbytes,
    }


def agreement(case: str, folder: str, tokens: int) -> dict[str, Any]:
    import jax
    import numpy as np

    from rekindle._src.models.base import LoadedModel
    from rekindle._src.models.loading import checkpoint
    from workshop import reference

    def logits(model: LoadedModel) -> np.ndarray:
        return np.asarray(reference.prefill(model, text, reference.empty_cache(model, tokens))[0])

    harness.child(write, folder, grown(case, SIZES, GPT2, MORE))
    text = np.random.default_rng(1).integers(0, 8192, tokens).tolist()
    exact = logits(checkpoint.load(folder, dtype="float32"))
    log_p = np.asarray(jax.nn.log_softmax(exact))
    found: dict[str, Any] = {}
    for variant, options in VARIANTS.items():
        other = logits(checkpoint.load(folder, **options))
        log_q = np.asarray(jax.nn.log_softmax(other))
        top = float(np.mean(exact.argmax(-1) == other.argmax(-1)))
        found[variant] = (top, float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()))
    return found


def main() -> None:
    families = list(FAMILIES)
    given = harness.options(__doc__, tokens=256, only=(families, families))
    heads = [f"{variant}: top-1, KL" for variant in VARIANTS]
    harness.table("family", "logits", "greedy", "MB", "load MB/s", "peak / weights", *heads)
    for case in given.only:
        answer: dict[str, Any] = {}
        for part in (parity, loading, agreement):
            with tempfile.TemporaryDirectory() as folder:
                answer |= harness.child(part, case, Path(folder, "model"), given.tokens)
        cells = [f"{answer[v][0]:.1%}, {answer[v][1]:.1e}" for v in VARIANTS]
        print(
            f"| {case} | {answer['delta']:.1e} | {answer['greedy']} | {answer['mb']:.0f} | {answer['rate']:.0f} "
            f"| {answer['ratio']:.2f} | {' | '.join(cells)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
