"""A tokenizer, its chat templates and its defaults of sampling as the metadata of a GGUF file.

`tokenizer.huggingface.json` holds the whole tokenizer.json, which rekindle reads back. The other keys hold the same for
llama.cpp, as far as its format can.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from rekindle._src.core.sampling import Sampling
from rekindle._src.text.backends import TokenizerSections
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.gguf.vocabulary import (
    BYTE,
    CONTROL,
    HUGGINGFACE,
    NORMAL,
    SPECIAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from rekindle._src.text.tokenizer import Tokenizer
from rekindle._src.text.tokenizer_limits import PRE_TOKENIZERS, PreTokenizer

_log = logging.getLogger("rekindle.engine")
_KEY = "tokenizer.ggml"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_WORDS = (
    "Hello World's 3 33 333 3333 don't DON'T we'LL\t x=y; (a+b)*[c]... /path/\n\n  \n indented   CamelCase "
    "HTTPServer naïve Ünïcode café\u0301 привет мир 你好世界 こんにちは 안녕 नमस्ते สวัสดี 😀 "
    "—“quotes” $5 100% a_b C:\\x\r\n  end  "
)
# The first text separates names that differ for numbers in other scripts; the second is for names without a match.
_PROBES = (_WORDS + "½ ²³ Ⅷ ٣٤٥ ३४५", _WORDS)


def tokenizer_metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, object]:
    """Return the vocabulary and the special tokens. `vocab_size` is the number of rows of the embedding."""
    if not tokenizer.has_text:
        return {f"{_KEY}.model": "none", **_stops(tokenizer)}
    serialized = json.loads(tokenizer.definition())
    model = serialized["model"] | tokenizer.parts.model  # old files leave settings out, even the kind
    definition = json.dumps(serialized, ensure_ascii=False, separators=(",", ":"))
    fields: dict[str, Any] = {f"{_KEY}.model": _kind(tokenizer.parts), HUGGINGFACE: definition}
    if fields[f"{_KEY}.model"] == "none":
        return fields | _stops(tokenizer)
    tokens, kinds = _tokens(tokenizer, model, vocab_size)
    fields[f"{_KEY}.tokens"], fields[f"{_KEY}.token_type"] = tokens, kinds
    if model["type"] == "BPE":
        merges: list[str] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        fields[f"{_KEY}.merges"] = merges
        if fields[f"{_KEY}.model"] == "gpt2":
            name = pre_tokenizer_name(tokenizer.backend, whole_words=model["ignore_merges"])
            if name is not None:
                fields[f"{_KEY}.pre"] = name
        else:
            fields[f"{_KEY}.scores"] = _scores(tokens, merges)
            fields[f"{_KEY}.pre"] = "default"
    else:
        by_token = {token: float(score) for token, score in model["vocab"]}
        fields[f"{_KEY}.scores"] = [by_token.get(token, 0.0) for token in tokens]
    if fields[f"{_KEY}.model"] != "gpt2":
        first = tokenizer.token(tokenizer.encode("a", add_special_tokens=False)[0]) or ""
        fields[f"{_KEY}.add_space_prefix"] = first.startswith("▁")
    return fields | _stops(tokenizer) | _around(tokenizer)


def template_metadata(template: ChatTemplate | None) -> dict[str, object]:
    """Return the fields of the chat templates."""
    if template is None:
        return {}
    key = "tokenizer.chat_template"
    others = sorted(template.templates.keys() - {"default"})
    fields: dict[str, Any] = {f"{key}.{name}": template.templates[name] for name in others}
    if others:
        fields["tokenizer.chat_templates"] = others
    return fields | ({key: template.templates["default"]} if "default" in template.templates else {})


def sampling_metadata(sampling: Sampling | None) -> dict[str, object]:
    """Return the fields of the defaults of sampling."""
    if sampling is None:
        return {}
    plain = Sampling()
    values: dict[str, object] = {"temp": float(sampling.temperature), "penalty_repeat": sampling.repetition_penalty}
    off: dict[str, object] = {"penalty_repeat": plain.repetition_penalty}
    same = "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta"
    for name in same:
        values[name], off[name] = getattr(sampling, name), getattr(plain, name)
    if sampling.samplers is not None:
        values["sequence"] = ";".join(sampling.samplers)
    return {f"general.sampling.{name}": value for name, value in values.items() if off.get(name) != value}


def pre_tokenizer_name(backend: tokenizers.Tokenizer, *, whole_words: bool) -> str | None:
    """Return llama.cpp's name of a way to split words; None, with a warning, if it has none."""
    for probe in _PROBES:
        words = _split(backend.normalizer, backend.pre_tokenizer, probe)
        fitting = [name for name, pre in PRE_TOKENIZERS.items() if _splits_alike(pre, words, probe)]
        if fitting:
            return next((name for name in fitting if PRE_TOKENIZERS[name].whole_words == whole_words), fitting[0])
    _log.warning("llama.cpp has no name for how this tokenizer splits words; there it will split them in another way")
    return None


