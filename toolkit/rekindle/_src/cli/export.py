"""`rekindle export MODEL OUT`: write a checkpoint as a GGUF file or as a folder of safetensors."""

from __future__ import annotations

import argparse

from rekindle._src.core.activity import Progress
from rekindle._src.session.exporting import export


def run(arguments: argparse.Namespace) -> int:
    target = export(arguments.model, arguments.out, type=arguments.type, progress=Progress("exporting"))
    size = sum(path.stat().st_size for path in (target.rglob("*") if target.is_dir() else [target]))
    print(f"{target} ({size / 1e6:,.0f} MB)")
    return 0
