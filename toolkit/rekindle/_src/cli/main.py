"""The parsers of all subcommands. A subcommand is in `commands` or in a module of its name, imported when it runs."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from rekindle._src.cli import usage
from rekindle._src.cli.controls import for_stream
from rekindle._src.cli.usage import Parser
from rekindle._src.core import memory
from rekindle._src.core.activity import Activity, State
from rekindle._src.core.config import POLICIES, EngineConfig
from rekindle._src.core.dtypes import DTYPES, KV_DTYPES, QUANTIZE_KINDS, checked_dtype, checked_quantize
from rekindle._src.core.mesh_shape import parsed_mesh
from rekindle._src.core.options import Place
from rekindle._src.core.sampling import ANSWER_TOKENS, Sampling
from rekindle._src.core.version import VERSION
from rekindle._src.replicas.autoscaling import Range
from rekindle._src.replicas.routing import RouterName
from rekindle.errors import ConfigError, RekindleError

T = TypeVar("T")


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

    The options are checked before the subcommand and JAX are imported.
    """
    commands = parser()
    arguments = commands.parse_args(argv)
    if arguments.command is None:
        print(commands.format_help(), end="")
        return 0
    try:
        with Activity(lambda: State("importing JAX")):
            run = _imported(arguments.command.replace("-", "_"))
        imported()
        return int(run(arguments))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # keeps the interpreter from complaining about the pipe at exit
        return 1
    except RekindleError as error:
        print(for_stream(f"rekindle: {error}", sys.stderr), file=sys.stderr)
        return 1


# The imports of the functions in `commands`, loaded before they run.
_NEEDED = {
    "export": "opening.exporting", "follow": "opening.following", "generate": "session.opening",
    "run_batch": "serve.batch", "simulate": "bench.simulation", "warm": "opening.blueprint",
}  # fmt: skip


_MODULES = {"ls": "local", "pull": "local", "rm": "local"}  # modules that several share


def _imported(command: str) -> Callable[[argparse.Namespace], int]:
    if command in _MODULES:
        module = importlib.import_module(f"rekindle._src.cli.{_MODULES[command]}")
        return getattr(module, command)  # type: ignore[no-any-return]
    if command not in _NEEDED:
        return importlib.import_module(f"rekindle._src.cli.{command}").run  # type: ignore[no-any-return]
    importlib.import_module(f"rekindle._src.{_NEEDED[command]}")
    return getattr(importlib.import_module("rekindle._src.cli.commands"), command)  # type: ignore[no-any-return]


