"""Workloads that need a new process: the time to its first token (W5), and a restart that restores the cache (W8)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle._src.core.memory import gc_paused

if TYPE_CHECKING:
    from rekindle._src.bench.workloads import Figures

FIRST_PROMPT = 32
SNAPSHOT = "bench"
RESTART = {"max_model_len": 2048, "max_requests": 32, "precompile": "all"}


def first_token(model: str, options: Mapping[str, Any]) -> Figures:
    """Run W5: seconds from a process's start to its first token, with an empty store and with the filled one."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as cache:
        for store in ("cold", "warm"):
            start = time.perf_counter()
            answer = _child({"do": "first", "model": model, "options": {**options, "cache_dir": cache}}, start)
            figures[f"{store}_s"] = answer["seconds"]
            figures[f"{store}_peak_mb"] = answer["peak_bytes"] / 1e6
    return figures


def restart(model: str, options: Mapping[str, Any], *, seed: int = 0, programs: Path | None = None) -> Figures:
    """Run W8: W4 with a cold cache, then the same in a new process that restores the first one's pages.

    Prefill ends with the last request's first token. `programs` is a cache directory with compiled programs, so that
    the first process need not compile them. Neither process compiles during its measurement.
    """
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as cache:
        if programs is not None and (programs / "programs").exists():
            shutil.copytree(programs / "programs", Path(cache) / "programs")
        for role in ("cold", "restored"):
            order = {"do": role, "model": model, "seed": seed, "options": {**RESTART, **options, "cache_dir": cache}}
            answer = _child(order, time.perf_counter())
            figures |= {f"{role}_{name}": value for name, value in answer["figures"].items()}
    return figures | {"restored_share": figures["restored_prefill_s"] / figures["cold_prefill_s"]}


def _child(order: dict[str, Any], start: float) -> dict[str, Any]:
    """Run `main` in another process; the first line that it prints ends the measurement."""
    command = [sys.executable, "-m", "rekindle._src.bench.fresh", json.dumps(order)]
    # An installed package comes with bytecode; a source tree has to be allowed to write it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        seconds = time.perf_counter() - start
        child.stdout.read()
    if child.returncode or not line:
        raise RuntimeError(f"{' '.join(command[:3])} {order['do']} ended with status {child.returncode}")
    return {**json.loads(line), "seconds": seconds}


def main() -> None:
    order = json.loads(sys.argv[1])
    answer = _first(order) if order["do"] == "first" else _shared_prefix(order)
    if answer:
        print(json.dumps(answer), flush=True)


def _first(order: dict[str, Any]) -> dict[str, Any]:
    with gc_paused(stays=True):  # as in `rekindle.open_sync`
        from rekindle._src.session.opening import open_sync

    with open_sync(order["model"], quiet=True, **order["options"]) as session:
        session.generate_sync(list(range(3, 3 + FIRST_PROMPT)), max_tokens=1, ignore_eos=True)
        # Printed here, so that closing the session is not measured.
        print(json.dumps({"peak_bytes": peak_bytes()}), flush=True)
    return {}


def _shared_prefix(order: dict[str, Any]) -> dict[str, Any]:
    import anyio

    from rekindle._src.bench.workloads import SHARED, Prompts, together
    from rekindle._src.session.opening import open_sync

    prompts = Prompts(500, order["seed"])  # ids below 500 are in every vocabulary
    prefix, unrelated = prompts(SHARED), prompts(SHARED)
    requests, warm_up = ([start + prompts(32) for _ in range(16)] for start in (prefix, unrelated))
    restored = order["do"] == "restored"
    with open_sync(order["model"], quiet=True, restore=SNAPSHOT if restored else None, **order["options"]) as session:
        if not restored:  # restoring does not save the cost of a first run
            anyio.run(together, session, warm_up, [32] * 16)
        result = anyio.run(together, session, requests, [32] * 16)
        if not restored:
            session.save(SNAPSHOT).result_sync()
        figures = {"wall_s": result["wall_s"], "prefill_s": result["ttft_max_ms"] / 1e3}
        return {"figures": {**figures, "ttft_p50_ms": result["ttft_p50_ms"]}}


def peak_bytes() -> int:
    """Return the largest resident size of this process in bytes; ru_maxrss would include its parent's before exec."""
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
