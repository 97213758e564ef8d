"""`rekindle cache`: list, remove, prune or clear the cache on disk."""

from __future__ import annotations

import argparse

from rekindle._src.cli.usage import Parser
from rekindle._src.core.options import Size
from rekindle.errors import ConfigError

NEEDS = ("rekindle._src.cli.cache",)


def options(command: Parser) -> None:
    command.add("action", None, choices=("ls", "rm", "prune", "clear"))
    command.add("names", "rm: models as ls names them, or single entries as ls --all does", nargs="*", metavar="NAME")
    command.add("--cache-dir", "the cache directory")
    command.add("--to", "prune: keep at most this much, newest first (default 4GiB)", default="4GiB")
    command.flag("--yes", "rm, prune, clear: remove without asking")
    command.flag("--all", "ls: a line for every entry instead of one for each model")
    command.flag("--json", "ls: print the entries as JSON")
    command.checks += _check_size, _check_names


def _check_size(arguments: argparse.Namespace) -> None:
    """Replace the size that `cache prune` keeps by its bytes."""
    arguments.to = Size()("--to", arguments.to, ConfigError)


def _check_names(arguments: argparse.Namespace) -> None:
    """Check that `cache rm` has names, and no other action has."""
    if arguments.action == "rm" and not arguments.names:
        raise ConfigError("NAME", "(none)", "is missing", "Write rekindle cache rm NAME, as rekindle cache ls names it")
    if arguments.action != "rm" and arguments.names:
        raise ConfigError("NAME", arguments.names[0], "is for rm", f"Write rekindle cache rm {arguments.names[0]}")


def run(arguments: argparse.Namespace) -> int:
    from rekindle._src.cli import cache

    return cache.run(arguments)
