"""The versions of a conversation, made when a message is edited, answered again or forked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

Message = Mapping[str, Any]
Key = tuple[str, ...]
A = TypeVar("A")


class Branch(NamedTuple, Generic[A]):
    """The messages from one place on, and the view's record of the last one if the model has just written it."""

    messages: tuple[Message, ...]
    answer: A | None = None


class Place(NamedTuple):
    """The place of a message among its versions, from 1 on. It is 0 where none of them is shown."""

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


class Branches(Generic[A]):
    """The branches of a conversation, by the messages before them. Equal messages are one version."""

    def __init__(self) -> None:
        self._kept: dict[Key, dict[str, Branch[A]]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, before: Sequence[Message], branch: Branch[A]) -> None:
        """Keep a branch, in place of an earlier state of it."""
        if branch.messages:
            self._kept.setdefault(_key(before), {})[_name(branch.messages[0])] = branch

    def place(self, before: Sequence[Message], message: Message | None) -> Place:
        """Return the place of a message, or of None, among the versions that follow the messages before it."""
        names = [*self._kept.get(_key(before), ())]
        if message is None:
            return Place(0, len(names))
        name = _name(message)
        return Place(names.index(name) + 1, len(names)) if name in names else Place(len(names) + 1, len(names) + 1)

    def turned(self, before: Sequence[Message], message: Message | None, by: int) -> Branch[A] | None:
        """Return the branch of the version `by` places further; None if there is none."""
        kept = [*self._kept.get(_key(before), {}).values()]
        number = self.place(before, message).number
        wanted = number + by - 1 if number else len(kept) - 1
        return kept[wanted] if 0 <= wanted < len(kept) else None


def _name(message: Message) -> str:
    return json.dumps([message.get("role"), message.get("content")], ensure_ascii=False, default=str)


def _key(messages: Sequence[Message]) -> Key:
    return tuple(map(_name, messages))
