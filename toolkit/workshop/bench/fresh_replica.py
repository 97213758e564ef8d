"""How soon a fresh machine with a shared cache is ready, compared with one that has a cache folder of its own.

    python fresh_replica.py [--shape 135m] [--repeat 5] [--stages] [--work DIR]

A process opens a checkpoint with random weights, asks it, and so fills the shared cache. Then processes in turn open it
with an empty cache folder and the shared cache, or with the folder of the first one. Seconds count from the process's
start; nothing may be compiled or traced. `--stages` says for one process of each kind when what began and ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

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
        backing: Any = read_through.backing_of(Path(folder))
        assert backing.wait(120)
        print(f"{backing!r}", file=sys.stderr)


def start(model: str, folder: str, shared: str, stages: bool) -> dict[str, Any]:
    begun = float(os.environ["BEGUN"])
    if stages:
        watch(begun)
    import rekindle

    more = {"shared_cache": shared} if shared else {}
    with rekindle.open_sync(model, cache_dir=folder, **more, **OPTIONS) as session:
        ready = time.time() - begun
        session.generate_sync(PROMPT, max_tokens=1, ignore_eos=True)
        answered, stats = time.time() - begun, session.stats()
    return {"ready": ready, "first token": answered, "built": stats.compilations + stats.traces}


def watch(begun: float) -> None:
    """Say when parts of opening begin and end."""

    def say(name: str, at: float) -> float:
        print(f"  {at - begun:6.2f} to {time.time() - begun:6.2f} s  {name}", file=sys.stderr)
        return time.time()

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            at = time.time()
            try:
                return function(*given, **more)
            finally:
                say(" ".join([name, *(one[:40] for one in given[1:] if isinstance(one, str))]), at)

        return run

    at = say("Python", begun)
    import rekindle  # noqa: F401

    at = say("import rekindle", at)
    import jax

    at = say("import jax", at)
    from rekindle._src.core.shared_cache import SharedCache
    from rekindle._src.models.loading import prepared
    from rekindle._src.opening import blueprint, build
    from rekindle._src.programs.store import ExecutableStore
    from rekindle._src.text.tokenizer import Tokenizer

    at = say("import the session's parts", at)
    jax.devices()
    say("JAX's devices", at)
    stages: dict[Any, tuple[str, ...]] = {
        SharedCache: ("fetch",), ExecutableStore: ("load",), prepared: ("load",), Tokenizer: ("load",),
        build: ("build", "source_of", "blueprint", "attach_caches"), blueprint: ("_caches",),
    }  # fmt: skip
    for owner, names in stages.items():
        for name in names:
            label = f"{owner.__name__.rpartition('.')[2]}.{name}"
            setattr(owner, name, watched(label, getattr(owner, name)))


def main() -> None:
    given = harness.options(__doc__, shape="135m", repeat=5, stages=False, work=(Path, "kept between runs"))
    with contextlib.ExitStack() as stack:
        work = given.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        measure(given.shape, given.repeat, given.stages, work)


def measure(shape: str, repeat: int, stages: bool, work: Path) -> None:
    from rekindle._src.bench.shapes import write_checkpoint

    model = write_checkpoint(shape, work / f"model-{shape}")
    own, store, fresh = work / "own", work / "shared", work / "fresh"
    harness.child(fill, model, own, store, REKINDLE_CACHE=str(own))
    kinds = {"a fresh machine": (fresh, store), "a cache folder of its own": (own, "")}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for number, name in harness.turns(kinds, repeat, int(stages)):
        folder, shared = kinds[name]
        shutil.rmtree(fresh, ignore_errors=True)
        if number < 0:
            print(name, file=sys.stderr)
        environment = {"BEGUN": str(time.time()), "REKINDLE_CACHE": str(folder)}
        one = harness.child(start, model, folder, shared, number < 0, **environment)
        assert not one["built"], one
        runs[name] += [one] * (number >= 0)
    for name, some in runs.items():
        for what in ("ready", "first token"):
            print(f"{shape}, {name}: {what} after {harness.spread([one[what] for one in some], '.2f')} s")


if __name__ == "__main__":
    main()
