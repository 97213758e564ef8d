"""Time to first token of prompts that share a long prefix: cold, and after a restart from disk, host and device.

    python tests/bench/restart.py [--shape 360m] [--prompts 16] [--shared 1024] [--repeat 3] [--at-once] [--cache DIR]

All prompts come in one call. Programs are ready in every case; each of the two sessions is a process of its own. Both
have answered two other prompts before, unless they are asked `--at-once`, as soon as they are open. Shown are medians;
a `--cache` that is kept compiles nothing the second time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

OWN = 40  # tokens of each prompt after the shared ones


def first_tokens(session: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Milliseconds, mean and last, and what they generated."""
    start = time.perf_counter()
    done = session.generate_sync(prompts, max_tokens=4)
    times = [one.timings.first_token * 1e3 for one in done]
    return {
        "mean": sum(times) / len(times),
        "last": max(times),
        "total": (time.perf_counter() - start) * 1e3,
        "cached": sum(one.usage.cached_tokens for one in done),
        "tokens": [one.token_ids for one in done],
    }


def child(role: str, folder: str, shape: str, count: int, shared: int, at_once: bool) -> dict[str, Any]:
    import rekindle
    from rekindle._src.bench.shapes import random_shape

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
        if not at_once:
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


def processes(folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One session that computes and saves, one that restores."""
    results: dict[str, Any] = {}
    for role in ("cold", "restored"):
        command = [sys.executable, __file__, "--child", role, folder, "--shape", arguments.shape]
        command += ["--prompts", str(arguments.prompts), "--shared", str(arguments.shared)]
        command += ["--at-once"] * arguments.at_once
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results |= json.loads(done.stdout.splitlines()[-1])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="360m")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--shared", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--cache")
    parser.add_argument("--child", nargs=2)
    arguments = parser.parse_args()
    if arguments.child:
        rest = (arguments.shape, arguments.prompts, arguments.shared, arguments.at_once)
        print(json.dumps(child(*arguments.child, *rest)))
        return
    with contextlib.ExitStack() as stack:
        folder = arguments.cache or stack.enter_context(tempfile.TemporaryDirectory())
        runs = [processes(folder, arguments) for _ in range(arguments.repeat)]
        size = sum(file.stat().st_size for file in Path(folder, "pages").rglob("*") if file.is_file())
    prompts = f"{arguments.prompts} prompts sharing {arguments.shared} tokens"
    print(f"{arguments.shape}: {prompts}, {size / 2**20:.0f} MiB on disk, median of {len(runs)}")
    right = np.array(runs[0]["cold"]["tokens"])
    for name in ("cold", "disk", "host", "device"):
        median = {part: statistics.median(run[name][part] for run in runs) for part in ("mean", "last")}
        # Random weights choose between near ties, which other rows in a step may turn in bfloat16.
        same = np.mean([np.array(run[name]["tokens"]) == right for run in runs])
        shares = [100 * run[name]["mean"] / run["cold"]["mean"] for run in runs]
        print(
            f"{name:8}mean {median['mean']:7.1f} ms ({statistics.median(shares):5.1f} % of cold, "
            f"{min(shares):.1f} to {max(shares):.1f})  last {median['last']:7.1f} ms  "
            f"{runs[0][name]['cached']} tokens cached  {same:.0%} of tokens as cold"
        )
    opened, saved = (statistics.median(run[what]["mean"] for run in runs) for what in ("open", "save"))
    print(f"open {opened:.0f} ms, save {saved:.0f} ms, rates {runs[-1]['rates']}")


if __name__ == "__main__":
    main()
