"""`rekindle pull`: download a model from the Hub, or go on with a download."""

from __future__ import annotations

import argparse

from rekindle._src.cli.usage import Parser, check_model
from rekindle.errors import ConfigError

NEEDS = ("rekindle._src.cli.local",)


def options(command: Parser) -> None:
    command.add("model", "owner/name, owner/name/file.gguf, each with @revision if it is not the main one")
    command.model_arguments = ()  # the model to download
    command.checks.append(_check)


def _check(arguments: argparse.Namespace) -> None:
    """Check that the model to pull is a hub id, and that the hub's package is there."""
    from rekindle._src.models.loading.hub import EMBEDDED, hub_id
    from rekindle._src.models.loading.stores.known import store_of

    store = store_of(arguments.model)
    if store is not None and store.PREFIX != "hub":
        problem = f"is in {store.TITLE}, which its own tool fills"
        raise ConfigError("model", arguments.model, problem, "Pass a hub id such as owner/name")
    arguments.model = arguments.model.removeprefix("hub:")
    if arguments.model in EMBEDDED or hub_id(arguments.model) is None:
        raise ConfigError("model", arguments.model, "is on this machine", "Pass a hub id such as owner/name")
    check_model(arguments.model)


def run(arguments: argparse.Namespace) -> int:
    from rekindle._src.cli import local

    return local.pull(arguments)
