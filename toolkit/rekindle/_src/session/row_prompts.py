"""Prompts from a template and the rows of a table, or of any iterable of mappings, that fill it."""

from __future__ import annotations

import difflib
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from rekindle._src.session.prompts import parse_one
from rekindle.errors import InvalidRequest

Template = str | Callable[[Mapping[str, Any]], Any]
Messages = list[dict[str, Any]]


class Rows:
    """Rows as mappings, one after the other: of a pandas or polars DataFrame, or of an iterable of mappings."""

    def __init__(self, rows: Any) -> None:
        self.total: int | None = len(rows) if isinstance(rows, Sized) else None
        self._frame = hasattr(rows, "columns") and (hasattr(rows, "iter_rows") or hasattr(rows, "itertuples"))
        if not self._frame and (isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable)):
            raise InvalidRequest(
                "rows", rows, "are no rows", "Pass a DataFrame, a list of dicts or any iterable of mappings"
            )
        self._rows: Any = rows
        self._read = False

    @property
    def source(self) -> Any:
        """The DataFrame or the sequence of the rows; None if they can be read only once."""
        return self._rows if self._frame or isinstance(self._rows, Sequence) else None

    def check_names(self, names: Iterable[str]) -> None:
        """Raise `InvalidRequest` for a field's name that no row has, as far as that is known before rows are read."""
        if self._frame:
            known = dict.fromkeys(str(name) for name in self._rows.columns)
        elif isinstance(self._rows, Sequence) and self._rows and all(isinstance(row, Mapping) for row in self._rows):
            known = dict.fromkeys(str(name) for row in self._rows for name in row)
        else:
            return
        for name in names:
            if name not in known:
                similar = difflib.get_close_matches(name, known, n=1)
                listed = ", ".join(map(repr, known)) or "none"
                fix = f"Did you mean {similar[0]!r}?" if similar else f"The columns are {listed}"
                raise InvalidRequest("template", "{" + name + "}", "names a column that no row has", fix)

    def __iter__(self) -> Iterator[Any]:
        if self._read and isinstance(self._rows, Iterator):
            fix = "Pass a list, or call map with a new iterator and out= to go on"
            raise InvalidRequest("rows", self._rows, "was read before and can't be read again", fix)
        self._read = True
        if not self._frame:
            return iter(self._rows)
        if hasattr(self._rows, "iter_rows"):  # polars
            return iter(self._rows.iter_rows(named=True))
        names = [str(name) for name in self._rows.columns]
        return (dict(zip(names, values, strict=True)) for values in self._rows.itertuples(index=False, name=None))


class RowPrompts:
    """A template to be filled with rows. Errors name the row."""

    def __init__(self, template: Any, *, chat: bool, system: str | None) -> None:
        if not isinstance(template, str) and not callable(template):
            raise InvalidRequest(
                "template",
                template,
                "is neither text nor a function",
                'Pass "Summarise: {text}", or a function of a row',
            )
        if system is not None and not isinstance(system, str):
            raise InvalidRequest("system", system, "is not text", "Pass a str, or leave it out")
        if system is not None and not chat:
            raise InvalidRequest("system", system, "is for chats", "Pass chat=True as well")
        self._template, self._chat, self._system = template, chat, system
        self.fields = _fields(template) if isinstance(template, str) else ()

    def fill(self, index: int, row: Any) -> str | list[int] | Messages:
        """Return the prompt of a row: text, token ids, or the messages of a chat."""
        field = f"rows[{index}]"
        if not isinstance(row, Mapping):
            raise InvalidRequest(field, row, "is not a mapping", "Use dicts such as {'text': '…'}")
        if isinstance(self._template, str):
            missing = [name for name in self.fields if name not in row]
            if missing:
                names = ", ".join(map(repr, row)) or "none"
                raise InvalidRequest(
                    field, dict(row), f"has no {missing[0]!r}, which the template names", f"Its fields are {names}"
                )
        filled: Any
        try:
            filled = self._template.format_map(row) if isinstance(self._template, str) else self._template(row)
        except Exception as error:
            wrong = InvalidRequest(field, dict(row), f"does not fit the template: {error!r}", "Change one of the two")
            wrong.__cause__ = error
            raise wrong from error
        if isinstance(filled, Sequence) and not isinstance(filled, str) and filled and isinstance(filled[0], Mapping):
            return self._messages([dict(message) for message in filled])
        if self._chat and isinstance(filled, str):
            return self._messages([{"role": "user", "content": filled}])
        try:
            prompt = parse_one(filled)
        except InvalidRequest as error:
            fix = "Return text, token ids or messages"
            raise InvalidRequest(field, filled, "was made into something that is no prompt", fix) from error
        if prompt.text is not None:
            return prompt.text
        assert prompt.token_ids is not None, "a prompt has text or token ids"
        return [int(token) for token in prompt.token_ids]

    def _messages(self, messages: Messages) -> Messages:
        return messages if self._system is None else [{"role": "system", "content": self._system}, *messages]


def _fields(template: str) -> tuple[str, ...]:
    """Return the names in a format string, each once."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise InvalidRequest(
            "template", template, f"is no format string: {error}", "Write {{ and }} for braces that are text"
        ) from None
    fields = [name.split(".")[0].split("[")[0] for name in names]
    if any(not name or name.isdigit() for name in fields):
        raise InvalidRequest(
            "template",
            template,
            "has braces without a field's name",
            "Write {text}, and {{ or }} for braces in the text",
        )
    return tuple(dict.fromkeys(fields))
