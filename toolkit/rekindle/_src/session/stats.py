"""Reports on a session: a snapshot of its numbers, one step, and its compiled programs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from rekindle._src.core import words
from rekindle._src.core.contracts import RunnerLike
from rekindle._src.core.drawable import Record, figures_of
from rekindle._src.core.figures import FIGURES, EngineFigures, Group, figure
from rekindle._src.core.mesh_shape import MeshReport, describe_share
from rekindle._src.core.pictures import PictureStatistics
from rekindle._src.core.records import FinishReason, StepResult, TokenEvent
from rekindle._src.views import html, style

if TYPE_CHECKING:
    from rekindle._src.execution.runner import RunnerStatistics
    from rekindle._src.kvcache.tree import CacheStatistics
    from rekindle._src.scheduling.drafting.drafter import DraftCounts
    from rekindle._src.scheduling.scheduler import SchedulerStatistics


_PAGES = (style.TIERS["device"], style.shade(style.TIERS["device"], 1.0))  # held ones, and cached ones


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RowReport(Record):
    """One request's part in a step."""

    request_id: str
    kind: str  # "prefill", "decode", or "draft": a guessed token, which follows the decode row before it
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
    copied: tuple[int, ...] = ()  # pages with first tokens from another page on the device

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
            copied=tuple(copy.page for copy in plan.copies),
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
        if self.copied:
            lines.append(f"  pages {_ranges(sorted(self.copied))} begin as copies of others")
        return "\n".join(lines)

    def _size(self) -> str:
        return f"{words.count(len(self.rows), 'row')}, {words.count(self.tokens, 'token')}"

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
                    f"{words.count(self.tokens, 'token')} in program {self.program}",
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