def _splits_alike(pre: PreTokenizer, words: Sequence[str], probe: str) -> bool:
    return words == _split(pre.normalizer(), pre.pre_tokenizer(), probe)


def _split(normalizer: Any, pre_tokenizer: Any, text: str) -> list[str]:
    text = text if normalizer is None else normalizer.normalize_str(text)
    return [text] if pre_tokenizer is None else [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def _kind(parts: TokenizerSections) -> str:
    """Return llama.cpp's name of the kind of tokenizer; "none" for kinds that it does not have."""
    kind = parts.model["type"]
    if kind == "BPE":
        return "gpt2" if "ByteLevel" in str(parts.decoder) else "llama"
    return "t5" if kind == "Unigram" else "none"


def _tokens(tokenizer: Tokenizer, model: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the tokens by id and the type of each. Ids without a token get a filler, as in llama.cpp's converter."""
    added = tokenizer.backend.get_added_tokens_decoder()
    unknown = model.get("unk_token")
    tokens, kinds = list[str](), list[int]()
    for index in range(vocab_size):
        token = tokenizer.token(index)
        tokens.append(f"[PAD{index}]" if token is None else token)
        if token is None:
            kinds.append(UNUSED)
        elif token == unknown or (unknown is None and model.get("unk_id") == index):
            kinds.append(UNKNOWN)
        elif index in added:
            kinds.append(CONTROL if added[index].special else USER_DEFINED)
        else:
            kinds.append(BYTE if model.get("byte_fallback") and _BYTE.fullmatch(token) else NORMAL)
    return tokens, kinds


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Return a score for each piece that keeps the order of merges: the place of its first merge, negated."""
    first = dict[str, int]()
    for place, merge in enumerate(merges):
        first.setdefault(merge.replace(" ", ""), place)
    return [-float(first.get(token, len(merges))) for token in tokens]


def _stops(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the ids of the named special tokens, and of the tokens that end a sequence or a turn."""
    fields: dict[str, Any] = {}
    for short, special in SPECIAL.items():
        name = tokenizer.special.get(special)
        index = tokenizer.backend.token_to_id(name) if name is not None and tokenizer.has_text else None
        if index is not None:
            fields[f"{_KEY}.{short}_token_id"] = index
    if tokenizer.bos_id is not None:
        fields[f"{_KEY}.bos_token_id"] = tokenizer.bos_id
    named = fields.get(f"{_KEY}.eos_token_id")
    ends = [*([named] if named is not None else []), *(index for index in tokenizer.eos_ids if index != named)]
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return fields | {f"{_KEY}.{key}": index for key, index in zip(keys, ends, strict=False)}


def _around(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the flags for a token before a text and for one after it."""
    ids = tokenizer.encode("a")
    bare = len(tokenizer.encode("a", add_special_tokens=False))
    before = len(ids) > bare and ids[0] == tokenizer.bos_id
    after = len(ids) > bare and ids[-1] in tokenizer.eos_ids
    return {f"{_KEY}.add_bos_token": before, f"{_KEY}.add_eos_token": after}
