"""`rekindle export`: write a checkpoint as a GGUF file or as a folder of safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path

from rekindle._src.cli import usage
from rekindle._src.cli.usage import Parser
from rekindle._src.core.activity import Progress
from rekindle.errors import ConfigError

NEEDS = ("rekindle._src.opening.exporting",)
TYPES = ("auto", "f32", "f16", "bf16", "q8_0", "q4_0")


def options(command: Parser) -> None:
    command.add("model", "a folder, a GGUF file, a hub id, a name of `rekindle ls`, or 'tiny'")
    command.add("out", "a name that ends in .gguf, or a folder's name; neither may exist", type=Path)
    matrices = "of matrices; q8_0 and q4_0 for GGUF only (default auto: as they are)"
    command.add("--type", matrices, default="auto", choices=TYPES)
    command.checks += _check, usage.check_models


def _check(arguments: argparse.Namespace) -> None:
    if arguments.out.exists():
        raise ConfigError("out", str(arguments.out), "exists already", "Remove it, or pass another name")


def run(arguments: argparse.Namespace) -> int:
    """Write a checkpoint as a GGUF file or as a folder of safetensors."""
    from rekindle._src.opening.exporting import export

    target = export(arguments.model, arguments.out, type=arguments.type, progress=Progress("exporting"))
    size = sum(path.stat().st_size for path in (target.rglob("*") if target.is_dir() else [target]))
    print(f"{target} ({size / 1e6:,.0f} MB)")
    return 0