class Figures(EngineFigures):
    """The figures that `SessionStats` takes over from its two parts."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def scheduler(self) -> SchedulerStatistics:
            """The scheduler's own figures."""
            ...

        @property
        def runner(self) -> RunnerStatistics:
            """The runner's own figures."""
            ...

    @property
    @figure("requests")
    def waiting(self) -> int:
        """Sequences in the queue, parked and preempted ones included."""
        return self.scheduler.waiting

    @property
    @figure("requests")
    def parked(self) -> int:
        """Waiting sequences parked for a prefix that another request computes."""
        return self.scheduler.parked

    @property
    @figure("requests")
    def leaving(self) -> int:
        """Sequences that ended while a step in flight still contains them."""
        return self.scheduler.leaving

    @property
    @figure("steps")
    def steps_in_flight(self) -> int:
        """Steps that were submitted to the device and not read yet."""
        return self.scheduler.steps_in_flight

    @property
    @figure("pages")
    def pages_free(self) -> int:
        """Empty KV pages."""
        return self.scheduler.pages_free

    @property
    @figure("pages")
    def pages_cached(self) -> int:
        """KV pages kept by the prefix cache alone, until room is needed."""
        return self.scheduler.pages_cached

    @property
    @figure("pages")
    def reserve_fraction(self) -> float:
        """Share of the tokens still to come from running requests that has pages in reserve."""
        return self.scheduler.reserve_fraction

    @property
    @figure("requests")
    def submitted(self) -> int:
        """Sequences submitted so far."""
        return self.scheduler.submitted

    @property
    @figure("requests")
    def finished(self) -> int:
        """Sequences that ended by themselves, or at max_tokens."""
        return self.scheduler.finished

    @property
    @figure("tokens")
    def prefill_tokens(self) -> int:
        """Prompt tokens computed; a preempted sequence counts again."""
        return self.scheduler.prefill_tokens

    @property
    def drafters(self) -> Mapping[str, DraftCounts]:
        """Tokens that each drafter proposed, and how many were accepted, by its name."""
        return self.scheduler.drafters

    @property
    def shards(self) -> tuple[SchedulerStatistics, ...]:
        """The figures of each data shard of a mesh with several; they add up to the session's."""
        return self.scheduler.shards

    @property
    def cache(self) -> CacheStatistics | None:
        """Counts of the prefix cache; None without one."""
        return self.scheduler.cache

    @property
    @figure("tokens")
    def padding(self) -> int:
        """Padding positions computed because a program was larger than its step."""
        return self.runner.padding

    @property
    @figure("steps")
    def host_seconds(self) -> float:
        """Seconds of packing and dispatch, compiling included."""
        return self.runner.host_seconds

    @property
    @figure("steps")
    def device_seconds(self) -> float:
        """Seconds spent running steps, as far as the host can tell."""
        return self.runner.device_seconds

    @property
    @figure("steps")
    def traces(self) -> int:
        """Python functions traced by JAX."""
        return self.runner.traces

    @property
    @figure("steps")
    def compilations(self) -> int:
        """Programs compiled; the others came from disk."""
        return self.runner.compilations

    @property
    def programs(self) -> dict[str, int]:
        """The numbers of steps that ran in each program, by its name."""
        return self.runner.programs

    @property
    @figure("pages")
    def pages_out(self) -> int:
        """Pages copied from the device to host memory."""
        return self.runner.pages_out

    @property
    @figure("pages")
    def pages_in(self) -> int:
        """Pages copied from host memory to the device."""
        return self.runner.pages_in


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
    idle_share: float = 0.0  # of the time with requests
    mesh: MeshReport | None = None  # the devices that share the model; None for one
    collective_seconds: float | None = None  # of all steps' collectives alone; None where not measured
    pictures: PictureStatistics | None = None  # None where the model reads text alone

    def _figure(self, name: str) -> Any:
        return getattr(self.scheduler if hasattr(self.scheduler, name) else self.runner, name)

    @property
    @figure("steps")
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
        pictures = fields.pop("pictures")
        fields |= {} if pictures is None else pictures._asdict()
        if self.collective_seconds is None:
            fields.pop("collective_seconds")
        elif self.collective_share is not None:
            fields["collective_share"] = self.collective_share
        figures = {**as_mapping(fields.pop("runner")), **as_mapping(fields.pop("scheduler")), **fields}
        for name in ("shards", "drafters"):
            if not figures.get(name):
                figures.pop(name, None)
        return figures

    def __str__(self) -> str:
        figures = self.as_dict()
        shards = {f"shard {number}": shard for number, shard in enumerate(figures.pop("shards", ()))}
        for name, shard in shards.items():
            figures[name] = f"{shard.running} running, {shard.waiting} waiting, {shard.pages_free} pages free"
        for name, counts in as_mapping(figures.pop("drafters", {})).items():
            figures[f"drafts of {name}"] = str(counts)
        return "\n".join(f"{name:24}{_shown(value)}" for name, value in figures.items())

    def __repr__(self) -> str:
        figures = self.as_dict()
        waiting, running = figures.get("waiting", 0), figures.get("running", 0)
        steps = words.count(figures.get("steps", 0), "step")
        return f"<SessionStats {self.model}: {running} running, {waiting} waiting, {steps}>"

    def _repr_html_(self) -> str:
        return str(html.block(*self.shown(), title=f"Session over {self.model}"))

    def shown(self) -> list[str]:
        """Return the parts that a notebook shows below a title."""
        figures = self.as_dict()
        parts: list[str] = [foremost(figures), _work(figures)]
        mesh = figures.pop("mesh", None)
        parts += [html.line(str(mesh), describe_share(figures))] if mesh is not None else []
        parts += [_shards(figures.pop("shards"))] if "shards" in figures else []
        parts += [html.line("paused")] if self.paused else []
        parts += [html.line("stalled", self.stalled)] if self.stalled else []
        if figures.get("pages_total"):
            parts += [
                html.line(
                    "memory of requests and cache",
                    html.with_hint(f"{words.count(figures['pages_total'], 'page')} on the device", html.PAGES),
                ),
                html.bar(
                    {name: figures[f"pages_{name}"] for name in ("held", "cached", "free")}, rest="free", colours=_PAGES
                ),
            ]
        figures.pop("model")  # it is in the title
        sizes = as_mapping(figures.pop("step_sizes", {}))
        programs, cache = as_mapping(figures.pop("programs", {})), as_mapping(figures.pop("cache", {}))
        drafters = as_mapping(figures.pop("drafters", {}))
        folded: list[str] = [*grouped({**figures, **cache})]
        if drafters:
            folded.append(html.line("drafts", *(f"{name}: {counts}" for name, counts in drafters.items())))
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
        return figures_of(figures)
    if hasattr(figures, "_asdict"):
        return dict(figures._asdict())
    return {}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# Words for figures that are fields.
