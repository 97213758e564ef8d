"""The measuring itself: every engine in turn, round by round, so that all see the same good and bad minutes.

Then what came out: medians, ratios to the best peer, a table and a picture of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from engine import Answer, Setting
from plans import ARRIVING, COMPARED, PLANS, WORKLOADS, Draw, Figures, Plan, arrivals, capacity, medians, ratio
from process import EngineFailed, Load, Process, settle

FIRST_PROMPT = 32  # tokens of W5's prompt
OURS = "rekindle"
CHECKED = "W3"  # the workload whose first tokens are compared between the engines


@dataclasses.dataclass
class Race:
    """Some engines over one model in one precision; the lists have one entry per counted round."""

    settings: dict[str, Setting]
    pythons: dict[str, str]
    vocab_size: int
    log: IO[str]
    restart: Callable[[Setting], Figures]  # W8, which only rekindle has
    figures: dict[str, dict[str, list[Figures]]] = dataclasses.field(default_factory=dict)  # [engine][workload]
    failures: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)  # [engine][workload]
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    agreement: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # share of equal first tokens
    capacity: dict[str, float] = dataclasses.field(default_factory=dict)  # requests a second, from round 0 of W7
    disturbed: list[float] = dataclasses.field(default_factory=list)  # cores that others used during a measurement
    resident: dict[str, float] = dataclasses.field(default_factory=dict)  # MB of each engine, after all rounds

    def run(self, workloads: list[str], rounds: int) -> None:
        self._engines: dict[str, Process] = {}
        self._firsts: dict[str, list[int]] = {}
        for name in self.settings:
            self._attempt(name, "open", self._open, name)
        for number in range(rounds + 1):
            for workload in workloads:
                names = [name for name in self._engines if self._takes_part(name, workload)]
                turn = number % max(1, len(names))
                for name in names[turn:] + names[:turn]:
                    say(f"round {number} of {rounds}: {workload:9} {name}")
                    figures = self._attempt(name, workload, self._measure, name, workload, number)
                    if figures and number:  # round 0 warms up: it compiles, and grows every buffer
                        self.figures.setdefault(name, {}).setdefault(workload, []).append(figures)
                    elif number and name in self.figures and workload in self.failures.get(name, {}):
                        self.figures[name].pop(workload, None)
                if workload == CHECKED:
                    self._compare()
        for name, process in list(self._engines.items()):
            memory = self._attempt(name, "memory", functools.partial(process.ask, do="memory"))
            if memory:
                self.resident[name] = memory["resident_bytes"] / 1e6
            self._attempt(name, "close", functools.partial(process.ask, do="close"))
            process.wait()

    def _takes_part(self, name: str, workload: str) -> bool:
        return workload not in self.failures.get(name, {}) and (workload != "W8" or name == "rekindle")

    def _open(self, name: str) -> None:
        setting = dataclasses.asdict(self.settings[name])
        say(f"{name}: converting")
        Process(name, self.pythons[name], self.log, "convert").once(**setting)
        say(f"{name}: opening")
        process = Process(name, self.pythons[name], self.log)
        self.notes[name] = process.ask(do="open", **setting)["notes"]
        self._engines[name] = process

    def _measure(self, name: str, workload: str, number: int) -> Figures:
        engines = list(self._engines.values())
        settle(engines)
        load = Load(engines)
        if workload == "W5":
            return self._first_token(name, number)
        if workload == "W8":
            return self.restart(self.settings[name]) if number else {}
        plan = self._plan(workload, number)
        self._engines[name].ask(do="forget")
        answers = []
        for batch in plan.batches:
            answers.append(Answer(**self._engines[name].ask(do="generate", **dataclasses.asdict(batch))))
            short = [len(ids) for ids in answers[-1].ids]
            if short != batch.outputs:
                raise EngineFailed(f"{workload}: {short} tokens instead of {batch.outputs}")
        others = load.of_others()
        if number:
            self.disturbed.append(others)
        if workload == CHECKED:
            self._firsts[name] = [ids[0] for ids in answers[-1].ids]
        figures = plan.figures(plan.batches, answers)
        if workload == ARRIVING and not number:
            self.capacity[name] = figures["capacity_req_s"]
        return figures | {"cores_used_by_others": others}

    def _plan(self, workload: str, number: int) -> Plan:
        draw = Draw(self.vocab_size, 100 * number + WORKLOADS.index(workload))
        if workload == ARRIVING:
            return arrivals(draw, self.capacity) if number else capacity(draw)
        return PLANS[workload](draw)

    def _first_token(self, name: str, number: int) -> Figures:
        """Two processes: the first finds nothing that an earlier one compiled, the second does."""
        base = self.settings[name]
        scratch = Path(base.scratch).with_name(Path(base.scratch).name + "-first")
        shutil.rmtree(scratch, ignore_errors=True)
        setting = dataclasses.replace(base, cache=str(scratch), first_token=True)
        prompt = Draw(self.vocab_size, number).prompt(FIRST_PROMPT)
        figures: Figures = {}
        for store in ("cold", "warm"):
            process = Process(name, self.pythons[name], self.log, "first")
            answer = process.ask(**dataclasses.asdict(setting), prompt=prompt)
            figures[f"{store}_s"] = time.perf_counter() - process.started
            figures[f"{store}_peak_mb"] = answer["peak_bytes"] / 1e6
            figures[f"{store}_resident_mb"] = answer["resident_bytes"] / 1e6
            process.wait()
        return figures

    def _compare(self) -> None:
        """Different weights, or a wrong rotation, would show here; rounding moves a token only now and then."""
        ours = self._firsts.pop("rekindle", None)
        for name, firsts in self._firsts.items():
            if ours:
                same = statistics.mean(one == other for one, other in zip(ours, firsts, strict=True))
                self.agreement.setdefault(name, []).append(same)
        self._firsts.clear()

    def _attempt(self, name: str, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """One engine's failure is a gap in the table, and in the log, not the end."""
        try:
            return call(*arguments)
        except EngineFailed as error:
            self.failures.setdefault(name, {})[what] = str(error)
            say(f"{name}: {what} failed: {error}")
            if name in self._engines and not self._engines[name].alive:
                del self._engines[name]
            return None


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def summary(race: Race, **about: Any) -> dict[str, Any]:
    """As it goes into the JSON file: every round, and what follows from them."""
    middle = {
        name: {workload: medians(rounds) for workload, rounds in by_workload.items()}
        for name, by_workload in race.figures.items()
    }
    return {
        **about,
        "medians": middle,
        "ratios": {f"{workload} {figure}": best_peer(race, workload, figure) for workload, figure in compared(middle)},
        "notes": race.notes,
        "resident_mb": race.resident,
        "failures": race.failures,
        "capacity_req_s": race.capacity,
        "same_first_token": {name: statistics.mean(shares) for name, shares in race.agreement.items()},
        "cores_used_by_others": statistics.median(race.disturbed) if race.disturbed else 0.0,
        "rounds": race.figures,
    }


