"""`rekindle bench`: the workloads on this machine, as medians, beside what its memory and arithmetic allow."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

import rekindle
from rekindle.bench import workloads
from rekindle.bench.shapes import SHAPES, random_shape
from rekindle.cli.main import engine_options
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle.models.base import LoadedModel


def run(arguments: argparse.Namespace) -> int:
    names = [name.strip().upper() for name in arguments.workloads.split(",") if name.strip()]
    for name in names:
        if name not in workloads.WORKLOADS:
            known = ", ".join(workloads.WORKLOADS)
            raise ConfigError("--workloads", name, "is not known", f"Use some of {known}")
    report = measure(arguments.model, names, arguments.repeat, engine_options(arguments))
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 0


def measure(model: str, names: list[str], repeat: int, options: dict[str, Any]) -> dict[str, Any]:
    """Medians of `repeat` runs of each workload, every one in a warm session."""
    from rekindle.bench import limits

    loaded: LoadedModel | str = model
    if model.lower() in SHAPES and not Path(model).exists():
        dtype = options.get("dtype", "auto")
        loaded = random_shape(
            model.lower(), dtype="bfloat16" if dtype == "auto" else dtype, quantize=options.get("quantize")
        )
    report: dict[str, Any] = {"model": model, **options, "limits": dataclasses.asdict(limits.measure())}
    for name in names:
        _say(f"{name} …")
        report[name] = anyio.run(_workload, loaded, name, repeat, options)
    return report


async def _workload(model: LoadedModel | str, name: str, repeat: int, options: dict[str, Any]) -> dict[str, float]:
    needed = {
        "max_model_len": max(workloads.LENGTHS.get(name, 0), workloads.MODEL_LEN),
        "max_requests": workloads.REQUESTS.get(name, 2),
    }
    if model == "tiny":
        needed["max_model_len"] = min(needed["max_model_len"], 1024)
    async with rekindle.open(model, **{"precompile": "all", "quiet": True, **needed, **options}) as session:
        prompts = workloads.Prompts(session.tokenizer.vocab_size if model == "tiny" else vocab_size(model))
        runs = [await workloads.WORKLOADS[name](session, prompts) for _ in range(repeat + 1)][1:]
    return {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}


def vocab_size(model: LoadedModel | str) -> int:
    """Of a model in memory; a folder's prompts are drawn from the ids that every vocabulary has."""
    return 1000 if isinstance(model, str) else model.config.vocab_size


def show(report: dict[str, Any]) -> None:
    limits = report["limits"]
    print(
        f"{report['model']}: this machine reads {limits['read_gb_per_s']:.0f} GB/s and multiplies "
        f"{limits['bf16_gflop_per_s']:.0f} (bfloat16), {limits['f32_gflop_per_s']:.0f} (float32) GFLOP/s"
    )
    for name, figures in report.items():
        if name.startswith("W"):
            print(f"{name}  " + "  ".join(f"{figure} {value:,.1f}" for figure, value in figures.items()))


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
