"""What each step costs the host in the real loop, part by part, and how long the device waits for it.

    python tests/bench/host_time.py [--model FOLDER | --shape 360m | --layers 8 --hidden 384] [--rows 1 4 16]

Medians per step in µs: `plan` and `commit` of the scheduler, `pack` into the uploads, the whole `dispatch`,
`detokenize` for all rows together, `turn` from one result to the next dispatch. `idle` is the share of time in which no
step was on the device, seen by a thread that waits for every output. Prints, asserts nothing.
"""

from __future__ import annotations

import argparse
import collections
import functools
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("tests", "toolkit", "kernels")]

import jax  # noqa: E402

import rekindle  # noqa: E402
from rekindle._src.bench.shapes import random_shape  # noqa: E402
from rekindle._src.dispatch import detokenize  # noqa: E402
from rekindle._src.models.placement import random_model  # noqa: E402
from rekindle._src.models.registry import config_from_hf  # noqa: E402
from rekindle._src.programs.packing import Upload  # noqa: E402
from rekindle._src.session.session import Session  # noqa: E402

COLUMNS = ("plan", "pack", "dispatch", "commit", "detokenize", "turn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a checkpoint folder; without it, a random model")
    parser.add_argument("--shape", help="of that model, as `rekindle bench` names it; without it, a Llama of")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    random = random_shape(arguments.shape) if arguments.shape else shaped(arguments.layers, arguments.hidden)
    model = arguments.model or random
    print(f"{'rows':>4}" + "".join(f"{name:>12}" for name in COLUMNS) + f"{'step':>12}{'idle':>8}")
    with (
        tempfile.TemporaryDirectory() as folder,
        rekindle.open_sync(model, max_requests=max(arguments.rows), cache_dir=folder, disk_memory=0) as session,
        Clock(session) as clock,
    ):
        for rows in arguments.rows:
            for count in (8, arguments.tokens):  # the first time compiles
                clock.clear()
                prompts = [list(range(5 + row, 25 + row)) for row in range(rows)]
                session.generate_sync(prompts, max_tokens=count, ignore_eos=True)
            clock.show(rows)


def shaped(layers: int, hidden: int) -> Any:
    fields = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16384, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 192),
        "intermediate_size": 3 * hidden, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return random_model(config_from_hf(fields), seed=0, dtype="bfloat16")


class Clock:
    """Wraps the parts of one session's loop and notes how long each call took."""

    def __init__(self, session: Session) -> None:
        engine: Any = session._engine
        self._runner, self._scheduler = engine.runner, engine.scheduler
        self._outputs: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Clock:
        self.clear()
        self._undo = [
            self._wrap(self._scheduler, "plan"),
            self._wrap(self._scheduler, "commit"),
            self._wrap(Upload, "pack"),
            self._wrap(detokenize, "deliver", "detokenize"),
            self._wrap(self._runner, "dispatch", after=self._dispatched),
            self._wrap(self._runner, "fetch", after=self._fetched),
        ]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._outputs.put(None)
        self._thread.join()
        for undo in self._undo:
            undo()

    def clear(self) -> None:
        self._seconds: dict[str, list[float]] = collections.defaultdict(list)
        self._dispatches: list[float] = []
        self._ready: dict[int, float] = {}
        self._last_fetched = 0.0

    def show(self, rows: int) -> None:
        time.sleep(0.1)  # the watching thread sees the last step
        seconds, steps = self._seconds, len(self._dispatches)
        found = {name: statistics.median(seconds[name]) for name in COLUMNS if seconds[name]}
        found["detokenize"] = sum(seconds["detokenize"]) / steps
        waits = [max(0.0, self._dispatches[at + 1] - self._ready[at]) for at in range(steps - 1)]
        whole = self._ready[steps - 1] - self._dispatches[0]
        cells = "".join(f"{found.get(name, 0.0) * 1e6:12.0f}" for name in COLUMNS)
        print(f"{rows:4}{cells}{whole / steps * 1e6:12.0f}{sum(waits) / whole:8.1%}", flush=True)

    def _wrap(
        self, owner: Any, name: str, column: str = "", *, after: Callable[[Any, float], object] | None = None
    ) -> Callable[[], None]:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = inner(*args, **options)
            self._seconds[column or name].append(time.perf_counter() - start)
            if after is not None:
                after(result, start)
            return result

        setattr(owner, name, timed)
        return lambda: setattr(owner, name, inner)

    def _dispatched(self, in_flight: Any, start: float) -> None:
        if self._last_fetched:
            self._seconds["turn"].append(start - self._last_fetched)
        if in_flight.output is not None:
            self._outputs.put((len(self._dispatches), in_flight.output.rows))
            self._dispatches.append(in_flight.dispatched)

    def _fetched(self, result: Any, start: float) -> None:
        self._last_fetched = time.perf_counter()

    def _watch(self) -> None:
        while (entry := self._outputs.get()) is not None:
            jax.block_until_ready(entry[1])
            self._ready[entry[0]] = time.perf_counter()


if __name__ == "__main__":
    main()
