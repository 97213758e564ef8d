"""`rekindle ls`: list the models on this machine."""

from __future__ import annotations

import argparse

from rekindle._src.cli.usage import Parser

NEEDS = ("rekindle._src.cli.local",)


def options(command: Parser) -> None:
    command.add("begin", "list only names with this beginning, such as ollama:", nargs="?", default="", metavar="NAME")
    command.model_arguments = ("begin",)
    command.flag("--names", "only the names, without a look into the models")
    command.add("--cache-dir", "the cache directory; its kept weights are listed too")
    command.flag("--json", "print them as JSON")


def run(arguments: argparse.Namespace) -> int:
    from rekindle._src.cli import local

    return local.ls(arguments)
