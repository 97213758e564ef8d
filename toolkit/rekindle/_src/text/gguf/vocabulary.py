"""The tokenizer of a GGUF file as a `tokenizers.Tokenizer`: byte-level BPE, SentencePiece's BPE and its unigrams.

llama.cpp merges the pieces of SentencePiece by their scores. `tokenizers` merges by a list, which is made of the scores
here as transformers makes it: every way to cut a piece into two others, the best score first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from rekindle._src.models.loading.gguf.metadata import Metadata
from rekindle._src.text import tokenizer_limits
from rekindle._src.text.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from rekindle._src.text.panics import panics_as
from rekindle._src.text.tokenizer_limits import CUT_CHARACTERS, MERGES_PER_PIECE
from rekindle.errors import CheckpointError, UnsupportedModel

LONGEST = 512  # characters of a piece that others are merged to; a hostile one could have millions
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
HUGGINGFACE = "tokenizer.huggingface.json"
_log = logging.getLogger("rekindle.engine")
_SPACE = "▁"  # stands for a space in SentencePiece's pieces
_KEY = "tokenizer.ggml"
# The names of special tokens in the file and in a Hugging Face folder.
SPECIAL = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "cls": "cls_token",
    "mask": "mask_token",
    "seperator": "sep_token",  # codespell:ignore seperator
}  # fmt: skip


class Vocabulary(NamedTuple):
    """The tokens of a file, and of which type each is."""

    path: Path
    metadata: Metadata
    tokens: Sequence[str]
    kinds: Sequence[int]

    @classmethod
    def of(cls, metadata: Metadata) -> Vocabulary:
        tokens = metadata.texts(f"{_KEY}.tokens")[:]
        kinds = metadata.numbers(f"{_KEY}.token_type", np.full(len(tokens), NORMAL))
        found = cls(metadata.path, metadata, tokens, kinds.tolist())
        found.check("token_type", len(kinds))
        return found

    def check(self, name: str, count: int) -> None:
        """Raises `CheckpointError` unless there is one of something for each token."""
        if count != len(self.tokens):
            raise CheckpointError(
                f"{self.path}: {_KEY}.{name} has {count:,} entries for {len(self.tokens):,} tokens. Download it again."
            )

    def ids(self) -> dict[str, int]:
        """The id of each token; the first, where several have one text."""
        return {token: index for index, token in reversed(list(enumerate(self.tokens)))}

    def special(self) -> dict[str, str]:
        """The named special tokens, such as `{"bos_token": "<s>"}`."""
        found = {}
        for theirs, ours in SPECIAL.items():
            index = self.metadata.integer(f"{_KEY}.{theirs}_token_id", None)
            if index is not None and 0 <= index < len(self.tokens):
                found[ours] = self.tokens[index]
        return found

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.flag(f"{_KEY}.{name}", default))


def read_backend(metadata: Metadata) -> tokenizers.Tokenizer | None:
    """The tokenizer of a file, or None if it has no vocabulary. `UnsupportedModel` names a kind that is not read."""
    if (stored := metadata.text(HUGGINGFACE, None)) is not None:
        tokenizer_limits.check_file(stored.encode(), metadata.path)
        return _guarded(metadata.path, lambda: _from_json(stored))
    kind = metadata.text(f"{_KEY}.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in _KINDS:
        raise UnsupportedModel(
            f"{metadata.path}: {_KEY}.model={kind[:80]!r} is not implemented. Use one of: {', '.join(sorted(_KINDS))}."
        )
    words = Vocabulary.of(metadata)
    return _guarded(metadata.path, lambda: _KINDS[kind](words))


def _guarded(path: Path, make: Any) -> tokenizers.Tokenizer:
    try:
        with panics_as(CheckpointError, f"it made the tokenizer of {path}"):
            return make()
    except CheckpointError:
        raise
    except Exception as error:  # the Rust side raises bare Exception
        raise CheckpointError(
            f"{path} has a vocabulary that makes no tokenizer ({error}). Download it again"
        ) from error


def _from_json(text: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(text)
    made.no_padding()
    made.no_truncation()
    return made


def _byte_level(words: Vocabulary) -> tokenizers.Tokenizer:
    name = words.metadata.text(f"{_KEY}.pre", None)
    if name is None:
        _log.warning(
            "%s does not say how text is split into words (%s.pre): an old file; see llama.cpp", words.path, _KEY
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{words.path}: {_KEY}.pre={name[:80]!r} is not implemented: it says how text is split into words. "
            f"Implemented: {', '.join(sorted(PRE_TOKENIZERS))}."
        )
    return byte_level(words, PRE_TOKENIZERS[name])


def byte_level(words: Vocabulary, pre: PreTokenizer) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary of bytes, with a way to split words."""
    merges = []
    for merge in words.metadata.texts(f"{_KEY}.merges"):
        left, space, right = merge.partition(" ")
        if not space:
            raise CheckpointError(f"{words.path}: {_KEY}.merges has {merge[:80]!r}, which are not two tokens.")
        merges.append((left, right))
    made = tokenizers.Tokenizer(models.BPE(vocab=words.ids(), merges=merges, ignore_merges=pre.whole_words))
    if (normalizer := pre.normalizer()) is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre.pre_tokenizer()
    made.decoder = decoders.ByteLevel()
    return _finished(words, made, add_bos=pre.add_bos)