def parser() -> Parser:
    root = Parser(prog="rekindle", description="LLM inference for JAX, made for notebooks.")
    root.add_argument("--version", action="version", version=f"rekindle {VERSION}")
    commands = root.add_subparsers(dest="command", metavar="command", parser_class=Parser)

    generate = commands.add_parser("generate", help="continue a prompt, token by token")
    generate.add("prompt", "the prompt; read from standard input if it is absent or '-'", nargs="?")
    _model_options(generate)
    _sampling_options(generate)
    generate.flag("--json", "print one JSON object at the end")
    generate.checks.append(usage.check_prompt)

    chat = commands.add_parser("chat", help="chat with a model; the conversation stays cached")
    _model_options(chat)
    _sampling_options(chat, max_tokens=ANSWER_TOKENS)
    chat.add("--system", "a system message that opens the conversation")

    doctor = commands.add_parser("doctor", help="check this installation, and show a fix for each problem")
    doctor.add("--cache-dir", "the cache directory to check")
    doctor.add("--model", "a checkpoint to check for NaN and infinity in weights and layers")
    doctor.add("--mesh", "check that so many devices can share a model: 4, model=4,expert=2", type=_mesh, metavar="N")
    shape = "only show the memory that a folder or a shape such as 70b needs on each device of --mesh"
    doctor.add("--plan", shape, metavar="SHAPE")
    doctor.add("--device", "with --plan: the kind of device (default H100); here: this machine's", default="H100")
    doctor.add("--quantize", "with --plan", type=_quantize, metavar="KIND")
    doctor.add("--context", "with --plan: tokens of a request (default 8192; here: the session's)", type=int)
    doctor.flag("--json", "print the checks as JSON")
    doctor.flag("--report", "print one text for an issue, without home directory, user name and secrets")
    doctor.checks += usage.check_doctor, usage.check_models

    warm = commands.add_parser("warm", help="compile a model's programs ahead of time and store them")
    warm.add("model", "a folder, a GGUF file, a hub id, a name of `rekindle ls`, or 'tiny'", nargs="?", default="tiny")
    _engine_options(warm, None)  # all that a server takes, also what changes no program
    _additions(warm)
    warm.add("--device-kind", "fail unless this machine's device is of this kind, such as 'cpu'")
    warm.flag("--json", "print the programs as JSON")
    warm.checks.append(usage.check_models)

    here = "list the models on this machine: the Hub's cache, Ollama, LM Studio, llama.cpp, and what rekindle keeps"
    ls = commands.add_parser("ls", help=here)
    ls.add("begin", "list only names with this beginning, such as ollama:", nargs="?", default="", metavar="NAME")
    ls.model_arguments = ("begin",)
    ls.flag("--names", "only the names, without a look into the models")
    ls.add("--cache-dir", "the cache directory; its kept weights are listed too")
    ls.flag("--json", "print them as JSON")

    pull = commands.add_parser("pull", help="download a model from the Hub, or go on with a download")
    pull.add("model", "owner/name, owner/name/file.gguf, each with @revision if it is not the main one")
    pull.model_arguments = ()  # the model to download
    pull.checks.append(usage.check_pull)

    rm = commands.add_parser("rm", help="remove what rekindle has made of models; other tools' files stay")
    rm.add("names", "models as ls names them", nargs="+", metavar="NAME")
    rm.model_arguments = ("names",)
    rm.add("--cache-dir", "the cache directory")
    rm.flag("--yes", "remove without asking")

    tab = commands.add_parser("completion", help="print a script with which Tab completes commands and models")
    tab.add("shell", 'for ~/.bashrc: eval "$(rekindle completion bash)"', choices=("bash", "fish", "words", "zsh"))
    tab.add("--line", "words: a line; its last word is completed", default="")

    export = commands.add_parser("export", help="write a checkpoint as a GGUF file or as a folder of safetensors")
    export.add("model", "a folder, a GGUF file, a hub id, a name of `rekindle ls`, or 'tiny'")
    export.add("out", "a name that ends in .gguf, or a folder's name; neither may exist", type=Path)
    types = ("auto", "f32", "f16", "bf16", "q8_0", "q4_0")
    words = "of matrices; q8_0 and q4_0 for GGUF only (default auto: as they are)"
    export.add("--type", words, default="auto", choices=types)
    export.checks += usage.check_out, usage.check_models

    kept = "list, remove, prune or clear the cache on disk: programs, pages, snapshots, weights"
    cache = commands.add_parser("cache", help=kept)
    cache.add("action", None, choices=("ls", "rm", "prune", "clear"))
    cache.add("names", "rm: models as ls names them, or single entries as ls --all does", nargs="*", metavar="NAME")
    cache.add("--cache-dir", "the cache directory")
    cache.add("--to", "prune: keep at most this much, newest first (default 4GiB)", default="4GiB")
    cache.flag("--yes", "rm, prune, clear: remove without asking")
    cache.flag("--all", "ls: a line for every entry instead of one for each model")
    cache.flag("--json", "ls: print the entries as JSON")
    cache.checks += usage.check_size, usage.check_names

    measured = "measure this machine: single stream, prefill, batch, shared prefix, start"
    bench = commands.add_parser("bench", help=measured)
    _model_options(bench, checked=usage.check_bench)
    bench.add("--workloads", "comma-separated names (default W1,W2,W3,W4)", default="W1,W2,W3,W4")
    bench.add("--repeat", "runs of each workload; the median is shown", type=int, default=3)
    bench.flag("--breakdown", "also break the steps of W1, W2 and W3 down into parts")
    bench.flag("--growth", "instead measure step time against rows, context, pages and queue")
    bench.add("--scale", "with --growth: the share of each sweep's range to measure", type=float, default=1.0)
    bench.add("--plots", "with --growth: a folder for pictures; needs matplotlib", type=Path)
    bench.flag("--json", "print the figures as JSON")

    batch = commands.add_parser("run-batch", help="answer a file of requests in OpenAI's batch format")
    batch.add("input", "a JSON object with custom_id, method, url and body on each line", type=Path)
    batch.add("output", "gets a line for each; called again after a kill, it goes on", type=Path)
    batch.add("--name", "the model's name in the requests; by default as --model")
    batch.flag("--strict", "refuse unknown fields instead of ignoring them")
    batch.checks.append(usage.check_files)
    _model_options(batch)

    follow = commands.add_parser("follow", help="give this machine's devices to a session of several processes")
    follow.add("--coordinator", "where the leader opens the session", required=True, metavar="HOST:PORT")
    follow.add("--process", "which process this is, from 1", required=True, type=int, metavar="I")
    follow.add("--processes", "how many there are, the leader included", required=True, type=int, metavar="N")
    follow.add("--model", "where this machine has the model, if not where the leader has it")
    follow.add("--cache-dir", "where programs persist")
    follow.add("--wait", "seconds to wait for the leader (default 300)", type=float, default=300.0)
    follow.checks.append(usage.check_follow)

    _simulate(commands.add_parser("simulate", help="compare routers and numbers of replicas in simulated time"))
    _serve(commands.add_parser("serve", help="answer requests over HTTP, as OpenAI's API"))
    return root


