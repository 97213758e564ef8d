"""What came out: medians, ratios to the best peer, a table and a picture of them."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from plans import COMPARED, Figures, medians, ratio
from rounds import Race

OURS = "rekindle"


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
