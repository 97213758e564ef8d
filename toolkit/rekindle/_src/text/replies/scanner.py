"""The scanner: text of a reply in, events out. What it emits is final, and nothing of the text is lost.

By default a call is emitted once it is complete. With `pieces`, a call of a known tool starts as soon as its name is
known, and its arguments follow as they come; one that turns out to be none is dropped by an event of its own.
Whitespace beside tags and calls belongs to them. What looks like a call and is none comes out as content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

from rekindle._src.core.reply import (
    ContentDelta,
    ReasoningDelta,
    ReplyEvent,
    ToolCallArguments,
    ToolCallDropped,
    ToolCallStarted,
)
from rekindle._src.text.replies.call import Call, Known
from rekindle._src.text.replies.source import SPACE, Malformed, Reading, Source, peek, skip_space, take
from rekindle._src.text.replies.syntax import CallSyntax, Opener

Tags = tuple[str, str]


class ReplyScanner:
    """Reads one reply while it arrives: `feed` every piece of text, then `finish` once. Both return events."""

    def __init__(
        self,
        *,
        syntax: CallSyntax | None,
        tags: Tags | None,
        reasoning_open: bool,
        known: Known,
        new_id: Callable[[int], str],
        pieces: bool = False,
    ) -> None:
        self.source: Source = Source()
        self.known: Known = known
        self._openers: tuple[Opener, ...] = syntax.openers if syntax is not None else ()
        self._marked = {opener.text: opener for opener in self._openers if not opener.bare}
        self._begins = _first_characters([opener.text for opener in self._openers])
        self._tags, self._open = tags, reasoning_open
        self._new_id = new_id
        self._events: list[ReplyEvent] = []
        self._calls = 0
        self._pieces = pieces
        self._writing = False  # a call has started and is not complete
        self._held: list[Call] | None = None  # calls inside of reasoning, until it is clear whether they are meant
        self._gap: list[str] = []  # whitespace that counts only if more of the same kind follows
        self._said = False  # some content is out
        self._beside = False  # what came last is no content, but a tag or a call
        self._blank = True  # nothing but whitespace stands in this line so far
        self._reading: Generator[None, None, None] | None = self._read()

    def feed(self, text: str) -> list[ReplyEvent]:
        """The events that `text` makes final."""
        self.source.push(text)
        return self._go_on()

    def finish(self) -> list[ReplyEvent]:
        """The events that remain when no text follows."""
        self.source.ended = True
        return self._go_on()

    # What readers of a family's syntax use.

    def streams(self, name: str) -> bool:
        """Whether a call of `name` is emitted while it arrives."""
        return self._pieces and self._held is None and name in self.known

    def begin(self, name: str) -> Callable[[str], None] | None:
        """Start a call, if it is emitted while it arrives; what takes its arguments in pieces."""
        if not self.streams(name):
            return None
        self._writing = True
        self._events.append(ToolCallStarted(self._calls, self._new_id(self._calls), name))
        return self._write

    def _write(self, text: str) -> None:
        if text:
            self._events.append(ToolCallArguments(self._calls, text))

    def found(self, *calls: Call) -> None:
        """Emit complete calls, or the end of the one that has started."""
        if self._held is not None:
            self._held += calls
            return
        for call in calls:
            if not self._writing:
                self._events.append(ToolCallStarted(self._calls, self._new_id(self._calls), call.name))
                self._write(call.text)
            self._writing = False
            self._calls += 1
        self._beside = True
        self.source.mark()

    def _go_on(self) -> list[ReplyEvent]:
        if self._reading is not None and next(self._reading, self) is self:
            self._reading = None
        events, self._events = self._events, []
        return events

    def _read(self) -> Reading[None]:
        if self._tags is not None:
            yield from self._read_reasoning(*self._tags)
        while (yield from peek(self.source)):
            opener = self._next_opener()
            if opener is None:
                if not self.source.ended:
                    yield
                continue
            self.source.mark()
            if not opener.bare:
                self.source.at += len(opener.text)
            try:
                yield from opener.read(self)
                self._blank = True
            except Malformed:
                if opener.bare and not self.source.since_mark():
                    self.source.at += len(opener.text)
                text = self._sayable(self.source.since_mark())
                if self._writing:
                    self._writing = False
                    self._events.append(ToolCallDropped(self._calls, text))
                    self._calls += 1
                else:
                    self._emit(ContentDelta, text)
        if not self._beside:
            self._emit(ContentDelta, "".join(self._gap))

    def _read_reasoning(self, opening: str, closing: str) -> Reading[None]:
        source = self.source
        while (char := (yield from peek(source))) and char in SPACE:
            self._gap.append(char)
            source.at += 1
            source.mark()
        repeated = yield from take(source, opening)  # it may stand in the prompt and again in the reply
        self._beside = self._open or repeated or (yield from take(source, closing))
        if self._beside:
            self._gap.clear()
        if not (repeated or self._open):
            return
        yield from skip_space(source)
        openers, ends = self._marked, (closing, *self._marked)
        begins = _first_characters(ends)
        while (yield from peek(source)):
            source.mark()
            found, end = None, len(source.text)
            if begins.search(source.text, source.at) is not None:
                found = self._first(ends)
                end = end - self._undecided(ends) if found is None else found[0]
            self._think(source.text[source.at : end])
            source.at = end
            if found is None:
                if not source.ended:
                    yield
                continue
            source.mark()
            source.at += len(found[1])
            if found[1] == closing:
                self._gap.clear()
                return
            if (yield from self._ends_with_calls(openers[found[1]])):
                return
            self._think(source.since_mark())
        self._emit(ReasoningDelta, "".join(self._gap))
        self._gap.clear()

    def _ends_with_calls(self, opener: Opener) -> Reading[bool]:
        """Whether calls inside of reasoning are meant as such: only if the reply ends with them.

        A model may think about a call, and may also forget to close its reasoning before one.
        """
        held: list[Call] = []
        self._held = held
        try:
            yield from opener.read(self)
            while (yield from take(self.source, opener.text)):
                yield from opener.read(self)
            yield from skip_space(self.source)
            ended = (yield from peek(self.source)) == ""
        except Malformed:
            ended = False
        self._held = None
        if ended:
            self._gap.clear()
            self.found(*held)
        return ended

    def _think(self, text: str) -> None:
        """Reasoning; whitespace at its end waits for more."""
        self._emit(ReasoningDelta, self._without_gap(text))

    def _next_opener(self) -> Opener | None:
        """Say everything before the next opener, which is then what comes next; None if there is none yet."""
        source = self.source
        source.mark()
        if self._begins.search(source.text, source.at) is None:
            self._say(source.text[source.at :])
            source.at = len(source.text)
            return None
        openers = self._marked
        found = self._first(tuple(openers))
        first = None if found is None else openers[found[1]]
        end = len(source.text) - self._undecided(tuple(openers)) if found is None else found[0]
        for opener in self._openers:
            if opener.bare and (at := self._at_line_start(opener.text, end)) >= 0:
                first, end = opener, at
        self._say(source.text[source.at : end])
        source.at = end
        return first

    def _first(self, literals: Sequence[str]) -> tuple[int, str] | None:
        """The literal that comes first in the unread text, and where."""
        starts = ((self.source.text.find(literal, self.source.at), literal) for literal in literals)
        return min((found for found in starts if found[0] >= 0), default=None)

    def _at_line_start(self, text: str, end: int) -> int:
        """Where `text` begins a line before `end`, or -1."""
        source, at = self.source, self.source.at
        blank = self._blank
        while at < end:
            if blank and source.text.startswith(text, at):
                return at
            char = source.text[at]
            blank = char == "\n" or (blank and char in SPACE)
            at += 1
        return -1

    def _undecided(self, literals: Sequence[str]) -> int:
        """The length of the longest end of the text that is the beginning of a literal; 0 if no more text comes."""
        if self.source.ended:
            return 0
        text, at = self.source.text, self.source.at
        for size in range(min(max(map(len, literals), default=1) - 1, len(text) - at), 0, -1):
            if any(len(literal) > size and literal.startswith(text[-size:]) for literal in literals):
                return size
        return 0

    def _say(self, text: str) -> None:
        self._emit(ContentDelta, self._sayable(text))

    def _sayable(self, text: str) -> str:
        """Content; whitespace at its end waits for more, and beside tags and calls it is dropped."""
        if not text:
            return ""
        line = text.rpartition("\n")[2]
        self._blank = (self._blank or "\n" in text) and not line.strip(SPACE)
        said = self._without_gap(text)
        if not said:
            return ""
        if self._beside and not self._said:
            said = said.lstrip(SPACE)
        self._said, self._beside = True, False
        return said

    def _without_gap(self, text: str) -> str:
        """`text` behind the whitespace that waited for it, and without its own at the end, which waits."""
        said = text.rstrip(SPACE)
        gap = text[len(said) :]
        if not said:
            self._gap.append(gap)
            return ""
        said, self._gap = "".join(self._gap) + said, [gap]
        return said

    def _emit(self, kind: type[ContentDelta] | type[ReasoningDelta], text: str) -> None:
        if text:
            self._events.append(kind(text))


def _first_characters(literals: Sequence[str]) -> re.Pattern[str]:
    """Finds a character that can begin one of the literals. Most pieces of text hold none, and leave at once."""
    return re.compile("|".join(sorted({re.escape(literal[0]) for literal in literals})) or "(?!)")