_FIELDS: dict[str, dict[str, str]] = {
    "requests": {
        "live": "between submit and their end; n=3 counts three times",
        "places": "how many may be live at once: max_requests + max_queue",
        "waiting_for_a_place": "callers that await a place",
    },
    "steps": {
        "collective_seconds": "time of the collectives of these steps alone: sums over devices, gathering logits",
        "idle_seconds": "the device had nothing to do although requests were there",
        "idle_share": "of the time in which requests were there",
        "slow_steps": "that took longer than step_timeout",
        "paused": "inside a paused() block",
        "stalled": "the step that has been running for longer than step_timeout",
    },
    "cache": {
        "nodes": "pages in the tree, on all tiers",
        "device_pages": "of them, on the device",
        "evictable_pages": "of them, those that no request holds",
        "pinned_pages": "kept by pin()",
        "forgotten_nodes": "gone from every tier",
        "matches": "prompts looked up",
        "hits": "of them, those that found something",
        "device_hit_pages": "found on the device",
        "host_hit_pages": "found in host memory or on disk",
        "published_pages": "put into the tree",
        "merged_pages": "computed twice and then kept once",
        "evicted_pages": "left the device",
        "offloaded_pages": "of them, to host memory",
        "states": "on the device, in models with states; pages of layers with a window",
        "states_taken": "left by requests for later ones",
        "states_restored": "brought back from host memory",
        "states_evicted": "left the device",
        "stateless_pages": "cached, and computed again because no state or no window was there",
    },
}
GROUPS: dict[str, dict[str, str]] = {  # the meanings of figures, in the order of a notebook's display
    group: {entry.name: entry.words for entry in FIGURES.values() if entry.group == group} | _FIELDS.get(group, {})
    for group in (*get_args(Group), "cache")
}


def foremost(figures: Mapping[str, Any]) -> html.Markup:
    """Show the figures that summarise a session, six at most; zeros say nothing, and the others are folded."""
    prompted, cached = figures.get("prompt_tokens", 0), figures.get("cached_tokens", 0)
    generated, busy = figures.get("generated_tokens", 0), figures.get("device_seconds", 0.0)
    running, finished = figures.get("running", 0), figures.get("finished", 0)
    pairs = {
        f"{words.plural(running, 'request')} running": running,
        "waiting": figures.get("waiting", 0),
        f"{words.plural(finished, 'request')} finished": finished,
        f"{words.plural(generated, 'token')} generated": generated,
        "tokens/s while it computed": generated / busy if busy else 0,
        f"of {prompted:,} prompt tokens were cached": f"{cached / prompted:.0%}" if cached else 0,
    }
    return html.tiles({name: figure for name, figure in pairs.items() if figure})


def _work(figures: Mapping[str, Any]) -> html.Markup:
    """Show the tokens so far as one bar: cached, computed for prompts, and generated."""
    cached, generated = figures.get("cached_tokens", 0), figures.get("generated_tokens", 0)
    parts = {
        "from the cache": cached,
        "prompts, computed": max(0, figures.get("prompt_tokens", 0) - cached),
        "generated": generated,
    }
    hues = (style.shade(style.TIERS["device"], 1.0), style.PHASES["prefill"], style.PHASES["decode"])
    present = {name: hue for (name, tokens), hue in zip(parts.items(), hues, strict=True) if tokens}
    if not present:
        return html.Markup("")
    bar = html.bar({name: parts[name] for name in present}, colours=tuple(present.values()))
    return html.block(html.line("tokens so far"), bar)


def grouped(figures: Mapping[str, Any]) -> list[html.Markup]:
    """Return one table for each group that has figures, and one for the figures of no group."""
    remaining = dict(figures)
    parts: list[html.Markup] = []
    for title, names in GROUPS.items():
        present = {name: remaining.pop(name) for name in names if name in remaining}
        present = {
            name: value for name, value in present.items() if value is not False and value != ""
        }  # paused, stalled
        if present:
            parts.append(_table(title, present, names))
    if remaining:
        parts.append(_table("more", remaining, {}))
    return parts


def _table(title: str, figures: Mapping[str, Any], words: Mapping[str, str]) -> html.Markup:
    pairs = {name.replace("_", " "): value for name, value in figures.items()}
    titles = {name.replace("_", " "): meaning for name, meaning in words.items()}
    block = html.block(html.pairs(pairs, titles), title=title)
    return html.Markup(f'<div style="display:inline-block;vertical-align:top;margin-right:1em">{block}</div>')
