"""Interactive figures over recorded data: widgets while a kernel runs, pages with their own script in a saved notebook.

Views follow a session; a figure has all that it shows, so it acts in a documentation page as well. Where scripts are
stripped, its saved form is its first state as a static picture, or one line that says what it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import anywidget
import numpy as np
import traitlets
from numpy.typing import ArrayLike, NDArray

from rekindle._src.core import words
from rekindle._src.core.contracts import TokenizerLike
from rekindle._src.views import html, style
from rekindle.errors import InvalidRequest

_STATIC = Path(__file__).parent / "static"
SCRIPT = "".join((_STATIC / name).read_text() for name in ("pieces.js", "figures.js"))
STYLE = style.SHEET + (_STATIC / "controls.css").read_text()
PLAIN = SCRIPT.partition("\nexport default")[0]  # without what makes it a module
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_LEAST = 2e-3  # the smallest probability whose bar can be seen
_LIKELY = 16  # tokens of a distribution that have a bar of their own
_BINS = 64  # of the others: enough to know how much of the tail a temperature or a cut-off keeps


class RowLike(Protocol):
    """One row of a step, as far as the figure of a batch shows it."""

    @property
    def request_id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str | None: ...


class ReportLike(Protocol):
    """One step, as far as the figure shows it: `session.step()` returns such reports."""

    @property
    def tokens(self) -> int: ...
    @property
    def rows(self) -> Sequence[RowLike]: ...


class StepRecord(NamedTuple):
    """One step of a run in time, as a dashboard records it."""

    at: float  # time.perf_counter() when it was committed
    step: int
    rows: tuple[tuple[int, str, str], ...]  # slot, request, "prefill" or "decode"
    sampled: int  # tokens sampled
    computed: int
    moved: int  # pages offloaded and restored
    seconds: float  # on the device
    busy: float = 0.0  # seconds since the previous step if a request ran in both, else seconds on the device


class FigureWidget(anywidget.AnyWidget):
    _esm = traitlets.Unicode(SCRIPT).tag(sync=True)
    _css = traitlets.Unicode(STYLE).tag(sync=True)
    kind = traitlets.Unicode().tag(sync=True)
    data: Any = traitlets.Dict().tag(sync=True)


class Figure:
    """A figure of one kind over its data. The last expression of a cell shows it."""

    def __init__(self, kind: str, data: dict[str, object], summary: str, still: str = "") -> None:
        self.kind: str = kind
        self.data: dict[str, object] = data
        self.summary: str = summary
        self.still: str = still  # its first state as static HTML, for pages without scripts

    def __repr__(self) -> str:
        return f"<Figure: {self.summary}>"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        widget: Any = FigureWidget(kind=self.kind, data=self.data)  # Any: anywidget has no types
        bundle = widget._repr_mimebundle_(**options)
        data, *metadata = bundle if isinstance(bundle, tuple) else (bundle,)
        whole = {**(data or {}), "text/html": self.saved(), "text/plain": repr(self)}
        return (whole, *metadata) if metadata else whole

    def saved(self) -> str:
        """Return the figure as HTML that needs nothing else."""
        data = json.dumps(self.data).replace("<", "\\u003c")  # no text of a model ends the script
        name = f"rekindle-{hashlib.sha256(data.encode()).hexdigest()[:12]}"  # the same in every build of a page
        needs = "An interactive figure: it needs a page that runs scripts."
        line = self.still or html.line(f"{self.summary}. {needs}")
        call = f"mount(document.getElementById({json.dumps(name)}), {json.dumps(self.kind)}, {data});"
        looks = f"<style>{STYLE}</style>"
        return f'{looks}<div id="{name}">{line}</div><script>(() => {{\n{PLAIN}\n{call}\n}})();</script>'


def steps(reports: Iterable[ReportLike | None]) -> Figure:
    """Return the figure of a batch over time, from the reports of its steps; None, a step without work, is left out."""
    slots: dict[str, int] = {}
    recorded = []
    for report in filter(None, reports):
        rows = []
        for row in report.rows:
            if row.request_id not in slots:
                slots[row.request_id] = min(set(range(len(slots) + 1)) - set(slots.values()))
            rows.append(
                {
                    "id": row.request_id, "kind": row.kind, "slot": slots[row.request_id], "start": row.start,
                    "stop": row.stop, "text": row.text, "ended": row.finish_reason,
                }
            )  # fmt: skip
        for row in report.rows:
            if row.finish_reason is not None:
                slots.pop(row.request_id, None)
        recorded.append({"tokens": report.tokens, "rows": rows})
    return Figure("steps", {"steps": recorded}, f"{words.count(len(recorded), 'step')} of a batch")


def run(records: Iterable[StepRecord]) -> Figure:
    """Return the figure of a run in time, from its recorded steps."""
    steps = list(records)
    began = steps[0].at - steps[0].busy if steps else 0.0
    numbers: dict[str, int] = {}  # of requests, which a long run would name again and again
    recorded = []
    for step in steps:
        rows = [[slot, numbers.setdefault(name, len(numbers)), kind == "prefill"] for slot, name, kind in step.rows]
        times = [round(1e3 * (step.at - began), 2), round(1e3 * step.busy, 2)]
        recorded.append([*times, step.sampled, step.computed, step.moved, rows])
    summary = f"{words.count(len(numbers), 'request')} in {words.count(len(steps), 'step')}, as they ran"
    return Figure("run", {"names": list(numbers), "steps": recorded}, summary)


def distribution(logits: ArrayLike, tokenizer: TokenizerLike) -> Figure:
    """Return the figure of a next token's distribution, from its logits."""
    try:
        values = np.asarray(logits, np.float64)
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.ndim != 1 or len(values) != tokenizer.vocab_size:
        wanted = 'Pass captured ones: generate(…, capture=Capture({"logits": -1}, -1)).captured["logits", -1][0]'
        raise InvalidRequest("logits", type(logits), f"must be one row of {tokenizer.vocab_size:,} numbers", wanted)
    order = np.argsort(-values, kind="stable")
    likely, others = order[:_LIKELY], values[order[_LIKELY:]]
    rest = []
    for part in np.array_split(others, min(_BINS, len(others))) if len(others) else ():
        weights = np.exp(part - part.max())
        rest.append([float(part.max() + np.log(weights.mean())), len(part)])  # the same sum at temperature 1
    texts = [tokenizer.decode([int(token)], skip_special_tokens=False) for token in likely]
    data = {"texts": texts, "logits": [float(values[token]) for token in likely], "rest": rest}
    summary = f"the next token's distribution over {len(values):,} tokens"
    return Figure("distribution", data, summary, _bars(texts, values, order, summary))


