"""The breakdown of a step's time into parts, measured by the profiler: `python -m workshop.breakdown --model 135m`.

W1 a step that decodes one row    W2 a step full of prefill tokens    W3 one of decode rows and prefill tokens together

A step's parts add up to its wall time, which begins when the step before it ends. Recording takes time too;
`untraced_ms` is the time of such a step without recording.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import itertools
import json
import os
import re
import statistics
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import jax

from rekindle._src.bench import workloads
from rekindle._src.bench.workloads import whole_programs
from rekindle._src.cli import bench, usage
from rekindle._src.core.config import EngineConfig
from rekindle._src.dispatch.engine import Engine
from rekindle._src.dispatch.threads import capture_contexts
from rekindle._src.opening.build import build
from rekindle._src.opening.open_request import OpenRequest
from rekindle._src.session.opening import Opening
from rekindle._src.session.session import Session, client_of
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.core.records import StepResult
    from rekindle._src.dispatch.backend import Front
    from rekindle._src.models.base import LoadedModel

TURNS = 2  # runs of a workload without the profiler, and again with it


@dataclasses.dataclass(frozen=True, slots=True)
class Breakdown:
    """Means over the middle half of a workload's steps, ordered by time."""

    program: str
    rows: float  # decode rows, without padding
    tokens: float  # prefill tokens, without padding
    steps: int
    step_ms: float  # from the end of the step before to the end of this one
    untraced_ms: float  # the same without the profiler
    parts_ms: dict[str, float]  # by the names in PARTS; their sum is step_ms


class StepTiming(NamedTuple):
    """A step that ran. `ended` is the time at which the host had its result, in seconds of time.perf_counter()."""

    program: str
    rows: int
    tokens: int
    ended: float


def traced_times(
    steps: Sequence[StepTiming], trace: Path, parts: Mapping[str, str], is_selected: Callable[[StepTiming], bool]
) -> list[dict[str, float]]:
    """Return the milliseconds by part of each selected step, without the first of `steps`."""
    runs = executions(trace)
    assert len(runs) == len(steps), f"{len(steps)} steps ran, and the profiler saw {len(runs)} programs"
    results = []
    for (_, previous), (step, run) in itertools.pairwise(zip(steps, runs, strict=True)):
        if is_selected(step):
            times = own_times(run, parts)
            times["idle"] = max(0.0, run[0].start - max(interval.end for interval in previous))
            results.append({part: time / 1e6 for part, time in times.items()})
    return results


