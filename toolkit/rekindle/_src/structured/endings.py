"""JSON that ends: bounds numbers, and closes objects while tokens are left.

A grammar allows numbers and texts without end, and a model that has begun one may write on until its tokens are used
up. So a number may have no more digits than an int64 or a float surely holds. When few tokens are left, a short end of
the text is searched for, and tokens that would not leave room for it are no longer allowed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.records import Mask, mask_words

DIGITS = 18  # of a number, before and after its point: any integer of so many is an int64
EXPONENT = 2  # digits; a float of 18 digits and this exponent is finite
_SPARE = 6  # tokens beyond the shortest end that an escape, a sign or an exponent may need
_FARTHEST = 128  # tokens beyond the shortest end from which on structure is limited
_LONGEST = 512  # tokens of an end that is searched for
_MOST_TRIED = 1_024  # tokens tried in searches for one text, of some 50 µs each
_MOST_AT_ONCE = 256
_FEW = 24  # tokens that are all tried
_SECONDS = 5e-5  # that a token of an end takes about
_NOTICE = 4  # tokens by which a search is announced before it, so that the step can be planned with it
_UNKNOWN = 64  # assumed tokens of an end before one was found
_SHORT = 128  # tokens of a text; the end of a shorter text is searched for at once
_LONG_NUMBER = re.compile(r"\d{19}|\d[eE]\+?\d")
_DIGIT = re.compile(rb"-?[0-9]")
_OF_NUMBERS = b"-+.0123456789eE"
_STRUCTURE = b'{}[]",:'
_ORDER = b'}]",0123456789ntf[{:-.'  # tried in this order for a short end


class Spelling:
    """The role of each token in JSON. All texts of a tokenizer share it."""

    def __init__(self, tokens: Iterable[bytes], ends: Iterable[int], vocab: int) -> None:
        size = mask_words(vocab) * 32
        self.numbers: dict[int, tuple[bool, str]] = {}  # tokens that end in a number: True if all of it, and that part
        self.single: dict[bytes, int] = {}  # tokens of one byte
        # Tokens that neither end nor escape anything in a string.
        self.plain: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.digits: set[int] = set()  # tokens that are digits alone
        self.opening: set[int] = set()  # tokens with which an object or an array may begin a text
        self.ends: tuple[int, ...] = tuple(ends)
        leading = np.zeros(size, np.uint8)
        joined, quoting = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        for token, data in enumerate(tokens):
            if len(data) == 1:
                self.single.setdefault(data, token)
            elif any(byte in _STRUCTURE for byte in data):
                joined[token] = True
                quoting[token] = b'"' in data
            if b'"' not in data and b"\\" not in data:
                self.plain[token] = True
            if data.strip()[:1] in (b"{", b"["):
                self.opening.add(token)
            if data[:1].isdigit():
                leading[token] = min(255, len(data) - len(data.lstrip(b"0123456789")))
                if leading[token] == len(data):
                    self.digits.add(token)
            tail = data[len(data.rstrip(_OF_NUMBERS)) :]
            if tail and tail == data:
                self.numbers[token] = True, data.decode()
            elif (digit := _DIGIT.search(tail)) is not None:
                self.numbers[token] = False, tail[digit.start() :].decode()
        self.joined: Mask = _packed(joined)  # tokens of more than one byte with structure
        self.quoting: Mask = _packed(quoting)
        self._leading = leading
        self._long: dict[int, Mask | None] = {}
        self.order: tuple[int, ...] = tuple(self.single[byte] for byte in _bytes(_ORDER) if byte in self.single)
        self.structure: tuple[int, ...] = tuple(self.single[byte] for byte in _bytes(_STRUCTURE) if byte in self.single)
        self.closers: set[int] = {self.single[byte] for byte in _bytes(b",}]") if byte in self.single}
        self.quote: int = self.single.get(b'"', -1)
        self.letter: int = self.single.get(b"z", -1)

    def longer(self, digits: int) -> Mask | None:
        """Return the mask of tokens that begin with at least `digits` digits; None if there are none."""
        if digits not in self._long:
            matches = self._leading >= digits
            self._long[digits] = _packed(matches) if matches.any() else None
        return self._long[digits]


class Bounds:
    """The properties that a grammar's texts share: tokens, cost of structure, and whether numbers are bounded."""

    def __init__(self, spelling: Spelling, kind: str, text: str) -> None:
        self.spelling: Spelling = spelling
        self.reach: int = _SPARE + (min(_FARTHEST, _Costs(text).highest) if kind == "schema" else 0)
        self.digits: bool = kind == "json" or not _LONG_NUMBER.search(text)


