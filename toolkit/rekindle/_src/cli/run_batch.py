"""`rekindle run-batch`: answer a file of requests in OpenAI's batch format, without a server."""

from __future__ import annotations

import argparse
import sys

import anyio

from rekindle._src.cli.usage import engine_options
from rekindle._src.serve.batch import BatchRun
from rekindle._src.session.opening import open


def run(arguments: argparse.Namespace) -> int:
    return anyio.run(_run, arguments)


async def _run(arguments: argparse.Namespace) -> int:
    async with open(arguments.model, **engine_options(arguments)) as session:
        batch = BatchRun(
            session, arguments.input, arguments.output, name=arguments.name, strict=arguments.strict
        )  # fmt: skip
        await batch.run()
    print(f"{batch.answered:,} lines answered, {batch.failed:,} with an error; {batch.resumed:,} were answered before")
    if batch.failed:
        print(f"the errors are in {arguments.output}", file=sys.stderr)
    return 0