def middle(times: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the mean of the entries with a sum between the quartiles: robust like a median, but the parts add up."""
    ordered = sorted(times, key=lambda parts: sum(parts.values()))
    chosen = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    return {name: statistics.fmean(parts[name] for parts in chosen) for name in chosen[0]}


# -- the steps


class RecordingRunner:
    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.steps: list[StepTiming] = []

    def fetch(self, in_flight: Any) -> StepResult:
        result: StepResult = self._runner.fetch(in_flight)
        if result.program:
            plan = result.plan
            step = StepTiming(result.program, len(plan.decode), plan.prefill_tokens, time.perf_counter())
            self.steps.append(step)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


async def full_prefills(session: Session, prompts: workloads.RandomPrompts) -> None:
    """Run W2 with several prompts at once, so that one step follows the next."""
    await session.cache.clear(tier="memory")
    await session.generate([prompts(1024) for _ in range(8)], max_tokens=1, ignore_eos=True)


Round = Callable[["Session", workloads.RandomPrompts], Awaitable[object]]
ROUNDS: dict[str, Round] = {"W1": workloads.single_stream, "W2": full_prefills, "W3": workloads.batch}


def measures(name: str, step: StepTiming) -> bool:
    """True if a workload measures steps of this kind: `step.rows` and `step.tokens` decide."""
    return (step.rows > 0, step.tokens > 0) == (name != "W2", name != "W1")


async def measure(
    model: LoadedModel | str, name: str, vocab_size: int, options: Mapping[str, object], round_: Round | None = None
) -> Breakdown | None:
    """Return the breakdown of W1, W2 or W3 in a new session; None if no such step runs with these `options`."""
    if jax.default_backend() != "cpu":
        raise ConfigError("--breakdown", jax.default_backend(), "has no breakdown yet, only CPU has", "Leave it out")
    with tempfile.TemporaryDirectory() as folder, separate_calls():
        overrides = {
            "precompile": "lazy",
            "quiet": True,
            "host_memory": 0,
            "disk_memory": 0,
            "cache_dir": f"{folder}/cache",
        }
        opening = Opening(functools.partial(_build, model, EngineConfig.of({**options, **overrides})))
        async with opening as session:
            runner = client_of(session).engine.runner
            assert isinstance(runner, RecordingRunner), "made by _build"
            await whole_programs(session)
            prompts, one_round = workloads.RandomPrompts(vocab_size), round_ or ROUNDS[name]

            async def run_round() -> list[StepTiming]:
                runner.steps = []
                await one_round(session, prompts)
                async with session.paused():  # no step is in flight now
                    return runner.steps

            counts = Counter(step.program for step in await run_round() if measures(name, step))  # compiles as well
            if not counts:
                return None
            program = max(counts, key=counts.__getitem__)

            def is_selected(step: StepTiming) -> bool:
                return step.program == program and measures(name, step)

            (key,) = (bucket for bucket in runner.programs.lattice.ahead if bucket.name == program)
            parts = parts_of(runner.programs.get(key).as_text() or "")
            matches, plain, traced = [], [], []
            for turn in range(TURNS):  # alternating, so that other load on the machine affects both
                plain += [
                    {"": 1e3 * (step.ended - last.ended)}
                    for last, step in itertools.pairwise(await run_round())
                    if is_selected(step)
                ]
                with record_trace(trace := Path(folder, str(turn))):
                    steps = await run_round()
                traced += traced_times(steps, trace, parts, is_selected)
                matches += [step for step in steps if is_selected(step)]
    if not plain or not traced:
        return None
    rows, tokens = (statistics.fmean(getattr(step, field) for step in matches) for field in ("rows", "tokens"))
    parts_ms = middle(traced)
    return Breakdown(program, rows, tokens, len(traced), sum(parts_ms.values()), middle(plain)[""], parts_ms)


def _build(model: LoadedModel | str, config: EngineConfig) -> Front:
    front = build(OpenRequest(model, config, contexts=capture_contexts()))
    assert isinstance(front.backend, Engine), "a session's"
    recording: Any = RecordingRunner(front.backend.runner)
    front.backend.runner = recording
    return front


@contextlib.contextmanager
def separate_calls() -> Iterator[None]:
    """Compile the programs of this block such that they call each native kernel separately, for the profiler."""
    previous = os.environ.get("REKINDLE_CHAIN")
    os.environ["REKINDLE_CHAIN"] = "0"
    try:
        yield
    finally:
        del os.environ["REKINDLE_CHAIN"]
        if previous is not None:
            os.environ["REKINDLE_CHAIN"] = previous


@contextlib.contextmanager
def record_trace(folder: Path) -> Iterator[None]:
    """Record the profiler's trace of the block, without Python calls, which would slow the host down."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        yield


PARTS = {
    "products": "the layers' matrices; native ones with norms and gates",
    "attention": "",
    "pages": "writing keys and values",
    "states": "layers with a state, between their products",
    "norms": "norms outside of products",
    "rope": "",
    "logits": "the product with the head",
    "sampling": "with log-probabilities",
    "small": "all other operations",
    "between": "XLA's dispatch, from one operation to the next",
    "idle": "the host's work and the program's start, before the step",
}
KERNELS = {
    "matvec": "products", "gemm": "products", "int4": "products", "int4of16": "products", "int6groups": "products",
    "int8groups": "products", "codebook": "products", "codebookof16": "products", "adapter": "products",
    "adaptergate": "products",
    "decode": "attention", "prefill": "attention", "addkeys": "attention", "write": "pages",
    "decodepacked": "attention", "prefillpacked": "attention", "writepacked": "pages",
    "pagebounds": "pages", "pageboundspacked": "pages", "choose": "attention",
    "convolution": "states", "delta": "states", "channeldelta": "states", "scan": "states",
    "norm": "norms", "gatedrows": "small", "rope": "rope", "argmax": "sampling", "sample": "sampling",
    "gate": "sampling",
}  # fmt: skip
SCOPES = {
    "attend": "attention", "recur": "states", "write_kv": "pages", "rope": "rope", "logits": "logits",
    "sample": "sampling", "draw": "sampling", "logprobs": "sampling", "prompt_logprobs": "sampling",
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


def break_down(model: str, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return the breakdown of each workload's steps, or None where `options` run no such step."""
    loaded, breakdowns = bench.loaded_model(model, options), {}
    for name in names:
        bench.say(f"breakdown of {name} …")
        sizes = {**bench.needed(loaded, name, options), **options}
        measurement = anyio.run(measure, loaded, name, bench.vocab_size(loaded), sizes)
        breakdowns[name] = None if measurement is None else dataclasses.asdict(measurement)
    return breakdowns


def show_breakdown(breakdowns: dict[str, dict[str, Any] | None]) -> None:
    """Print a column for each workload and a line for each part: milliseconds and the share of the step."""
    columns = {name: figures for name, figures in breakdowns.items() if figures is not None}
    for name, figures in breakdowns.items():
        if figures is None:
            print(f"{name}: no such step runs with these options")
    if not columns:
        return

    def line(title: str, cells: Iterable[str], note: str = "") -> None:
        print(f"{title:10}" + "".join(f"{cell:>20}" for cell in cells) + (f"   {note}" if note else ""))

    print()
    line("", (f"{name} {figures['program']}" for name, figures in columns.items()))
    line(
        "",
        (f"{column['rows']:.0f} + {column['tokens']:.0f} tokens" for column in columns.values()),
        "decoded + prefilled",
    )
    for part, note in PARTS.items():
        times = ((column["parts_ms"][part], column["step_ms"]) for column in columns.values())
        line(part, (f"{ms:.3f} ms {ms / step:6.1%}" for ms, step in times), note)
    line("step", (f"{column['step_ms']:.3f} ms       " for column in columns.values()), "recorded by the profiler")
    line("", (f"{column['untraced_ms']:.3f} ms       " for column in columns.values()), "otherwise")


def main(argv: Sequence[str] | None = None) -> int:
    """Break the steps of workloads down and print their parts."""
    parser = usage.Parser(prog="python -m workshop.breakdown", description=__doc__)
    usage.add_model(parser, checked=lambda arguments: None)
    parser.add_argument("--workloads", help="some of them", nargs="+", choices=tuple(ROUNDS), default=[*ROUNDS])
    parser.flag("--json", "print the figures as JSON")
    arguments = parser.parse_args(argv)
    breakdowns = break_down(arguments.model, arguments.workloads, usage.engine_options(arguments))
    print(json.dumps(breakdowns, indent=1)) if arguments.json else show_breakdown(breakdowns)
    return 0


if __name__ == "__main__":
    main()