def _serve(serve: Parser) -> None:
    several = {"action": "append", "default": []}
    serve.add("model", "local folders, hub ids, or 'tiny' (the default)", nargs="*", default=["tiny"])
    serve.add("--name", "a model's name; in the models' order", **several)
    serve.add("--host", "the address to listen at (default 127.0.0.1)", default="127.0.0.1")
    serve.add("--port", "0 takes a free one (default 8000)", type=int, default=8000)
    keys = "a key that requests may bring; several times for several; $REKINDLE_API_KEY is one, too"
    serve.add("--api-key", keys, **several)
    serve.add("--api-key-file", "a file with a key on each line", type=Path)
    serve.flag("--strict", "refuse unknown fields instead of ignoring them")
    serve.add("--body-limit", "of a request (default 32)", type=int, default=32, metavar="MIB")
    taken = "that all requests may take before they get 503; one client may take half (default 1024)"
    serve.add("--request-memory", taken, type=int, default=1024, metavar="MIB")
    waiting = "prompt tokens that may wait before requests get 429 (default 1048576)"
    serve.add("--max-queued-tokens", waiting, type=int, default=1 << 20, metavar="N")
    serve.add("--drain", "seconds that answers may go on after SIGTERM, up to a day", type=float, default=30.0)
    serve.add("--cors-origin", "an origin with pages that may use the server", **several)
    serve.add("--allowed-host", "a name that requests may be sent to", metavar="NAME", **several)
    serve.add("--max-connections", "at most; three quarters of them from one address", type=int)
    serve.flag("--trust-request-chat-template", "let requests bring a chat template, which is code")
    _additions(serve)
    serve.flag("--adapter-loading", "let requests load adapters from folders of this machine")
    serve.flag("--allow-urls", "fetch pictures that requests name by URLs, from public addresses alone")
    names = ("rekindle", "vllm", "both")
    serve.add("--metrics-names", "vllm: for its dashboards", choices=names, default="rekindle")
    replicas = "processes that run the model, on Ray; 1-4: as many as the load asks for (default: this one)"
    serve.add("--replicas", replicas, type=_replicas, metavar="N")
    router = "with --replicas: how one is chosen (default affinity: where a prompt's beginning is cached)"
    serve.add("--router", router, choices=get_args(RouterName), default="affinity")
    serve.add("--prefill", "with --decode: replicas that compute prompts alone, on Ray", type=int, metavar="N")
    decode = "replicas that take prompts' pages from those and go on from there"
    serve.add("--decode", decode, type=int, metavar="N")
    serve.flag("--grafana", "print a Grafana dashboard as JSON instead of serving")
    serve.flag("--access-log", "log every request")
    _engine_options(serve, None)
    serve.checks += usage.check_serve, usage.check_models


