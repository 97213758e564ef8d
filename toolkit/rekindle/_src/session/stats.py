"""Reports on a session: a snapshot of its numbers, one step, and its compiled programs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rekindle._src.core import html
from rekindle._src.core.contracts import RunnerLike
from rekindle._src.core.mesh_report import MeshReport, describe_share
from rekindle._src.core.records import FinishReason, StepResult, TokenEvent
from rekindle._src.session.stat_figures import Figures
from rekindle._src.session.stat_groups import foremost, grouped

if TYPE_CHECKING:
    from rekindle._src.execution.runner import RunnerStatistics
    from rekindle._src.scheduling.explain import SchedulerStatistics


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RowReport(html.Record):
    """One request's part in a step."""

    request_id: str
    kind: str  # "prefill", "decode", or "draft": a guessed token beside the decode row before it
    start: int
    stop: int  # positions [start, stop) were computed
    pages: tuple[int, ...]
    token_id: int | None  # None if it sampled none, for a wrong draft, and for a draft after the end
    text: str  # of that token
    finish_reason: FinishReason | None

    def __str__(self) -> str:
        span = f"position {self.start}" if self.stop - self.start == 1 else f"positions {self.start}–{self.stop - 1}"
        output = "" if self.token_id is None else f" → {self.text!r} ({self.token_id})"
        if self.kind == "draft" and self.token_id is None:
            output = ", in vain"
        ended = f", ended by {self.finish_reason}" if self.finish_reason is not None else ""
        return f"{self.kind:8}{self.request_id:8}{span} on pages {_ranges(self.pages)}{output}{ended}"

    def _repr_html_(self) -> str:
        return str(html.line(str(self)))


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """One engine step: the rows it ran, their pages, and their output. Print it to see all of it."""

    step: int
    program: str
    rows: tuple[RowReport, ...]
    offloaded: tuple[int, ...]
    restored: tuple[int, ...]
    host_seconds: float
    device_seconds: float

    @classmethod
    def of(cls, result: StepResult, events: tuple[TokenEvent, ...], decode: Callable[[list[int]], str]) -> StepReport:
        plan = result.plan
        event_by_id = {event.request_id: event for event in events}
        kinds = ["draft" if row.draft else "decode" for row in plan.decode] + ["prefill"] * len(plan.prefill)
        rows: list[RowReport] = []
        places = Counter[str]()  # rows of a request so far
        for row, output, kind in zip(plan.rows, result.rows, kinds, strict=True):
            event, place = event_by_id.get(row.request.id), places[row.request.id]
            places[row.request.id] += 1
            count = len(event.token_ids) if event is not None else 0
            token = output.token_id if place < count or kind != "draft" else None
            rows.append(
                RowReport(
                    request_id=row.request.id,
                    kind=kind,
                    start=row.start,
                    stop=row.start + row.length,
                    pages=tuple(row.pages.tolist()),
                    token_id=token,
                    text="" if token is None else decode([token]),
                    finish_reason=event.finish_reason if event is not None and place == max(0, count - 1) else None,
                )
            )
        return cls(
            step=plan.step,
            program=result.program,
            rows=tuple(rows),
            offloaded=tuple(move.page for move in plan.offload),
            restored=tuple(move.page for move in plan.restore),
            host_seconds=result.host_seconds,
            device_seconds=result.device_seconds,
        )

    @property
    def tokens(self) -> int:
        """Positions computed, over all rows."""
        return sum(row.stop - row.start for row in self.rows)

    def __str__(self) -> str:
        head = (
            f"step {self.step}: {self._size()}, program {self.program}, "
            f"{self.device_seconds * 1e3:.1f} ms on the device, {self.host_seconds * 1e3:.1f} ms on the host"
        )
        lines = [head, *(f"  {row}" for row in self.rows)]
        if self.offloaded:
            lines.append(f"  pages {_ranges(sorted(self.offloaded))} left for host memory")
        if self.restored:
            lines.append(f"  pages {_ranges(sorted(self.restored))} came back from host memory")
        return "\n".join(lines)

    def _size(self) -> str:
        return f"{html.count(len(self.rows), 'row')}, {html.count(self.tokens, 'token')}"

    def __repr__(self) -> str:
        return f"<StepReport {self.step}: {self._size()}, program {self.program}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                row.kind,
                row.request_id,
                f"{row.start}–{row.stop - 1}" if row.stop - row.start > 1 else f"{row.start}",
                _ranges(row.pages),
                f"{row.text!r}" if row.token_id is not None else "in vain" if row.kind == "draft" else "",
                row.finish_reason or "",
            )
            for row in self.rows
        ]
        moved = [f"pages {_ranges(sorted(self.offloaded))} left for host memory"] if self.offloaded else []
        moved += [f"pages {_ranges(sorted(self.restored))} came back from host memory"] if self.restored else []
        return str(
            html.block(
                html.line(
                    f"{html.count(self.tokens, 'token')} in program {self.program}",
                    f"{self.device_seconds * 1e3:.1f} ms on the device",
                    f"{self.host_seconds * 1e3:.1f} ms on the host",
                    *moved,
                ),
                html.table(["", "request", "positions", "pages", "token", "ended by"], rows),
                title=f"Step {self.step}",
            )
        )


