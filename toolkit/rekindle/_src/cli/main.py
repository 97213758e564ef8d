"""The parser of every subcommand; each one's work is in the module of its name, imported when it is called."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rekindle._src.core.config import DTYPES, POLICIES, QUANTIZE
from rekindle.errors import RekindleError


def program() -> int:
    """`main` in a process of its own: what it imports stays, and looking through that for garbage took 0.1 s."""
    gc.disable()

    def imported() -> None:
        gc.freeze()
        gc.enable()

    return main(imported=imported)


def main(argv: Sequence[str] | None = None, *, imported: Callable[[], object] = lambda: None) -> int:
    """Run one subcommand and return the exit status: 0 fine, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = parser().parse_args(argv)
    try:
        command = importlib.import_module(f"rekindle._src.cli.{arguments.command}")
        imported()
        return int(command.run(arguments))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # keeps the interpreter from complaining about the pipe at exit
        return 1
    except RekindleError as error:
        print(f"rekindle: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="rekindle", description="LLM inference for JAX, made for notebooks.")
    from rekindle import __version__

    root.add_argument("--version", action="version", version=f"rekindle {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="command")

    generate = commands.add_parser("generate", help="continue a prompt, token by token")
    generate.add_argument("prompt", nargs="?", help="the prompt; read from standard input when absent or '-'")
    _model_options(generate)
    _sampling_options(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object when it is done")

    chat = commands.add_parser("chat", help="talk to a model; the conversation's cache stays warm")
    _model_options(chat)
    _sampling_options(chat)
    chat.add_argument("--system", help="a system message that opens the conversation")

    doctor = commands.add_parser("doctor", help="check this installation, with the fix for what is wrong")
    doctor.add_argument("--cache-dir", help="the cache directory to check")
    doctor.add_argument("--json", action="store_true", help="print the checks as JSON")

    warm = commands.add_parser("warm", help="compile a model's programs into the store ahead of time")
    warm.add_argument("model", nargs="?", default="tiny", help="a local folder, a hub id, or 'tiny'")
    _engine_options(warm)
    warm.add_argument("--device-kind", help="fail unless this machine's device is of this kind, such as 'cpu'")
    warm.add_argument("--json", action="store_true", help="print the programs as JSON")

    cache = commands.add_parser("cache", help="what persists on disk: programs, pages, snapshots, weights")
    cache.add_argument("action", choices=("ls", "prune", "clear"))
    cache.add_argument("--cache-dir", help="the cache directory")
    cache.add_argument("--to", default="4GiB", help="prune: keep at most this much, newest first (default 4GiB)")
    cache.add_argument("--yes", action="store_true", help="prune, clear: remove without asking")
    cache.add_argument("--json", action="store_true", help="ls: print the entries as JSON")

    bench = commands.add_parser(
        "bench", help="measure this machine: single stream, prefill, batch, shared prefix, start"
    )
    _model_options(bench)
    bench.add_argument("--workloads", default="W1,W2,W3,W4", help="comma-separated names (default W1,W2,W3,W4)")
    bench.add_argument("--repeat", type=int, default=3, help="runs of each workload; the median is shown")
    bench.add_argument("--breakdown", action="store_true", help="also: what the steps of W1, W2 and W3 are made of")
    bench.add_argument("--growth", action="store_true", help="instead: step time against rows, context, pages, queue")
    bench.add_argument("--scale", type=float, default=1.0, help="with --growth: a share of each sweep's largest value")
    bench.add_argument("--plots", type=Path, help="with --growth: a folder for pictures; needs matplotlib")
    bench.add_argument("--json", action="store_true", help="print the figures as JSON")
    return root


def _model_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="tiny", help="a local folder, a hub id, or 'tiny' (the default)")
    _engine_options(command)


def _engine_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", choices=DTYPES, default="auto")
    command.add_argument("--quantize", choices=[name for name in QUANTIZE if name])
    command.add_argument("--max-model-len", type=int)
    command.add_argument("--max-requests", type=int)
    command.add_argument("--policy", choices=POLICIES)
    command.add_argument(
        "--prompt-lookup", type=int, metavar="N", help="guess up to N tokens from text that repeats, a step (default 0)"
    )
    command.add_argument("--cache-dir", help="where programs, pages and snapshots persist")


def _sampling_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-tokens", type=int, default=256)
    command.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    command.add_argument("--top-k", type=int, default=0)
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--min-p", type=float, default=0.0)
    command.add_argument("--repetition-penalty", type=float, default=1.0)
    command.add_argument("--seed", type=int)
    command.add_argument("--stop", action="append", default=[], help="stop at this text; may be given several times")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `open()` that were given."""
    names = ("dtype", "quantize", "max_model_len", "max_requests", "policy", "prompt_lookup", "cache_dir")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of a request."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    return {name: getattr(arguments, name) for name in names}
