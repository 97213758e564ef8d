"""The adapters of an open session: which there are, and how one is loaded or unloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rekindle._src.capabilities.adapters.owner import AdapterShelf
from rekindle._src.capabilities.adapters.request import ADAPTERS
from rekindle._src.core.names import checked_path
from rekindle._src.models.adapters.adapter import Adapter
from rekindle._src.session.client import Client
from rekindle.errors import CheckpointError, ConfigError, RequestAborted


def names(client: Client) -> tuple[str, ...]:
    """Return the names of the adapters that requests may use."""
    adapters = ADAPTERS.of(client.front)
    return () if adapters is None else adapters.names


async def load(client: Client, name: str, source: Any, alpha: float | None) -> None:
    """Load an adapter under a name. It is read in a thread of its own: a stranger's may take long."""
    shelf = shelf_of(client)

    def late(seconds: float) -> CheckpointError:
        return CheckpointError(
            f"The adapter {name!r} was not read within {seconds:g} s. Copy it to a disk that is quick enough, and load "
            "it again."
        )

    def read(wanted: Callable[[], bool]) -> Adapter:
        return shelf.read(name, source, alpha, lambda: wanted() and not client.host.closing)

    try:
        adapter = await shelf.threads.run(read, late)
    except RequestAborted:
        client.host.check()
        raise
    client.host.check()  # the session may have been closed meanwhile
    _drop(client, shelf.put(adapter))


def put(client: Client, adapter: Adapter) -> None:
    """Give an adapter its name: later requests have it. It is one that was made in this process."""
    shelf = shelf_of(client)
    _drop(client, shelf.put(shelf.read(adapter.name, adapter)))


async def save(client: Client, name: str, folder: str | Path) -> None:
    """Write an adapter as a new folder."""
    shelf = shelf_of(client)
    await client.in_writer(partial(shelf.write, name, checked_path("folder", folder)))


async def unload(client: Client, name: str) -> None:
    """Forget an adapter and its cached pages."""
    _drop(client, shelf_of(client).remove(name))


def shelf_of(client: Client) -> AdapterShelf:
    """Return the adapters of a session. Raise ConfigError where it can have none."""
    client.host.check()
    shelf = ADAPTERS.of(client.front)
    if shelf is None:
        raise ConfigError("adapter", None, "can't be used in this session", "Open one with rekindle.open")
    assert isinstance(shelf, AdapterShelf), "a session's own"
    return shelf


def _drop(client: Client, old: Adapter | None) -> None:
    if old is not None:
        client.ask(partial(client.engine.device.drop_altered, old.digest))
