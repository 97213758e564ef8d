"""The state that all endpoints of a server share, and the items of recent responses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.core.version import VERSION
from rekindle._src.dispatch.intake import Turns
from rekindle._src.serve.errors import Refused
from rekindle._src.serve.fields import UnknownFields
from rekindle._src.serve.life import Hosts, Life
from rekindle._src.serve.logprobs import TokenNames
from rekindle._src.serve.metrics import Metrics, Names, Tracing
from rekindle._src.serve.models import Models, SessionLike

FINGERPRINT = f"rekindle-{VERSION}"

MOST_ITEMS = 10_000
MOST_CHARACTERS = 16 << 20


class Service:
    """The models, the limits and the state of a server, owned by its loop."""

    def __init__(
        self,
        models: Models,
        life: Life,
        *,
        strict: bool = False,
        body_limit: int = 32 << 20,
        body_seconds: float = 60.0,
        heartbeat: float = 15.0,
        trust_templates: bool = False,
        metrics_names: Names = "rekindle",
        hosts: Hosts | None = None,
    ) -> None:
        self.hosts: Hosts = hosts or Hosts()
        self.models, self.life, self.strict = models, life, strict
        self.body_limit, self.body_seconds, self.trust_templates = body_limit, body_seconds, trust_templates
        self.metrics: Metrics = Metrics(models, life, metrics_names)
        self.heartbeat = heartbeat  # seconds of silence after which a stream gets a comment
        self.tracing: Tracing = Tracing()
        self.item_store: KeptItems = KeptItems()
        self.turns: Turns = Turns(2)  # at parsing large bodies and building requests from them
        self.unknown: UnknownFields = UnknownFields()
        self._names: dict[str, tuple[SessionLike, TokenNames]] = {}

    def token_names(self, name: str, session: SessionLike) -> TokenNames:
        """Return the texts of a model's tokens, kept from request to request."""
        entry = self._names.get(name)
        if entry is None or entry[0] is not session:
            entry = self._names[name] = session, TokenNames(session.tokenizer)
        return entry[1]


class KeptItems:
    """The latest items, in memory only; the oldest are dropped first."""

    def __init__(self, most_items: int = MOST_ITEMS, most_characters: int = MOST_CHARACTERS) -> None:
        self._most_items, self._most_characters = most_items, most_characters
        self._items: OrderedDict[tuple[bytes, str], tuple[Mapping[str, Any], int]] = OrderedDict()
        self._characters = 0

    def keep(self, key: bytes, items: Sequence[Mapping[str, Any]]) -> None:
        """Keep the text of items for the sender with this key."""
        for item in items:
            content = [{"type": part["type"], "text": part["text"]} for part in item.get("content", ())]
            entry = {**item, "content": content} if "content" in item else dict(item)
            size = sum(len(part["text"]) for part in content) + len(item.get("arguments", "")) + len(item["id"])
            self._items[key, item["id"]] = entry, size
            self._characters += size
        while self._items and (len(self._items) > self._most_items or self._characters > self._most_characters):
            _, (_, size) = self._items.popitem(last=False)
            self._characters -= size

    def get(self, key: bytes, name: str, path: str) -> Mapping[str, Any]:
        """Return an item by its id. Raise `Refused` (404) if it is not kept, or belongs to another sender."""
        entry = self._items.get((key, name))
        if entry is None:
            raise Refused(
                404,
                f"{path}: item {name[:200]!r} is not found. The last items of answers are kept in memory, until the "
                "server ends. Send the item itself; clients do so with store: false",
                param=path,
                code="item_not_found",
            )
        return entry[0]
