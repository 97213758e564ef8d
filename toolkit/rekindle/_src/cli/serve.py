"""`rekindle serve`: answer requests over HTTP until a signal ends it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from rekindle._src.cli.main import engine_options
from rekindle._src.replicas.opening_fleet import fleet
from rekindle._src.serve.app import app
from rekindle._src.serve.grafana import dashboard
from rekindle._src.serve.server import address, check_connections, warn_if_open
from rekindle._src.session.opening import open
from rekindle.errors import ConfigError, MissingExtra, RekindleError


def run(arguments: argparse.Namespace) -> int:
    if arguments.grafana:
        print(json.dumps(dashboard(), indent=1))
        return 0
    try:
        from rekindle._src.serve.listening import Listener, bind
    except ImportError as error:
        raise MissingExtra("uvicorn", "serve") from error
    keys = api_keys(arguments)
    check_connections(arguments.max_connections)
    warn_if_open(arguments.host, keys)
    bound = bind(arguments.host, arguments.port)  # before a model is loaded in vain
    options = engine_options(arguments)
    models = named(arguments.model, arguments.name)
    roles = {"prefill": arguments.prefill, "decode": arguments.decode}
    if arguments.replicas is None and not any(roles.values()):
        openings: dict[str, Any] = {name: open(model, **options) for name, model in models.items()}
    else:
        several = {"replicas": arguments.replicas, "router": arguments.router, **options}
        if any(roles.values()):
            several["roles"] = {name: count for name, count in roles.items() if count is not None}
        openings = {name: fleet(model, **several) for name, model in models.items()}
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        listener.stop(0.0)

    made = app(
        openings,
        api_key=keys,
        strict=arguments.strict,
        body_limit=arguments.body_limit << 20,
        max_queued_tokens=arguments.max_queued_tokens,
        cors_origins=arguments.cors_origin,
        allowed_hosts=arguments.allowed_host,
        trust_request_chat_template=arguments.trust_request_chat_template,
        metrics_names=arguments.metrics_names,
        opened=lambda name: print(f"{name} is ready", file=sys.stderr),
        failed=failed,
    )
    url = address(arguments.host, bound.getsockname()[1])

    def started() -> None:
        print(f"rekindle listens at {url}/v1 and loads {', '.join(openings)}", file=sys.stderr)

    service = made.state.rekindle
    service.hosts.add(arguments.host)
    listener = Listener(
        made,
        service.life,
        bound,
        started=started,
        access_log=arguments.access_log,
        max_connections=arguments.max_connections,
    )
    try:
        with listener.signals(arguments.drain):
            listener.serve_forever()
    finally:
        bound.close()
        for served in service.models.by_name.values():
            if served.session is not None:
                served.session.close()
    if failures:
        first = failures[0]
        print(f"rekindle: {first if isinstance(first, RekindleError) else repr(first)}", file=sys.stderr)
        return 1
    return 0


def named(models: list[str], names: list[str]) -> dict[str, str]:
    """The models by the names under which they are served."""
    if len(names) > len(models):
        raise ConfigError("--name", names, f"gives more names than the {len(models)} models", "Give one for each")
    found: dict[str, str] = {}
    for index, model in enumerate(models):
        name = names[index] if index < len(names) else Path(model).name if Path(model).exists() else model
        if name in found:
            raise ConfigError("--name", name, "is the name of two models", "Give each a name of its own")
        found[name] = model
    return found


def api_keys(arguments: argparse.Namespace) -> list[str]:
    """The keys of the command line, of --api-key-file and of $REKINDLE_API_KEY."""
    keys: list[Any] = [*arguments.api_key]
    if arguments.api_key_file is not None:
        try:
            lines = arguments.api_key_file.read_text().splitlines()
        except OSError as error:
            raise ConfigError(
                "--api-key-file", str(arguments.api_key_file), f"can't be read: {error}", "Check the path"
            ) from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError("--api-key-file", str(arguments.api_key_file), "has no key", "Write one on each line")
        keys += found
    if os.environ.get("REKINDLE_API_KEY"):
        keys.append(os.environ["REKINDLE_API_KEY"])
    return keys
