"""`rekindle serve`: answer requests over HTTP, as OpenAI's API."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rekindle._src.cli import usage
from rekindle._src.cli.usage import Parser, check_additions
from rekindle._src.core.names import checked_name, name_of_model
from rekindle._src.replicas.autoscaling import Range
from rekindle._src.replicas.routing import RouterName, roles_of
from rekindle.errors import ConfigError, MissingExtra

LONGEST_IDLE = 30 * 86_400.0  # seconds
NEEDS = ("rekindle._src.cli.serve",)


def options(command: Parser) -> None:
    several = {"action": "append", "default": []}
    command.add("model", "local folders, hub ids, or 'tiny' (the default)", nargs="*", default=["tiny"])
    command.add("--name", "a model's name; in the models' order", **several)
    command.add("--host", "the address to listen at (default 127.0.0.1)", default="127.0.0.1")
    command.add("--port", "0 takes a free one (default 8000)", type=int, default=8000)
    keys = "a key that requests may bring; several times for several; $REKINDLE_API_KEY is one, too"
    command.add("--api-key", keys, **several)
    command.add("--api-key-file", "a file with a key on each line", type=Path)
    command.flag("--strict", "refuse unknown fields instead of ignoring them")
    command.add("--body-limit", "of a request (default 32)", type=int, default=32, metavar="MIB")
    taken = "that all requests may take before they get 503; one client may take half (default 1024)"
    command.add("--request-memory", taken, type=int, default=1024, metavar="MIB")
    waiting = "prompt tokens that may wait before requests get 429 (default 1048576)"
    command.add("--max-queued-tokens", waiting, type=int, default=1 << 20, metavar="N")
    command.add("--drain", "seconds that answers may go on after SIGTERM, up to a day", type=float, default=30.0)
    command.add("--cors-origin", "an origin with pages that may use the server", **several)
    command.add("--allowed-host", "a name that requests may be sent to", metavar="NAME", **several)
    command.add("--max-connections", "at most; three quarters of them from one address", type=int)
    command.flag("--trust-request-chat-template", "let requests bring a chat template, which is code")
    usage.add_additions(command)
    command.flag("--adapter-loading", "let requests load adapters from folders of this machine")
    command.flag("--allow-urls", "fetch pictures that requests name by URLs, from public addresses alone")
    names = ("rekindle", "vllm", "both")
    command.add("--metrics-names", "vllm: for its dashboards", choices=names, default="rekindle")
    loaded = "load models at their first request, at most N at a time; the least recently used sleeps for the next"
    command.add("--max-loaded", loaded, type=int, metavar="N")
    memory = "the same, with at most MIB of weights and pages of all that are loaded"
    command.add("--models-memory", memory, type=int, metavar="MIB")
    idle = "unload a model that had no request for so long; the next one loads it again"
    command.add("--idle-unload", idle, type=float, metavar="SECONDS")
    replicas = "processes that run the model, on Ray; 1-4: as many as the load asks for (default: this one)"
    command.add("--replicas", replicas, type=_replicas, metavar="N")
    router = "with --replicas: how one is chosen (default affinity: where a prompt's beginning is cached)"
    command.add("--router", router, choices=get_args(RouterName), default="affinity")
    command.add("--prefill", "with --decode: replicas that compute prompts alone, on Ray", type=int, metavar="N")
    decode = "replicas that take prompts' pages from those and go on from there"
    command.add("--decode", decode, type=int, metavar="N")
    command.flag("--grafana", "print a Grafana dashboard as JSON instead of serving")
    command.flag("--access-log", "log every request")
    usage.add_engine(command, None)
    command.checks += _check, usage.check_models


def _replicas(text: str) -> int | tuple[int, int]:
    try:
        least, most = (int(part) for part in (text.split("-") if "-" in text else (text, text)))
        size = Range.of((least, most))
    except ValueError:  # ConfigError is one
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number above 0 nor a range. Use 2, or 1-4") from None
    return size.least if size.least == size.most else (size.least, size.most)


def _check(arguments: argparse.Namespace) -> None:
    from rekindle._src.serve.life import Hosts, check_bound, check_origins, seconds_to_drain

    if not 0 <= arguments.port < 1 << 16:
        raise ConfigError("--port", arguments.port, "is no port", "Use one from 1024 to 65535, or 0 for a free one")
    roles: dict[Any, Any] = {"prefill": arguments.prefill, "decode": arguments.decode}
    if None in roles.values() and any(count is not None for count in roles.values()):
        option, partner = ("prefill", "--decode") if arguments.decode is None else ("decode", "--prefill")
        raise ConfigError(option, roles[option], f"needs {partner}", f"Pass {partner} 1, too")
    if arguments.prefill is not None:
        roles_of(roles, None)
    _check_loading(arguments)
    if not arguments.grafana and importlib.util.find_spec("uvicorn") is None:
        raise MissingExtra("uvicorn", "serve")
    check_origins(arguments.cors_origin)
    if arguments.max_connections is not None:
        check_bound("max_connections", arguments.max_connections)
    seconds_to_drain("--drain", arguments.drain)
    Hosts(arguments.allowed_host)
    check_additions(arguments, models_by_name(arguments.model, arguments.name))
    api_keys(arguments)


def _check_loading(arguments: argparse.Namespace) -> None:
    """Check the options of models that are loaded on demand. Raise ConfigError."""
    given = [name for name in ("max_loaded", "models_memory", "idle_unload") if getattr(arguments, name) is not None]
    if not given:
        return
    option = "--" + given[0].replace("_", "-")
    if arguments.replicas is not None or arguments.prefill is not None:
        problem = "loads models in this process, and replicas are others"
        raise ConfigError(option, getattr(arguments, given[0]), problem, "Leave one of the two out")
    for name in ("max_loaded", "models_memory"):
        if (count := getattr(arguments, name)) is not None and count < 1:
            raise ConfigError("--" + name.replace("_", "-"), count, "is not a whole number above 0", "Use 1 or more")
    if arguments.idle_unload is not None and not 0 < arguments.idle_unload <= LONGEST_IDLE:
        problem = f"is not a number of seconds above 0, up to {LONGEST_IDLE:,.0f}"
        raise ConfigError("--idle-unload", arguments.idle_unload, problem, "Use 600")


def models_by_name(models: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    if len(names) > len(models):
        raise ConfigError("--name", names, f"gives more names than the {len(models)} models", "Give one for each")
    by_name: dict[str, str] = {}
    for index, model in enumerate(models):
        if index < len(names):
            name = checked_name("--name", names[index], colons=True)
        else:
            name = name_of_model(Path(model).name if os.path.exists(model) else model)
        if name in by_name:
            raise ConfigError("--name", name, "is the name of two models", "Give each a name of its own")
        by_name[name] = model
    return by_name


def api_keys(arguments: argparse.Namespace) -> list[str]:
    """Return the keys of the command line, of --api-key-file and of $REKINDLE_API_KEY."""
    keys: list[Any] = [*arguments.api_key]
    if arguments.api_key_file is not None:
        try:
            lines = arguments.api_key_file.read_text().splitlines()
        except OSError as error:
            raise ConfigError(
                "--api-key-file", str(arguments.api_key_file), f"can't be read: {error}", "Check the path"
            ) from None
        file_keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not file_keys:
            raise ConfigError("--api-key-file", str(arguments.api_key_file), "has no key", "Write one on each line")
        keys += file_keys
    if os.environ.get("REKINDLE_API_KEY"):
        keys.append(os.environ["REKINDLE_API_KEY"])
    return keys


def run(arguments: argparse.Namespace) -> int:
    from rekindle._src.cli import serve

    return serve.run(arguments, models_by_name(arguments.model, arguments.name), api_keys(arguments))
