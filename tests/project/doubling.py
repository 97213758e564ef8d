"""Tests whether reading a text takes time in proportion to its length, with texts that may not."""

from __future__ import annotations

import re._constants as op
import re._parser as parser
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

MOST = 2.5  # times as much for a text of twice the length
SHORT = 1 << 13  # characters: what takes more than linear time takes well over QUICK for so many
LONG = 1 << 15
_QUICK = 2e-3  # seconds of a processor
_DOUBLINGS = 3  # from the shorter text to the longer, so that a noisy machine does not decide
_TRIES = 8
_LIMIT = 5.0  # seconds for one text: an exponential time would not end

# What is repeated: whatever opens, closes, escapes or separates in one of the formats, alone and by turns.
FEW = ("{", "[", "(", '"', "'", "\\", "`", "*", "<", "|", " ", "\n", "a", "0", "{{", "a ", '\\"')
PARTS = (
    *"{}[]()<>\"'`\\/|*_#~-+=:;,.!?%@&^$ \t\n\r0aé\x00",
    "{{", "}}", "{%", "%}", "{#", "[[", "[]", "{}", "()", "<>", '\\"', "\\'", "\\\\", "\\u", '"a', "'a", '",', '":',
    "**", "*a", "`a", "``", "# ", "- ", "> ", "| ", "|-", "[](", "[a](", "1.", "a.", ".a", "a ", " a", "a\n", " \n",
    "\r\n", "a,", "a=", "a:", "a-", "1e", "-1", "0,", "/a", "a/", "//", "/*", "<a", "</", "<|", "|>", "&a", "%1", "$a",
)  # fmt: skip


class Hostile(NamedTuple):
    """A text with a part that is repeated."""

    before: str
    part: str
    after: str = ""

    def text(self, length: int) -> str:
        return self.before + self.part * max(1, length // len(self.part)) + self.after

    def __str__(self) -> str:
        return f"{self.before!r} + {self.part!r} * n + {self.after!r}"


def growth(read: Callable[[str], object], hostile: Hostile, length: int) -> float:
    """Return how many times as long a text of twice the length takes, up to `length` characters; 0 if that is quick."""
    long, short = hostile.text(length), hostile.text(length >> _DOUBLINGS)
    longest = _seconds(read, long)
    if longest == float("inf"):
        return longest
    shortest = float("inf")
    for _ in range(_TRIES):
        if longest < _QUICK:
            return 0.0
        shortest = min(shortest, _seconds(read, short))
        times = float((longest / shortest) ** (1 / _DOUBLINGS))
        if times <= MOST:
            break
        longest = min(longest, _seconds(read, long))
    return times


def _seconds(read: Callable[[str], object], text: str) -> float:
    with _bounded():
        start = time.thread_time()
        try:
            read(text)
        except _TooLong:
            return float("inf")
        return time.thread_time() - start


class _TooLong(BaseException):
    """A text takes too long."""


@contextmanager
def _bounded() -> Iterator[None]:
    """Interrupt what takes too long, as far as it looks for signals, as `re` does."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def attacks(pattern: str | bytes, flags: int = 0) -> list[Hostile]:
    """Texts that run through each repeat of a pattern, and then fail or end."""
    tree = parser.parse(pattern, flags)
    found: dict[Hostile, None] = {}

    def walk(items: Any, before: str) -> str:
        """Return a text that the items match."""
        text = ""
        for kind, value in items:
            if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
                least, most, body = value
                one = walk(body, before + text)
                if most is op.MAXREPEAT or most > 8:
                    for part in {one, *(one[:1] if one else ())}:
                        for after in ("", "\x00", "\n", "!"):
                            found[Hostile(before + text, part, after)] = None
                            found[Hostile("", before + text + part, after)] = None
                text += one * max(1, min(least, 64))
            elif kind is op.SUBPATTERN:
                text += walk(value[3], before + text)
            elif kind is op.ATOMIC_GROUP:
                text += walk(value, before + text)
            elif kind is op.BRANCH:
                texts = [walk(branch, before + text) for branch in value[1]]
                text += texts[0]
            elif kind is op.ASSERT and value[0] > 0:
                walk(value[1], before + text)
            else:
                text += _one(kind, value)
        return text

    whole = walk(list(tree), "")
    if whole:
        found[Hostile("", whole)] = None
        found[Hostile(whole[:-1], whole[-1])] = None
    return [one for one in found if one.part]


def _one(kind: Any, value: Any) -> str:
    """A character that an item matches."""
    if kind is op.LITERAL:
        return chr(value)
    if kind is op.NOT_LITERAL:
        return "a" if value != ord("a") else "b"
    if kind is op.ANY:
        return "a"
    if kind is op.IN:
        if value[0][0] is not op.NEGATE:
            first, item = value[0]
            if first is op.LITERAL:
                return chr(item)
            if first is op.RANGE:
                return chr(item[0])
            return {"DIGIT": "0", "SPACE": " ", "WORD": "a"}.get(str(item).removeprefix("CATEGORY_"), "!")
        refused = {item for one, item in value if one is op.LITERAL}
        return next(char for char in "a !0\\" if ord(char) not in refused)
    return ""
