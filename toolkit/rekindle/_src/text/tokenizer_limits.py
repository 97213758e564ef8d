"""Bounds for tokenizers, which come from a download: the cost of opening one and of encoding a text, and panics.

The tokenizers library checks none of this. A regex of megabytes took it a gigabyte for each, a piece of a unigram
vocabulary with two million characters ended the process, and thirty replacements that double the text make a billion
characters of one. Files are measured before the library reads them. A pipeline of parts that are known to take time
and memory in proportion to the text encodes in this process, any other in a separate one (`encoding_process.py`).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from rekindle._src.core.own_failure import is_panic
from rekindle._src.text.gguf.pre_tokenizers import LINES, PRE_TOKENIZERS
from rekindle.errors import CheckpointError, RekindleError

LONGEST_TEXT = 4096  # bytes of one string of a tokenizer, such as a regex: those of real ones have hundreds
LONGEST_PIECE = 1024  # bytes of a piece of a unigram vocabulary; real ones have up to 100
PIECE_CHARACTERS = (
    8,
    1 << 20,
)  # of a unigram vocabulary per piece, and in addition; XLM-RoBERTa's have 6. Each takes 660 B
REGEXES = 64
# For each piece of a SentencePiece vocabulary. Gemma's 262,144 have 515,000 merges.
MERGES_PER_PIECE = 16
CUT_CHARACTERS = 1 << 29  # hashed in all to find the merges; 30 million for Gemma's pieces

_GROWTH = 128  # characters that normalizers may make of one; NFKC makes 18 of one of Arabic
_AFFIX = 64  # characters of a prefix or suffix that each piece of a word gets
_WORD = 1000  # characters of a word in which pieces are looked for, in time that grows with its square
_TEMPLATE = 16  # tokens and sequences that a post-processor puts together
_PARTS = 32
_CHARSMAP = b'"precompiled_charsmap"'
_LETTER_ESCAPES = re.compile(rb"(?<!\\)(?:\\\\)*\\u00(?:[46][1-9a-fA-F]|[57][0-9aA])")

# Regexes of real tokenizers beside those of `pre_tokenizers.py`. They consume every run of characters that they look
# at, so that their time is in proportion to the text.
_KNOWN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
    r"\s+(?!\S)|\s",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
# One class of characters with a count: it consumes every character that it looks at.
_ONE_CLASS = re.compile(
    r"(?:\[\^?(?:\\.(?:\{\^?\w+\})?|[^\[\]\\&])+\]|\\[pP]\{\^?\w+\}|\\[sSdDwW]|\\?[^\w\\()\[\]{}|?*+^$.]|\w)"
    r"(?:[+*?]|\{\d+(?:,\d*)?\})?"
)

Growth = Callable[[Mapping[str, Any]], float]


def check_file(content: bytes, path: Path | str) -> None:
    """Raise `CheckpointError` for a tokenizer.json that would cost more than its size to read.

    It is measured by its strings, without parsing it: parsing would take a third of the library's own time.
    """
    escape = _LETTER_ESCAPES.search(content)
    if escape is not None:
        raise CheckpointError(f"{path} writes letters as escapes ({escape[0]!r}). Save it again with transformers")
    regexes = content.count(b'"Regex"')
    if regexes > REGEXES:
        raise CheckpointError(f"{path} has {regexes:,} regexes, and {REGEXES} are read. Use another tokenizer")
    starts, lengths = _strings(content)
    unigram = b'"Unigram"' in content
    limit = LONGEST_PIECE if unigram else LONGEST_TEXT
    for index in np.flatnonzero(lengths > limit).tolist():
        key = content[starts[index - 1] - 1 : starts[index - 1] + lengths[index - 1] + 1] if index else b""
        if key != _CHARSMAP:
            check_text(int(lengths[index]), limit, path)
    if unigram:
        check_unigram(int(lengths[lengths <= limit].sum()), len(lengths), path)


def check_text(length: int, limit: int, path: Path | str) -> None:
    """Raise `CheckpointError` for a string of a tokenizer that has more bytes than its kind may have."""
    if length > limit:
        raise CheckpointError(
            f"{path} has a tokenizer with a string of {length:,} bytes, and at most {limit:,} are read: "
            "a longer one can cost gigabytes. Use another tokenizer"
        )


def check_unigram(characters: int, pieces: int, path: Path | str) -> None:
    """Raise `CheckpointError` for a unigram vocabulary whose tree of characters would take gigabytes."""
    each, extra = PIECE_CHARACTERS
    limit = each * pieces + extra
    if characters > limit:
        raise CheckpointError(
            f"{path} has a unigram vocabulary of {characters:,} characters in {pieces:,} pieces, and at most {limit:,} "
            "are read: each takes some 700 bytes. Use another tokenizer"
        )


def check_decoder(backend: tokenizers.Tokenizer, path: Path | str) -> None:
    """Raise `CheckpointError` for a decoder that could make much text of few tokens: it runs for every token."""
    reason = _reason(backend.decoder, "decoders", _DECODERS)
    if reason is not None:
        raise CheckpointError(f"{path} has a tokenizer whose decoder has {reason}. Use another tokenizer")


def unbounded_part(backend: tokenizers.Tokenizer) -> str | None:
    """Return the part by which a text could cost more than in proportion to its length, in words, or None."""
    return (
        _reason(backend.normalizer, "normalizers", _NORMALIZERS)
        or _reason(backend.pre_tokenizer, "pretokenizers", _PRE_TOKENIZERS)
        or _reason(backend.post_processor, "processors", _PROCESSORS)
        or _model_reason(backend.model)
    )


def _strings(content: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return where the strings of a JSON document begin, and the number of bytes of each as written."""
    octets = np.frombuffer(content, np.uint8)
    quotes = np.flatnonzero(octets == ord('"'))
    behind = quotes[(quotes > 0) & (octets[quotes - 1] == ord("\\"))]
    escaped = [at for at in behind.tolist() if _backslashes(content, at) % 2]
    if escaped:
        quotes = np.setdiff1d(quotes, np.asarray(escaped), assume_unique=True)
    pairs = quotes[: len(quotes) // 2 * 2].reshape(-1, 2)
    return pairs[:, 0] + 1, pairs[:, 1] - pairs[:, 0] - 1


def _backslashes(content: bytes, end: int) -> int:
    """Return the number of backslashes in a row before `end`, at most 4,096: more make the string too long anyway."""
    before = content[max(0, end - LONGEST_TEXT) : end]
    return len(before) - len(before.rstrip(b"\\"))


def _reason(part: Any, inner: str, allowed: Mapping[str, Growth]) -> str | None:
    """Return the reason why a part is not known to be bounded; None for a bounded part."""
    if part is None:
        return None
    try:
        steps = list(_steps(json.loads(part.__getstate__()), inner))
    except Exception:  # one of Python's own, which can't be written
        return "a part that can't be described"
    if len(steps) > _PARTS:
        return f"{len(steps):,} steps, where {_PARTS} are usual"
    growth = 1.0
    for step in steps:
        kind = str(step.get("type"))
        if kind not in allowed:
            return f"a step of an unknown kind ({kind[:80]!r})"
        factor = allowed[kind](step)
        if factor == float("inf"):
            return f"a {kind} that is not known to be bounded ({json.dumps(step)[:120]})"
        growth *= factor
        if growth > _GROWTH:
            return f"steps that make up to {growth:,.0f} characters of one"
    return None


def _steps(part: Mapping[str, Any], inner: str) -> Iterator[Mapping[str, Any]]:
    if part.get("type") != "Sequence":
        yield part
        return
    for step in part[inner]:
        yield from _steps(step, inner)


def _model_reason(model: Any) -> str | None:
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(model, name, None)
        if affix is not None and len(affix) > _AFFIX:
            return f"a {name} of {len(affix):,} characters"
    longest = getattr(model, "max_input_chars_per_word", 0)
    return f"words of {longest:,} characters to look for pieces in" if longest > _WORD else None


def _same(step: Mapping[str, Any]) -> float:
    return 1


def _pattern(step: Mapping[str, Any]) -> float:
    """Return 1 if a step's pattern takes time in proportion to the text, else infinity."""
    pattern = step.get("pattern") or {}
    regex = pattern.get("Regex")
    bounded = regex is None or regex in _known() or _ONE_CLASS.fullmatch(regex) is not None
    return 1 if bounded else float("inf")


@functools.cache
def _known() -> frozenset[str]:
    return frozenset((*_KNOWN, LINES, *(pattern for pre in PRE_TOKENIZERS.values() for pattern in pre.patterns)))


def _replaced(step: Mapping[str, Any]) -> float:
    return max(1, len(step.get("content", ""))) * _pattern(step)


def _prepended(step: Mapping[str, Any]) -> float:
    return 1 if len(step.get("prepend", "")) <= _AFFIX else float("inf")


def _mapped(step: Mapping[str, Any]) -> float:
    """Return the length of the longest text that a SentencePiece table has for a character."""
    try:
        table = base64.b64decode(step["precompiled_charsmap"], validate=True)
    except (KeyError, ValueError, binascii.Error):
        return float("inf")
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max((len(text) for text in texts), default=1)


def _template(step: Mapping[str, Any]) -> float:
    fits = all(len(step.get(name, ())) <= _TEMPLATE for name in ("single", "pair"))
    tokens: Sequence[Mapping[str, Any]] = list((step.get("special_tokens") or {}).values())
    fits = fits and all(len(token.get("ids", ())) <= _TEMPLATE for token in tokens)
    once = sum("Sequence" in piece for piece in step.get("single", ())) <= 1
    return 1 if fits and once else float("inf")


_NORMALIZERS: dict[str, Growth] = {
    "NFC": lambda step: 3, "NFD": lambda step: 4, "NFKC": lambda step: 18, "NFKD": lambda step: 18,
    "Lowercase": lambda step: 3, "ByteLevel": lambda step: 4, "BertNormalizer": lambda step: 4,
    "Nmt": _same, "Strip": _same, "StripAccents": _same,
    "Replace": _replaced, "Prepend": _prepended, "Precompiled": _mapped,
}  # fmt: skip
_PRE_TOKENIZERS: dict[str, Growth] = {
    **dict.fromkeys(
        ("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation",
         "UnicodeScripts", "Whitespace", "WhitespaceSplit"), _same),
    "Split": _pattern,
}  # fmt: skip
_PROCESSORS: dict[str, Growth] = {
    "ByteLevel": _same, "BertProcessing": _same, "RobertaProcessing": _same, "TemplateProcessing": _template,
}  # fmt: skip
_DECODERS: dict[str, Growth] = {
    **dict.fromkeys(
        ("BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Strip", "WordPiece"), _same),
    "Replace": _replaced,
}  # fmt: skip


@contextlib.contextmanager
def panics_as(error: Callable[[str], RekindleError], doing: str) -> Iterator[None]:
    """Raise `error` in place of a panic in the tokenizers library within the block; other exceptions pass as they are.

    pyo3 raises a Rust panic as `PanicException`, which derives from `BaseException`: `except Exception` lets it pass,
    and one prompt would end the dispatch loop with every other request. The library's state is not shared between
    calls, so the next call works.
    """
    try:
        yield
    except BaseException as cause:
        if not is_panic(cause):
            raise
        raise error(f"the tokenizers library panicked while {doing}: {_first_line(cause)}") from cause


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