def _bars(texts: Sequence[str], logits: FloatArray, order: IntArray, summary: str) -> html.Markup:
    """Return the distribution's first state, at temperature 1 with all tokens. It ends where bars can't be seen."""
    weights = np.exp(logits - logits.max())
    shares = (weights / weights.sum())[order]
    named = enumerate(zip(texts, shares.tolist(), strict=False))
    seen = [(json.dumps(text, ensure_ascii=False), share) for at, (text, share) in named if at < 3 or share >= _LEAST]
    others = 1.0 - sum(share for _, share in seen)
    bars = [(text, share, style.BLUE) for text, share in seen]
    if len(seen) < len(logits):
        bars.append((words.count(len(logits) - len(seen), "other"), max(0.0, others), style.GREY))
    largest = max(share for _, share, _ in bars)
    scale = html.line(f"The longest bar is {largest:.1%}.") if largest < 1 else ""
    return html.block(*(_bar(*bar, largest) for bar in bars), scale, title=summary)


def _bar(name: str, share: float, colour: str, largest: float) -> str:
    """Return a bar as long as its share of the largest one's."""
    code = f"width:9em;flex:none;text-align:right;overflow:hidden;white-space:nowrap;font-family:{style.CODE}"
    look = f"height:.8em;border-radius:2px;width:{100 * share / largest:.2f}%;background:{colour}"
    return (
        f'<div style="display:flex;gap:8px;align-items:center;font-size:85%"><span style="{code}">{html.escape(name)}'
        f'</span><div style="flex:1;min-width:0"><div style="{look}"></div></div>'
        f'<span style="opacity:{style.QUIET};width:9em;flex:none">{share:.1%}</span></div>'
    )


def prefixes(texts: Sequence[str], page: int) -> Figure:
    """Return the figure of a prefix tree that grows by typing; its pages hold `page` words each."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("texts", texts, "must be a list of texts", "Pass [text, …]")
    summary = f"a prefix tree of {words.count(len(texts), 'prompt')}"
    return Figure("prefixes", {"texts": list(texts), "page": page}, summary)