def _ranges(pages: Sequence[int]) -> str:
    """Format page numbers as ranges: `3–5, 9` for (3, 4, 5, 9)."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and page == runs[-1][1] + 1:
            runs[-1][1] = page
        else:
            runs.append([page, page])
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in runs) or "none"


@dataclasses.dataclass(frozen=True, slots=True)
class SessionStats(Figures):
    """A snapshot of a session. The figures of `scheduler` and `runner` have their names here, too: `stats.running`."""

    model: str
    live: int  # requests between submit and their end
    places: int  # how many may live at once
    waiting_for_a_place: int
    paused: bool
    scheduler: SchedulerStatistics
    runner: RunnerStatistics
    slow_steps: int = 0  # steps that took longer than step_timeout, including one that still runs
    stalled: str = ""  # the step that has been running for longer than step_timeout
    idle_seconds: float = 0.0  # time without work for the device although there were requests
    idle_share: float = 0.0  # of the time in which there were requests
    mesh: MeshReport | None = None  # the devices that share the model; None for one
    collective_seconds: float | None = None  # of all steps' collectives alone; None where not measured

    @property
    def collective_share(self) -> float | None:
        """The collectives' share of `device_seconds`, as far as they take as long in a step as they do alone."""
        if self.collective_seconds is None or not self.device_seconds:
            return None
        return self.collective_seconds / self.device_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return every figure by its name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.mesh is None:
            fields.pop("mesh")
        if self.collective_seconds is None:
            fields.pop("collective_seconds")
        elif self.collective_share is not None:
            fields["collective_share"] = self.collective_share
        figures = {**as_mapping(fields.pop("runner")), **as_mapping(fields.pop("scheduler")), **fields}
        if not figures.get("shards"):
            figures.pop("shards", None)
        return figures

    def __str__(self) -> str:
        figures = self.as_dict()
        shards = {f"shard {number}": shard for number, shard in enumerate(figures.pop("shards", ()))}
        for name, shard in shards.items():
            figures[name] = f"{shard.running} running, {shard.waiting} waiting, {shard.pages_free} pages free"
        return "\n".join(f"{name:24}{_shown(value)}" for name, value in figures.items())

    def __repr__(self) -> str:
        figures = self.as_dict()
        waiting, running = figures.get("waiting", 0), figures.get("running", 0)
        steps = html.count(figures.get("steps", 0), "step")
        return f"<SessionStats {self.model}: {running} running, {waiting} waiting, {steps}>"

    def _repr_html_(self) -> str:
        return str(html.block(*self.shown(), title=f"Session over {self.model}"))

    def shown(self) -> list[str]:
        """Return the parts that a notebook shows below a title."""
        figures = self.as_dict()
        parts: list[str] = [foremost(figures)]
        mesh = figures.pop("mesh", None)
        parts += [html.line(str(mesh), describe_share(figures))] if mesh is not None else []
        parts += [_shards(figures.pop("shards"))] if "shards" in figures else []
        parts += [html.line("paused")] if self.paused else []
        parts += [html.line("stalled", self.stalled)] if self.stalled else []
        if figures.get("pages_total"):
            parts += [
                html.with_hint(html.line(f"{html.count(figures['pages_total'], 'page')} on the device"), html.PAGES),
                html.bar({name: figures[f"pages_{name}"] for name in ("held", "cached", "free")}, rest="free"),
            ]
        figures.pop("model")  # it is in the title
        sizes = as_mapping(figures.pop("step_sizes", {}))
        programs, cache = as_mapping(figures.pop("programs", {})), as_mapping(figures.pop("cache", {}))
        folded: list[str] = [*grouped({**figures, **cache})]
        if programs:
            folded.append(html.line("steps by program", *(f"{name}: {steps:,}" for name, steps in programs.items())))
        if sizes:
            folded.append(html.line("steps by tokens", *(f"up to {size:,}: {sizes[size]:,}" for size in sorted(sizes))))
        parts.append(html.details("all figures", *folded))
        return parts


