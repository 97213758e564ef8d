"""`rekindle chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse

from rekindle._src.cli import usage
from rekindle._src.cli.usage import Parser
from rekindle._src.core.sampling import ANSWER_TOKENS

NEEDS = ("rekindle._src.cli.chat",)


def options(command: Parser) -> None:
    usage.add_model(command)
    usage.add_sampling(command, max_tokens=ANSWER_TOKENS)
    command.add("--system", "a system message that opens the conversation")
    overflow = "when the context is full: go on without the oldest turns, or refuse and ask (default: %(default)s)"
    command.add("--overflow", overflow, choices=("drop", "refuse"), default="drop")


def run(arguments: argparse.Namespace) -> int:
    from rekindle._src.cli import chat

    return chat.run(arguments)
