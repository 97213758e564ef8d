"""The rule for the turns that leave a chat's prompt when the context is full: the same for every kind of chat.

A turn is a user's message with everything up to the next one, so that a call stays with its result. System messages
and pinned turns stay, and so does the last turn. The oldest others leave, several at once: the prompt begins at the
first turn after a multiple of half the room. It begins there for many turns then, which find each other's pages. The
place depends on the messages alone, so that a repeated, forwarded or restored chat is cut in the same place.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

from rekindle.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]
PINNED = "pinned"  # the key of a message whose turn stays
SYSTEM = ("system", "developer")  # roles of messages that stay
_OVERHEAD = 16  # characters of a message besides its content, about: its role, and the marks around it
_OF_VALUE = 4  # characters of a value besides its text, about
_OTHER_PART = 1_000  # characters in place of a part that is no text, such as a picture


def turns_of(messages: Messages) -> list[range]:
    """Return the places of each whole turn. System messages before the first turn are in none."""
    start = next((at for at, message in enumerate(messages) if message.get("role") not in SYSTEM), len(messages))
    users = [at for at in range(start, len(messages)) if messages[at].get("role") == "user"]
    starts = sorted({start, *users} - {len(messages)})
    return [range(first, stop) for first, stop in itertools.pairwise([*starts, len(messages)])]


def stays(messages: Messages, turn: range) -> bool:
    """True if a turn is pinned."""
    return any(messages[at].get(PINNED) for at in turn)


def leaving(messages: Messages, cut: int) -> set[int]:
    """Return the places of the messages that leave with the first `cut` turns, which are not pinned or the system's."""
    return {
        at
        for turn in turns_of(messages)[:cut]
        for at in ([] if stays(messages, turn) else turn)
        if messages[at].get("role") not in SYSTEM
    }


def without_turns(messages: Messages, cut: int) -> list[Mapping[str, Any]]:
    """Return the messages without their first `cut` turns; pinned turns and system messages stay."""
    gone = leaving(messages, cut)
    return [message for at, message in enumerate(messages) if at not in gone]


def missing(messages: Messages, kept: Messages) -> set[int]:
    """Return the places of the messages that are not among `kept`.

    Where a chat has the same object several times, and fewer of them are kept, the oldest are missing.
    """
    rest = Counter(map(id, kept))
    gone: set[int] = set()
    for at in range(len(messages) - 1, -1, -1):
        if rest[id(messages[at])] > 0:
            rest[id(messages[at])] -= 1
        else:
            gone.add(at)
    return gone


def unpinned(messages: Messages) -> Messages:
    """Return the messages as a template gets them, which knows no pins. Raise `InvalidRequest` for a wrong pin."""
    several = messages if isinstance(messages, list | tuple) else ()
    if not any(isinstance(message, Mapping) and PINNED in message for message in several):
        return messages
    for at, message in enumerate(messages):
        if isinstance(message, Mapping) and not isinstance(message.get(PINNED, False), bool):
            fix = "Use True for a turn that stays in the prompt, or leave it out"
            raise InvalidRequest(f"messages[{at}].{PINNED}", message[PINNED], "must be True or False", fix)
    return [
        {key: value for key, value in message.items() if key != PINNED} if isinstance(message, Mapping) else message
        for message in messages
    ]


def size_of(message: Mapping[str, Any]) -> int:
    """Return about how many characters a message has in the prompt, in a time that grows with its length."""
    size = _OVERHEAD
    content = message.get("content")
    for part in [content] if isinstance(content, str) else content if isinstance(content, list | tuple) else ():
        text = part.get("text") if isinstance(part, Mapping) else part
        size += len(text) if isinstance(text, str) else _OTHER_PART
    return size + (characters_of(message["tool_calls"]) if message.get("tool_calls") else 0)


def characters_of(value: object) -> int:
    """Return about how many characters a value has as JSON, which is not written for this."""
    size, values, counted = 0, [value], set[int]()
    while values:
        one = values.pop()
        size += _OF_VALUE
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, Mapping | list | tuple) and id(one) not in counted:
            counted.add(id(one))
            if isinstance(one, Mapping):
                values += one.keys()
                values += one.values()
            else:
                values += one
    return size


class ChatCuts(NamedTuple):
    """The places where a chat may be cut."""

    turns: tuple[int, ...]  # how many of the oldest turns may leave, ascending from 0
    guess: int  # index of the first cut that seems to fit


def cuts_of(messages: Messages, room: float, extra: float = 0) -> ChatCuts:
    """Return the places where a chat may be cut, for a prompt of about `room` characters.

    `extra` is about what the prompt has besides messages, such as tools, in characters.
    """
    turns = turns_of(messages)
    sizes = [0 if stays(messages, turn) else sum(size_of(messages[at]) for at in turn) for turn in turns]
    whole = extra + sum(map(size_of, messages))
    step = max(room - (whole - sum(sizes)), room / 4) / 2
    ends = [0, *itertools.accumulate(sizes)]
    steps = [at for at in range(1, len(turns)) if ends[at] // step > ends[at - 1] // step]
    cuts = sorted({0, *steps, max(0, len(turns) - 1)})
    guess = next((index for index, cut in enumerate(cuts) if whole - ends[cut] <= room), len(cuts) - 1)
    return ChatCuts(tuple(cuts), guess)


def search(count: int, guess: int) -> Generator[int, bool, int]:
    """Find the first of `count` places that fits, where all after it fit, too. Return it; the last one at the worst.

    Yields a place and is sent whether it fits: at most about twice the logarithm of `count` times, and twice if the
    guess is right. The last place is taken to fit without a test.
    """
    low, high = -1, count - 1  # `low` does not fit, `high` does
    place, stride = min(guess, count - 1), 1
    while high - low > 1:
        place = min(max(place, low + 1), high - 1)
        if (yield place):
            high = place
            place, stride = (place - stride, 2 * stride) if low < 0 else ((low + high) // 2, stride)
        else:
            low = place
            place, stride = (place + stride, 2 * stride) if high == count - 1 else ((low + high) // 2, stride)
    return high
