"""The scanner: text of a reply in, events out. Its events are final, and no text is lost.

By default a call is emitted once it is complete. With `pieces`, a call of a known tool starts as soon as its name is
known, and its arguments follow as they come; an event drops one that turns out to be none.
Whitespace next to tags and calls belongs to them. Text that looks like a call and is none is emitted as content.
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
from rekindle._src.text.replies.call import (
    SPACE,
    Calls,
    CallSyntax,
    Known,
    MalformedCall,
    Opener,
    Reading,
    ReplyCall,
    TextSource,
    ahead,
    peek,
    skip_space,
    take,
)
from rekindle._src.text.replies.marks import NO_MARKS, ReplyMarks, Tags


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
        marks: ReplyMarks = NO_MARKS,
    ) -> None:
        self.source: TextSource = TextSource()
        self.known: Known = known
        of_calls: tuple[Opener, ...] = syntax.openers if syntax is not None else ()
        self._openers = (*of_calls, *_openers_of(marks, tags))
        self._marked = {opener.text: opener for opener in self._openers if not opener.bare}
        self._call_openers = {opener.text: opener for opener in of_calls if not opener.bare}
        self._marks = marks
        self._prefix = ""  # text before the reply that was fed, and is no part of it
        self._first_place = 0  # of the reply, in characters that were fed
        self._thoughts: list[tuple[int, int]] = []
        self._ids: set[str] = set()
        self._held: list[str] = []  # texts of calls inside of reasoning
        self._begins = _first_characters([opener.text for opener in self._openers])
        self._tags, self._open = tags, reasoning_open
        self._new_id = new_id
        self._events: list[ReplyEvent] = []
        self._calls = 0
        self._pieces = pieces
        self._writing = False  # a call has started and is not complete
        self._pending_calls: list[ReplyCall] | None = (
            None  # calls inside of reasoning, until it is clear if they are meant
        )
        self._gap: list[str] = []  # whitespace that counts only if more text of the same kind follows
        self._has_content = False  # content was emitted
        self._after_marker = False  # the last thing read is a tag or a call
        self._blank = True  # nothing but whitespace stands in this line so far
        self._thoughts_again = tags[0] if tags is not None and marks.anywhere else None
        self._reading: Generator[None, None, None] | None = self._read()

    def feed(self, text: str) -> list[ReplyEvent]:
        """Return the events that `text` makes final."""
        self.source.push(text)
        return self._go_on()

    def finish(self) -> list[ReplyEvent]:
        """Return the events that remain when no text follows."""
        self.source.ended = True
        return self._go_on()

    def begin_with(self, prefix: str) -> None:
        """Take the end of the prompt, with which the reply's syntax begins."""
        self.source.push(prefix)
        self._prefix = prefix
        self._begin_here()

    @property
    def thoughts(self) -> list[tuple[int, int]]:
        """The half-open ranges of the reply's characters that are reasoning, with the whitespace around it."""
        start = self._first_place
        return [(max(begin - start, 0), end - start) for begin, end in self._thoughts if end > start]

    def _begin_here(self) -> None:
        """Begin the reply after the text so far."""
        self._first_place = self.source.base + len(self.source.text)
        self._thoughts.clear()

    def _note_thoughts(self, begin: int, length: int) -> None:
        """Add a range of reasoning, which may continue the last one."""
        end = begin + length
        if self._thoughts and self._thoughts[-1][1] == begin:
            begin, _ = self._thoughts.pop()
        self._thoughts.append((begin, end))

    # For the readers of a family's syntax.

    @property
    def has_content(self) -> bool:
        """True if content was emitted."""
        return self._has_content

    def streams(self, name: str) -> bool:
        """True if a call of `name` is emitted while it arrives."""
        return self._pieces and self._pending_calls is None and name in self.known

    def begin(self, name: str, id: str = "") -> Callable[[str], None] | None:
        """Start a call if it is emitted while it arrives; return the function that takes its arguments in pieces."""
        if not self.streams(name):
            return None
        self._writing = True
        self._start(name, id)
        return self._write

    def _start(self, name: str, id: str) -> None:
        if not id or id in self._ids:
            id = self._new_id(self._calls)
        self._ids.add(id)
        self._events.append(ToolCallStarted(self._calls, id, name))

    def _write(self, text: str) -> None:
        if text:
            self._events.append(ToolCallArguments(self._calls, text))

    def emit(self, *calls: ReplyCall) -> None:
        """Emit complete calls, or the end of the one that has started."""
        if self._pending_calls is not None:
            self._pending_calls += calls
            self.keep()
            return
        for call in calls:
            if not self._writing:
                self._start(call.name, call.id)
                self._write(call.text)
            self._writing = False
            self._calls += 1
        self.keep()

    def keep(self) -> None:
        """Note that the text read so far belongs to emitted calls, or to marks."""
        if self._pending_calls is not None:
            self._held.append(self.source.since_mark())
        else:
            self._after_marker = True
            self._prefix = ""
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
                if opener.text == self._thoughts_again:
                    self._gap.clear()
                    yield from self._read_thoughts()
                self._blank = True
            except MalformedCall:
                if opener.bare and not self.source.since_mark():
                    self.source.at += len(opener.text)
                text = self._sayable(self._without_prefix(self.source.since_mark()))
                self._give_back(text, unread=opener.text in self._call_openers)
        if not self._after_marker:
            self._emit(ContentDelta, "".join(self._gap))

    def _give_back(self, text: str, *, unread: bool = True) -> None:
        """Emit the text of what turned out to be no call. `unread` says that it had a call's mark."""
        if self._writing:
            self._writing = False
            self._events.append(ToolCallDropped(self._calls, text))
            self._calls += 1
        elif text:
            self._events.append(ContentDelta(text, unread))

    def _read_reasoning(self, opening: str, closing: str) -> Reading[None]:
        source = self.source
        while (char := (yield from peek(source))) and char in SPACE:
            self._gap.append(char)
            source.at += 1
            source.mark()
        repeated = yield from take(source, opening)  # it may stand in the prompt and again in the reply
        self._after_marker = self._open or repeated or (yield from take(source, closing))
        if self._after_marker:
            self._gap.clear()
        if repeated or self._open:
            yield from self._read_thoughts()

    def _read_thoughts(self) -> Reading[None]:
        """Read reasoning from after its opening tag to its end."""
        source, marks = self.source, self._marks
        assert self._tags is not None, "the reply has reasoning"
        opening, closing = self._tags
        while marks.anywhere and (yield from take(source, opening)):
            pass
        if marks.header:
            yield from self._skip_header(marks.header)
        begin = source.place
        yield from skip_space(source)
        self._note_thoughts(begin, source.place - begin)
        last = (closing, *marks.text_begins)
        ends = (*last, *self._call_openers)
        begins = _first_characters(ends)
        while (yield from peek(source)):
            source.mark()
            match, end = None, len(source.text)
            if begins.search(source.text, source.at) is not None:
                match = self._first(ends)
                end = end - self._undecided(ends) if match is None else match[0]
            self._think(source.text[source.at : end])
            self._note_thoughts(source.place, end - source.at)
            source.at = end
            if match is None:
                if not source.ended:
                    yield
                continue
            if match[1] in last:
                source.at += len(match[1])
                while (yield from take(source, closing)):
                    pass
            elif not marks.ended_by_calls:
                source.mark()
                begin = source.place
                source.at += len(match[1])
                if (yield from self._ends_with_calls(self._call_openers[match[1]])):
                    return
                self._note_thoughts(begin, source.place - begin)
                continue
            self._gap.clear()
            self._after_marker = True
            return
        self._emit(ReasoningDelta, "".join(self._gap))
        self._gap.clear()

    def _skip_header(self, header: str) -> Reading[None]:
        source = self.source
        length = yield from ahead(source, header)
        while length and source.at + length == len(source.text) and not source.ended:
            yield
            length = yield from ahead(source, header)
        if length and source.text[source.at + length : source.at + length + 1] in ("", "<", *SPACE):
            source.at += length

    def _ends_with_calls(self, opener: Opener) -> Reading[bool]:
        """True if calls inside of reasoning are meant as calls: only if the reply ends with them.

        A model may think about a call, and may also forget to close its reasoning before one. The last call may be
        cut, if there is a whole one before it. Calls that are not meant are part of the reasoning.
        """
        source, held = self.source, list[ReplyCall]()
        self._pending_calls = held
        self._held.clear()
        cut = False
        try:
            yield from opener.read(self)
            self.keep()  # its closing tag, too, before the next one may be cut
            while (yield from take(source, opener.text)):
                yield from opener.read(self)
                self.keep()
            yield from skip_space(source)
            complete = (yield from peek(source)) == "" or (
                source.ended and opener.text.startswith(source.text[source.at :])
            )
        except MalformedCall:
            cut = complete = bool(held) and source.ended  # the reader has waited for more text
        self._pending_calls = None
        rest = source.since_mark()
        if complete:
            self._gap.clear()
            source.mark()
            self.emit(*held)
            if cut:
                self._give_back(self._sayable(rest))
        else:
            self._think("".join(self._held) + rest)
        self._held.clear()
        return complete

    def _think(self, text: str) -> None:
        """Emit reasoning; whitespace at its end waits for more."""
        self._emit(ReasoningDelta, self._without_gap(text))

    def _next_opener(self) -> Opener | None:
        """Emit everything before the next opener and return it, still unread; None if there is none yet."""
        source = self.source
        source.mark()
        if self._begins.search(source.text, source.at) is None:
            self._say(source.text[source.at :])
            source.at = len(source.text)
            return None
        openers = self._marked
        match = self._first(tuple(openers))
        first = None if match is None else openers[match[1]]
        end = len(source.text) - self._undecided(tuple(openers)) if match is None else match[0]
        for opener in self._openers:
            if opener.bare and (at := self._at_line_start(opener.text, end)) >= 0:
                first, end = opener, at
        self._say(source.text[source.at : end])
        source.at = end
        return first

    def _first(self, literals: Sequence[str]) -> tuple[int, str] | None:
        """Return the place and text of the literal that comes first in the unread text."""
        starts = ((self.source.find(literal), literal) for literal in literals)
        return min((match for match in starts if match[0] >= 0), default=None)

    def _at_line_start(self, text: str, end: int) -> int:
        """Return the place where `text` begins a line before `end`, or -1."""
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
        """Return the length of the longest end of the text that may begin a literal; 0 if no more text comes."""
        if self.source.ended:
            return 0
        text, at = self.source.text, self.source.at
        for size in range(min(max(map(len, literals), default=1) - 1, len(text) - at), 0, -1):
            if any(len(literal) > size and literal.startswith(text[-size:]) for literal in literals):
                return size
        return 0

    def _say(self, text: str) -> None:
        if text:
            self._emit(ContentDelta, self._sayable(self._without_prefix(text)))

    def _without_prefix(self, text: str) -> str:
        text, self._prefix = text.removeprefix(self._prefix), ""
        return text

    def _sayable(self, text: str) -> str:
        """Return the content to emit; whitespace at its end waits, and next to tags and calls it is dropped."""
        if not text:
            return ""
        line = text.rpartition("\n")[2]
        self._blank = (self._blank or "\n" in text) and not line.strip(SPACE)
        content = self._without_gap(text)
        if not content:
            return ""
        if self._after_marker and not self._has_content:
            content = content.lstrip(SPACE)
        self._has_content, self._after_marker = True, False
        return content

    def _without_gap(self, text: str) -> str:
        """Return `text` after the whitespace that waited for it. The whitespace at its own end waits in turn."""
        content = text.rstrip(SPACE)
        gap = text[len(content) :]
        if not content:
            self._gap.append(gap)
            return ""
        content, self._gap = "".join(self._gap) + content, [gap]
        return content

    def _emit(self, kind: type[ContentDelta] | type[ReasoningDelta], text: str) -> None:
        if text:
            self._events.append(kind(text))


def _openers_of(marks: ReplyMarks, tags: Tags | None) -> list[Opener]:
    """Return the openers of marks that are no calls."""
    dropped = [*marks.noise, *marks.text_begins, *(tags if tags is not None and marks.anywhere else ())]
    openers = [Opener(text, _drop) for text in dropped]
    for begin, end in marks.wraps:
        openers += [Opener(begin, _begin_wrap), Opener(end, _end_wrap)]
    return openers


def _drop(calls: Calls) -> Reading[None]:
    """Leave a mark out."""
    calls.keep()
    yield from ()


def _begin_wrap(calls: Calls) -> Reading[None]:
    """Leave a tag out that stands before all content."""
    if calls.has_content:
        raise MalformedCall
    yield from _drop(calls)


def _end_wrap(calls: Calls) -> Reading[None]:
    """Leave a tag out that ends the reply."""
    yield from skip_space(calls.source)
    if (yield from peek(calls.source)):
        raise MalformedCall
    calls.keep()


def _first_characters(literals: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of the literals' first characters. Most pieces of text hold none and leave at once."""
    return re.compile("|".join(sorted({re.escape(literal[0]) for literal in literals})) or "(?!)")
