"""Bounds for tokenizers, which come from a download: the cost of opening one and of encoding a text, and panics.

The tokenizers library checks none of this. A regex of megabytes took it a gigabyte for each, a piece of a unigram
vocabulary with two million characters ended the process, and thirty replacements that double the text make a billion
characters of one. Files are measured before the library reads them. A pipeline of parts that are known to take time
and memory in proportion to the text encodes in this process, any other in a separate one (`encoding_process.py`).

Among the known parts are the first splits of text into words in byte-level BPE, by llama.cpp's names in
`tokenizer.ggml.pre`. A GGUF file has the name only. The expressions come from the tokenizers with these
names, as their tokenizer.json has them; llama.cpp writes some of them in another way that means the same.
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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, normalizers, pre_tokenizers

from rekindle._src.core.json_values import quotes_of
from rekindle._src.core.own_failure import is_panic
from rekindle._src.text.backends import TokenizerSections
from rekindle.errors import CheckpointError, RekindleError


@functools.cache
def byte_of_character() -> dict[str, int]:
    """Return the byte of each character in GPT-2's alphabet: printable Latin-1 unchanged, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
LINES = r"[^\n]+|\n+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_START = r"[^\r\n\p{L}\p{N}]?"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str) -> str:
    """Return the pattern of words that begin with capitals, each with an ending such as a contraction."""
    return f"{_WORD_START}{_UPPER}*{_LOWER}+{ending}|{_WORD_START}{_UPPER}+{_LOWER}*{ending}"


