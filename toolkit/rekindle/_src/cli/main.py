"""The command line. A subcommand is a module of `commands`, which is imported when it is used."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final

from rekindle._src.cli.controls import for_stream
from rekindle._src.cli.usage import Parser
from rekindle._src.core import memory
from rekindle._src.core.activity import Activity, State
from rekindle._src.core.version import VERSION
from rekindle.errors import RekindleError

COMMANDS: Final = {
    "generate": "continue a prompt, token by token",
    "chat": "chat with a model; the conversation stays cached",
    "doctor": "check this installation, and show a fix for each problem",
    "warm": "compile a model's programs ahead of time and store them",
    "ls": "list the models on this machine: the Hub's cache, Ollama, LM Studio, llama.cpp, and what rekindle keeps",
    "pull": "download a model from the Hub, or go on with a download",
    "rm": "remove what rekindle has made of models; other tools' files stay",
    "learn": "copy a page of the course here and open it in JupyterLab",
    "completion": "print a script with which Tab completes commands and models",
    "export": "write a checkpoint as a GGUF file or as a folder of safetensors",
    "cache": "list, remove, prune or clear the cache on disk: programs, pages, snapshots, weights",
    "bench": "measure this machine: single stream, prefill, batch, shared prefix, start",
    "run-batch": "answer a file of requests in OpenAI's batch format",
    "follow": "give this machine's devices to a session of several processes",
    "simulate": "compare routers and numbers of replicas in simulated time",
    "serve": "answer requests over HTTP, as OpenAI's API",
}


def program() -> int:
    """Run `main` as a process. Garbage collection is off during imports, where it took 0.1 s."""
    gc.disable()
    memory.own_process = True

    def imported() -> None:
        gc.freeze()
        gc.enable()

    return main(imported=imported)


def main(argv: Sequence[str] | None = None, *, imported: Callable[[], object] = lambda: None) -> int:
    """Run one subcommand and return the exit status: 0 success, 1 failure, 130 interrupted; wrong usage exits with 2.

    The options are checked before JAX is imported.
    """
    commands = parser()
    arguments = commands.parse_args(argv)
    if arguments.command is None:
        print(commands.format_help(), end="")
        return 0
    try:
        command = _module(arguments.command)
        with Activity(lambda: State("importing JAX")):
            for needed in command.NEEDS:
                importlib.import_module(needed)
        imported()
        return int(command.run(arguments))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # keeps the interpreter from complaining about the pipe at exit
        return 1
    except RekindleError as error:
        print(for_stream(f"rekindle: {error}", sys.stderr), file=sys.stderr)
        return 1


def parser() -> Parser:
    """Return the parser of all subcommands; each of them gets its options when it is used."""
    root = Parser(prog="rekindle", description="LLM inference for JAX, made for notebooks.")
    root.add_argument("--version", action="version", version=f"rekindle {VERSION}")
    commands = root.add_subparsers(dest="command", metavar="command", parser_class=Parser)
    for name, words in COMMANDS.items():
        commands.add_parser(name, help=words, declare=_module_options(name))
    return root


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"rekindle._src.cli.commands.{name.replace('-', '_')}")


def _module_options(name: str) -> Callable[[Parser], object]:
    return lambda command: _module(name).options(command)
