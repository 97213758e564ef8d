"""The first split of text into words in byte-level BPE, by llama.cpp's names in `tokenizer.ggml.pre`.

A file has the name only. The expressions are those of the tokenizers that the names come from, as their tokenizer.json
has them; llama.cpp writes some of them in another way that means the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_START = r"[^\r\n\p{L}\p{N}]?"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str) -> str:
    """Return the pattern of words whose capitals come first, each with an ending such as a contraction."""
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


_LLAMA3 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",))
_LLAMA3_WHOLE = _LLAMA3._replace(whole_words=True, add_bos=True)
_QWEN2 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), composed=True)
_PLAIN = PreTokenizer((_GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_TEKKEN = PreTokenizer((rf"{_cased('')}|\p{{N}}|{_CASED_REST}",), whole_words=True, add_bos=True)
_GPT4O = PreTokenizer((rf"{_cased(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}",))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

# In the order in which an exported tokenizer is compared with them.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "llama-bpe": _LLAMA3_WHOLE, "llama3": _LLAMA3_WHOLE, "llama-v3": _LLAMA3_WHOLE, "falcon3": _LLAMA3_WHOLE,
    "pixtral": _LLAMA3_WHOLE, "dbrx": _LLAMA3, "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "stablelm2": _QWEN2._replace(composed=False),
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS, "codeshell": _DIGITS,
    "exaone": _DIGITS, "minerva-7b": _DIGITS,
    "gpt-2": _PLAIN, "olmo": _PLAIN, "phi-2": _PLAIN, "mpt": _PLAIN, "jais": _PLAIN, "trillion": _PLAIN,
    "tekken": _TEKKEN, "gpt-4o": _GPT4O, "llama4": _GPT4O, "default": _DEFAULT,
}  # fmt: skip
