"""The parsers of all subcommands. Each subcommand is in the module of its name, which is imported when it runs."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rekindle._src.core.config import DTYPES, POLICIES, QUANTIZE
from rekindle._src.core.version import VERSION
from rekindle.errors import RekindleError


def program() -> int:
    """Run `main` as a process, without garbage collection while it imports, which took 0.1 s."""
    gc.disable()

    def imported() -> None:
        gc.freeze()
        gc.enable()

    return main(imported=imported)


def main(argv: Sequence[str] | None = None, *, imported: Callable[[], object] = lambda: None) -> int:
    """Run one subcommand and return the exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""
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
    root.add_argument("--version", action="version", version=f"rekindle {VERSION}")
    commands = root.add_subparsers(dest="command", required=True, metavar="command")

    generate = commands.add_parser("generate", help="continue a prompt, token by token")
    generate.add_argument("prompt", nargs="?", help="the prompt; read from standard input if it is absent or '-'")
    _model_options(generate)
    _sampling_options(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end")

    chat = commands.add_parser("chat", help="chat with a model; the conversation stays cached")
    _model_options(chat)
    _sampling_options(chat)
    chat.add_argument("--system", help="a system message that opens the conversation")

    doctor = commands.add_parser("doctor", help="check this installation, and show a fix for each problem")
    doctor.add_argument("--cache-dir", help="the cache directory to check")
    doctor.add_argument("--model", help="a checkpoint, whose weights and layers are checked for NaN and infinity")
    doctor.add_argument("--json", action="store_true", help="print the checks as JSON")

    warm = commands.add_parser("warm", help="compile a model's programs ahead of time and store them")
    warm.add_argument("model", nargs="?", default="tiny", help="a local folder, a hub id, or 'tiny'")
    _engine_options(warm)
    warm.add_argument(
        "--structured", action="store_true", default=None, help="the programs of structured output as well"
    )
    warm.add_argument("--device-kind", help="fail unless this machine's device is of this kind, such as 'cpu'")
    warm.add_argument("--json", action="store_true", help="print the programs as JSON")

    cache = commands.add_parser(
        "cache", help="list, prune or clear what is kept on disk: programs, pages, snapshots, weights"
    )
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
    bench.add_argument("--breakdown", action="store_true", help="also break the steps of W1, W2 and W3 down into parts")
    bench.add_argument(
        "--growth", action="store_true", help="instead measure step time against rows, context, pages and queue"
    )
    bench.add_argument(
        "--scale", type=float, default=1.0, help="with --growth: the share of each sweep's range to measure"
    )
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
        "--prompt-lookup",
        type=int,
        metavar="N",
        help="speculative decoding by prompt lookup: up to N draft tokens in a step (default 0)",
    )
    command.add_argument("--cache-dir", help="where programs, pages and snapshots persist")


def _sampling_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-tokens", type=int, default=256)
    command.add_argument("--temperature", type=float, help="0 is greedy; left out, the checkpoint's own or 0")
    command.add_argument("--top-k", type=int)
    command.add_argument("--top-p", type=float)
    command.add_argument("--min-p", type=float)
    command.add_argument("--repetition-penalty", type=float)
    command.add_argument("--seed", type=int)
    command.add_argument("--stop", action="append", default=[], help="stop at this text; may be given several times")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `open()` that were given on the command line."""
    names = ("dtype", "quantize", "max_model_len", "max_requests", "policy", "prompt_lookup", "cache_dir", "structured")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given on the command line."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
