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
LINES = r"[^\n]+|\n+"
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
    "exaone4": _PLAIN, "granite-docling": _PLAIN, "deepseek-llm": _DEEPSEEK_LLM, "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK3, "hunyuan-dense": _DEEPSEEK3, "falcon": _FALCON, "qwen35": _QWEN35, "seed-coder": _SEED,
    "glm4": _LLAMA3._replace(whole_words=True), "glm5": _LLAMA3._replace(whole_words=True), "chatglm-bpe": _LLAMA3,
    "falcon-h1": _LLAMA3_WHOLE, "lfm2": _LLAMA3_WHOLE, "midm-2.0": _LLAMA3_WHOLE,
    "hunyuan": _QWEN2._replace(composed=False), "megrez": _QWEN2, "mellum2": _DIGITS, "kanana2": _GPT4O,
}  # fmt: skip
