"""The first request of the very first restart after the very first save, and the same request computed cold.

    python first_restart.py [--shape 135m] [--modes lazy background all] [--repeat 5] [--shared 1024]

For each mode a process with an empty cache folder compiles, answers the prompt and saves. Then, so many times, two
processes are timed in turn, each on a copy of what it left: one restores in that mode and is asked the prompt as soon
as it is open; one has its programs ready, nothing cached, and is asked the same, then another prompt of that length.
Shown are medians of the time to the first token, and its share of the quicker one of the two that were computed.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np

OWN = 16  # tokens of the prompt after those that are restored
MODES = ["lazy", "background", "all"]


def child(role: str, mode: str, folder: str, shape: str, shared: int) -> dict[str, Any]:
    import rekindle

    draw, model = np.random.default_rng(0), harness.model(shape)
    prompt, other = (draw.integers(3, model.config.vocab_size, shared + OWN).tolist() for _ in range(2))
    restore = "mine" if role == "restored" else None
    options: dict[str, Any] = {"cache_dir": folder, "max_model_len": 2048, "precompile": mode, "quiet": True}
    start = time.perf_counter()
    with rekindle.open_sync(model, restore=restore, **options) as session:
        opened = time.perf_counter() - start
        prompts = (prompt, other) if role == "cold" else (prompt,)
        done = [session.generate_sync(ids, max_tokens=4, ignore_eos=True) for ids in prompts]
        compiled = session.stats().compilations
        if role == "first":
            session.save("mine").result_sync()
    first = [one.timings.first_token * 1e3 for one in done]
    ids, cached = done[0].token_ids, done[0].usage.cached_tokens
    return {"open": opened * 1e3, "first": first, "cached": cached, "tokens": ids, "compiled": compiled}


def measure(mode: str, kept: Path, shape: str, shared: int, repeat: int) -> None:
    """Print what one mode takes."""
    if not kept.exists():
        harness.child(child, "first", mode, kept, shape, shared)
    runs: dict[str, list[dict[str, Any]]] = {"restored": [], "cold": []}
    for _, role in harness.turns(runs, repeat, 0):
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copytree(kept, Path(folder, "cache"))
            runs[role].append(harness.child(child, role, mode if role == "restored" else "all", copy, shape, shared))
    restored, cold = runs.values()
    shares = [100 * one["first"][0] / min(other["first"]) for one, other in zip(restored, cold, strict=True)]
    firsts = [statistics.median(one["first"][i] for one in some) for some, i in ((restored, 0), (cold, 0), (cold, 1))]
    same = all(one["tokens"] == cold[0]["tokens"] for one in restored)
    print(
        f"{shape} {mode:11}restored {firsts[0]:6.1f} ms, cold {firsts[1]:6.1f} ms and {firsts[2]:6.1f} ms: "
        f"{harness.spread(shares, '.1f')} %; opened in {statistics.median(one['open'] for one in restored):.0f} ms; "
        f"{max(one['compiled'] for one in restored)} compilations; {restored[0]['cached']} tokens cached; "
        f"tokens {'as' if same else 'not as'} cold",
        flush=True,
    )


def main() -> None:
    keep = (Path, "a folder for what the first processes leave, used if it is there")
    given = harness.options(__doc__, shape="135m", modes=(MODES, MODES), shared=1024, repeat=5, keep=keep)
    with tempfile.TemporaryDirectory() as folder:
        for mode in given.modes:
            kept = (given.keep or Path(folder)) / f"{given.shape}-{mode}"
            measure(mode, kept, given.shape, given.shared, given.repeat)


if __name__ == "__main__":
    main()