class Ending:
    """Steers one text to its end."""

    __slots__ = (
        "_begun", "_bounds", "_budget", "_closes", "_look_at", "_number", "_path", "_seconds", "_tried", "_usual",
        "steered",
    )  # fmt: skip

    def __init__(self, bounds: Bounds, budget: int | None) -> None:
        """Set up; `budget` is the most tokens of the text, None if it may end without being whole."""
        self._bounds, self._budget = bounds, budget
        self._begun = self._closes = False  # True if it has tokens; True if it is an object or an array
        # Tokens left at which the shortest end is searched for.
        self._look_at = _LONGEST if budget is None or budget < _SHORT else min(_LONGEST, budget - _NOTICE)
        self._path: tuple[int, ...] | None = None  # the shortest end, if it is known
        self._number = ""  # the number at the end of the text
        self._tried = 0
        self._seconds = 0.0  # processor time of searches since the last `take_seconds`
        self._usual = _SECONDS * max(bounds.reach, _UNKNOWN)  # likely seconds of the next search
        self.steered: bool = False  # True if a token was removed because it would not have left enough tokens

    def copy(self) -> Ending:
        clone = object.__new__(Ending)
        for name in Ending.__slots__:
            setattr(clone, name, getattr(self, name))
        return clone

    def consume(self, token: int) -> None:
        """Take the text's next token."""
        spelling = self._bounds.spelling
        if not self._begun:
            self._begun, self._closes = True, token in spelling.opening
        whole, part = spelling.numbers.get(token, (False, ""))
        if whole:
            part = self._number[-64:] + part if self._number else part if part[0] in "-0123456789" else ""
        self._number = part
        path = self._path
        if not path:
            return
        if token == path[0]:
            self._path = path[1:]
        elif not ((path[0] == spelling.quote and spelling.plain[token])
                  or (path[0] in spelling.closers and token in spelling.digits)):  # fmt: skip
            self._path = None

    def limit(self, mask: Mask, matcher: Any, used: int, *, forced: bool) -> None:
        """Remove from `mask` tokens that would make a number too long, or the text of `used` tokens exceed its budget.

        `forced`: the allowed tokens are only other spellings of the same text.
        """
        if self._number and self._bounds.digits:
            self._limit_digits(mask)
        if self._budget is not None and self._closes and (room := self._budget - used) <= self._look_at:
            start = time.thread_time()
            self._limit_structure(mask, matcher, room, forced)
            self._usual = time.thread_time() - start
            self._seconds += self._usual

    def take_seconds(self) -> float:
        """Return the seconds spent searching for an end since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def due(self, used: int) -> float:
        """Return the likely seconds of a search that is due soon, in a text of `used` tokens; 0 if none is."""
        if self._budget is None or not self._closes or self._budget - used > self._look_at + _NOTICE:
            return 0.0
        return self._usual

    def _limit_digits(self, mask: Mask) -> None:
        spelling, number = self._bounds.spelling, self._number
        limit = EXPONENT if "e" in number or "E" in number else DIGITS
        room = limit - (len(number) - len(number.rstrip("0123456789")))
        long = spelling.longer(max(1, room + 1))
        if long is None or _has(mask, spelling.letter):  # it is within a string
            return
        if room > 0 or any(_has(mask, token) for token in (*spelling.closers, *spelling.ends)):
            mask &= ~long

    def _limit_structure(self, mask: Mask, matcher: Any, room: int, forced: bool) -> None:
        spelling, reach = self._bounds.spelling, self._bounds.reach
        path = self._path
        if not path or not _has(mask, path[0]):  # such as a quote amid the bytes of a character
            path = self.shortest(matcher, room)
        if not path or not _has(mask, path[0]):
            self._look_at, self._path = room // 2, None
            return
        spare = room - len(path)
        if spare > reach:  # tokens until the next search, and structure that they may begin, leave enough
            self._look_at, self._path = room - max(1, (spare - reach) // 2), None
            return
        self._look_at, self._path, first = room, path, path[0]
        if spare < _SPARE:
            self.steered |= not (forced or _is_only(mask, first))
            mask.fill(0)
        elif _has(mask, spelling.letter) and first == spelling.quote:  # a string, which may go on
            mask &= ~spelling.quoting
        else:
            few = _few(mask)  # such as the names of properties
            limit = min(_MOST_TRIED, self._tried + _MOST_AT_ONCE)
            for token in spelling.structure if few is None else few:
                if token != first and _has(mask, token) and not self._fits(matcher, token, room - 1 - _SPARE, limit):
                    mask[token >> 5] &= ~_bit(token)
                    self.steered = True
            if few is None:
                mask &= ~spelling.joined
        mask[first >> 5] |= _bit(first)

    def _fits(self, matcher: Any, token: int, room: int, limit: int) -> bool:
        """True if the text can end within `room` tokens after this one. False once `limit` tokens were tried."""
        if self._tried > limit:
            return False
        ahead = matcher.deep_copy()
        if not ahead.consume_token(token):
            return False
        path = self.shortest(ahead, room)
        self._tried += room if path is None else len(path)
        return path is not None

    def shortest(self, matcher: Any, room: int) -> tuple[int, ...] | None:
        """Return the tokens of a short end; None if none of at most `room` tokens was found."""
        spelling = self._bounds.spelling
        ahead, path, limit = matcher.deep_copy(), list[int](), min(room, _LONGEST)
        mask = np.zeros_like(spelling.joined)
        while len(path) <= limit:
            if ahead.is_stopped():
                return tuple(path)
            forced = ahead.compute_ff_tokens()
            if not forced:
                ahead.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                forced = [self._pick(mask)]
            if len(path) + len(forced) > limit:
                return None
            for token in forced:
                if token < 0 or not ahead.consume_token(token):
                    return None
            path += forced
        return None

    def _pick(self, mask: Mask) -> int:
        """Return the allowed token that leads to a short end; -1 if no token is allowed."""
        spelling = self._bounds.spelling
        for token in spelling.ends:
            if _has(mask, token):
                return token
        if _has(mask, spelling.letter):  # a string, or a name
            return spelling.quote if _has(mask, spelling.quote) else spelling.letter
        for token in spelling.order:
            if _has(mask, token):
                return token
        words = np.flatnonzero(mask)
        if not len(words):
            return -1
        word = int(words[0])
        bits = int(mask[word]) & 0xFFFFFFFF
        return word * 32 + (bits & -bits).bit_length() - 1


class _Costs:
    """About how many tokens a text may have to add because of one token that begins an optional part.

    Parts that a schema requires from the beginning are in every short end, and cost nothing more.
    """

    def __init__(self, text: str) -> None:
        self._root: Any = None
        self._known: dict[int, int] = {}
        self.highest: int = 0
        try:
            self._root = schema = json.loads(text)
            self._needs(schema)
            for definitions in ("$defs", "definitions"):
                for part in _values(schema, definitions):
                    self._begins(part)
        except RecursionError:  # a schema may nest deeper than Python
            self.highest = _FARTHEST

    def _begins(self, schema: Any, name: str = "") -> None:
        """Count the cost of an optional part."""
        self.highest = max(self.highest, 6 + len(name) // 3 + self._needs(schema))

    def _needs(self, schema: Any) -> int:
        """Return the least tokens that a part requires."""
        if not isinstance(schema, Mapping):
            return 0
        if id(schema) not in self._known:
            self._known[id(schema)] = 0  # a part that requires itself has no end anyway
            self._known[id(schema)] = min(2 * _FARTHEST, self._sum(schema))
        return self._known[id(schema)]

    def _sum(self, schema: Mapping[str, Any]) -> int:
        cost = 2 + _number(schema, "minLength")
        if "const" in schema:
            cost += len(json.dumps(schema["const"])) // 2
        cost += max((len(json.dumps(value)) // 2 for value in _values(schema, "enum")), default=0)
        required = _values(schema, "required")
        for name, part in _items(schema, "properties"):
            if name in required:
                cost += len(name) // 3 + 6 + self._needs(part)
            else:
                self._begins(part, name)
        for keyword in ("additionalProperties", "patternProperties", "items", "prefixItems"):
            for part in _values(schema, keyword) if keyword[0] == "p" else [schema.get(keyword)]:
                self._begins(part)
                cost += _number(schema, "minItems") * (1 + self._needs(part)) if "tems" in keyword else 0
        for keyword in ("anyOf", "oneOf", "allOf"):
            for part in _values(schema, keyword):
                self._begins(part)
        cost += sum(map(self._needs, _values(schema, "allOf")))
        cost += max(
            [*map(self._needs, _values(schema, "anyOf")), *map(self._needs, _values(schema, "oneOf"))], default=0
        )
        return cost + self._needs(self._referred(schema.get("$ref")))

    def _referred(self, reference: Any) -> Any:
        node = self._root
        for step in reference.split("/")[1:] if isinstance(reference, str) else ("",):
            node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
        return node


def _items(schema: Any, keyword: str) -> list[tuple[str, Any]]:
    value = schema.get(keyword) if isinstance(schema, Mapping) else None
    return list(value.items()) if isinstance(value, Mapping) else []


def _values(schema: Any, keyword: str) -> list[Any]:
    entry = schema.get(keyword) if isinstance(schema, Mapping) else None
    return list(entry) if isinstance(entry, list) else [value for _, value in _items(schema, keyword)]


def _number(schema: Mapping[str, Any], keyword: str) -> int:
    value = schema.get(keyword)
    return min(_FARTHEST, int(value)) if isinstance(value, int | float) and value > 0 else 0


def _few(mask: Mask) -> list[int] | None:
    """Return the allowed tokens; None if there are many."""
    words = np.flatnonzero(mask)
    if len(words) > _FEW:
        return None
    tokens = [int(word) * 32 + bit for word in words for bit in range(32) if int(mask[word]) >> bit & 1]
    return tokens if len(tokens) <= _FEW else None


def _bytes(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


def _packed(bits: np.ndarray[Any, np.dtype[np.bool_]]) -> Mask:
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).view(np.int32)


def _has(mask: Mask, token: int) -> bool:
    return token >= 0 and bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _is_only(mask: Mask, token: int) -> bool:
    return int(np.count_nonzero(mask)) == 1 and mask[token >> 5] == _bit(token)
