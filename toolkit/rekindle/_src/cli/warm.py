"""`rekindle warm MODEL`: compile a model's programs into the store, so that the first session only loads them.

No weights are read, since programs depend only on their shapes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

import jax

from rekindle import tiny
from rekindle._src.cli.usage import engine_options
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.mesh_shape import checked_mesh
from rekindle._src.models.loading.checkpoint import describe
from rekindle._src.models.loading.hub import readable_name
from rekindle._src.models.placement import placement_of
from rekindle._src.programs.warming import Warmed, warm
from rekindle._src.session.builder import stored_programs
from rekindle._src.session.resolve import resolve
from rekindle.errors import ConfigError
from rekindle_kernels import build_kernels


def run(arguments: argparse.Namespace) -> int:
    options = EngineConfig.of(engine_options(arguments))
    if options.processes > 1:
        fix = "Open the session once with precompile='all'; each process then stores its own"
        raise ConfigError("--processes", options.processes, "can't be warmed by one of them", fix)
    if arguments.device_kind is not None:
        check_kind(arguments.device_kind)
    model = describe(
        tiny.folder() if arguments.model == "tiny" else arguments.model,
        dtype=options.dtype,
        quantize=options.quantize,
        divided=options.mesh is not None,
        device_memory=options.device_memory,
    )
    placement = placement_of(checked_mesh(options.mesh), model.graph)
    shapes, weight_bytes = placement.shapes(model.shapes), placement.bytes_per_device(model.shapes)
    config = resolve(options, model.found.config, weight_bytes=weight_bytes, placement=placement)
    programs = stored_programs(
        model.found.config, model.graph, shapes, config, placement=placement, name=readable_name(model.found.folder)
    )
    start = time.perf_counter()
    kernels = build_kernels(programs.kernels())
    if kernels is not None:
        kernels.wait()
    warm(programs, progress=None if arguments.json else show)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(record) for record in programs.manifest()], indent=1))
    else:
        print(f"{len(programs.manifest())} programs are ready after {time.perf_counter() - start:.2f} s")
    return 0


def check_kind(kind: str) -> None:
    """Raise ConfigError unless this machine's device is of this kind: programs can't be cross-compiled."""
    device_kind = jax.local_devices()[0].device_kind
    if kind.casefold() != device_kind.casefold():
        raise ConfigError(
            "--device-kind",
            kind,
            f"needs a device of that kind, and this machine has {device_kind!r}",
            "Run this on such a machine and copy its cache directory's `programs` folder",
        )


def show(warmed: Warmed) -> None:
    program = warmed.program
    print(
        f"[{warmed.done:2}/{warmed.total}] {program.name:8} {program.origin} in {program.seconds:.2f} s",
        file=sys.stderr,
        flush=True,
    )
