"""Reads replies by a `response_template` while they arrive, with the end of the prompt as their beginning.

Within a field only its own closing mark counts. Outside, each opening one does: the earliest, and of several the
longest. Text of a field leaves as it comes; calls leave when their field is closed, or the reply ends. Where
transformers keeps the last text of a field that comes twice, both are kept; a call that is none stays in the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rekindle._src.core.reply import ContentDelta, ReasoningDelta
from rekindle._src.text.replies.arguments import fits, kinds_of
from rekindle._src.text.replies.call import SPACE, Known, MalformedCall, Reading, ReplyCall, json_call
from rekindle._src.text.replies.patterns import Pattern, PatternSearch
from rekindle._src.text.replies.response_template import Marks, ReplyField, ResponseTemplate
from rekindle._src.text.replies.scanner import ReplyScanner
from rekindle._src.text.replies.tag_reader import literal

MAX_MATCH = 1_024  # characters of a mark that a pattern finds
CALLS = "tool_calls"
_REASONING = ("thinking", "reasoning_content", "reasoning")
_BETWEEN = "\n\n"  # two texts of a field that comes twice


class _Hit(NamedTuple):
    """A mark in the text. The smallest is the one that counts."""

    place: int
    longest: int  # its length, negative
    closes: bool
    name: str
    field: ReplyField
    groups: Mapping[str, str]


class TemplateScanner(ReplyScanner):
    """Reads one reply. `calls` says that the field of calls counts; without, its text is content."""

    def __init__(
        self,
        template: ResponseTemplate,
        *,
        calls: bool,
        known: Known,
        new_id: Callable[[int], str],
        pieces: bool = False,
    ) -> None:
        super().__init__(syntax=None, tags=None, reasoning_open=False, known=known, new_id=new_id, pieces=pieces)
        fields = [field for field in template.fields if calls or field.name != CALLS]
        self._template = template
        self._explicit = [field for field in fields if not field.is_implicit]
        self._implicit = next((field for field in fields if field.is_implicit), None)
        self._searches: dict[tuple[str, bool], PatternSearch] = {}
        self._region: list[str] = []  # text of the field that is open, if it is read as a whole
        self._mark = ""  # the text that opened it
        self._outside: list[str] = []  # text that no field takes
        self._said: set[str] = set()  # fields with text
        self._fresh = True  # nothing of this field's text was emitted
        self._begun = False  # a mark was read
        self._gaps: dict[str, list[str]] = {}  # whitespace that waits for more text, by field

    def go_on_from(self, prompt: str, continued: str) -> None:
        """Take the text before the reply: the prompt after its last anchor."""
        before = prompt if prompt.endswith(continued) else prompt + continued
        self.feed(self._template.after_anchor(before))
        self._begin_here()
        self._outside.clear()
        self._said.clear()
        self._gaps.clear()

    def _read(self) -> Reading[None]:
        field, groups = self._implicit, dict[str, str]()
        opened = False
        while (hit := (yield from self._next(field))) is not None:
            source = self.source
            mark = source.text[hit.place : hit.place - hit.longest]
            self._take(field, source.text[source.at : hit.place])
            source.at = hit.place - hit.longest
            source.mark()
            self._begun = True
            if hit.closes:
                if field is not None and not field.is_implicit:
                    self._close(field, {**groups, **hit.groups}, mark)
                self._end_text(field)
                field = self._implicit
            else:
                if field is None or field.name != hit.field.name:
                    self._end_text(field)
                field, groups, opened = hit.field, dict(hit.groups), True
                self._mark, self._fresh = mark, True
                self._region.clear()
        if field is not None and not field.is_implicit:
            self._close(field, groups, "")
        self._end_text(field)
        if not opened and self._implicit is None:
            self._emit(ContentDelta, "".join(self._outside).strip(SPACE))

    def _next(self, field: ReplyField | None) -> Reading[_Hit | None]:
        """Give all text before the next mark to a field, and return the mark; None at the end."""
        source = self.source
        marks = list(self._looked_for(field))
        literals = tuple(text for _, _, one in marks for text in one.texts)
        while True:
            hit, hold = self._best(marks)
            hold = min(hold, len(source.text) - self._undecided(literals))  # one that begins earlier, or is longer
            if hit is not None and (source.ended or hit.place < hold):
                return hit
            end = min(hold, hit.place if hit is not None else hold)
            if source.ended:
                end = len(source.text)
            self._take(field, source.text[source.at : end])
            source.at = max(source.at, end)
            source.mark()
            if source.ended:
                return None
            yield

    def _looked_for(self, field: ReplyField | None) -> Iterator[tuple[ReplyField, bool, Marks]]:
        if field is not None:
            yield field, True, field.closes
        if field is None or field.is_implicit:
            for one in self._explicit:
                yield one, False, one.opens

    def _best(self, marks: Sequence[tuple[ReplyField, bool, Marks]]) -> tuple[_Hit | None, int]:
        """Return the mark that counts of those in the text, and the place from which another may begin."""
        source, hits, hold = self.source, list[_Hit](), len(self.source.text) + 1
        for field, closes, one in marks:
            for text in one.texts:
                if (place := source.find(text)) >= 0:
                    hits.append(_Hit(place, -len(text), closes, field.name, field, {}))
            if one.pattern is not None:
                search = self._search((field.name, closes), one.pattern)
                search.feed(source.text, source.base, ended=source.ended, limit=MAX_MATCH)
                while (match := search.match) is not None and match.start == match.end:
                    if match.end == 0 and not (closes or self._begun):
                        break  # a reply may begin inside of a field, once
                    search = self._searches[field.name, closes] = PatternSearch(one.pattern, match.end + 1)
                    search.feed(source.text, source.base, ended=source.ended, limit=MAX_MATCH)
                if match is not None:
                    start = match.start - source.base
                    groups = {
                        name: source.text[begin - source.base : end - source.base] for name, begin, end in match.groups
                    }
                    hits.append(_Hit(start, match.start - match.end, closes, field.name, field, groups))
                elif not search.decided:
                    hold = min(hold, search.pending - source.base)
        return min(hits, key=lambda hit: hit[:4], default=None), hold

    def _search(self, key: tuple[str, bool], pattern: Pattern) -> PatternSearch:
        """Return the search for a pattern from here on: the one before if it has found nothing that is read."""
        at, search = self.source.place, self._searches.get(key)
        if search is not None:
            start = search.match.start if search.match is not None else search.pending
            if start >= at or (search.decided and search.match is None):
                return search
        search = self._searches[key] = PatternSearch(pattern, at)
        return search

    def _take(self, field: ReplyField | None, text: str) -> None:
        if not text:
            return
        if field is None:
            self._outside.append(text)
            return
        kind = _kind(field)
        if kind is None:
            self._region.append(text)
            return
        if kind is ReasoningDelta:
            self._note_thoughts(self.source.place, len(text))
        if field.strip:
            text = text.lstrip(SPACE) if self._fresh and not self._goes_on(field) else text
            self._gap = self._gaps.get(field.name, [])
            text = self._without_gap(text) if text else ""
            self._gaps[field.name] = self._gap
        if not text:
            return
        if self._fresh and field.name in self._said and not self._goes_on(field):
            text = (field.join if field.join is not None else _BETWEEN if field.strip else "") + text
        self._fresh = False
        self._said.add(field.name)
        self._emit(kind, text)

    def _goes_on(self, field: ReplyField) -> bool:
        """True if all text of a field is one, whatever comes between."""
        return field.is_implicit and field.join is None and field.name in self._said

    def _end_text(self, field: ReplyField | None) -> None:
        """Leave the whitespace at the end of a field's text out, unless the implicit one goes on later."""
        if field is not None and not (field.is_implicit and field.join is None and not self.source.ended):
            self._gaps.pop(field.name, None)
        self._fresh = True

    def _close(self, field: ReplyField, groups: Mapping[str, str], mark: str) -> None:
        """Read a region that has ended as a whole."""
        if _kind(field) is not None or field.name != CALLS:
            return
        text = "".join(self._region)
        self._region.clear()
        try:
            for value in field.values(text, groups):
                self.emit(_call(value, self.known))
        except (MalformedCall, RecursionError):
            self._said.add("content")
            gap = "".join(self._gaps.pop("content", []))
            self._events.append(ContentDelta(f"{gap}{self._mark}{text}{mark}", unread=True))