def _sentence_pieces(words: Vocabulary) -> tokenizers.Tokenizer:
    vocab = words.ids()
    scores = words.metadata.numbers(f"{_KEY}.scores").tolist()
    words.check("scores", len(scores))
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(words, vocab, scores), unk_token=_unknown(words), fuse_unk=True,
                   byte_fallback=True)
    )  # fmt: skip
    prefix = words.flag("add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    made.normalizer = normalizers.Sequence([*_squeezed(words), *steps, normalizers.Replace(" ", _SPACE)])
    ending = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ending])
    return _finished(words, made, add_bos=True)


def _merges(words: Vocabulary, vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to cut a piece into two others, those of pieces with the best score first.

    Raises `CheckpointError` for pieces that can be cut in far more ways than those of vocabularies in use.
    """
    found: list[tuple[float, int, int, int, tuple[str, str]]] = []
    cut = [
        (index, piece)
        for piece, index in vocab.items()  # the first of those with one text
        if words.kinds[index] in (NORMAL, USER_DEFINED) and len(piece) <= LONGEST
    ]
    most = MERGES_PER_PIECE * max(4096, len(vocab))
    characters = sum(len(piece) ** 2 for _, piece in cut)
    if characters > CUT_CHARACTERS:
        raise _too_many_cuts(words, f"{characters:,} characters to cut, and at most {CUT_CHARACTERS:,} are")
    for index, piece in cut:
        if len(found) > most:
            raise _too_many_cuts(words, f"more than {most:,} merges, {MERGES_PER_PIECE} for each piece, which are")
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocab and right in vocab:
                found.append((-scores[index], index, vocab[left], vocab[right], (left, right)))
    found.sort()  # among pieces of one score the vocabulary's order decides
    return [pair for *_, pair in found]


def _too_many_cuts(words: Vocabulary, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{words.path}: {_KEY}.tokens has pieces that consist of others in too many ways: {problem} read. "
        "Download it again"
    )


def _unigrams(words: Vocabulary) -> tokenizers.Tokenizer:
    scores = words.metadata.numbers(f"{_KEY}.scores").tolist()
    words.check("scores", len(scores))
    pieces = list(zip(words.tokens, scores, strict=True))
    lengths = [len(token.encode()) for token in words.tokens]
    tokenizer_limits.check_text(max(lengths, default=0), tokenizer_limits.LONGEST_PIECE, words.path)
    tokenizer_limits.check_unigram(sum(lengths), len(lengths), words.path)
    unknown = _unknown(words)
    made = tokenizers.Tokenizer(
        models.Unigram(
            pieces, unk_id=None if unknown is None else words.ids()[unknown], byte_fallback=BYTE in words.kinds
        )
    )
    steps: list[Any] = []
    charsmap = words.metadata.numbers(f"{_KEY}.precompiled_charsmap", None)
    if charsmap is not None and charsmap.size:
        steps.append(normalizers.Precompiled(charsmap.astype(np.uint8).tobytes()))
    made.normalizer = normalizers.Sequence([*steps, *_squeezed(words)])
    scheme = "always" if words.flag("add_space_prefix", True) else "never"
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    return _finished(words, made, add_bos=False)


def _squeezed(words: Vocabulary) -> list[Any]:
    """The normalizers of a vocabulary that takes several spaces for one."""
    if not words.flag("remove_extra_whitespaces", False):
        return []
    return [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]


def _unknown(words: Vocabulary) -> str | None:
    index = words.metadata.integer(f"{_KEY}.unknown_token_id", None)
    if index is None:
        index = next((number for number, kind in enumerate(words.kinds) if kind == UNKNOWN), None)
    return words.tokens[index] if index is not None and 0 <= index < len(words.tokens) else None


def _finished(words: Vocabulary, made: tokenizers.Tokenizer, *, add_bos: bool) -> tokenizers.Tokenizer:
    """Adds the tokens that text may spell out, and what `encode` puts around a text."""
    added = [
        AddedToken(token, normalized=False, special=kind != USER_DEFINED)
        for token, kind in zip(words.tokens, words.kinds, strict=True)
        if token
        and (kind in (CONTROL, USER_DEFINED) or (kind == UNKNOWN and words.metadata[f"{_KEY}.model"] != "gpt2"))
    ]
    made.add_special_tokens([token for token in added if token.special])
    made.add_tokens([token for token in added if not token.special])
    special, ids = words.special(), words.ids()
    first = special.get("bos_token") if words.flag("add_bos_token", add_bos) else None
    last = special.get("eos_token") if words.flag("add_eos_token", False) else None
    around = [token for token in (first, last) if token is not None]
    if around:
        single = [*([first] if first else []), "$A", *([last] if last else [])]
        pair = [*([f"{first}:0"] if first else []), "$A:0", *([f"{first}:1"] if first else []), "$B:1",
                *([f"{last}:1"] if last else [])]  # fmt: skip
        made.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(token, ids[token]) for token in dict.fromkeys(around)]
        )
    return made


_KINDS = {"gpt2": _byte_level, "llama": _sentence_pieces, "t5": _unigrams}