def compared(middle: dict[str, dict[str, Figures]]) -> list[tuple[str, str]]:
    """The rows of the table: every workload and figure that somebody has."""
    return [
        (workload, figure)
        for workload, figures in COMPARED.items()
        for figure in figures
        if any(figure in by_workload.get(workload, {}) for by_workload in middle.values())
    ]


def best_peer(race: Race, workload: str, figure: str) -> dict[str, Any]:
    """Against whichever peer rekindle does worst: `ratio` above 1 means that rekindle is better than all of them.

    Another engine of rekindle's own is no peer, and only in `all`.
    """
    ours = race.figures.get(OURS, {}).get(workload, [])
    ratios = {
        name: ratio(figure, ours, rounds[workload])
        for name, rounds in race.figures.items()
        if name != OURS and workload in rounds and any(figure in one for one in rounds[workload])
    }
    known = {name: value for name, value in ratios.items() if not math.isnan(value)}
    peer = min((name for name in known if not name.startswith(OURS)), key=known.__getitem__, default=None)
    return {"peer": peer, "ratio": known[peer] if peer is not None else None, "all": known}


def text(race: dict[str, Any]) -> str:
    """Markdown."""
    names = [OURS, *(name for name in race["medians"] if name != OURS)]
    lines = [
        f"\n{title(race)} (medians of {rounds_of(race)} rounds; "
        f"others used {race['cores_used_by_others']:.2f} cores meanwhile)\n",
        f"| | {' | '.join(names)} | rekindle / best peer |",
        "|" + "---|" * (len(names) + 2),
    ]
    for workload, figure in compared(race["medians"]):
        values = [race["medians"].get(name, {}).get(workload, {}).get(figure) for name in names]
        best = race["ratios"][f"{workload} {figure}"]
        against = "" if best["ratio"] is None else f"{best['ratio']:.2f}× ({best['peer']})"
        lines.append(f"| {workload} {figure} | {' | '.join(map(number, values))} | {against} |")
    lines += [f"\nrekindle / {name}: {ratios_of(race, name)}" for name in names[1:] if name.startswith(OURS)]
    lines += [f"\n{name}: {note}" for name, note in race["notes"].items()]
    if race["resident_mb"]:
        found = ", ".join(f"{name} {value:,.0f}" for name, value in race["resident_mb"].items())
        lines.append(f"MB resident after all rounds: {found}")
    lines += [f"{name}: same first token in {share:.0%}" for name, share in race["same_first_token"].items()]
    if race["capacity_req_s"]:
        found = ", ".join(f"{name} {value:.2f}" for name, value in race["capacity_req_s"].items())
        lines.append(f"W7 at shares of the slowest engine's capacity in requests a second: {found}")
    lines += [f"{name}: {what}: {why}" for name, found in race["failures"].items() for what, why in found.items()]
    return "\n".join(lines)


def ratios_of(race: dict[str, Any], name: str) -> str:
    """Ours to one engine's, in every figure that both have."""
    found = ((row, best["all"].get(name)) for row, best in race["ratios"].items())
    return ", ".join(f"{row} {ratio:.2f}×" for row, ratio in found if ratio is not None)


def title(race: dict[str, Any]) -> str:
    """What was raced: a shape in a precision, or a file."""
    file = race.get("file")
    return f"{race['shape']}, {race['bits']} bits" if file is None else f"{file} ({race['file_mb']:,.0f} MB)"


def number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rounds_of(race: dict[str, Any]) -> int:
    return max((len(rounds) for one in race["rounds"].values() for rounds in one.values()), default=0)


def plot(report: dict[str, Any], file: Path) -> None:
    """The ratios as bars, one panel per model and precision."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    races = report["races"]
    figure, axes = pyplot.subplots(1, len(races), figsize=(5.5 * len(races), 6), squeeze=False, sharex=True)
    for race, axis in zip(races, axes[0], strict=True):
        rows = [(name, best) for name, best in race["ratios"].items() if best["ratio"] is not None][::-1]
        axis.barh(
            [name for name, _ in rows],
            [best["ratio"] for _, best in rows],
            color=["#2a7" if best["ratio"] >= 1 else "#c63" for _, best in rows],
        )
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_title(title(race))
        axis.set_xlabel("rekindle / best peer (above 1: rekindle is better)")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
