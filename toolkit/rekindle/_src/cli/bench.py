"""`rekindle bench`: medians of the workloads on this machine, compared with its memory and arithmetic limits."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from rekindle._src.bench import workloads
from rekindle._src.bench.shapes import hf_config, is_shape, random_shape, write_checkpoint
from rekindle._src.cli.usage import engine_options
from rekindle._src.core.config import cache_folder
from rekindle._src.models.loading.hub import EMBEDDED
from rekindle._src.session import opening
from rekindle.errors import RekindleError

if TYPE_CHECKING:
    from rekindle._src.bench.limits import MachineLimits, Work
    from rekindle._src.models.base import LoadedModel
    from rekindle._src.session.session import Session


def run(arguments: argparse.Namespace, names: list[str]) -> int:
    """Measure the workloads with these names, and print their figures."""
    report = measure(arguments.model, names, arguments.repeat, engine_options(arguments))
    print(json.dumps(report, indent=1)) if arguments.json else show(report)
    return 0


def measure(model: str, names: list[str], repeat: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return medians of `repeat` runs of each workload: in a warm session, or for W5 and W8 in new processes."""
    from rekindle._src.bench import limits

    options = {"dtype": "bfloat16", **options} if is_shape(model) else options
    say("limits …")
    machine = limits.measure()
    report: dict[str, Any] = {"model": model, **options, "limits": dataclasses.asdict(machine)}
    loaded = loaded_model(model, options)
    work = _work(model, options)
    for name in names:
        say(f"{name} …")
        if name in workloads.FRESH:
            report[name] = _fresh(model, name, repeat, options)
        else:
            report[name] = anyio.run(_workload, loaded, name, repeat, options)
            report[name] |= shares(name, report[name], work, machine, options)
    return report


def shares(
    name: str, figures: dict[str, float], work: Work, limits: MachineLimits, options: dict[str, Any]
) -> dict[str, float]:
    """Return the share of the machine's limit that a workload reaches. Memory reads bound W1, and products bound W2."""
    if name == "W1":
        return {"share_of_read": work.decode_bytes * figures["decode_tok_s"] / (limits.read_gb_per_s * 1e9)}
    if name == "W2":
        rate = limits.product(options.get("dtype", "auto"), options.get("quantize"))
        return {"share_of_product": work.prefill_flop * figures["prefill_tok_s"] / (rate * 1e9)}
    return {}


async def _workload(model: LoadedModel | str, name: str, repeat: int, options: dict[str, Any]) -> dict[str, float]:
    from rekindle_kernels import current_platform

    # A GPU's compiler measures alternatives: all programs of a session take it many minutes, a workload's programs one.
    # The first run makes these in parts.
    precompile = "all" if current_platform() == "cpu" else "lazy"
    options = {"precompile": precompile, "quiet": True, **needed(model, name, options), **options}
    async with opening.open(model, **options) as session:
        prompts = workloads.RandomPrompts(session.tokenizer.vocab_size if model in EMBEDDED else vocab_size(model))
        workload = functools.partial(workloads.WORKLOADS[name], session, prompts)
        if options["precompile"] != "all":
            await workload()
            await workloads.whole_programs(session)
        runs = await timed_runs(session, workload, repeat)
        stats = session.stats()
    figures = _medians(runs)
    if stats.drafted_tokens:
        figures["guessed_share"] = stats.accepted_tokens / stats.generated_tokens
    return figures


COMPILING = 6  # runs at most that are left out because a program was compiled in them


async def timed_runs(
    session: Session, workload: Callable[[], Awaitable[dict[str, float]]], repeat: int
) -> list[dict[str, float]]:
    """Return the figures of `repeat` runs without compilation, after a first run that warms the session up."""
    await workload()
    runs: list[dict[str, float]] = []
    for _ in range(repeat + COMPILING):
        before = session.stats().compilations
        figures = await workload()
        if session.stats().compilations == before:
            runs.append(figures)
        if len(runs) == repeat:
            return runs
    raise RekindleError(f"programs were still compiled after {repeat + COMPILING} runs. Use precompile='all'")


def needed(model: LoadedModel | str, name: str, options: dict[str, Any]) -> dict[str, int]:
    """Return the session sizes that a workload needs."""
    length = max(workloads.LENGTHS.get(name, 0), workloads.MODEL_LEN)
    requests = workloads.REQUESTS.get(name, 2)
    return {
        "max_model_len": min(length, 1024) if model in EMBEDDED else length,
        "max_requests": max(requests, options.get("prompt_lookup", 0) + 1),  # each draft takes a row
    }


def _fresh(model: str, name: str, repeat: int, options: dict[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        source = str(write_checkpoint(model.lower(), Path(folder) / "model")) if is_shape(model) else model
        if name == "W5":
            measure_once: Callable[..., dict[str, float]] = workloads.first_token
        else:
            limit = {"max_model_len": 1024} if model in EMBEDDED else {}
            options = {**limit, **options}
            measure_once = functools.partial(workloads.restart, programs=cache_folder(options.get("cache_dir")))
        try:
            return _medians([measure_once(source, options) for _ in range(repeat)])
        except RuntimeError as error:
            raise RekindleError(f"{name} failed: {error}. Its output above says why") from error


def loaded_model(model: str, options: dict[str, Any]) -> LoadedModel | str:
    """Return a model of random weights in a named shape; other models are opened by their names."""
    if not is_shape(model):
        return model
    dtype = options.get("dtype", "auto")
    dtype = "bfloat16" if dtype == "auto" else dtype
    return random_shape(model.lower(), dtype=dtype, quantize=options.get("quantize"))


def _work(model: str, options: dict[str, Any]) -> Work:
    """Return the cost of the model's weights, computed from their shapes."""
    from rekindle import tiny
    from rekindle._src.bench.limits import Work
    from rekindle._src.models.base import abstract_model
    from rekindle._src.models.loading.checkpoint import WeightForm, describe
    from rekindle._src.models.precision import resolve_dtype
    from rekindle._src.models.registry import config_from_hf

    dtype, quantize = options.get("dtype", "auto"), options.get("quantize")
    if is_shape(model):
        config = config_from_hf(hf_config(model.lower()))
        return Work.of(*abstract_model(config, resolve_dtype(dtype, config), quantize))
    described = describe(tiny.located(model), WeightForm.of(dtype, quantize))
    return Work.of(described.graph, described.shapes)


def vocab_size(model: LoadedModel | str) -> int:
    """Return the vocabulary size that prompts are drawn from; for a folder, one that every vocabulary has."""
    return 1000 if isinstance(model, str) else model.config.vocab_size


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}


def show(report: dict[str, Any]) -> None:
    limits = report["limits"]
    print(
        f"{report['model']}: this machine reads {limits['read_gb_per_s']:.0f} GB/s and multiplies "
        f"{limits['bf16_gflop_per_s']:.0f} (bfloat16), {limits['f32_gflop_per_s']:.0f} (float32), "
        f"{limits['int8_gflop_per_s']:.0f} (int8) GFLOP/s"
    )
    for name, figures in report.items():
        if name.startswith("W"):
            print(f"{name}  " + "  ".join(f"{figure} {_number(figure, value)}" for figure, value in figures.items()))


def _number(figure: str, value: float) -> str:
    if "share" in figure:
        return f"{value:.1%}" if figure.startswith("idle") else f"{value:.0%}"
    return f"{value:,.2f}" if figure.endswith("_s") and not figure.endswith("tok_s") else f"{value:,.1f}"


def say(text: str) -> None:
    """Print progress, at a terminal alone."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
