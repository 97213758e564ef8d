"""Sleeping, waking and swapping weights: seconds, bytes before and after, the same tokens, nothing compiled.

    python sharing_a_device.py [MODEL] [--dtype float32] [--cycles 100] [--swaps 200]

`sleep` is measured with weights that are dropped and read again, and with weights in host memory. On a CPU, host memory
is the device's, so that only the first frees them. Swaps are of two sets of a trainer's arrays in turn, under a load of
rollouts that are started anew as they end.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any, Literal

import harness
import jax
import numpy as np

import rekindle

WARM_UP = 10  # swaps after which programs for continuations of all lengths are there
PROMPTS = ["Once upon a time there was", "The capital of France is", "Tom and Anna saw a bird. It"]


def on_device() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def sleeping(session: rekindle.Session, mode: Literal["host", "drop"], cycles: int) -> dict[str, Any]:
    want = session.generate_sync(PROMPTS[0], max_tokens=8, temperature=0.0).token_ids
    session.sleep(weights=mode).result_sync()  # programs that move pages are compiled at their first use
    session.wake().result_sync()
    session.generate_sync(PROMPTS[0], max_tokens=8, temperature=0.0)
    compiled = session.stats().compilations
    asleep, awake, same, report = [], [], 0, None
    before, live = harness.memory("VmRSS"), on_device()
    for cycle in range(cycles):
        report = session.sleep(weights=mode).result_sync()
        asleep.append(report.seconds)
        if not cycle:
            while_asleep, live_asleep = harness.memory("VmRSS"), on_device()
        awake.append(session.wake().result_sync())
        same += session.generate_sync(PROMPTS[0], max_tokens=8, temperature=0.0).token_ids == want
    assert report is not None
    return {
        "mode": mode, "cycles": cycles, "weights_bytes": report.weights_bytes, "page_bytes": report.page_bytes,
        "resident_before_asleep_after": [before, while_asleep, harness.memory("VmRSS")],
        "arrays_before_asleep_after": [live, live_asleep, on_device()],
        "seconds_to_sleep": round(statistics.median(asleep), 4), "seconds_to_wake": round(statistics.median(awake), 4),
        "same_tokens": f"{same} of {cycles}", "compiled": session.stats().compilations - compiled,
    }  # fmt: skip


def swapping(session: rekindle.Session, model: Any, swaps: int) -> dict[str, Any]:
    states = [
        dict(zip(model.graph.paths, [leaf * factor for leaf in model.leaves], strict=True)) for factor in (1.0, 1.001)
    ]
    done = threading.Event()
    batches: list[Any] = []

    def load() -> None:
        while not done.is_set():
            batches.append(session.rollout_sync(PROMPTS, n=2, max_tokens=32, ignore_eos=True))

    thread = threading.Thread(target=load)
    thread.start()
    seconds, memory, compiled = [], [], 0
    for number in range(-WARM_UP, swaps):
        if not number:
            compiled = session.stats().compilations
            seconds.clear()
            memory.clear()
        start = time.perf_counter()
        session.swap_weights(states[number % 2]).result_sync()
        seconds.append(time.perf_counter() - start)
        memory.append(on_device())
        time.sleep(0.05)
    done.set()
    thread.join()
    versions = np.concatenate([batch.versions[batch.completion_mask] for batch in batches])
    ordered = all((np.diff(done.weights_versions) >= 0).all() for batch in batches for done in batch.completions)
    return {
        "swaps": swaps, "seconds": round(statistics.median(seconds), 4),
        "compiled": session.stats().compilations - compiled, "tokens_meanwhile": len(versions),
        "versions_seen": len(np.unique(versions)), "versions_never_go_back": bool(ordered),
        "arrays_first_and_last": [memory[1], memory[-1]],
    }  # fmt: skip


def main() -> None:
    arguments = harness.options(__doc__, "model", model="tiny", dtype="float32", cycles=100, swaps=200)
    folder = str(rekindle.tiny.folder()) if arguments.model == "tiny" else arguments.model
    options: dict[str, Any] = {"dtype": arguments.dtype, "max_model_len": 512, "host_memory": 256 << 20, "quiet": True}
    report: dict[str, Any] = {"model": Path(folder).name}
    with rekindle.open_sync(folder, **options) as session:
        report["sleep"] = [sleeping(session, mode, arguments.cycles) for mode in ("drop", "host")]
        model = rekindle.models.load(folder, dtype=arguments.dtype)
        report["swap"] = swapping(session, model, arguments.swaps)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
