"""The measuring itself: every engine in turn, round by round, so that all see the same good and bad minutes."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import arriving
from engine import Answer, Setting
from plans import ARRIVING, PLANS, WORKLOADS, Draw, Figures, Plan
from process import EngineFailed, Load, Process, settle

FIRST_PROMPT = 32  # tokens of W5's prompt
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
            return arriving.arrivals(draw, self.capacity) if number else arriving.capacity(draw)
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
