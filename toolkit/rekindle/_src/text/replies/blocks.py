"""A block of calls, by its marks and the reader of one call; and how a family writes its blocks, as data."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rekindle._src.text.replies.call import (
    KEYWORDS,
    OBJECT,
    TAGGED,
    CallForm,
    Calls,
    MalformedCall,
    NamedArguments,
    Opener,
    Reading,
    TagForm,
    Token,
    ahead,
    close,
    take,
)
from rekindle._src.text.replies.call_grammar import literal, mark

_PLACES = re.compile(r'"\{name\}"|\{name\}|\{index\}')
ReadOne = Callable[[Calls, bool], Reading[None]]  # reads what follows the mark of a call; True: of a tool's only


@dataclasses.dataclass(frozen=True, slots=True)
class CallBlock:
    """Where calls stand in a reply: `begins`, then each call between its marks, then `ends`. Closing marks may be
    missing. `alone` says that a call of a tool counts without the block's mark."""

    read_one: ReadOne
    begins: str = ""
    call: str = ""
    call_ends: str = ""
    ends: str = ""
    alone: bool = False

    def openers(self) -> tuple[Opener, ...]:
        """Return the texts at which calls may begin."""
        openers = [Opener(self.begins, partial(self._read, True))] if self.begins else []
        if self.call and (self.alone or not self.begins):
            openers.append(Opener(self.call, partial(self._read, False)))
        return tuple(openers)

    def _read(self, in_block: bool, calls: Calls) -> Reading[None]:
        source = calls.source
        if in_block and self.call and not (yield from take(source, self.call)):
            raise MalformedCall
        only_known = not in_block and bool(self.begins)
        while True:
            yield from self.read_one(calls, only_known)
            if self.call_ends and (yield from close(source, self.call_ends)):
                calls.keep()
            if self.ends and (yield from close(source, self.ends)):
                calls.keep()
                return
            if self.call:
                if not (yield from take(source, self.call)):
                    return
            elif not (in_block and (yield from ahead(source, "{"))):
                return
            only_known = False


@dataclasses.dataclass(frozen=True, slots=True)
class CallText:
    """How a family writes calls, in a grammar for forced calls and in earlier replies.

    `{name}` and `{key}` stand for names, `{index}` for the number of a call; `value` has what is around an argument,
    `text_value` around one that is a text.
    """

    before: str
    after: str
    begins: str = ""
    between: str = ""
    ends: str = ""
    arguments: str = OBJECT
    value: tuple[str, str] = ("", "")
    text_value: tuple[str, str] | None = None
    between_values: str = ""

    def form(self, markers: Sequence[str], token: Token) -> CallForm:
        """Return the form of calls that a model must make."""
        spelled = partial(_spelled, markers, token)

        def call(name: str) -> tuple[str, ...]:
            return (spelled(_named(self.before, name, 0)), self.arguments, spelled(self.after))

        def tag(key: str, is_text: bool) -> TagForm:
            before, after = self.text_value if is_text and self.text_value is not None else self.value
            before, after = before.replace("{key}", key), after.replace("{key}", key)
            places = [after.find(marker) for marker in markers if token(marker) is not None and marker in after]
            end = min(places, default=len(after))
            return TagForm(spelled(before), spelled(after), after[:end], spelled(after[end:]))

        return CallForm(
            call,
            spelled(self.begins),
            spelled(self.between),
            spelled(self.ends),
            tag if self.arguments == TAGGED else None,
            spelled(self.between_values),
        )

    def write(self, calls: Sequence[NamedArguments]) -> str:
        """Return calls of an earlier reply, as the model wrote them."""
        texts = [
            f"{_named(self.before, name, index)}{self._written(arguments)}{self.after}"
            for index, (name, arguments) in enumerate(calls)
        ]
        return f"{self.begins}{self.between.join(texts)}{self.ends}"

    def _written(self, arguments: Mapping[str, Any]) -> str:
        if self.arguments == OBJECT:
            return json.dumps(dict(arguments), ensure_ascii=False)
        if self.arguments == KEYWORDS:
            return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
        values = []
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            before, after = self.text_value if is_text and self.text_value is not None else self.value
            text = value if is_text else json.dumps(value, ensure_ascii=False)
            values.append(f"{before.replace('{key}', key)}{text}{after.replace('{key}', key)}")
        return self.between_values.join(values)


def _named(text: str, name: str, index: int) -> str:
    """Return the text with a call's name and number in their places. A name may read as one of these itself."""
    values = {'"{name}"': json.dumps(name), "{name}": name, "{index}": str(index)}
    return _PLACES.sub(lambda place: values[place[0]], text)


def _spelled(markers: Sequence[str], token: Token, text: str) -> str:
    """Return a text as a part of a rule, with markers as their tokens."""
    parts: list[str] = []
    start = at = 0
    while at < len(text):
        marker = max((marker for marker in markers if text.startswith(marker, at)), key=len, default="")
        if marker:
            parts += [literal(text[start:at])] if at > start else []
            parts.append(mark(marker, token))
            start = at + len(marker)
        at += len(marker) or 1
    return " ".join([*parts, literal(text[start:])] if start < len(text) else parts)