def _additions(command: Parser) -> None:
    """Add the first model's additions to its weights. Programs depend on whether there are any."""
    several = {"action": "append", "default": []}
    adapter = "an adapter (LoRA) of the first model, served under its name; several times for several"
    command.add("--adapter", adapter, metavar="NAME=FOLDER", **several)
    steering = (
        "changes inside the first model that requests may name, safetensors of vectors; several times for several"
    )
    command.add("--steering", steering, metavar="NAME=FILE", **several)


def _simulate(simulate: Parser) -> None:
    simulate.add("--replicas", "such as 1,2,4 (the default)", type=_counts, default=[1, 2, 4])
    roles = "also P replicas that compute prompts for D that decode, such as 1+3; several times for several"
    simulate.add("--roles", roles, action="append", type=_pair, default=[], metavar="P+D")
    simulate.add("--move-us", "of a prompt's token from one replica to another (default 5)", type=float, default=5.0)
    routers = get_args(RouterName)
    simulate.add("--router", "several times for several; by default all", action="append", choices=routers)
    loads = ("chats", "questions", "floods")
    simulate.add("--load", "made up (default chats)", choices=loads, default="chats")
    trace = "a recorded load: on each line {timestamp (ms), input_length, output_length, hash_ids}, as Mooncake's"
    simulate.add("--trace", trace, type=Path)
    simulate.add("--requests", "of a made-up load (default 1000)", type=int, default=1000)
    simulate.add("--rate", "requests a second (default 8)", type=float, default=8.0)
    simulate.add("--seed", None, type=int, default=0)
    simulate.add("--measure", "take the cost of steps from this model on this machine", metavar="MODEL")
    simulate.add("--step-ms", "of a step (default 8, about 8B on an H100)", type=float, default=8.0)
    simulate.add("--row-us", "of a row that decodes (default 30)", type=float, default=30.0)
    simulate.add("--prefill-us", "of a prompt's token (default 40)", type=float, default=40.0)
    simulate.add("--context-us", "of a position looked back at (default 0.05)", type=float, default=0.05)
    simulate.add("--request-ms", "of a request in addition to its steps (default 0)", type=float, default=0.0)
    simulate.add("--max-requests", "that one replica runs at once (default 64)", type=int, default=64)
    simulate.add("--max-tokens-per-step", None, type=int, default=1024)
    simulate.add("--max-model-len", None, type=int, default=32768)
    simulate.add("--device-tokens", "that the cache holds (default 200000)", type=int, default=200_000)
    simulate.add("--policy", None, choices=POLICIES, default="fcfs")
    simulate.flag("--json", "print the figures as JSON")
    simulate.checks.append(usage.check_files)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: these are no numbers above 0. Use 1,2,4")
    return counts


def _replicas(text: str) -> int | tuple[int, int]:
    try:
        least, most = (int(part) for part in (text.split("-") if "-" in text else (text, text)))
        size = Range.of((least, most))
    except ValueError:  # ConfigError is one
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number above 0 nor a range. Use 2, or 1-4") from None
    return size.least if size.least == size.most else (size.least, size.most)


def _pair(text: str) -> tuple[int, int]:
    try:
        prefill, decode = (int(part) for part in text.split("+"))
    except ValueError:
        prefill = decode = 0
    if min(prefill, decode) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: this does not say how many prefill and decode. Use 1+3")
    return prefill, decode


def _checked(check: Callable[[str], T]) -> Callable[[str], T]:
    """Return a type of arguments that a function checks."""

    def read(text: str) -> T:
        try:
            return check(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"{error.value!r}: {error.problem}. {error.fix}") from None

    return read


