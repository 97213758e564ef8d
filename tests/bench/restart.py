"""Time to first token of prompts that share a long prefix: cold, and after a restart from disk, host and device.

    python tests/bench/restart.py [--shape 360m] [--prompts 16] [--shared 1024]

All prompts are submitted at once. Programs are ready in every case; each of the two sessions is a process of its own.
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

OWN = 40  # tokens of each prompt after the shared ones


def first_tokens(session: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Milliseconds, mean and last, and what they generated."""
    start = time.perf_counter()
    done = [handle.result_sync() for handle in [session.submit(prompt, max_tokens=4) for prompt in prompts]]
    times = [one.timings.first_token * 1e3 for one in done]
    return {
        "mean": sum(times) / len(times),
        "last": max(times),
        "total": (time.perf_counter() - start) * 1e3,
        "cached": sum(one.usage.cached_tokens for one in done),
        "tokens": [one.token_ids for one in done],
    }


def child(role: str, folder: str, shape: str, count: int, shared: int) -> dict[str, Any]:
    import numpy as np

    import rekindle
    from rekindle.bench.shapes import random_shape

    draw = np.random.default_rng(0)
    prefix = draw.integers(3, 40000, shared).tolist()
    prompts = [prefix + draw.integers(3, 40000, OWN).tolist() for _ in range(count)]
    other = [draw.integers(3, 40000, shared + OWN).tolist() for _ in range(2)]
    model = random_shape(shape)
    start = time.perf_counter()
    options: dict[str, Any] = {"cache_dir": folder, "max_model_len": 2048, "max_requests": count, "precompile": "all"}
    found: dict[str, Any] = {}
    with rekindle.open_sync(model, restore="mine" if role == "restored" else None, **options) as session:
        found["open"] = {"mean": (time.perf_counter() - start) * 1e3}
        first_tokens(session, other)
        if role == "cold":
            found["cold"] = first_tokens(session, prompts)
            report = session.save("mine").result_sync()
            found["save"] = {"mean": report.seconds * 1e3, "bytes": report.bytes}
            return found
        found["disk"] = first_tokens(session, prompts)
        found["device"] = first_tokens(session, prompts)
        session.cache.clear(tier="device").result_sync()
        found["host"] = first_tokens(session, prompts)
        found["rates"] = dict(zip(("compute", "copy", "load"), _rates(session), strict=True))
    return found


def _rates(session: Any) -> tuple[float | None, ...]:
    rates = session.cache.stats().rates
    return rates.compute_token, rates.copy_page, rates.load_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="360m")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--shared", type=int, default=1024)
    parser.add_argument("--child", nargs=2)
    arguments = parser.parse_args()
    rest = (arguments.shape, arguments.prompts, arguments.shared)
    if arguments.child:
        print(json.dumps(child(*arguments.child, *rest)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, Any] = {}
        for role in ("cold", "restored"):
            command = [sys.executable, __file__, "--child", role, folder]
            command += ["--shape", rest[0], "--prompts", str(rest[1]), "--shared", str(rest[2])]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results |= json.loads(done.stdout.splitlines()[-1])
        size = sum(file.stat().st_size for file in Path(folder, "pages").rglob("*") if file.is_file())
    cold = results["cold"]
    print(f"{arguments.shape}: {rest[1]} prompts sharing {rest[2]} tokens, {size / 2**20:.0f} MiB on disk")
    for name in ("cold", "disk", "host", "device"):
        one = results[name]
        print(
            f"{name:8}mean {one['mean']:9.1f} ms ({100 * one['mean'] / cold['mean']:5.1f} % of cold)"
            f"  last {one['last']:9.1f} ms  {one['cached']} tokens cached"
            f"  same tokens: {one['tokens'] == cold['tokens']}"
        )
    print(f"open {results['open']['mean']:.0f} ms, save {results['save']['mean']:.0f} ms, rates {results['rates']}")


if __name__ == "__main__":
    main()
