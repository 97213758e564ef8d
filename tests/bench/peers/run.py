"""rekindle beside llama.cpp, OpenVINO GenAI and transformers on this machine: the same weights, threads and requests.

    python tests/bench/peers/run.py [--shape 135m] [--bits 16 8] [--rounds 5] [--python peers=PATH] [--json FILE]

Run it with rekindle's Python; README.md in the folder above says what the others need. One engine works at a time,
each in a process of its own; the figures are medians over the rounds, ratios are medians of each round's own ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "toolkit"), str(HERE.parents[2] / "kernels")]

import table  # noqa: E402
from engine import ENGINES, Setting  # noqa: E402
from plans import WORKLOADS, Figures  # noqa: E402
from process import EngineFailed  # noqa: E402
from rounds import Race, say  # noqa: E402

from rekindle._src.bench import fresh, shapes  # noqa: E402
from rekindle._src.bench.folder import write_checkpoint  # noqa: E402


def main() -> None:
    options = parse()
    options.work.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"rounds": options.rounds, "threads": options.threads, "races": []}
    with (options.work / "log.txt").open("a") as log:
        for shape in options.shape:
            for bits in options.bits:
                report["races"].append(race(shape, bits, options, log))
                print(table.text(report["races"][-1]), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(report, indent=1))
    if options.plot:
        table.plot(report, options.plot)


def race(shape: str, bits: int, options: argparse.Namespace, log: Any) -> dict[str, Any]:
    say(f"{shape}, {bits} bits; logs are in {log.name}")
    folder = write_checkpoint(shape, options.work / shape)
    settings = {}
    for name in options.engines:
        scratch = options.work / f"{shape}-{name}"
        settings[name] = Setting(str(folder), bits == 8, options.threads, str(scratch), str(scratch / "cache"))
    one = Race(settings, options.pythons, shapes.SHAPES[shape]["vocab_size"], log, restart)
    one.run(options.workloads, options.rounds)
    return table.summary(one, shape=shape, bits=bits)


def restart(setting: Setting) -> Figures:
    """W8, with the programs that the engine's own process has compiled."""
    precision = {"dtype": "bfloat16", "quantize": "int8" if setting.eight_bit else None}
    try:
        return fresh.restart(setting.folder, precision, programs=Path(setting.cache))
    except (OSError, RuntimeError) as error:
        raise EngineFailed(str(error)) from error


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["135m"], choices=list(shapes.SHAPES))
    parser.add_argument("--bits", nargs="+", type=int, default=[16, 8], choices=[16, 8])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument(
        "--workloads", nargs="+", default=list(WORKLOADS), help="such as W1 W3 'W4 primed'; default all"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted ones; another one before them warms up")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH",
        help="the Python of an engine's virtual environment; NAME is an engine, or 'peers' for all but rekindle",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "rekindle-peers", help="weights, logs"
    )
    parser.add_argument("--json", type=Path, help="where every round's figures go, beside the medians and ratios")
    parser.add_argument("--plot", type=Path, help="where a picture of the ratios goes; needs matplotlib")
    options = parser.parse_args()
    unknown = sorted({*options.workloads} - {*WORKLOADS})
    if unknown:
        parser.error(f"unknown workloads {unknown}; known are {', '.join(WORKLOADS)}")
    given = dict(one.split("=", 1) for one in options.python)
    default = {"rekindle": sys.executable}
    options.pythons = {
        name: given.get(name) or default.get(name) or given.get("peers", sys.executable) for name in ENGINES
    }
    return options


if __name__ == "__main__":
    main()
