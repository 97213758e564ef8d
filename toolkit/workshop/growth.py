"""The growth of a decoding step's time with rows, context, cached pages and queued requests.

    python -m workshop.growth --model 135m [--scale 0.5] [--plots FOLDER]

Rows and context are work for the model and are measured with the chosen one. Cached pages and queued requests are
bookkeeping and should cost nothing: they are measured with a model so small that any cost would show.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from rekindle._src.bench.shapes import random_shape
from rekindle._src.bench.workloads import RandomPrompts, whole_programs
from rekindle._src.cli import bench, usage
from rekindle._src.session import opening

if TYPE_CHECKING:
    from rekindle._src.models.base import LoadedModel
    from rekindle._src.session.session import Session

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8000)
PAGES = (100, 1_000, 10_000, 100_000)
QUEUED = (1, 10, 100, 1_000, 10_000)
PAGE_SIZE = 8  # tokens; the smallest possible, so that many pages are filled quickly
NEW = 48  # tokens per measured request


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One step time: the median time between two tokens of a decoding request, in milliseconds."""

    sweep: str  # "rows", "context", "cached pages" or "queued requests"
    x: int
    step_ms: float


Progress = Callable[[str], None]


async def measure(
    model: LoadedModel | str,
    vocab_size: int,
    settings: Mapping[str, object],
    *,
    scale: float = 1.0,
    say: Progress = print,
) -> list[Point]:
    """Measure every sweep, up to `scale` times its largest x."""
    points: list[Point] = []

    def reach(xs: Sequence[int]) -> list[int]:
        return [x for x in xs if x <= max(xs) * scale] or [xs[0]]

    with tempfile.TemporaryDirectory() as cache:
        common = {"cache_dir": cache, "host_memory": 0, "disk_memory": 0, "precompile": "lazy", "quiet": True}
        options: dict[str, Any] = {
            name: settings[name] for name in settings if name not in ("max_model_len", "max_requests")
        }
        many, long = {"max_requests": max(ROWS), "max_model_len": 512}, {"max_requests": 2, "max_model_len": 8192}
        async with opening.open(model, **{**common, **options, **many}) as session:
            await whole_programs(session)
            prompts = RandomPrompts(vocab_size)
            for rows in reach(ROWS):
                say(f"rows {rows}")
                points.append(Point("rows", rows, await step_ms(session, [prompts(128) for _ in range(rows)])))
        async with opening.open(model, **{**common, **options, **long}) as session:
            await whole_programs(session)
            longest = session.config.max_model_len or 0
            for context in reach(CONTEXTS):
                if context + NEW < longest:
                    say(f"context {context}")
                    points.append(Point("context", context, await step_ms(session, [prompts(context)])))
        for pages in reach(PAGES):
            say(f"cached pages {pages}")
            points.append(Point("cached pages", pages, await _beside_pages(pages, common)))
        for queued in reach(QUEUED):
            say(f"queued requests {queued}")
            points.append(Point("queued requests", queued, await _beside_queue(queued, common)))
    return points


async def step_ms(session: Session, prompts: Sequence[list[int]], new: int = NEW) -> float:
    """Return the median time between tokens, in milliseconds, while all prompts decode together."""
    times: list[list[float]] = [[] for _ in prompts]

    async def stream_one(index: int) -> None:
        async for delta in session.stream(prompts[index], max_tokens=new, ignore_eos=True):
            times[index] += [time.perf_counter()] * len(delta.token_ids)

    for _ in range(2):  # the first turn compiles programs and allocates buffers for the second
        await session.cache.clear(tier="memory")
        for entry in times:
            entry.clear()
        async with anyio.create_task_group() as group:
            for index in range(len(prompts)):
                group.start_soon(stream_one, index)
    start, stop = max(entry[0] for entry in times), min(entry[-1] for entry in times)
    return rate_ms([at for at in times[-1] if start <= at <= stop])


