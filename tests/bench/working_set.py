"""Throughput when the prefixes in use need four times the device's pages: with host memory behind it, and without.

    python tests/bench/working_set.py [--layers 8] [--hidden 384] [--rounds 3]

Every request repeats one of many prefixes (80 % of its tokens) in turn, the worst order for any cache that is too
small. Both sessions answer the same requests, round by round alternating.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import numpy as np

import rekindle
from rekindle._src.models.placement import random_model
from rekindle._src.models.registry import config_from_hf

PAGE, PREFIX, OWN, NEW = 32, 512, 128, 4
DEVICE_PAGES = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    config = config_from_hf(
        {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8192,
            "hidden_size": arguments.hidden, "num_hidden_layers": arguments.layers, "num_attention_heads": 6,
            "num_key_value_heads": 2, "intermediate_size": 3 * arguments.hidden, "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True, "bos_token_id": 1,
            "eos_token_id": 2,
        }
    )  # fmt: skip
    model = random_model(config, seed=0, dtype="bfloat16")
    count = 4 * DEVICE_PAGES * PAGE // PREFIX
    draw = np.random.default_rng(0)
    prefixes = [draw.integers(3, 8000, PREFIX).tolist() for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "cache_dir": folder, "page_size": PAGE, "device_pages": DEVICE_PAGES, "max_requests": 2,
            "max_tokens_per_step": 128, "max_model_len": 1024, "disk_memory": 0, "precompile": "all",
        }  # fmt: skip
        sessions = {
            name: rekindle.open_sync(model, host_memory=memory, **options)
            for name, memory in (("without", 0), ("with host memory", 1 << 30))
        }
        seconds: dict[str, list[float]] = {name: [] for name in sessions}
        for turn in range(arguments.rounds + 1):
            own = [draw.integers(3, 8000, OWN).tolist() for _ in prefixes]
            for name, session in sessions.items():
                start = time.perf_counter()
                handles = [
                    session.submit(prefix + rest, max_tokens=NEW) for prefix, rest in zip(prefixes, own, strict=True)
                ]
                for handle in handles:
                    handle.result_sync()
                if turn:  # the first one fills the caches and compiles
                    seconds[name].append(time.perf_counter() - start)
        for name, session in sessions.items():
            best, stats = statistics.median(seconds[name]), session.cache.stats()
            print(
                f"{name:18}{count * (PREFIX + OWN + NEW) / best:9.0f} tokens/s (median of {arguments.rounds}), "
                f"{stats.saved_tokens} tokens saved, {stats.offloaded_pages} pages left, {stats.rates}"
            )
            session.close()
        ratio = statistics.median(
            without / behind for without, behind in zip(seconds["without"], seconds["with host memory"], strict=True)
        )
        print(f"with / without: {ratio:.2f}")


if __name__ == "__main__":
    main()
