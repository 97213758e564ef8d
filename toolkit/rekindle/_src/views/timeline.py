"""The drawing of a request's life: its phases as one bar over time, then as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rekindle._src.core import words
from rekindle._src.scheduling.sequence import Explanation
from rekindle._src.scheduling.timeline import Phase, PhaseKind, summary
from rekindle._src.views import html, style, svg

_WIDTH = 620  # pixels
_WORK = {
    PhaseKind.INTAKE: style.SERIES[6],
    PhaseKind.LOADING: style.SERIES[2],
    PhaseKind.COMPILING: style.SERIES[4],
    PhaseKind.PREFILL: style.PHASES["prefill"],
    PhaseKind.DECODE: style.PHASES["decode"],
}  # the others are waits, which are grey


def explanation(request: Explanation) -> html.Markup:
    """Draw the state of a request, its life so far, and where its prompt came from."""
    prompt = {"from the cache": request.cached_tokens, "computed": request.prompt_tokens - request.cached_tokens}
    kinds = [words.count(request.prompt_tokens, "prompt token")]
    for note in request.notes:
        computed = note.tokens - note.cached
        prompt["from the cache"] -= note.cached
        prompt["computed"] -= computed
        prompt |= {f"{note.kind}s from the cache": note.cached, f"{note.kind}s computed": computed}
        kinds.append(f"{note.tokens:,} of them {note.kind}s")
    state, drawn = html.text(f"{request.id}: {request.text}"), drawn_timeline(request.timeline)
    return html.block(state, drawn, _phases(request.timeline), html.line(*kinds), html.bar(prompt))


def _phases(timeline: Sequence[Phase]) -> str:
    rows = [(f"{phase.start:.3f} s", f"{phase.seconds:.3f} s", str(phase.kind), phase.words) for phase in timeline]
    table = html.table(["at", "for", "", ""], rows, limit=40)
    return html.details(words.count(len(rows), "phase"), table, opened=len(rows) <= 6) if rows else ""


def drawn_timeline(phases: Sequence[Phase]) -> html.Markup:
    """Draw phases as one bar over time; hovering over one tells its seconds and its reason."""
    total = max((phase.start + phase.seconds for phase in phases), default=0.0)
    if total <= 0:
        return html.Markup("")
    scale, step = _WIDTH / total, _tick(total)
    parts = [
        svg.rect(
            phase.start * scale, 0, max(1.0, phase.seconds * scale), 14, _WORK.get(phase.kind, style.GREY),
            title=" · ".join(filter(None, (f"{phase.kind} {words.seconds(phase.seconds)}", phase.words))),
        )
        for phase in phases
    ]  # fmt: skip
    for number in range(int(total / step) + 1):
        x = number * step * scale
        anchor = "start" if number == 0 else "end" if x > _WIDTH - 24 else "middle"
        parts.append(svg.stroke([(x, 14), (x, 18)], width=1))
        parts.append(
            svg.words(x, 29, words.seconds(number * step) if number else "0", anchor=anchor, opacity=style.QUIET)
        )
    kinds = dict.fromkeys(phase.kind for phase in phases)
    names = html.legend({str(kind): _WORK.get(kind, style.GREY) for kind in kinds})
    return html.Markup(svg.picture(_WIDTH, 32, parts, label=f"timeline: {summary(phases)}") + names)


def _tick(total: float) -> float:
    """Return the seconds between two marks of an axis: 1, 2 or 5 of some decimal place, so that there are 3 to 7."""
    unit = 10.0 ** math.floor(math.log10(total / 5))
    return next(unit * factor for factor in (1, 2, 5, 10) if total / (unit * factor) <= 6)
