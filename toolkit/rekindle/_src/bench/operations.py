"""The profiler's events of a program on XLA:CPU, each attributed to the part of a step that it computes.

XLA records an operation by the name of its instruction. The program's text describes that instruction: the native
kernel that it calls, and the `jax.named_scope`s around it. When several operations run at once (a loop and its body, or
operations in parallel threads), the time counts once, for the one that began last. Native products include norms and
gates; without native kernels these are ordinary XLA operations and count as "small".
"""

from __future__ import annotations

import heapq
import itertools
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

PARTS = {
    "products": "the layers' matrices; native ones with norms and gates",
    "attention": "",
    "pages": "writing keys and values",
    "norms": "those that are not part of a product",
    "rope": "",
    "logits": "the product with the head",
    "sampling": "with log-probabilities",
    "small": "all other operations",
    "between": "XLA's dispatch, from one operation to the next",
    "idle": "the host's work and the program's start, before the step",
}
KERNELS = {
    "matvec": "products", "gemm": "products", "int4": "products", "int6groups": "products", "int8groups": "products",
    "decode": "attention", "prefill": "attention", "write": "pages",
    "norm": "norms", "rope": "rope", "argmax": "sampling", "sample": "sampling",
}  # fmt: skip
SCOPES = {
    "attend": "attention", "write_kv": "pages", "rope": "rope", "logits": "logits", "sample": "sampling",
    "draw": "sampling", "logprobs": "sampling", "prompt_logprobs": "sampling",
}  # fmt: skip


class Interval(NamedTuple):
    """An operation with its start and end in the profiler's nanoseconds."""

    start: float
    end: float
    name: str


# -- the parts of a program


def parts_of(program: str) -> dict[str, str]:
    """Return the part of each instruction of a compiled program's text; control flow belongs to its body's part."""
    bodies: dict[str, list[str]] = defaultdict(list)
    body = ""
    for line in program.splitlines():
        if line.endswith("{") and (opening := re.match(r"(?:ENTRY )?%?([\w.-]+) ", line)):
            body = opening[1]
        elif " = " in line:
            bodies[body].append(line)
    parts = {}
    for line in itertools.chain.from_iterable(bodies.values()):
        if instruction := re.match(r"\s*(?:ROOT )?%?([\w.-]+) = ", line):
            callee = re.search(r"(?:calls|to_apply|body)=%?([\w.-]+)", line)
            parts[instruction[1]] = _part(line, bodies.get(callee[1], []) if callee else [])
    return parts


def _part(line: str, body: Sequence[str]) -> str:
    kernel = re.search(r'custom_call_target="rekindle_([a-z0-9]+)', line)
    scopes = re.search(r'op_name="([^"]*)"', line) or re.search(r'op_name="([^"]*)"', "\n".join(reversed(body)))
    inside = [SCOPES[scope] for scope in (scopes[1].split("/") if scopes else ()) if scope in SCOPES]
    assert kernel is None or kernel[1] in KERNELS, f"KERNELS has no entry for rekindle_{kernel and kernel[1]}"
    if kernel and (KERNELS[kernel[1]] != "products" or "logits" not in inside):
        return KERNELS[kernel[1]]
    if inside:
        return inside[-1]
    return "products" if any(re.search(r"dot_general| (ragged-)?dot\(", text) for text in (line, *body)) else "small"


# -- the profiler's events


def executions(trace: Path) -> list[list[Interval]]:
    """Return the operations of each program run in the order of the runs."""
    with warnings.catch_warnings():
        # jaxlib's own types raise this warning at the first event. Where warnings are errors it would end the process,
        # because jaxlib aborts when it can't make a type.
        warnings.filterwarnings("ignore", r"builtin type \w+ has no __module__ attribute", DeprecationWarning)
        return _executions(trace)


def _executions(trace: Path) -> list[list[Interval]]:
    (file,) = trace.glob("**/*.xplane.pb")
    runs: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if plane.name != "/host:CPU":
            continue
        started: list[tuple[tuple[int, int], int, Any]] = []
        ends: dict[int, float] = {}  # of operations that end after their call has returned
        for event in itertools.chain.from_iterable(line.events for line in plane.lines):
            stats = dict(event.stats)
            if "hlo_op" in stats:
                started.append(((stats["program_id"], stats["run_id"]), stats.get("_p", -1), event))
            elif event.name.startswith("end: ") and "_c" in stats:
                ends[stats["_c"]] = event.start_ns
        for run, link, event in started:
            end = max(event.start_ns + event.duration_ns, ends.get(link, 0.0))
            runs[run].append(Interval(event.start_ns, end, event.name))
    return sorted((sorted(run) for run in runs.values()), key=lambda run: run[0].start)


def own_times(run: Sequence[Interval], parts: Mapping[str, str]) -> dict[str, float]:
    """Return nanoseconds by part, from the first operation's start to the last one's end; each moment counts once."""
    times: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    waiting = sorted(run, key=lambda interval: interval.start, reverse=True)
    running: list[tuple[float, float, str]] = []  # the last one to begin comes first
    edges = sorted({edge for interval in run for edge in interval[:2]})
    for left, right in itertools.pairwise(edges):
        while waiting and waiting[-1].start <= left:
            start, end, name = waiting.pop()
            heapq.heappush(running, (-start, end, name))
        while running and running[0][1] <= left:
            heapq.heappop(running)
        times[parts.get(running[0][2], "small") if running else "between"] += right - left
    return times
