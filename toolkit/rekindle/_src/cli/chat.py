"""`rekindle chat`: an interactive conversation, whose prefix stays cached from turn to turn."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rekindle._src.cli.main import engine_options, sampling_options
from rekindle._src.session.opening import open_sync
from rekindle._src.session.session import Session

HELP = "/reset starts over · /undo drops the last turn · /stats shows the session · /quit or Ctrl-D leaves"


def run(arguments: argparse.Namespace) -> int:
    opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(opening)
    options = sampling_options(arguments)
    with open_sync(arguments.model, **engine_options(arguments)) as session:
        print(HELP, file=sys.stderr)
        while (line := _read()) is not None:
            match line.strip():
                case "":
                    continue
                case "/quit":
                    break
                case "/reset":
                    messages = list(opening)
                case "/undo":
                    messages = messages[:-2] if len(messages) > len(opening) else messages
                case "/stats":
                    print(session.stats(), file=sys.stderr)
                case text if text.startswith("/"):
                    print(HELP, file=sys.stderr)
                case text:
                    messages.append({"role": "user", "content": text})
                    messages.append({"role": "assistant", "content": _answer(session, messages, options)})
    return 0


def _read() -> str | None:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _answer(session: Session, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
    """Stream one answer; Ctrl-C ends it and keeps the text so far."""
    handle = session.chat(messages, **options)
    said = ""
    try:
        for delta in handle.stream_sync():
            said += delta.text
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        handle.cancel()
        print(" [interrupted]", end="")
    print()
    return said
