"""`rekindle rm`: remove what rekindle has made of models."""

from __future__ import annotations

import argparse

from rekindle._src.cli.usage import Parser

NEEDS = ("rekindle._src.cli.local",)


def options(command: Parser) -> None:
    command.add("names", "models as ls names them", nargs="+", metavar="NAME")
    command.model_arguments = ("names",)
    command.add("--cache-dir", "the cache directory")
    command.flag("--yes", "remove without asking")


def run(arguments: argparse.Namespace) -> int:
    from rekindle._src.cli import local

    return local.rm(arguments)
