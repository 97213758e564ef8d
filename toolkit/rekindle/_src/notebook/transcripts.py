"""Conversations outlive their kernel: a JSON file each, private to the user, in the cache folder's `chats`."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
import uuid
from pathlib import Path
from typing import Any

from rekindle._src.core.store import Store
from rekindle._src.notebook.attachments import is_content
from rekindle.errors import InvalidRequest, StoreError

VERSION = 1
MOST = 50  # kept conversations; the least recently used one is removed first
NEWEST = "auto"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
log = logging.getLogger("rekindle.cache")
Message = dict[str, Any]


def new_name() -> str:
    """Return a name for a conversation, readable for people."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


class Transcripts:
    """The conversations of one cache folder."""

    def __init__(self, cache_folder: Path) -> None:
        self.folder: Path = cache_folder / "chats"

    def names(self) -> list[str]:
        """Return the names of the kept conversations, the one that was used last first."""
        entries: list[tuple[float, str]] = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path.suffix == ".json" and _NAME.fullmatch(path.stem):
                    with contextlib.suppress(OSError):  # another process removed it meanwhile
                        entries.append((path.lstat().st_mtime, path.stem))
        return [name for _, name in sorted(entries, reverse=True)]

    def save(self, name: str, model: str, messages: list[Message]) -> bool:
        """Keep the messages under `name`, whole or not at all. On failure, log the reason and return False."""
        content = {"version": VERSION, "model": model, "saved": time.time(), "messages": messages}
        try:
            encoded = json.dumps(content, ensure_ascii=False).encode()
            if not Store(self.folder).put(f"{name}.json", encoded, durable=True):
                return False
        except (OSError, TypeError, ValueError) as error:
            log.warning("the conversation %r is no longer kept: %s: %s", name, type(error).__name__, error)
            return False
        for old in self.names()[MOST:]:
            with contextlib.suppress(OSError):
                (self.folder / f"{old}.json").unlink()
        return True

    def load(self, name: str) -> tuple[str, list[Message]]:
        """Return the name and the messages of a conversation; "auto" is the last one. Raise StoreError for none."""
        if name == NEWEST:
            name = next(iter(self.names()), NEWEST)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequest("restore", name, "can't be a conversation's name", 'Use one that was shown, or "auto"')
        store = Store(self.folder)
        if store.distrusted is not None:
            raise StoreError(f"conversation {name!r} is not read: {store.distrusted}")
        path = store.path(f"{name}.json")
        try:
            content = store.get(path.name)
            if content is not None:
                return name, _messages(json.loads(content))
        except OSError as error:
            raise StoreError(f"conversation {name!r} can't be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise StoreError(f"conversation {name!r} can't be used: {path} is damaged ({error}). Remove it") from error
        known = ", ".join(map(repr, self.names()))
        choices = f"There are: {known}" if known else "There is none: each chat view keeps its own while it is used"
        raise StoreError(f"there is no conversation {name!r} in {self.folder}. {choices}")


def _messages(content: Any) -> list[Message]:
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"it is not of version {VERSION}")
    messages = content.get("messages")
    if not isinstance(messages, list):
        raise ValueError("it has no messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("a message has no role")
        if not is_content(message.get("content")):
            raise ValueError("a message has no content")
    return messages
