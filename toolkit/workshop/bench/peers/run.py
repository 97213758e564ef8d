"""rekindle, llama.cpp, OpenVINO GenAI and transformers compared on this machine: same weights, threads and requests.

    python peers/run.py [--shape 135m] [--bits 16 8] [--rounds 5] [--python peers=PATH] [--json FILE]
    python peers/run.py --shape 360m --gguf q4_0 [--llama-server PROGRAM]
    python peers/run.py --file model-Q4_K_M.gguf

Run it with rekindle's Python; README.md in the folder above says what the others need. One engine works at a time,
each in a process of its own; the figures are medians over the rounds, ratios are medians of each round's own ratio.
With --gguf and --file, everybody opens the very same file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parents[3] / name) for name in ("toolkit", "kernels"))]

from engine import ENGINES, QUANTIZE, Setting  # noqa: E402
from plans import WORKLOADS, Figures  # noqa: E402
from process import EngineFailed  # noqa: E402
from rounds import Race, plot, say, summary, text  # noqa: E402

from rekindle._src.bench import shapes, workloads  # noqa: E402
from rekindle._src.bench.shapes import write_checkpoint  # noqa: E402
from rekindle._src.models.loading.gguf.header import read_header  # noqa: E402
from rekindle.models import export  # noqa: E402

ALONE = {"W1", "W2"}  # workloads of one request at a time
KINDS = {16: "bf16", 8: "q8_0", 4: "q4_0"}  # of GGUF files, by the bits of a weight


def main() -> None:
    options = parse()
    options.work.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"rounds": options.rounds, "threads": options.threads, "races": []}
    with (options.work / "log.txt").open("a") as log:
        races = [
            functools.partial(race, shape, precision, options, log)
            for shape in options.shape
            for precision in (*options.bits, *options.gguf)
        ]
        races += [functools.partial(race_file, file, options, log) for file in options.file]
        for one in races:
            report["races"].append(one())
            print(text(report["races"][-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1))
    if options.plot:
        plot(report, options.plot)


def race(shape: str, precision: int | str, options: argparse.Namespace, log: Any) -> dict[str, Any]:
    """In so many bits, or from a GGUF file of a kind."""
    say(f"{shape}, {precision} bits; logs are in {log.name}" if isinstance(precision, int) else f"{shape}, {precision}")
    folder = write_checkpoint(shape, options.work / shape)
    about: dict[str, Any] = {"shape": shape, "bits": precision}
    file = ""
    if isinstance(precision, str):
        written = gguf(folder, precision, options, log)
        about |= {"bits": None, "file": written.name, "file_mb": written.stat().st_size / 1e6}
        file = str(written)
    bits = precision if isinstance(precision, int) else 16  # a file has its own
    return run(shape, Setting(str(folder), bits, options.threads, "", "", file=file), about, options, log)


def gguf(folder: Path, kind: str, options: argparse.Namespace, log: Any) -> Path:
    """A file of the folder's weights, unless it is there; llama.cpp's own quantiser makes its mixture Q4_K_M."""
    file = options.work / f"{folder.name}-{kind}.gguf"
    if not file.exists() and kind == "q4_k_m":
        wide, made = gguf(folder, "bf16", options, log), file.with_suffix(".part")
        command = [options.llama_server and options.llama_server.with_name("llama-quantize"), wide, made, "Q4_K_M"]
        if options.llama_server is None:
            code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import with_llama_cpp as api; "
            code += "api.quantise(*sys.argv[1:], 15)"
            command = [options.pythons["llama_cpp"], "-c", code, wide, made]
        subprocess.run(command, stdout=log, stderr=log, check=True)
        made.rename(file)
    return file if file.exists() else export(folder, file, type=kind)


def race_file(file: Path, options: argparse.Namespace, log: Any) -> dict[str, Any]:
    """Over a GGUF file as it is, with trained weights or without."""
    say(f"{file.name}; logs are in {log.name}")
    vocab_size = len(read_header(file).metadata.texts("tokenizer.ggml.tokens"))
    about = {"shape": None, "bits": None, "file": file.name, "file_mb": file.stat().st_size / 1e6}
    setting = Setting(str(file), 16, options.threads, "", "", file=str(file))
    return run(file.stem, setting, about, options, log, vocab_size)


def run(
    shape: str, setting: Setting, about: dict[str, Any], options: argparse.Namespace, log: Any, vocab_size: int = 0
) -> dict[str, Any]:
    """All engines with the same weights, each with a folder of its own."""
    settings = {
        name: setting_of(name, setting, options.work / f"{shape}-{name}", options, log) for name in options.engines
    }
    one = Race(settings, options.pythons, vocab_size or shapes.SHAPES[shape]["vocab_size"], log, restart)
    one.run(options.workloads, options.rounds)
    return summary(one, **about)


def setting_of(name: str, setting: Setting, scratch: Path, options: argparse.Namespace, log: Any) -> Setting:
    """What one engine opens, and where it keeps its files."""
    program = str(options.llama_server or "")
    own = dataclasses.replace(
        setting, scratch=str(scratch), cache=str(scratch / "cache"), program=program,
        requests=1 if {*options.workloads} <= ALONE else setting.requests,
    )  # fmt: skip
    if name == "rekindle_int8":  # for comparison with rekindle on a file: the same weights in fewer bits
        return dataclasses.replace(own, file="", bits=8)
    if name.startswith("llama") and not setting.file:
        return dataclasses.replace(own, file=str(gguf(Path(setting.folder), KINDS[setting.bits], options, log)))
    return own


def restart(setting: Setting) -> Figures:
    """W8, with the programs that the engine's own process has compiled."""
    own = {"dtype": "bfloat16", "quantize": QUANTIZE[setting.bits]}
    precision = {} if setting.file else own
    try:
        return workloads.restart(setting.file or setting.folder, precision, programs=Path(setting.cache))
    except (OSError, RuntimeError) as error:
        raise EngineFailed(str(error)) from error


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(shapes.SHAPES), help="default 135m, and none with --file")
    parser.add_argument("--bits", nargs="*", type=int, choices=[16, 8, 4], help="default 16 8, and none with --gguf")
    parser.add_argument("--file", nargs="+", type=Path, default=[], help="GGUF files that everybody opens")
    parser.add_argument(
        "--gguf", nargs="+", default=[], choices=("q4_0", "q8_0", "q4_k_m"), help="files of shapes, for everybody"
    )
    parser.add_argument(
        "--llama-server", type=Path, metavar="PROGRAM", help="llama.cpp's own, for who lacks the package for Python"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="default all but rekindle_int8")
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
    parser.add_argument(
        "--json", type=Path, help="where every round's figures go, in addition to the medians and ratios"
    )
    parser.add_argument("--plot", type=Path, help="where a picture of the ratios goes; needs matplotlib")
    options = parser.parse_args()
    if options.shape is None:
        options.shape = [] if options.file else ["135m"]
    if options.bits is None:
        options.bits = [] if options.gguf else [16, 8]
    if options.engines is None:
        without = {"rekindle_int8", "llama_cpp" if options.llama_server else "llama_server"}
        options.engines = [name for name in ENGINES if name not in without]
    if "llama_server" in options.engines and options.llama_server is None:
        parser.error("llama_server takes part with --llama-server PROGRAM")
    unknown = sorted({*options.workloads} - {*WORKLOADS})
    if unknown:
        parser.error(f"unknown workloads {unknown}; known are {', '.join(WORKLOADS)}")
    given = dict(one.split("=", 1) for one in options.python)
    default = dict.fromkeys(("rekindle", "rekindle_int8", "llama_server"), sys.executable)
    options.pythons = {
        name: given.get(name) or default.get(name) or given.get("peers", sys.executable) for name in ENGINES
    }
    return options


if __name__ == "__main__":
    main()
