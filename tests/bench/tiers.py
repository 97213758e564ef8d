"""What tiers that have nothing to do, and a large prefix tree, cost a decoding step.

    python tests/bench/tiers.py [--layers 4] [--hidden 256] [--rounds 40] [--nodes 100000]

Two pairs of sessions over one random model answer the same requests, burst by burst in turn: without tiers and with
host memory and disk behind the device, and with a tree of 100 and of 100,000 nodes. Each burst is four requests that
decode together; the ratio is the median over the rounds. Both should be within 3 % of 1.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import rekindle
from rekindle.models.base import LoadedModel, random_model
from rekindle.models.config import ModelConfig
from rekindle.session import Session

PAGE, ROWS, NEW = 8, 4, 96


def shaped(layers: int, hidden: int) -> LoadedModel:
    fields = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": 1,
        "intermediate_size": 3 * hidden, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return random_model(ModelConfig.from_hf(fields), seed=0, dtype="bfloat16")


def step_ms(session: Session, prompts: Sequence[list[int]]) -> float:
    """Of all prompts decoding together, per token of the last to end."""
    done = session.generate_sync(list(prompts), max_tokens=NEW, ignore_eos=True)
    return max(1e3 * (one.timings.total - one.timings.first_token) / (NEW - 1) for one in done)


def compare(left: Session, right: Session, rounds: int, draw: np.random.Generator) -> tuple[float, float, float]:
    """Median step of each, and the median of right / left over the rounds; who goes first alternates."""
    times: dict[Session, list[float]] = {left: [], right: []}
    for turn in range(rounds + 2):
        prompts = [draw.integers(3, 4000, 24).tolist() for _ in range(ROWS)]
        for session in (left, right) if turn % 2 else (right, left):
            found = step_ms(session, prompts)
            if turn >= 2:
                times[session].append(found)
    ratios = [b / a for a, b in zip(times[left], times[right], strict=True)]
    return statistics.median(times[left]), statistics.median(times[right]), statistics.median(ratios)


def fill(session: Session, nodes: int, draw: np.random.Generator) -> None:
    while session.stats().cache.nodes < nodes:
        length = min(2000, nodes * PAGE)
        prompts = [draw.integers(3, 4000, length).tolist() for _ in range(ROWS)]
        session.generate_sync(prompts, max_tokens=1, ignore_eos=True)


def settle(*sessions: Session) -> None:
    """Until everything is saved: what one session writes in the background would slow the others of this process."""
    for session in sessions:
        before = -1
        while (disk := session.cache.stats().disk) is not None and disk.pages > before:
            before = disk.pages
            time.sleep(3.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=100_000)
    arguments = parser.parse_args()
    model = shaped(arguments.layers, arguments.hidden)
    draw = np.random.default_rng(0)
    options: dict[str, Any] = {
        "page_size": PAGE, "max_requests": ROWS, "max_tokens_per_step": 512, "max_model_len": 4096,
        "device_pages": arguments.nodes + 8192, "quiet": True,
    }  # fmt: skip
    nothing, everything = {"host_memory": 0, "disk_memory": 0}, {"host_memory": 1 << 30, "disk_memory": 4 << 30}

    def show(what: str, left: Session, right: Session) -> None:
        one, other, ratio = compare(left, right, arguments.rounds, draw)
        print(f"{what:32} {one:7.3f} and {other:7.3f} ms, ratio {ratio:.3f}", flush=True)

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())

        def opened(tiers: dict[str, int]) -> Session:
            return stack.enter_context(rekindle.open_sync(model, cache_dir=folder, **options, **tiers))

        bare, again, tiered = opened(nothing), opened(nothing), opened(everything)
        show("the same twice", bare, again)
        show("without and with tiers", bare, tiered)
        start = time.perf_counter()
        fill(again, arguments.nodes, draw)
        fill(tiered, arguments.nodes, draw)
        print(f"filled twice in {time.perf_counter() - start:.0f} s", flush=True)
        few = opened(everything)
        fill(few, 100, draw)
        settle(few, tiered)
        show(f"{few.stats().cache.nodes} and {again.stats().cache.nodes} nodes", bare, again)
        show(f"the same with tiers, {tiered.stats().cache.nodes}", few, tiered)
        if tiered.stats().cache.offloaded_pages:
            print("pages were offloaded: give more device pages")


if __name__ == "__main__":
    main()
