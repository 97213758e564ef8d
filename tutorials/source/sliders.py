"""`python tutorials/source/sliders.py`: sliders for pages that explain a trade, as files that cells show.

A slider needs no kernel and no library. It is an SVG, some inputs, and one handler in an attribute, so that it works on
the site and in a notebook. Where no script runs, its words, its bars and a table of some settings stay. Formulas are
written once, in the arithmetic that Python and JavaScript have in common: names, numbers, + - * / ** and the functions
below.
"""

from __future__ import annotations

import html
import math
import re
from pathlib import Path
from typing import NamedTuple

from drawing import Drawing

FOLDER = Path(__file__).resolve().parent / "pictures"
FUNCTIONS = {"min": min, "max": max, "ceil": math.ceil}
WIDTH = 300  # of the longest bar


class Control(NamedTuple):
    """An input: the name of its position, its range and start, and the value that it stands for."""

    name: str
    words: str
    least: float
    most: float
    step: float
    start: float
    value: str  # an expression of the name
    shown: str = ""  # the name of that value; the control's own in capitals
    digits: int = 0
    unit: str = ""

    @property
    def symbol(self) -> str:
        return self.shown or self.name.upper()


class Result(NamedTuple):
    """A line: a formula of controls and earlier results, with a bar if it has a colour."""

    name: str
    words: str
    formula: str
    digits: int = 0
    unit: str = ""
    fill: str = ""


class Slider(NamedTuple):
    title: str
    controls: tuple[Control, ...]
    results: tuple[Result, ...]
    above: tuple[str, str, str]  # an expression, and the verdict where it is at least 0, and otherwise
    columns: tuple[float, ...]  # positions of the first control, for the table

    def values(self, **positions: float) -> dict[str, float]:
        """The value of every control and result at these positions, and at the start of others."""
        values: dict[str, float] = {}
        for control in self.controls:
            at = positions.get(control.name, control.start)
            values[control.symbol] = _value(control.value, {control.name: at})
        for result in self.results:
            values[result.name] = _value(result.formula, values)
        return values

    def words(self, **positions: float) -> dict[str, str]:
        """What each of them says, and the verdict."""
        values = self.values(**positions)
        said = {control.symbol: _number(values[control.symbol], control.digits) for control in self.controls}
        said |= {result.name: _number(values[result.name], result.digits) for result in self.results}
        condition, yes, no = self.above
        return said | {"verdict": yes if _value(condition, values) >= 0 else no}

    @property
    def _bars(self) -> list[Result]:
        return [result for result in self.results if result.fill]

    def drawing(self) -> Drawing:
        values, said = self.values(), self.words()
        longest = max(values[bar.name] for bar in self._bars)
        d = Drawing(self.title, 700, 44 + 32 * len(self.results))
        for row, result in enumerate(self.results):
            y = 14 + 32 * row
            d.words(14, y + 11, result.words, "left")
            unit = f" {result.unit}" if result.unit else ""
            if result.fill:
                width = max(1, WIDTH * values[result.name] / longest)
                d.box(230, y, round(width, 1), 22, fill=result.fill)
                d.parts[-1] = d.parts[-1].replace("<rect", f'<rect data-bar="{result.name}"')
            x = 544 if result.fill else 230
            d.parts.append(
                f'<text text-anchor="start" x="{x}" y="{y + 11}" dy="0.35em">'
                f'<tspan data-out="{result.name}">{said[result.name]}</tspan>{html.escape(unit)}</text>'
            )
        d.parts.append(
            f'<text data-out="verdict" text-anchor="start" x="14" y="{28 + 32 * len(self.results)}">'
            f"{html.escape(said['verdict'])}</text>"
        )
        return d

    def script(self) -> str:
        """The handler of an input: this is the whole slider."""
        lines = ["const one = name => this.querySelector(name)"]
        lines += [
            "const number = (x, d) => x.toLocaleString('en', {minimumFractionDigits: d, maximumFractionDigits: d})"
        ]
        lines += ["const say = (name, text) => { one('[data-out=' + name + ']').textContent = text }"]
        for control in self.controls:
            lines.append(f"const {control.name} = +one('[name={control.name}]').value")
            if control.symbol != control.name:
                lines.append(f"const {control.symbol} = {_script(control.value)}")
            lines.append(f"say('{control.symbol}', number({control.symbol}, {control.digits}))")
        for result in self.results:
            lines.append(f"const {result.name} = {_script(result.formula)}")
            lines.append(f"say('{result.name}', number({result.name}, {result.digits}))")
        lines.append(f"const longest = Math.max({', '.join(bar.name for bar in self._bars)})")
        for bar in self._bars:
            width = f"Math.max(1, {WIDTH} * {bar.name} / longest)"
            lines.append(f"one('[data-bar={bar.name}]').setAttribute('width', {width})")
        condition, yes, no = self.above
        lines.append(f"say('verdict', {_script(condition)} >= 0 ? {_text(yes)} : {_text(no)})")
        return "; ".join(lines)

    def table(self) -> str:
        """Some settings, for readers without scripts."""
        first, said = self.controls[0], [self.words(**{self.controls[0].name: at}) for at in self.columns]
        head = "".join(f"<th>{one[first.symbol]}</th>" for one in said)
        rows = [f"<tr><th>{html.escape(first.words)}</th>{head}</tr>"]
        for result in self.results:
            unit = f", {result.unit}" if result.unit else ""
            cells = "".join(f"<td>{one[result.name]}</td>" for one in said)
            rows.append(f"<tr><td>{html.escape(result.words + unit)}</td>{cells}</tr>")
        return f"<details><summary>Some settings as a table</summary><table>{''.join(rows)}</table></details>"

    def html(self) -> str:
        inputs = []
        for control in self.controls:
            start = _number(self.values()[control.symbol], control.digits)
            unit = f" {control.unit}" if control.unit else ""
            inputs.append(
                f'<label style="display: block">'
                f'<input type="range" name="{control.name}" min="{control.least:g}" max="{control.most:g}" '
                f'step="{control.step:g}" value="{control.start:g}" style="width: 220px; vertical-align: middle"> '
                f'{html.escape(control.words)}: <output data-out="{control.symbol}">{start}</output>'
                f"{html.escape(unit)}</label>"
            )
        svg = self.drawing().svg().replace("<svg ", '<svg style="max-width: 100%; height: auto" ', 1)
        return "\n".join(
            (f'<div oninput="{html.escape(self.script())}">', svg.rstrip(), *inputs, self.table(), "</div>\n")
        )


