"""The breakers of DRY in a vocabulary: the tokens that begin one, in classes with the same rests.

As in llama.cpp, a breaker is spelled by a token whose text contains it, or by a token that ends with its beginning,
followed by the tokens of its rest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.capabilities.samplers.repetition import CLASSES, PER_WORD, REST, SEQUENCES
from rekindle._src.core.contracts import TokenizerLike
from rekindle._src.core.records import IntArray
from rekindle.errors import InvalidRequest

_KEPT = 8  # sets of breakers that are remembered
_MARK = b"\x00"  # between the texts of tokens


class BreakerTable(NamedTuple):
    """One set of breakers, as `repetition.Breakers` has them for a row."""

    classes: IntArray  # [ceil(V / PER_WORD)]
    rests: IntArray  # [CLASSES, SEQUENCES, 1 + REST]


def no_breakers(vocab_size: int) -> BreakerTable:
    """Return the table without any."""
    return BreakerTable(
        np.zeros(-(-vocab_size // PER_WORD), np.int32), np.full((CLASSES, SEQUENCES, 1 + REST), -1, np.int32)
    )


class BreakerTables:
    """The tables of a session's vocabulary; the latest are remembered. Its methods may be called in any thread."""

    def __init__(self, tokenizer: TokenizerLike, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock, self._making = threading.Lock(), threading.Lock()  # `find` waits for no table that is made
        self._texts: _Texts | None = None
        self._tables: OrderedDict[tuple[str, ...], BreakerTable] = OrderedDict()

    def find(self, breakers: tuple[str, ...]) -> BreakerTable | None:
        """Return the table of these breakers, if it is known."""
        with self._lock:
            table = self._tables.get(breakers)
            if table is not None:
                self._tables.move_to_end(breakers)
            return table

    def table(self, breakers: tuple[str, ...]) -> BreakerTable:
        """Return the table of these breakers. Raise InvalidRequest for too many ways to spell them."""
        with self._making:  # requests with the same breakers wait for one table
            known = self.find(breakers)
            if known is not None:
                return known
            if self._texts is None:
                self._texts = _Texts(self._tokenizer, self._vocab_size)
            table = make_table(self._texts, breakers, self._vocab_size, self._tokenizer)
            with self._lock:
                self._tables[breakers] = table
                while len(self._tables) > _KEPT:
                    self._tables.popitem(last=False)
            return table


class BreakerSpelling(NamedTuple):
    """The tokens that may spell a text, in ascending order."""

    whole: NDArray[np.int32]  # contain it
    begin: list[NDArray[np.int32]]  # end with so many of its first bytes, from 1 on, and don't contain it


class _Texts:
    """The texts of all tokens in one long text, for a quick search."""

    def __init__(self, tokenizer: TokenizerLike, vocab_size: int) -> None:
        from rekindle._src.text.detokenizer import token_bytes  # few requests need them
        from rekindle._src.text.tokenizer import Tokenizer

        def spelled(token: int) -> bytes:
            if isinstance(tokenizer, Tokenizer):
                return token_bytes(tokenizer, token)
            return tokenizer.decode([token], skip_special_tokens=False).encode()

        texts = [spelled(token).replace(_MARK, b" ") + _MARK for token in range(vocab_size)]
        self._joined: NDArray[np.uint8] = np.frombuffer(b"".join(texts) + _MARK * (CLASSES * SEQUENCES + 1), np.uint8)
        self._sizes = np.array([len(text) for text in texts], np.int64)

    def spelling(self, text: bytes) -> BreakerSpelling:
        """Return the tokens that spell `text` or begin it. Each of its bytes is looked for once."""
        text = text.replace(_MARK, b" ")
        owners = np.repeat(np.arange(len(self._sizes), dtype=np.int32), self._sizes)
        places, begin = np.flatnonzero(self._joined == text[0]), list[NDArray[np.int32]]()
        for size in range(1, len(text)):
            following = self._joined[places + size]
            begin.append(owners[places[following == _MARK[0]]])
            places = places[following == text[size]]
        whole = owners[places]
        whole = whole[np.diff(whole, prepend=-1) > 0]  # places ascend
        contains = np.zeros(len(self._sizes), np.bool_)
        contains[whole] = True
        return BreakerSpelling(whole, [tokens[~contains[tokens]] for tokens in begin])


def make_table(texts: _Texts, breakers: Sequence[str], vocab_size: int, tokenizer: TokenizerLike) -> BreakerTable:
    """Return the table of breakers. Raise InvalidRequest for too many ways to spell them."""
    if sum(len(breaker.encode()) - 1 for breaker in breakers) > CLASSES * SEQUENCES:
        problem = f"has more than {CLASSES * SEQUENCES} bytes after the first ones"
        raise InvalidRequest("dry_sequence_breakers", tuple(breakers), problem, "Use fewer or shorter ones")
    bits: dict[tuple[int, ...], int] = {(): 0}  # of each rest, in the codes of tokens
    codes = np.zeros(vocab_size, np.uint64)
    for breaker in breakers:
        spelled = breaker.encode()  # texts of tokens are bytes, which may be parts of characters
        spelling = texts.spelling(spelled)
        codes[spelling.whole] |= np.uint64(1)
        for size in range(1, len(spelled)):
            try:
                rest = spelled[size:].decode()
            except UnicodeDecodeError:  # it begins inside a character, and no tokens spell that alone
                continue
            ends = spelling.begin[size - 1]
            if not len(ends):
                continue
            tokens = tuple(tokenizer.encode(rest, add_special_tokens=False))
            if len(tokens) > REST:
                problem = f"has an end of {len(tokens)} tokens, {rest!r}, and {REST} are possible"
                raise InvalidRequest("dry_sequence_breakers", breaker, problem, "Use a shorter one")
            codes[ends] |= np.uint64(1 << bits.setdefault(tokens, len(bits)))
    found, first, classes = np.unique(codes, return_index=True, return_inverse=True)
    begin = [index for index in np.argsort(first) if found[index]]  # classes in the order of their first tokens
    ways = [sorted(rest for rest, bit in bits.items() if int(found[index]) >> bit & 1) for index in begin]
    if len(ways) > CLASSES or any(len(rests) > SEQUENCES for rests in ways):
        problem = f"can be spelled in {len(ways)} ways, and {CLASSES} are possible"
        raise InvalidRequest("dry_sequence_breakers", tuple(breakers), problem, "Use fewer or shorter ones")
    table, numbers = no_breakers(vocab_size), np.zeros(len(found), np.int32)
    for number, (index, rests) in enumerate(zip(begin, ways, strict=True)):
        numbers[index] = number + 1
        for place, tokens in enumerate(rests):
            table.rests[number, place, : 1 + len(tokens)] = len(tokens), *tokens
    padded = np.zeros(len(table.classes) * PER_WORD, np.uint32)
    padded[:vocab_size] = numbers[classes.reshape(-1)]
    shifts = np.arange(0, 4 * PER_WORD, 4, dtype=np.uint32)
    words = np.bitwise_or.reduce(padded.reshape(-1, PER_WORD) << shifts, axis=1)
    return table._replace(classes=words.view(np.int32))
