"""How soon a fresh machine with a shared cache is ready, beside one that has a cache folder of its own.

    python tests/bench/fresh_replica.py [--shape 135m] [--repeat 5] [--stages] [--work DIR]

A process opens a checkpoint with random weights, asks it, and so fills the shared cache. Then processes in turn open it
with an empty cache folder and the shared cache, or with the folder of the first one. Seconds count from the process's
start; nothing may be compiled or traced. `--stages` says for one process of each kind when what began and ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "toolkit"), str(ROOT / "kernels")]
OPTIONS: dict[str, Any] = {
    "max_requests": 4, "max_tokens_per_step": 256, "max_model_len": 1024, "host_memory": 1 << 28, "disk_memory": 0,
    "quiet": True, "precompile": "lazy",
}  # fmt: skip
PROMPT = [5, 6, 7, 8] * 8


def fill(model: str, folder: str, shared: str) -> None:
    import rekindle
    from rekindle._src.models.loading import prepared
    from rekindle_kernels import read_through

    with rekindle.open_sync(model, cache_dir=folder, shared_cache=shared, **OPTIONS) as session:
        session.generate_sync(PROMPT, max_tokens=8, ignore_eos=True)
        assert prepared.wait(120)
        behind: Any = read_through.behind(Path(folder))
        assert behind.wait(120)
        print(f"{behind!r}", file=sys.stderr)


def start(model: str, folder: str, shared: str, *, stages: bool) -> None:
    begun = float(os.environ["BEGUN"])
    if stages:
        watch(begun)
    import rekindle

    given = {"shared_cache": shared} if shared else {}
    with rekindle.open_sync(model, cache_dir=folder, **given, **OPTIONS) as session:
        ready = time.time() - begun
        session.generate_sync(PROMPT, max_tokens=1, ignore_eos=True)
        told, stats = time.time() - begun, session.stats()
        found = {"ready": ready, "told": told, "compilations": stats.compilations, "traces": stats.traces}
        print(json.dumps(found), flush=True)


def watch(begun: float) -> None:
    """Say when parts of opening begin and end."""

    def say(name: str, at: float) -> None:
        print(f"  {at - begun:6.2f} to {time.time() - begun:6.2f} s  {name}", file=sys.stderr)

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            at = time.time()
            try:
                return function(*given, **more)
            finally:
                words = [str(one)[:40] for one in given[1:] if isinstance(one, str)]
                say(" ".join([name, *words]), at)

        return run

    at = time.time()
    say("Python", begun)
    import rekindle  # noqa: F401

    say("import rekindle", at)
    at = time.time()
    import jax

    say("import jax", at)
    at = time.time()
    from rekindle._src.core.shared_cache import SharedCache
    from rekindle._src.models.loading import prepared
    from rekindle._src.programs.store import ExecutableStore
    from rekindle._src.session import builder
    from rekindle._src.text.tokenizer import Tokenizer

    say("import the session's parts", at)
    at = time.time()
    jax.devices()
    say("JAX's devices", at)
    watched_ones: list[tuple[Any, str]] = [
        (SharedCache, "fetch"), (ExecutableStore, "load"), (prepared, "load"), (builder, "_describe"),
        (builder, "stored_programs"), (builder, "make_parts"), (builder, "_build"), (Tokenizer, "load"),
    ]  # fmt: skip
    for owner, name in watched_ones:
        told = f"{owner.__name__.rpartition('.')[2]}.{name}"
        setattr(owner, name, watched(told, getattr(owner, name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--work", type=Path, help="kept between runs")
    parser.add_argument("--child", nargs=4, metavar=("ROLE", "MODEL", "FOLDER", "SHARED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        role, model, folder, shared = arguments.child
        if role == "fill":
            fill(model, folder, shared)
        else:
            start(model, folder, shared, stages=arguments.stages)
        return
    work = arguments.work or Path(tempfile.mkdtemp(prefix="rekindle-fresh-"))
    try:
        measure(arguments, work)
    finally:
        if arguments.work is None:
            shutil.rmtree(work)


def measure(arguments: argparse.Namespace, work: Path) -> None:
    from rekindle._src.bench.shapes import write_checkpoint

    model = write_checkpoint(arguments.shape, work / f"model-{arguments.shape}")
    own, shared = work / "own", work / "shared"

    def run(role: str, folder: Path, behind: str, *more: str, home: Path) -> dict[str, Any]:
        environment = {**os.environ, "BEGUN": str(time.time()), "REKINDLE_CACHE": str(home)}
        command = [sys.executable, __file__, *more, "--child", role, str(model), str(folder), behind]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}

    run("fill", own, str(shared), home=own)
    found: dict[str, list[dict[str, Any]]] = {"a fresh machine": [], "a cache folder of its own": []}
    for number in range(arguments.repeat + arguments.stages):
        fresh = work / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        for name, folder, behind in (
            ("a fresh machine", fresh, str(shared)),
            ("a cache folder of its own", own, ""),
        ):
            more = ["--stages"] if arguments.stages and not number else []
            if more:
                print(name, file=sys.stderr)
            one = run("start", folder, behind, *more, home=folder)
            assert not one["compilations"] and not one["traces"], one
            if not more:
                found[name].append(one)
    for name, all_of_them in found.items():
        for what, told in (("ready", "ready"), ("told", "first token")):
            times = [one[what] for one in all_of_them]
            middle = statistics.median(times)
            print(f"{arguments.shape}, {name}: {told} after {middle:.2f} s ({min(times):.2f} to {max(times):.2f})")


if __name__ == "__main__":
    main()