def _value(expression: str, names: dict[str, float]) -> float:
    return float(eval(expression, {"__builtins__": {}}, FUNCTIONS | names))


def _script(expression: str) -> str:
    return re.sub(rf"\b({'|'.join(FUNCTIONS)})\(", r"Math.\1(", expression)


def _text(words: str) -> str:
    assert not set(words) & set("'\\"), "it stands between quotes"
    return f"'{words}'"


def _number(value: float, digits: int) -> str:
    """As JavaScript writes it: halves are rounded up."""
    return f"{math.floor(value * 10**digits + 0.5) / 10**digits:,.{digits}f}"


TEXTS = Control("b", "texts in a step", 0, 9, 1, 0, "2**b")
PARAMETERS = Control("p", "parameters", -1, 3, 0.1, 0.9, "10**p", digits=1, unit="billion")

SLIDERS = {
    "09_slider": Slider(
        "How large should a page be? Slots of one text, in pages and as room for the longest",
        (
            Control("p", "tokens in a page", 0, 8, 1, 5, "2**p"),
            Control("n", "tokens of a text", 1, 2048, 1, 300, "n"),
            Control("m", "tokens of the longest text", 11, 15, 1, 12, "2**m"),
        ),
        (
            Result("used", "slots in use", "N", fill="c"),
            Result("taken", "slots of its pages", "P * ceil(N / P)", fill="a"),
            Result("reserved", "room for the longest", "M", fill="b"),
            Result("lost", "lost in the last page", "100 * (taken - used) / taken", 1, "%"),
            Result("entries", "entries of its page table", "taken / P"),
        ),
        (
            "10 - lost",
            "Less than a tenth is lost. Still smaller pages would only make the table longer.",
            "More than a tenth is lost. Smaller pages lose less, and make the table longer.",
        ),
        (0, 3, 5, 7, 8),
    ),
    "19_slider": Slider(
        "The roofline: at most as many tokens a second as reading allows, and as arithmetic allows",
        (
            TEXTS,
            PARAMETERS,
            Control("w", "bits for each", 2, 16, 0.5, 16, "w", digits=1),
            Control("g", "bandwidth", 1, 4, 0.1, 1.7, "10**g", unit="GB/s"),
            Control("f", "arithmetic", -1, 3, 0.1, -0.3, "10**f", digits=1, unit="TFLOP/s"),
        ),
        (
            Result("reading", "reading allows", "B * G / (P * W / 8)", 1, "tokens/s", "a"),
            Result("arithmetic", "arithmetic allows", "1000 * F / (2 * P)", 1, "tokens/s", "b"),
            Result("bound", "so at most", "min(reading, arithmetic)", 1, "tokens/s", "c"),
            Result("step", "a step takes at least", "1000 * B / bound", 1, "ms"),
            Result("meet", "the two meet at", "arithmetic / reading * B", 0, "texts"),
        ),
        (
            "arithmetic - reading",
            "Reading is the limit: fewer bits, or more texts in a step, make more tokens.",
            "Arithmetic is the limit: more texts in a step make each of them slower.",
        ),
        (0, 2, 4, 6, 9),
    ),
    "22_slider": Slider(
        "Drafts: tokens of a step, its time, and how many times as fast a text is written",
        (
            Control("k", "drafts in a step", 0, 16, 1, 4, "k"),
            Control("a", "share of drafts that are right", 0, 0.95, 0.05, 0.8, "a", digits=2),
            Control("c", "time to make one, in steps", 0, 0.5, 0.02, 0.1, "c", digits=2),
            Control("v", "time to verify one, in steps", 0, 1, 0.02, 0, "v", digits=2),
        ),
        (
            Result("tokens", "tokens of a step", "(1 - A**(K + 1)) / (1 - A)", 2, "", "c"),
            Result("time", "time of a step", "1 + K * (C + V)", 2, "plain steps", "b"),
            Result("gain", "times as fast", "tokens / time", 2, "", "a"),
        ),
        ("gain - 1", "Drafts do not slow this text down.", "These drafts cost more than they bring."),
        (0, 2, 4, 8, 16),
    ),
    "29_slider": Slider(
        "Memory of keys and values next to the memory of weights in 16 bits",
        (
            Control("t", "tokens of each text", 8, 20, 1, 13, "2**t"),
            TEXTS,
            Control("l", "layers", 8, 96, 1, 32, "l"),
            Control("k", "heads of keys and of values, of 128 numbers", 0, 6, 1, 3, "2**k"),
            Control("w", "bits of a number in a page", 4, 16, 4, 16, "w"),
            PARAMETERS,
        ),
        (
            Result("token", "one token", "2 * W / 8 * 128 * K * L / 1024", 0, "KiB"),
            Result("cache", "all texts", "token * T * B / 2**20", 1, "GiB", "a"),
            Result("weights", "weights", "2 * P * 10**9 / 2**30", 1, "GiB", "b"),
            Result("even", "as much as the weights from", "weights * 2**20 / (token * B)", 0, "tokens of each text"),
        ),
        (
            "weights - cache",
            "A step reads more weights than caches: more texts share that reading.",
            "A step reads more caches than weights, and more texts share nothing of it.",
        ),
        (8, 11, 13, 17, 20),
    ),
    "33_slider": Slider(
        "Experts of a layer: those in memory, those that a step reads, those that a token takes",
        (
            TEXTS,
            Control("g", "experts in a layer", 3, 9, 1, 7, "2**g"),
            Control("k", "experts of a token", 1, 8, 1, 8, "k"),
        ),
        (
            Result("memory", "in memory", "G", fill="b"),
            Result("read", "read in a step", "G * (1 - (1 - K / G)**B)", 1, "", "a"),
            Result("taken", "computed for a token", "K", fill="c"),
            Result("each", "tokens that share one", "B * K / read", 1),
        ),
        (
            "G / 2 - read",
            "Less than half of the experts is read: for reading, this is still a small model.",
            "More than half of the experts is read, nearly as of a dense model.",
        ),
        (0, 2, 4, 6, 9),
    ),
}


def main() -> None:
    for name, slider in SLIDERS.items():
        (FOLDER / f"{name}.html").write_text(slider.html(), encoding="utf-8")


if __name__ == "__main__":
    main()
