"""The items of recent responses. Later requests of the same sender may name them by id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.serve.errors import Refused

MOST_ITEMS = 10_000
MOST_CHARACTERS = 16 << 20


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
