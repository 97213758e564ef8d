"""Time to first token of prompts that share a long prefix: cold, and after a restart from disk, host and device.

    python restart.py [--shape 360m] [--prompts 16] [--shared 1024] [--repeat 3] [--at-once] [--cache DIR]

All prompts come in one call. Programs are ready in every case; each of the two sessions is a process of its own. Both
have answered two other prompts before, unless they are asked `--at-once`, as soon as they are open. Shown are medians;
a `--cache` that is kept compiles nothing the second time.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np

OWN = 40  # tokens of each prompt after the shared ones


def first_tokens(session: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Milliseconds, mean and last, and what they generated."""
    done = session.generate_sync(prompts, max_tokens=4)
    times = [one.timings.first_token * 1e3 for one in done]
    cached, tokens = sum(one.usage.cached_tokens for one in done), [one.token_ids for one in done]
    return {"mean": sum(times) / len(times), "last": max(times), "cached": cached, "tokens": tokens}


def child(role: str, folder: str, shape: str, count: int, shared: int, at_once: bool) -> dict[str, Any]:
    import rekindle

    draw, model = np.random.default_rng(0), harness.model(shape)

    def tokens(length: int) -> list[int]:
        return draw.integers(3, model.config.vocab_size, length).tolist()

    prefix = tokens(shared)
    prompts = [prefix + tokens(OWN) for _ in range(count)]
    other = [tokens(shared + OWN) for _ in range(2)]
    start = time.perf_counter()
    options: dict[str, Any] = {"cache_dir": folder, "max_model_len": 2048, "max_requests": count, "precompile": "all"}
    with rekindle.open_sync(model, restore="mine" if role == "restored" else None, **options) as session:
        found: dict[str, Any] = {"open": (time.perf_counter() - start) * 1e3}
        if not at_once:
            first_tokens(session, other)
        if role == "cold":
            found["cold"] = first_tokens(session, prompts)
            return found | {"save": session.save("mine").result_sync().seconds * 1e3}
        found["disk"] = first_tokens(session, prompts)
        found["device"] = first_tokens(session, prompts)
        session.cache.clear(tier="device").result_sync()
        found["host"] = first_tokens(session, prompts)
        rates = session.cache.stats().rates
        found["rates"] = {"compute": rates.compute_token, "copy": rates.copy_page, "load": rates.load_page}
    return found


def main() -> None:
    given = harness.options(__doc__, shape="360m", prompts=16, shared=1024, repeat=3, at_once=False, cache=str)
    rest = (given.shape, given.prompts, given.shared, given.at_once)
    with contextlib.ExitStack() as stack:
        folder = given.cache or stack.enter_context(tempfile.TemporaryDirectory())
        runs = [
            harness.child(child, "cold", folder, *rest) | harness.child(child, "restored", folder, *rest)
            for _ in range(given.repeat)
        ]
        size = sum(file.stat().st_size for file in Path(folder, "pages").rglob("*") if file.is_file())
    prompts = f"{given.prompts} prompts sharing {given.shared} tokens"
    print(f"{given.shape}: {prompts}, {size / 2**20:.0f} MiB on disk, median of {len(runs)}")
    right = np.array(runs[0]["cold"]["tokens"])
    for name in ("cold", "disk", "host", "device"):
        mean, last = (statistics.median(run[name][part] for run in runs) for part in ("mean", "last"))
        # Random weights choose between near ties, which other rows in a step may turn in bfloat16.
        same = np.mean([np.array(run[name]["tokens"]) == right for run in runs])
        shares = [100 * run[name]["mean"] / run["cold"]["mean"] for run in runs]
        print(
            f"{name:8}mean {mean:7.1f} ms, {harness.spread(shares, '5.1f')} % of cold; last {last:7.1f} ms  "
            f"{runs[0][name]['cached']} tokens cached  {same:.0%} of tokens as cold"
        )
    opened, saved = (statistics.median(run[what] for run in runs) for what in ("open", "save"))
    print(f"open {opened:.0f} ms, save {saved:.0f} ms, rates {runs[-1]['rates']}")


if __name__ == "__main__":
    main()
