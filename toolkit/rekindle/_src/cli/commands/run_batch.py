"""`rekindle run-batch`: answer a file of requests in OpenAI's batch format, without a server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle._src.cli import usage
from rekindle._src.cli.usage import Parser, engine_options

if TYPE_CHECKING:
    from rekindle._src.serve.batch import BatchRun

NEEDS = ("rekindle._src.serve.batch",)


def options(command: Parser) -> None:
    command.add("input", "a JSON object with custom_id, method, url and body on each line", type=Path)
    command.add("output", "gets a line for each; called again after a kill, it goes on", type=Path)
    command.add("--name", "the model's name in the requests; by default as --model")
    command.flag("--strict", "refuse unknown fields instead of ignoring them")
    command.checks.append(lambda arguments: usage.check_file("input", arguments.input))
    usage.add_model(command)


def run(arguments: argparse.Namespace) -> int:
    """Answer a file of requests in OpenAI's batch format, without a server."""
    import anyio

    from rekindle._src.serve.batch import BatchRun
    from rekindle._src.session.opening import open

    async def answered() -> BatchRun:
        async with open(arguments.model, **engine_options(arguments)) as session:
            batch = BatchRun(
                session, arguments.input, arguments.output, name=arguments.name, strict=arguments.strict
            )  # fmt: skip
            await batch.run()
            return batch

    batch = anyio.run(answered)
    print(f"{batch.answered:,} lines answered, {batch.failed:,} with an error; {batch.resumed:,} were answered before")
    if batch.failed:
        print(f"the errors are in {arguments.output}", file=sys.stderr)
    return 0
