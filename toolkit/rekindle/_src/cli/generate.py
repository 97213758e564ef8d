"""`rekindle generate`: print the continuation of a prompt while it is generated."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from rekindle._src.cli.usage import engine_options, sampling_options
from rekindle._src.core.records import Completion
from rekindle._src.session.opening import open_sync


def run(arguments: argparse.Namespace) -> int:
    prompt = arguments.prompt
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
    with open_sync(arguments.model, **engine_options(arguments)) as session:
        handle = session.submit(prompt, **sampling_options(arguments))
        if arguments.json:
            completion = handle.result_sync()
            print(json.dumps(as_json(completion), ensure_ascii=False))
            return 0
        interrupted = started = False
        try:
            for delta in handle.stream_sync():
                if not started:  # the progress bar uses the line until the first text
                    print(prompt, end="", flush=True)
                    started = True
                print(delta.text, end="", flush=True)
            if not started:
                print(prompt, end="", flush=True)
        except KeyboardInterrupt:
            interrupted = True
            handle.cancel()
        print()
        if interrupted:
            print("[interrupted]", file=sys.stderr)
            return 130
        completion = handle.result_sync()
        compiling = (
            f", {completion.timings.compiling:.1f} s of it compiling" if completion.timings.compiling >= 0.05 else ""
        )
        rate = completion.timings.decode_rate(completion.usage.completion_tokens)
        print(
            f"[{completion.usage.prompt_tokens} prompt + {completion.usage.completion_tokens} new tokens, first after "
            f"{completion.timings.first_token * 1e3:.0f} ms{compiling}, then {rate:.0f} tokens/s, "
            f"ended by {completion.finish_reason}]",
            file=sys.stderr,
        )
    return 0


def as_json(completion: Completion) -> dict[str, object]:
    return {
        "prompt": completion.prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": str(completion.finish_reason),
        "seed": completion.seed,
        "usage": dataclasses.asdict(completion.usage),
        "timings": {
            "queued": completion.timings.queued,
            "first_token": completion.timings.first_token,
            "total": completion.timings.total,
            "compiling": completion.timings.compiling,
        },
    }