_mesh, _quantize = _checked(parsed_mesh), _checked(checked_quantize)
_dtype = _checked(lambda text: checked_dtype("dtype", text))
_kv_dtype = _checked(lambda text: checked_dtype("kv_dtype", text, KV_DTYPES))


def _model_options(command: Parser, *, checked: usage.Check = usage.check_models) -> None:
    command.add("--model", "a local folder, a GGUF file, a hub id, or 'tiny' (the default)", default="tiny")
    _engine_options(command)
    command.checks.append(checked)


def _engine_options(command: Parser, place: Place | None = "command") -> None:
    command.checks.append(lambda arguments: EngineConfig.of(usage.engine_options(arguments)))
    usage.add_options(command, EngineConfig, place, _ENGINE)


def _sampling_options(command: Parser, *, max_tokens: int = 256) -> None:
    command.checks.append(lambda arguments: Sampling.of(None, usage.sampling_options(arguments)))
    length = {"default": max_tokens, "help": f"of new text (default {max_tokens})"}
    usage.add_options(command, Sampling, "command", {**_SAMPLING, "max_tokens": length})


# Where a command line differs from the declaration of an option.
_ENGINE: dict[str, dict[str, Any]] = {
    "dtype": {"type": _dtype, "default": "auto", "help": f"of the weights: {', '.join(DTYPES)}"},
    "quantize": {
        "type": _quantize, "metavar": "KIND",
        "help": f"{', '.join(QUANTIZE_KINDS)}, or by part: mlp=int4,attention=int8",
    },
    "mesh": {"type": _mesh, "metavar": "N", "help": "devices that share the model: 4, or model=4,expert=2"},
    "processes": {"metavar": "N", "help": "that share the model; the others run 'follow'"},
    "coordinator": {"metavar": "HOST:PORT", "help": "where this process waits for the others"},
    "prompt_lookup": {
        "metavar": "N", "help": "speculative decoding by prompt lookup: up to N draft tokens in a step (default 0)",
    },
    "drafts": {
        "help": "where draft tokens come from: auto (default), none, suffix for all texts of the session, mtp for "
        "the model's own head, or a small model, an assistant or a head (EAGLE-3, DFlash): a folder, a file or a name",
    },
    "cache_dir": {"help": "where programs, pages and snapshots persist"},
    "shared_cache": {"metavar": "URL", "help": "a second cache, a folder or URL that machines share"},
    "max_queue": {"help": "requests that may wait before others get 429 (default 1024)"},
    "restore": {"help": "a snapshot to restore, or 'auto' for what earlier sessions left"},
    "precompile": {
        "default": "background", "help": "when programs compile (default background: requests are served meanwhile)",
    },
    "kv_dtype": {
        "type": _kv_dtype, "metavar": "DTYPE", "help": f"of cached keys and values: {', '.join(KV_DTYPES)}",
    },
    "device_pages": {"help": "KV pages on the device"},
    "page_size": {"type": int, "metavar": "TOKENS", "help": "of a KV page"},
    "device_memory": {"help": "for KV pages on the device, such as 2GB"},
    "kernels": {"metavar": "NAME", "help": "implementation of attention"},
    "host_memory": {"help": "for pages that left the device, such as 2GB"},
    "disk_memory": {"help": "for pages and snapshots, such as 8GiB"},
    "capture_memory": {"help": "for captures that requests keep, such as 512MiB"},
    "prefix_cache": {"help": "don't share the pages of equal beginnings of prompts"},
    "step_timeout": {"type": float, "metavar": "SECONDS", "help": "after which a step is reported (default 60)"},
    "structured": {"help": "precompile structured output, too"},
    "deterministic": {"help": "the same seed gives the same tokens"},
    "generation_config": {"help": "greedy: sample only where requests ask for it"},
    "reply_format": {"help": "the syntax of calls and reasoning, such as hermes; by default what the checkpoint says"},
}  # fmt: skip
_SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"help": "0 is greedy; left out, the checkpoint's own or 0"},
    "stop": {"action": "append", "default": [], "help": "stop at this text; may be given several times"},
}
