"""`rekindle generate`: continue a prompt, token by token."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from rekindle._src.cli import usage
from rekindle._src.cli.controls import for_stream
from rekindle._src.cli.usage import Parser, engine_options, sampling_options
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.core.records import Completion

NEEDS = ("rekindle._src.session.opening",)


def options(command: Parser) -> None:
    command.add("prompt", "the prompt; read from standard input if it is absent or '-'", nargs="?")
    usage.add_model(command)
    usage.add_sampling(command)
    command.flag("--json", "print one JSON object at the end")
    command.checks.append(_check)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.prompt is None and sys.stdin.isatty():
        raise InvalidRequest("prompt", "(none)", "is missing", 'Write rekindle generate "Once upon a time"')
    if arguments.prompt == "":
        raise InvalidRequest("prompt", '""', "has no tokens", "Write at least one character")


def run(arguments: argparse.Namespace) -> int:
    """Print the continuation of a prompt while it is generated."""
    from rekindle._src.session.opening import open_sync

    prompt = arguments.prompt
    piped = prompt is None or prompt == "-"
    if piped:
        prompt = sys.stdin.read()
    if not prompt:  # said before a model is opened
        raise InvalidRequest("prompt", prompt, "has no text", 'Pass one: rekindle generate "Once upon a time"')
    beginning = "" if piped else prompt  # a pipe has its prompt: it is not repeated
    with open_sync(arguments.model, **engine_options(arguments)) as session:
        handle = session.submit(prompt, **sampling_options(arguments))
        if arguments.json:
            print(for_stream(json.dumps(_as_json(handle.result_sync()), ensure_ascii=False), sys.stdout))
            return 0
        started = False
        try:
            for delta in handle.stream_sync():
                if not started:  # the progress bar uses the line until the first text
                    print(beginning, end="", flush=True)
                    started = True
                print(for_stream(delta.text, sys.stdout), end="", flush=True)
            print("" if started else beginning)
        except KeyboardInterrupt:
            handle.cancel()
            print()
            print("[interrupted]", file=sys.stderr)
            return 130
        done = handle.result_sync()
        compiling = f", {done.timings.compiling:.1f} s of it compiling" if done.timings.compiling >= 0.05 else ""
        print(
            f"[{done.usage.prompt_tokens} prompt + {done.usage.completion_tokens} new tokens, first after "
            f"{done.timings.first_token * 1e3:.0f} ms{compiling}, then "
            f"{done.timings.decode_rate(done.usage.completion_tokens):.0f} tokens/s, ended by {done.finish_reason}]",
            file=sys.stderr,
        )
        if (found := done.repetition) is not None:
            print(f"[the text {found}: --temperature 0.8 or --repetition-penalty 1.1 helps]", file=sys.stderr)
    return 0


_TIMES = ("queued", "first_token", "total", "compiling")


def _as_json(completion: Completion) -> dict[str, object]:
    return {
        "prompt": completion.prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": str(completion.finish_reason),
        "seed": completion.seed,
        "usage": dataclasses.asdict(completion.usage),
        "timings": {name: getattr(completion.timings, name) for name in _TIMES},
    }
