"""The adapters of an open session, as its callers see them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rekindle._src.calls.call import Call, Once
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.host import Host
from rekindle._src.models.adapters.adapter import Adapter
from rekindle._src.opening.adapters import AdapterShelf
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.session.client import Client


class AdapterMethods:
    """The part of a session that loads and unloads adapters."""

    _host: Host
    _front: Front
    _client: Client

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests may use."""
        shelf: Any = self._front.adapters
        return () if shelf is None else shelf.names

    def load_adapter(self, name: str, source: Any, *, alpha: float | None = None) -> Call[None]:
        """Await it to load an adapter (LoRA) under a name, for `generate(…, adapter=name)`; nothing is compiled.

        `source` is a PEFT folder, a GGUF file of llama.cpp, or a trainer's arrays: by PEFT's names, or an nnx state
        with `lora_a` and `lora_b` at paths of the model such as `layers.0.attention.qkv`; `alpha` divided by the rank
        is then its scale, by default 1. A name that is in use means the new weights from now on; requests that run
        keep the old ones.
        """
        return Once(self._load_adapter, name, source, alpha, name="load_adapter")

    def unload_adapter(self, name: str) -> Call[None]:
        """Await it to forget an adapter and its cached pages. Requests that run with it go on."""
        return Once(self._unload_adapter, name, name="unload_adapter")

    async def _load_adapter(self, name: str, source: Any, alpha: float | None) -> None:
        shelf = self._shelf()
        adapter = await self._client.in_writer(partial(shelf.read, name, source, alpha))
        self._drop(shelf.put(adapter))

    async def _unload_adapter(self, name: str) -> None:
        self._drop(self._shelf().remove(name))

    def _shelf(self) -> AdapterShelf:
        self._host.check()
        shelf: Any = self._front.adapters
        if shelf is None:
            raise ConfigError("adapter", None, "can't be used in this session", "Open one with rekindle.open")
        assert isinstance(shelf, AdapterShelf), "a session's own"
        return shelf

    def _drop(self, old: Adapter | None) -> None:
        if old is not None:
            self._client.ask(partial(self._client.engine.device.drop_altered, old.digest))