def _shards(shards: Sequence[SchedulerStatistics]) -> html.Markup:
    """Return a table of the data shards' figures side by side."""
    rows = [
        (
            number,
            shard.running,
            shard.waiting,
            shard.pages_held,
            shard.pages_cached,
            shard.pages_free,
            f"{shard.hit_rate:.0%}",
        )
        for number, shard in enumerate(shards)
    ]
    return html.table(["shard", "running", "waiting", "pages held", "cached", "free", "prompt tokens cached"], rows)


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramReport:
    """The compiled programs of a session that are ready: where each came from, and how often it ran."""

    programs: tuple[Any, ...]  # name, origin, seconds, why
    steps: Mapping[str, int]  # by program
    total: int  # programs that the session may ever use; those for embeddings count once they are ready
    traces: int
    compilations: int

    @classmethod
    def of(cls, runner: RunnerLike) -> ProgramReport:
        """Return the report of a runner as it is now."""
        programs, figures = runner.programs, runner.statistics()
        ready = tuple(programs.manifest()) if programs is not None else ()
        known = {key.name for key in programs.keys} if programs is not None else set()
        return cls(
            programs=ready,
            steps=dict(figures.programs),
            total=len(known | {program.name for program in ready}),
            traces=figures.traces,
            compilations=figures.compilations,
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.programs)

    def __len__(self) -> int:
        return len(self.programs)

    def __repr__(self) -> str:
        return f"<ProgramReport: {self._summary()}>"

    def _summary(self) -> str:
        loaded = sum(program.origin == "loaded" for program in self.programs)
        ready = f"{len(self.programs)} of {self.total} programs are ready"
        return f"{ready}, {loaded} loaded from disk, {self.compilations} compiled, {self.traces} traced"

    def _repr_html_(self) -> str:
        rows = [
            (program.name, program.origin, program.seconds, self.steps.get(program.name, 0), program.why)
            for program in self.programs
        ]
        return str(
            html.block(
                html.line(self._summary()),
                html.table(["program", "origin", "seconds", "steps", "why not loaded"], rows),
            )
        )


def as_mapping(figures: Any) -> Mapping[str, Any]:
    if isinstance(figures, Mapping):
        return figures
    if dataclasses.is_dataclass(figures) and not isinstance(figures, type):
        return html.figures(figures)
    if hasattr(figures, "_asdict"):
        return dict(figures._asdict())
    return {}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
