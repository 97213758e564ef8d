"""`rekindle serve`: answer requests over HTTP until a signal ends it."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Awaitable, Generator, Iterator, Mapping
from typing import Any

import anyio

from rekindle._src.cli import usage
from rekindle._src.cli.controls import for_stream
from rekindle._src.cli.usage import engine_options
from rekindle._src.replicas.fleet import Fleet, fleet
from rekindle._src.serve.app import app
from rekindle._src.serve.metrics import dashboard
from rekindle._src.serve.server import address, warn_if_open
from rekindle._src.session.opening import open
from rekindle._src.shelf.shelf import Shelf, limits_of, shelf_of
from rekindle.errors import MissingExtra, RekindleError


class _FleetOpening:
    """A fleet that is being opened, and loads adapters before it takes requests."""

    def __init__(self, opening: Awaitable[Fleet], adapters: Mapping[str, object]) -> None:
        self._opening, self._adapters = opening, adapters

    def __await__(self) -> Generator[Any, Any, Fleet]:
        return self._open().__await__()

    async def _open(self) -> Fleet:
        opened = await self._opening
        try:
            for name, folder in self._adapters.items():
                await opened.load_adapter(name, folder)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await opened.aclose()
            raise
        return opened


@contextlib.contextmanager
def log_lines() -> Iterator[None]:
    """Log a server's own messages to stderr: its shutdown and, without a terminal, its progress."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    with contextlib.ExitStack() as before:
        for name in ("rekindle.server", "rekindle.progress", "rekindle.shelf"):
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET:
                before.callback(logger.setLevel, logging.NOTSET)
                logger.setLevel(logging.INFO)
            if not logger.hasHandlers():
                before.callback(logger.removeHandler, handler)
                before.callback(setattr, logger, "propagate", logger.propagate)
                logger.addHandler(handler)
                logger.propagate = False  # libraries that are imported later add a handler for everything
        yield


def _shelf(
    arguments: argparse.Namespace, models: Mapping[str, str], additions: Mapping[str, Any], options: Mapping[str, Any]
) -> Shelf | None:
    """Return a shelf of the models if they are to be loaded on demand; additions belong to the first."""
    memory = None if arguments.models_memory is None else arguments.models_memory << 20
    limits = limits_of(memory=memory, max_loaded=arguments.max_loaded, idle_unload=arguments.idle_unload)
    if not any(limits):
        return None
    first = next(iter(models))
    return shelf_of(
        {name: (model, {**options, **(additions if name == first else {})}) for name, model in models.items()}, limits
    )


def run(arguments: argparse.Namespace, models: Mapping[str, str], keys: list[str]) -> int:
    """Serve models by their names; with keys, only requests that bring one are answered."""
    if arguments.grafana:
        print(json.dumps(dashboard(), indent=1))
        return 0
    try:
        from rekindle._src.serve.listening import Listener, bind
    except ImportError as error:
        raise MissingExtra("uvicorn", "serve") from error
    warn_if_open(arguments.host, keys)
    listening_socket = bind(arguments.host, arguments.port)  # before loading: a bad address would waste it
    options = engine_options(arguments)
    roles = {"prefill": arguments.prefill, "decode": arguments.decode} if arguments.prefill is not None else None
    additions: Any = usage.additions(arguments)
    openings: dict[str, Any] = {}
    shelf = _shelf(arguments, models, additions, options)
    for name, model in models.items() if shelf is None else ():
        if arguments.replicas is None and roles is None:
            openings[name] = open(model, **additions, **options)
        else:
            sizes = {"replicas": arguments.replicas, "roles": roles, "router": arguments.router}
            adapters = additions.pop("adapters", None) or {}  # which replicas load once they are open
            openings[name] = _FleetOpening(fleet(model, **additions, **sizes, **options), adapters)
        additions = {}  # they belong to the first model
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        listener.stop(0.0)

    asgi = app(
        openings if shelf is None else shelf,
        api_key=keys,
        strict=arguments.strict,
        body_limit=arguments.body_limit << 20,
        request_memory=arguments.request_memory << 20,
        max_queued_tokens=arguments.max_queued_tokens,
        cors_origins=arguments.cors_origin,
        allowed_hosts=arguments.allowed_host,
        trust_request_chat_template=arguments.trust_request_chat_template,
        adapter_loading=arguments.adapter_loading,
        allow_urls=arguments.allow_urls,
        metrics_names=arguments.metrics_names,
        opened=lambda name: print(f"{name} is ready", file=sys.stderr),
        failed=failed,
    )
    url = address(arguments.host, listening_socket.getsockname()[1])

    def started() -> None:
        when = "loads" if shelf is None else "loads at the first request of each:"
        print(f"rekindle listens at {url}/v1 and {when} {', '.join(models)}; {url} has a page", file=sys.stderr)

    service = asgi.state.rekindle
    service.hosts.add(arguments.host)
    listener = Listener(
        asgi,
        service.life,
        listening_socket,
        started=started,
        access_log=arguments.access_log,
        max_connections=arguments.max_connections,
    )
    try:
        with log_lines(), listener.signals(arguments.drain):
            listener.serve_forever()
    finally:
        listening_socket.close()
        if shelf is not None:
            shelf.close()
        for served in service.models.by_name.values():
            if served.session is not None:
                served.session.close()
    for failure in failures:
        words = str(failure) if isinstance(failure, RekindleError) else repr(failure)
        print(for_stream(f"rekindle: {words}", sys.stderr), file=sys.stderr)
    return 1 if failures else 0