class PreTokenizer(NamedTuple):
    """The meaning of one name."""

    patterns: Sequence[str]  # text is split by the first, its pieces by the next
    whole_words: bool = False  # words that are tokens need no merges
    add_bos: bool = False  # unless the file says otherwise
    composed: bool = False  # text is normalized to NFC first

    def pre_tokenizer(self) -> Any:
        """Return the pre-tokenizer as an object of `tokenizers`."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> Any:
        """Return the normalizer as an object of `tokenizers`, or None."""
        return normalizers.NFC() if self.composed else None


# Letters with two cases, as they were when the tokenizer was made.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = PreTokenizer(
    (
        "[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"(?<!\s)\s+$", _HAN, r"\p{N}+",
    )
)  # fmt: skip
_DEEPSEEK_CODER = PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"))
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)  # fmt: skip
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))
_LLAMA3 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",))
_LLAMA3_WHOLE = _LLAMA3._replace(whole_words=True, add_bos=True)
_QWEN2 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), composed=True)
_MARKED_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_QWEN35 = PreTokenizer(
    (rf"{_CONTRACTIONS}|{_MARKED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",)
)
_SEED = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",))
_BAILING = PreTokenizer(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)
_PLAIN = PreTokenizer((_GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_TEKKEN = PreTokenizer((rf"{_cased('')}|\p{{N}}|{_CASED_REST}",), whole_words=True, add_bos=True)
_GPT4O = PreTokenizer((rf"{_cased(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}",))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

# An exported tokenizer is compared with them in this order.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "llama-bpe": _LLAMA3_WHOLE, "llama3": _LLAMA3_WHOLE, "llama-v3": _LLAMA3_WHOLE, "falcon3": _LLAMA3_WHOLE,
    "pixtral": _LLAMA3_WHOLE, "dbrx": _LLAMA3, "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "stablelm2": _QWEN2._replace(composed=False),
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS, "codeshell": _DIGITS,
    "exaone": _DIGITS, "minerva-7b": _DIGITS,
    "gpt-2": _PLAIN, "olmo": _PLAIN, "phi-2": _PLAIN, "mpt": _PLAIN, "jais": _PLAIN, "trillion": _PLAIN,
    "tekken": _TEKKEN, "gpt-4o": _GPT4O, "llama4": _GPT4O, "default": _DEFAULT,
    "exaone4": _PLAIN, "granite-docling": _PLAIN, "deepseek-llm": _DEEPSEEK_LLM, "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK3, "hunyuan-dense": _DEEPSEEK3, "falcon": _FALCON, "qwen35": _QWEN35, "seed-coder": _SEED,
    "glm4": _LLAMA3._replace(whole_words=True), "glm5": _LLAMA3._replace(whole_words=True), "chatglm-bpe": _LLAMA3,
    "falcon-h1": _LLAMA3_WHOLE, "lfm2": _LLAMA3_WHOLE, "midm-2.0": _LLAMA3_WHOLE,
    "bailingmoe": _BAILING, "bailingmoe2": _BAILING, "llada-moe": _BAILING,
    "hunyuan": _QWEN2._replace(composed=False), "megrez": _QWEN2, "mellum2": _DIGITS, "kanana2": _GPT4O,
}  # fmt: skip


LONGEST_TEXT = 4096  # bytes of one string of a tokenizer, such as a regex: real ones have hundreds
LONGEST_PIECE = 1024  # bytes of a piece of a unigram vocabulary; real ones have up to 100
PIECE_CHARACTERS = (
    8,
    1 << 20,
)  # of a unigram vocabulary per piece, and in addition; XLM-RoBERTa's have 6. Each takes 660 B
# Of added tokens, in bytes: per token, and in addition. Those of models that speak have 20 or so. The library finds
# them with an automaton of some 85 bytes for each.
ADDED_BYTES = (16, 2 << 20)
REGEXES = 64
# Of a tokenizer.json: each token and each part of a merge is one. Gemma's has 1.3 million, and each takes 200 bytes.
MAX_STRINGS = 1 << 22
# For each piece of a SentencePiece vocabulary. Gemma's 262,144 have 515,000 merges.
MERGES_PER_PIECE = 16
CUT_CHARACTERS = 1 << 29  # hashed in all to find the merges; 30 million for Gemma's pieces

_GROWTH = 128  # characters that normalizers may make of one; NFKC makes 18 of one of Arabic
_AFFIX = 64  # characters of a prefix or suffix that each piece of a word gets
_WORD = 1000  # characters of a word that is searched for pieces, in time that grows with its square
_PIECE = 128  # characters of a unigram piece: as many pieces may match where it does. SentencePiece's have up to 16
_LEAST = 16  # characters that one class of a regex needs; real ones need up to 3
_TEMPLATE = 16  # tokens and sequences that a post-processor puts together
_PARTS = 32
_CHARSMAP = b"precompiled_charsmap"
_CONTINUED = re.compile(rb'"continuing(?:_|\\u005[fF])subword(?:_|\\u005[fF])prefix"\s*:\s*"[^"]')
_LETTER_ESCAPES = re.compile(rb"(?<!\\)(?:\\\\)*\\u00(?:[46][1-9a-fA-F]|[57][0-9aA])")

# Regexes of real tokenizers, in addition to those above. They consume every run of characters that they look at, so
# that their time is in proportion to the text.
_KNOWN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
    r"\s+(?!\S)|\s",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SPECIAL = "()[]{}|?*+^$.\\"  # characters that mean something else than themselves

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
    if content.count(b'"') > 2 * MAX_STRINGS:
        raise CheckpointError(f"{path} has more than {MAX_STRINGS:,} strings, which are read. Use another tokenizer")
    starts, lengths = _strings(content)
    unigram = b'"Unigram"' in content
    limit = LONGEST_PIECE if unigram else LONGEST_TEXT
    for index in np.flatnonzero(lengths > limit).tolist():
        key = content[starts[index - 1] : starts[index - 1] + lengths[index - 1]] if index else b""
        if key != _CHARSMAP:
            check_text(int(lengths[index]), limit, path)
    if unigram:
        check_unigram(int(lengths[lengths <= limit].sum()), len(lengths), path)
    contents = lengths[_after(b"content", content, starts, lengths)]
    check_added(int(contents.sum()), len(contents), path)
    for index in _after(_CHARSMAP, content, starts, lengths).tolist():
        _check_charsmap(content[starts[index] : starts[index] + lengths[index]], path)
    if _CONTINUED.search(content) is not None:
        _check_merges(content, path)


def _check_merges(content: bytes, path: Path | str) -> None:
    """Raise `CheckpointError` for a merge with a second part that lacks the prefix of continuing pieces.

    The library cuts the prefix off without a look, and panics over a part that is shorter: it would write that to the
    process's output.
    """

    ends = list[tuple[str, str]]()

    def check(pairs: list[tuple[str, Any]]) -> None:
        fields = dict(pairs)
        prefix, merges = fields.get("continuing_subword_prefix"), fields.get("merges")
        if not isinstance(merges, list) or not isinstance(prefix, str):
            return
        for merge in merges:
            parts = merge.split(" ") if isinstance(merge, str) else merge
            end = parts[-1] if isinstance(parts, list) and parts else None
            if isinstance(end, str) and not end.startswith(prefix):
                ends.append((end, prefix))
                return

    with contextlib.suppress(ValueError, RecursionError):  # the library says where it is no JSON
        json.loads(content.decode(), object_pairs_hook=check)
    for end, prefix in ends:
        problem = f"a merge ends in {end[:40]!r}, without the continuing_subword_prefix {prefix[:40]!r}"
        raise CheckpointError(f"{path}: {problem}. Download it again")


def check_text(length: int, limit: int, path: Path | str) -> None:
    """Raise `CheckpointError` for a string of a tokenizer that has more bytes than its kind may have."""
    if length > limit:
        raise CheckpointError(
            f"{path} has a tokenizer with a string of {length:,} bytes, and at most {limit:,} are read: "
            "a longer one can cost gigabytes. Use another tokenizer"
        )


def check_unigram(characters: int, pieces: int, path: Path | str) -> None:
    """Raise `CheckpointError` for a unigram vocabulary with a tree of characters that would take gigabytes."""
    each, extra = PIECE_CHARACTERS
    limit = each * pieces + extra
    if characters > limit:
        raise CheckpointError(
            f"{path} has a unigram vocabulary of {characters:,} characters in {pieces:,} pieces, and at most {limit:,} "
            "are read: each takes some 700 bytes. Use another tokenizer"
        )


def check_added(count: int, tokens: int, path: Path | str) -> None:
    """Raise `CheckpointError` for added tokens of so many bytes that finding them in a text would take gigabytes."""
    each, extra = ADDED_BYTES
    limit = each * tokens + extra
    if count > limit:
        raise CheckpointError(
            f"{path} has {tokens:,} added tokens of {count:,} bytes, and at most {limit:,} are read: each takes some "
            "85. Use another tokenizer"
        )


def _check_charsmap(encoded: bytes, path: Path | str) -> None:
    """Raise `CheckpointError` for a SentencePiece table that calls itself larger than it is.

    The library allocates that size, and ends the process where it can't.
    """
    try:
        start = int.from_bytes(base64.b64decode(encoded[:8], validate=True)[:4], "little")
    except ValueError:
        return  # the library says that it is no base64
    if start > len(encoded):
        raise CheckpointError(
            f"{path} has a precompiled_charsmap of {len(encoded):,} characters, with a table of {start:,} bytes in it. "
            "Download it again"
        )


def check_decoder(parts: TokenizerSections, path: Path | str) -> None:
    """Raise `CheckpointError` for a decoder that could make much text of few tokens: it runs for every token."""
    reason = _reason(parts.decoder, "decoders", _DECODERS)
    if reason is not None:
        raise CheckpointError(f"{path} has a tokenizer, and its decoder has {reason}. Use another tokenizer")


def unbounded_part(parts: TokenizerSections) -> str | None:
    """Return the part that could make a text cost more than in proportion to its length, in words, or None."""
    return (
        _reason(parts.normalizer, "normalizers", _NORMALIZERS)
        or _reason(parts.pre_tokenizer, "pretokenizers", _PRE_TOKENIZERS)
        or _reason(parts.post_processor, "processors", _PROCESSORS)
        or _model_reason(parts.model)
    )


def _strings(content: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return where the strings of a JSON document begin, and the number of bytes of each as written."""
    quotes = quotes_of(content)
    pairs = quotes[: len(quotes) // 2 * 2].reshape(-1, 2)
    return pairs[:, 0] + 1, pairs[:, 1] - pairs[:, 0] - 1


def _after(key: bytes, content: bytes, starts: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return the numbers of the strings that follow this key."""
    keys = np.flatnonzero(lengths[:-1] == len(key))
    octets = np.frombuffer(content, np.uint8)
    for at, octet in enumerate(key):
        keys = keys[octets[starts[keys] + at] == octet]
    return keys + 1


def _reason(part: Mapping[str, Any] | None, inner: str, allowed: Mapping[str, Growth]) -> str | None:
    """Return the reason why a part is not known to be bounded; None for a bounded part."""
    if part is None:
        return None
    steps = list(_steps(part, inner))
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


def _model_reason(model: Mapping[str, Any]) -> str | None:
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(name)
        if affix is not None and len(affix) > _AFFIX:
            return f"a {name} of {len(affix):,} characters"
    piece = model.get("longest_piece", 0)
    if piece > _PIECE:
        return f"pieces of {piece:,} characters, each of which may begin with others"
    longest = model.get("max_input_chars_per_word", 0)
    return f"words of {longest:,} characters to look for pieces in" if longest > _WORD else None


def _same(step: Mapping[str, Any]) -> float:
    return 1


def _pattern(step: Mapping[str, Any]) -> float:
    """Return 1 if a step's pattern takes time in proportion to the text, else infinity."""
    pattern = step.get("pattern") or {}
    regex = pattern.get("Regex")
    bounded = regex is None or regex in _known() or is_one_class(regex)
    return 1 if bounded else float("inf")


def _pieces(step: Mapping[str, Any]) -> float:
    """Return 1, or infinity for a length of 0: the library panics there."""
    return 1 if step.get("length", 1) > 0 else float("inf")


def is_one_class(regex: str) -> bool:
    """True for one class of characters with a count: it consumes every character that it looks at.

    A class that needs many characters would look at them anew from each one, so a count begins at `_LEAST` at most. It
    is read in one pass, by hand: a pattern for patterns took exponential time for some of them.
    """
    first, second = regex[:1], regex[1:2]
    if first == "[":
        at = begin = 2 if second == "^" else 1
        while at < len(regex) and regex[at] not in "[]&":
            at += 2 if regex[at] == "\\" else 1
        if at == begin or regex[at : at + 1] != "]":
            return False
        at += 1
    elif first == "\\" and second in ("p", "P") and regex[2:3] == "{":
        end = regex.find("}")
        at = end + 1
        if not _is_word(regex[3:end].removeprefix("^")) or end < 0:
            return False
    elif first == "\\":
        at = 2
        if second not in tuple("sSdDwW") and (not second or _is_word(second) or second in _SPECIAL):
            return False
    else:
        at = 1
        if not first or first in _SPECIAL:
            return False
    count = regex[at:]
    if count in ("", "+", "*", "?"):
        return True
    low, comma, high = count[1:-1].partition(",")
    if not (count[0] == "{" and count[-1] == "}" and low.isdecimal() and (not comma or not high or high.isdecimal())):
        return False
    return max(len(low), len(high)) < 9 and int(low) <= min(_LEAST, int(high or low))


def _is_word(text: str) -> bool:
    return text != "" and all(character.isalnum() or character == "_" for character in text)


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
        ("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation",
         "UnicodeScripts", "Whitespace", "WhitespaceSplit"), _same),
    "FixedLength": _pieces, "Split": _pattern,
}  # fmt: skip
_PROCESSORS: dict[str, Growth] = {
    "ByteLevel": _same, "BertProcessing": _same, "RobertaProcessing": _same, "TemplateProcessing": _template,
}  # fmt: skip
_DECODERS: dict[str, Growth] = {
    **dict.fromkeys(
        ("BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Strip", "WordPiece"), _same),
    "Replace": _replaced,
}  # fmt: skip


def raise_panic(cause: BaseException, error: Callable[[str], RekindleError], doing: str) -> None:
    """Raise `error` if the cause is a panic in the tokenizers library.

    pyo3 raises a Rust panic as `PanicException`, which derives from `BaseException`: `except Exception` lets it pass,
    and one prompt would end the dispatch loop with every other request. The library's state is not shared between
    calls, so the next call works.
    """
    if is_panic(cause):
        raise error(f"the tokenizers library panicked while {doing}: {_first_line(cause)}") from cause


@contextlib.contextmanager
def panics_as(error: Callable[[str], RekindleError], doing: str) -> Iterator[None]:
    """Raise `error` in place of a panic in the tokenizers library within the block; others pass as they are."""
    try:
        yield
    except BaseException as cause:
        raise_panic(cause, error, doing)
        raise


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