def rate_ms(times: Sequence[float]) -> float:
    """Return milliseconds per token: the median over eighths of the run, because a delta may carry several tokens."""
    count = max(2, len(times) // 8)
    parts = [times[i : i + count + 1] for i in range(0, len(times) - 1, count)]
    return 1e3 * statistics.median((part[-1] - part[0]) / (len(part) - 1) for part in parts if len(part) > 1)


@asynccontextmanager
async def _micro(common: dict[str, Any], **options: Any) -> AsyncIterator[Session]:
    model = random_shape("micro", dtype="float32")
    fixed = {"page_size": PAGE_SIZE, "max_model_len": 4096, "max_tokens_per_step": 2048}
    async with opening.open(model, **{**common, **fixed, **options}) as session:
        yield session


async def _beside_pages(pages: int, common: dict[str, Any]) -> float:
    """Return the step time of a request that decodes while the tree holds `pages` pages."""
    length = min(4000, pages * PAGE_SIZE)
    async with _micro(common, device_pages=pages + 4096, max_requests=4) as session:
        prompts = RandomPrompts(500)
        filled = 0
        while filled < pages:
            await session.generate([prompts(length) for _ in range(4)], max_tokens=1, ignore_eos=True)
            filled += 4 * (length // PAGE_SIZE)
        return await _decoding(session, [prompts(64)])


async def _beside_queue(queued: int, common: dict[str, Any]) -> float:
    """Return the step time of requests that decode in every slot while `queued` other requests wait."""
    async with _micro(common, device_pages=8192, max_requests=4, max_queue=queued + 16) as session:
        prompts = RandomPrompts(500)
        await _decoding(session, [prompts(64) for _ in range(4)])
        running = [prompts(64) for _ in range(4)]
        return await _decoding(session, running, waiting=[prompts(16) for _ in range(queued)])


async def _decoding(session: Session, prompts: list[list[int]], waiting: Sequence[list[int]] = ()) -> float:
    """Return the same as `step_ms`, without flushing the cache and in one turn."""
    times: list[float] = []
    async with session.paused():
        handles = [session.submit(prompt, max_tokens=8 * NEW, ignore_eos=True) for prompt in prompts]
        others = [session.submit(prompt, max_tokens=1, ignore_eos=True) for prompt in waiting]
        while session.stats().live < len(handles) + len(others) or session.stats().waiting < len(waiting):  # noqa: ASYNC110
            await anyio.sleep(0.01)
    async for delta in handles[-1]:
        times += [time.perf_counter()] * len(delta.token_ids)
    for handle in [*handles, *others]:
        handle.cancel()
    return rate_ms(times[NEW:])


def plot(points: Sequence[Point], folder: Path) -> list[Path]:
    """Write one picture per sweep and return the paths; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for sweep in dict.fromkeys(point.sweep for point in points):
        chosen = [point for point in points if point.sweep == sweep]
        figure, axis = pyplot.subplots(figsize=(5, 3.5))
        axis.plot([point.x for point in chosen], [point.step_ms for point in chosen], marker="o")
        axis.set_xscale("linear" if sweep in ("rows", "context") else "log")
        axis.set_ylim(bottom=0)
        axis.set_xlabel(sweep)
        axis.set_ylabel("step, ms")
        figure.tight_layout()
        files.append(folder / f"{sweep.replace(' ', '_')}.png")
        figure.savefig(files[-1], dpi=120)
        pyplot.close(figure)
    return files


def grow(model: str, options: dict[str, Any], scale: float, plots: Path | None) -> dict[str, Any]:
    """Measure how the step time grows with rows, context, cached pages and queued requests."""
    loaded = bench.loaded_model(model, options)
    measured = functools.partial(measure, loaded, bench.vocab_size(loaded), options, scale=scale, say=bench.say)
    points = anyio.run(measured)
    if plots is not None:
        for file in plot(points, plots):
            bench.say(f"wrote {file}")
    return {"model": model, **options, "points": [dataclasses.asdict(point) for point in points]}


def show_growth(report: dict[str, Any]) -> None:
    """Print a line for each point, with its step time relative to the first of its sweep."""
    first: dict[str, float] = {}
    for point in report["points"]:
        ratio = point["step_ms"] / first.setdefault(point["sweep"], point["step_ms"])
        print(f"{point['sweep']:16} {point['x']:>8,}  step {point['step_ms']:8.2f} ms  {ratio:5.2f}×")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the sweeps and print their points."""
    parser = usage.Parser(prog="python -m workshop.growth", description=__doc__)
    usage.add_model(parser, checked=lambda arguments: None)
    parser.add("--scale", "the share of each sweep's range to measure (default 1)", type=float, default=1.0)
    parser.add("--plots", "a folder for pictures; needs matplotlib", type=Path)
    parser.flag("--json", "print the figures as JSON")
    arguments = parser.parse_args(argv)
    if arguments.scale <= 0:
        parser.error(f"--scale {arguments.scale} must be above 0. Use a share such as 0.5")
    report = grow(arguments.model, usage.engine_options(arguments), arguments.scale, arguments.plots)
    print(json.dumps(report, indent=1)) if arguments.json else show_growth(report)
    return 0


if __name__ == "__main__":
    main()