def _kind(field: ReplyField) -> type[ContentDelta] | type[ReasoningDelta] | None:
    if field.name in _REASONING:
        return ReasoningDelta
    return ContentDelta if field.name == "content" else None


def _call(value: Any, known: Known) -> ReplyCall:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping):
        raise MalformedCall
    name, arguments = function.get("name"), function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json_call(f'{{"name": "f", "arguments": {arguments or "{}"}}}').arguments
    if not isinstance(arguments, Mapping):
        raise MalformedCall
    schemas = known.get(name, {}) if isinstance(name, str) else {}
    return ReplyCall.of(name, {key: _cast(value, kinds_of(schemas.get(key))) for key, value in arguments.items()})


def _cast(value: Any, kinds: frozenset[str] | None) -> Any:
    """Return an argument with a type that the tool's schema names: a text that stands for such a value becomes it, and
    so does each text of a list that the schema doesn't name, since a tag may come twice."""
    if kinds is None:
        return value
    if isinstance(value, list) and "array" not in kinds:
        return [_of_kinds(one, kinds) if isinstance(one, str) else one for one in value]
    return _of_kinds(value, kinds) if isinstance(value, str) else value


def _of_kinds(text: str, kinds: frozenset[str]) -> Any:
    if not kinds - {"string"}:
        return text
    word = text.strip().lower() if len(text) < 16 else ""
    numbers = kinds & {"integer", "number"}
    if "boolean" in kinds and (word in ("true", "false") or (word in ("1", "0") and not numbers)):
        return word in ("true", "1")
    try:
        value = literal(text)
    except MalformedCall:
        return text
    if isinstance(value, float):
        if not math.isfinite(value):
            return text
        if numbers == {"integer"} and value.is_integer():
            return int(value)
    return value if fits(value, kinds) else text
