"""Seconds of the host until a GPU's first programs are ready, by XLA's own compiler, where there is no GPU.

    REKINDLE_COMPILERS=FOLDER python gpu_first_programs.py [--gpus t4 h100] [--shapes 135m 0.6b] [--forms parts whole]
    REKINDLE_COMPILERS=FOLDER python gpu_first_programs.py --each     every part by itself, and which ends cost what

A first text needs the program of its prompt and the one that decodes. Each row is a process of its own: it traces,
lowers and compiles both as a session does, in parts or as whole programs, with two workers. Processor seconds are those
of all threads and of ptxas, and hardly depend on what else runs on the machine; wall seconds do. Whole programs are
compiled without autotuning, which needs a device and comes on top of their time.
"""

from __future__ import annotations

import os
import resource
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import harness

PLUGIN = "--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir="
FORMS = ("parts", "whole")
QWEN3_1_7B = {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144}  # what it has other than 0.6B


@dataclass(frozen=True)
class Clock:
    """Seconds of the wall and of the processor since the process began, children included."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> Clock:
        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return cls(time.perf_counter(), own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime)

    def since(self, before: Clock) -> tuple[float, float]:
        return round(self.wall - before.wall, 2), round(self.processor - before.processor, 2)


def opened(stack: ExitStack, gpu: str, shape: str, layers: int, quantize: str | None) -> Any:
    """The programs of a shape in a GPU's default dtype, inside a target; the plugin is loaded, and has compiled."""
    import jax
    import jax.numpy as jnp

    from helpers import compilers
    from rekindle._src.bench.shapes import hf_config
    from rekindle._src.core.config import EngineConfig
    from rekindle._src.models.base import abstract_model
    from rekindle._src.models.registry import config_from_hf
    from rekindle._src.programs.programs import Programs
    from rekindle_kernels import deprecated, gpus, tuning

    capability = compilers.GPUS[gpu].capability
    tuning.compute_capability = lambda: capability
    stack.enter_context(compilers.target("gpu", gpu))
    stack.enter_context(deprecated.known())
    dtype = "bfloat16" if gpus.multiplies_bfloat16() else "float16"
    raw = {**hf_config("0.6b"), **QWEN3_1_7B} if shape == "1.7b" else hf_config(shape)
    config = config_from_hf({**raw, **({"num_hidden_layers": layers} if layers else {})})
    engine = EngineConfig(
        max_requests=16, max_model_len=4096, page_size=16, device_pages=4096, kv_dtype=dtype,
        max_tokens_per_step=512, host_memory=0, disk_memory=0,
    )  # fmt: skip
    programs = Programs(config, *abstract_model(config, dtype, quantize), engine)
    jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()
    return programs


def needed(programs: Any, tokens: int) -> list[Any]:
    """The program of a prompt, and the one that decodes."""
    from rekindle._src.programs.warming import first_needed

    steps = first_needed(programs, restoring=False)
    prompts = [key for key in steps if key.tokens]
    return [min(prompts, key=lambda key: (key.tokens < tokens, abs(key.tokens - tokens))), steps[1]]


def both(gpu: str, shape: str, layers: int, form: str, tokens: int, quantize: str | None) -> dict[str, Any]:
    """Make the two programs of a first text, as a session does."""
    from rekindle._src.programs.ledger import Form
    from rekindle._src.programs.warming import warm

    with ExitStack() as stack:
        programs = opened(stack, gpu, shape, layers, quantize)
        if form == "parts":
            programs.ledger.least = Form.PARTS
        keys = needed(programs, tokens)
        begin = Clock.now()
        warm(programs, keys, contexts=lambda: _target(gpu))
        wall, processor = Clock.now().since(begin)
        return {"wall": wall, "processor": processor, "compiled": programs.counts.compilations}


def _target(gpu: str) -> Any:
    from helpers import compilers

    return compilers.target("gpu", gpu)


def each(gpu: str, shape: str, layers: int, form: str, tokens: int, quantize: str | None) -> list[dict[str, Any]]:
    """Make each part by itself, or each whole program, with kernels counted."""
    from rekindle._src.programs.layered import compiled_with
    from rekindle._src.programs.recipes import compiler_options

    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        programs = opened(stack, gpu, shape, layers, quantize)
        parts = programs._layered
        for key in needed(programs, tokens):
            if form == "parts":
                made = [*parts._first(key), parts._closing(key, greedy=False)]
                jobs = [(part.name, lambda part=part: parts._traced(part).lower()) for part in made]
                options = programs.recipes.part_options
            else:
                jobs, options = [(key.name, lambda key=key: programs.compiler.build(key))], compiler_options("gpu")
            for name, build in jobs:
                begin = Clock.now()
                lowered = build()
                middle = Clock.now()
                text = compiled_with(lowered, options).as_text() or ""
                tracing, compiling = middle.since(begin), Clock.now().since(middle)
                kernels = text.count(" fusion(") + text.count(" custom-call(")
                rows.append({"name": name, "tracing": tracing, "compiling": compiling, "kernels": kernels})
    return rows


def main() -> int:
    options = harness.options(
        __doc__, gpus=["t4", "a100", "l4", "h100", "b200", "rtx5090"], shapes=["135m", "0.6b", "1.7b", "8b"],
        forms=list(FORMS), tokens=(128, "the prompt's"), layers=(0, "fewer than the shape has"), each=False,
        quantize=(str, "as in open()"),
    )  # fmt: skip
    from helpers import compilers

    root = compilers.folder("gpu")
    if root is None:
        raise SystemExit(compilers.FETCH)
    flags = f"{PLUGIN}{next(root.glob('nvidia/cu*'))}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    if options.each:
        harness.table("GPU", "shape", "program", "tracing, s (processor)", "compiling, s (processor)", "kernels")
    else:
        harness.table("GPU", "shape", "form", "processor, s", "wall, s", "compilations")
    for gpu in options.gpus:
        for shape in options.shapes:
            for form in options.forms:
                if options.each:
                    for row in harness.child(
                        each, gpu, shape, options.layers, form, options.tokens, options.quantize, **environment
                    ):
                        seconds = [f"{wall:.1f} ({own:.1f})" for wall, own in (row["tracing"], row["compiling"])]
                        print(f"| {gpu} | {shape} | {row['name']} | {' | '.join(seconds)} | {row['kernels']} |")
                    continue
                made = harness.child(
                    both, gpu, shape, options.layers, form, options.tokens, options.quantize, **environment
                )
                print(
                    f"| {gpu} | {shape} | {form} | {made['processor']:.1f} | {made['wall']:.1f} | {made['compiled']} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
