"""The first request of the very first restart after the very first save, beside the same request computed cold.

    python tests/bench/first_restart.py [--shape 135m] [--modes lazy background all] [--repeat 5] [--shared 1024]

For each mode a process with an empty cache folder compiles, answers the prompt and saves. Then, so many times, two
processes are timed in turn, each on a copy of what it left: one restores in that mode and is asked the prompt as soon
as it is open; one has its programs ready, nothing cached, and is asked the same, then another prompt of that length.
Shown are medians of the time to the first token, and its share of the quicker one of the two that were computed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

OWN = 16  # tokens of the prompt after those that are restored
MODES = ("lazy", "background", "all")


def child(role: str, mode: str, folder: str, shape: str, shared: int) -> dict[str, Any]:
    import rekindle
    from rekindle._src.bench.shapes import random_shape

    draw = np.random.default_rng(0)
    prompt, other = (draw.integers(3, 40000, shared + OWN).tolist() for _ in range(2))
    model = random_shape(shape)
    prompts = (prompt, other) if role == "cold" else (prompt,)
    restore = "mine" if role == "restored" else None
    options: dict[str, Any] = {"cache_dir": folder, "max_model_len": 2048, "precompile": mode, "quiet": True}
    start = time.perf_counter()
    with rekindle.open_sync(model, restore=restore, **options) as session:
        opened = time.perf_counter() - start
        asked = [session.generate_sync(ids, max_tokens=4, ignore_eos=True) for ids in prompts]
        compiled = session.stats().compilations
        if role == "first":
            session.save("mine").result_sync()
    return {
        "open": opened * 1e3,
        "first": [one.timings.first_token * 1e3 for one in asked],
        "cached": asked[0].usage.cached_tokens,
        "tokens": asked[0].token_ids,
        "compiled": compiled,
    }


def run(role: str, mode: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", role, mode, str(folder)]
    command += ["--shape", arguments.shape, "--shared", str(arguments.shared)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(mode: str, kept: Path, arguments: argparse.Namespace) -> None:
    """Print what one mode takes."""
    if not kept.exists():
        run("first", mode, kept, arguments)
    found: dict[str, list[dict[str, Any]]] = {"restored": [], "cold": []}
    for _ in range(arguments.repeat):
        for role, runs in found.items():
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder, "cache")
                shutil.copytree(kept, copy)
                runs.append(run(role, mode if role == "restored" else "all", copy, arguments))
    shares = [100 * restored["first"][0] / min(cold["first"]) for restored, cold in zip(*found.values(), strict=True)]
    restored, first, again = (
        statistics.median(one["first"][index] for one in found[role])
        for role, index in (("restored", 0), ("cold", 0), ("cold", 1))
    )
    opened = statistics.median(one["open"] for one in found["restored"])
    compiled = max(one["compiled"] for one in found["restored"])
    same = all(one["tokens"] == found["cold"][0]["tokens"] for one in found["restored"])
    print(
        f"{arguments.shape} {mode:11}restored {restored:6.1f} ms, cold {first:6.1f} ms and {again:6.1f} ms: "
        f"{statistics.median(shares):4.1f} % ({min(shares):.1f} to {max(shares):.1f}); opened in {opened:.0f} ms; "
        f"{compiled} compilations; {found['restored'][0]['cached']} tokens cached; tokens {'as' if same else 'not as'} "
        "cold",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--shared", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="a folder for what the first processes leave, used if it is there")
    parser.add_argument("--child", nargs=3)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(*arguments.child, arguments.shape, arguments.shared)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for mode in arguments.modes:
            measure(mode, (arguments.keep or Path(folder)) / f"{arguments.shape}-{mode}", arguments)


if __name__ == "__main__":
    main()
