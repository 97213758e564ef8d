"""The tokenizer of a GGUF file as a tokenizer.json: byte-level BPE, SentencePiece's BPE and its unigrams.

llama.cpp merges the pieces of SentencePiece by their scores. `tokenizers` merges by a list, which is built here
from the scores as transformers builds it: every way to cut a piece into two others, in the order of their scores.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from rekindle._src.models.loading.gguf.header import MAX_TEXTS, Metadata, Texts
from rekindle._src.text import tokenizer_limits
from rekindle._src.text.backends import added_section, section
from rekindle._src.text.gguf.token_table import CHUNK, Sums, TokenTable
from rekindle._src.text.tokenizer_limits import CUT_CHARACTERS, LINES, MERGES_PER_PIECE, PRE_TOKENIZERS
from rekindle.errors import CheckpointError, UnsupportedModel

_ID_BITS = MAX_TEXTS.bit_length()
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


class GgufVocabulary(NamedTuple):
    """The tokens of a file and the type of each."""

    path: Path
    metadata: Metadata
    tokens: Texts
    kinds: NDArray[Any]

    @classmethod
    def of(cls, metadata: Metadata) -> GgufVocabulary:
        tokens = metadata.texts(f"{_KEY}.tokens")
        kinds = metadata.numbers(f"{_KEY}.token_type", np.full(len(tokens), NORMAL))
        vocabulary = cls(metadata.path, metadata, tokens, kinds)
        vocabulary.check("token_type", len(kinds))
        return vocabulary

    def check(self, name: str, count: int) -> None:
        """Raise `CheckpointError` unless `count`, the number of entries of `name`, is the number of tokens."""
        if count != len(self.tokens):
            raise CheckpointError(
                f"{self.path}: {_KEY}.{name} has {count:,} entries for {len(self.tokens):,} tokens. Download it again."
            )

    def ids(self) -> dict[str, int]:
        """Return the id of each token; the first one where several have the same text."""
        return {token: index for index, token in reversed(list(enumerate(self.tokens)))}

    def added(self) -> NDArray[np.int64]:
        """Return the ids of the tokens that text may spell out."""
        spelled = (self.kinds == CONTROL) | (self.kinds == USER_DEFINED)
        if self.metadata[f"{_KEY}.model"] != "gpt2":
            spelled |= self.kinds == UNKNOWN
        lengths = self.tokens.ends - self.tokens.starts
        ids = np.flatnonzero(spelled & (lengths > 0))
        tokenizer_limits.check_added(int(lengths[ids].sum()), len(ids), self.path)
        return ids

    def special(self) -> dict[str, str]:
        """Return the named special tokens, such as `{"bos_token": "<s>"}`."""
        names = {}
        for key, name in SPECIAL.items():
            index = self.metadata.integer(f"{_KEY}.{key}_token_id", None)
            if index is not None and 0 <= index < len(self.tokens):
                names[name] = self.tokens[index]
        return names

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.flag(f"{_KEY}.{name}", default))


Pair = tuple[str, str]


class Merges(Protocol):
    """The merges of a vocabulary."""

    def whole(self, ids: Mapping[str, int]) -> list[Pair]:
        """Return all merges in the order of their ranks."""

    def making(self, token: str, ids: Mapping[str, int]) -> dict[int, Pair]:
        """Return the merges that produce one token, by numbers in the order of their ranks."""


class TokenizerRecipe(NamedTuple):
    """The parts from which the tokenizer of a BPE vocabulary, or of some of its tokens, is built."""

    words: GgufVocabulary
    options: Mapping[str, Any]  # of `models.BPE`
    merges: Merges
    normalizer: Any
    pre_tokenizer: Any
    decoder: Any
    add_bos: bool

    def make(self, ids: dict[str, int], merges: list[Pair], added: Collection[int]) -> tokenizers.Tokenizer:
        """Return a tokenizer of some tokens, where text may spell out those in `added`.

        From the text of a tokenizer.json it would take twice as long, and no one asks a part for its text.
        """
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, **self.options))
        if self.normalizer is not None:
            tokenizer.normalizer = self.normalizer
        if self.pre_tokenizer is not None:
            tokenizer.pre_tokenizer = self.pre_tokenizer
        tokenizer.decoder = self.decoder
        tokens = [added_token(self.words, index) for index in added]
        tokenizer.add_special_tokens([token for token in tokens if token.special])
        tokenizer.add_tokens([token for token in tokens if not token.special])
        if (processor := _processor(self.words, ids, add_bos=self.add_bos)) is not None:
            tokenizer.post_processor = processor
        return tokenizer

    def whole(self) -> bytes:
        """Return the tokenizer.json of all tokens. Raises `CheckpointError` for pieces with too many merges."""
        ids = self.words.ids()
        model = {**_BPE, **self.options, "vocab": ids, "merges": self.merges.whole(ids)}
        steps = (self.normalizer, self.pre_tokenizer, self.decoder)
        return _definition(self.words, model, ids, steps, add_bos=self.add_bos)


_BPE: dict[str, Any] = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip


def recipe(metadata: Metadata) -> TokenizerRecipe | None:
    """Return the recipe of a file's tokenizer if it merges tokens by llama.cpp's keys, else None.

    Raises `UnsupportedModel` for a kind that is not read.
    """
    if HUGGINGFACE in metadata:
        return None
    make = _RECIPES.get(metadata.text(f"{_KEY}.model", "none"))
    return None if make is None else make(GgufVocabulary.of(metadata))


def read_definition(metadata: Metadata) -> bytes | None:
    """Return the tokenizer.json of a file; None without a vocabulary. Raises `UnsupportedModel` for an unknown kind."""
    if (stored := metadata.text(HUGGINGFACE, None)) is not None:
        content = stored.encode()
        tokenizer_limits.check_file(content, metadata.path)
        return content
    if (bpe := recipe(metadata)) is not None:
        return bpe.whole()
    kind = metadata.text(f"{_KEY}.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind != "t5":
        known = ", ".join(sorted((*_RECIPES, "t5")))
        raise UnsupportedModel(f"{metadata.path}: {_KEY}.model={kind[:80]!r} is not implemented. Use one of: {known}.")
    return _unigrams(GgufVocabulary.of(metadata))


def _byte_level(words: GgufVocabulary) -> TokenizerRecipe:
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
    pre = PRE_TOKENIZERS[name]
    return TokenizerRecipe(
        words,
        {"ignore_merges": pre.whole_words},
        MergeList(words.path, words.metadata.texts(f"{_KEY}.merges")),
        pre.normalizer(),
        pre.pre_tokenizer(),
        decoders.ByteLevel(),
        pre.add_bos,
    )


class MergeList:
    """The merges that a file lists."""

    def __init__(self, path: Path, texts: Texts) -> None:
        self._path, self._texts = path, texts
        self._order = self._products = np.empty(0, np.int32)  # the merges by the ids that they produce; those ids

    def whole(self, ids: Mapping[str, int]) -> list[Pair]:
        return [self._pair(merge) for merge in self._texts]

    def making(self, token: str, ids: Mapping[str, int]) -> dict[int, Pair]:
        first, last = np.searchsorted(self._products, (ids[token], ids[token] + 1)).tolist()
        pairs = {place: self._pair(self._texts[place]) for place in self._order[first:last].tolist()}
        return {place: pair for place, pair in pairs.items() if pair[0] in ids and pair[1] in ids}

    def sort(self, table: TokenTable) -> None:
        """Find the token that each merge produces, for `making`. Raises `ValueError` if a merge produces none."""
        texts = self._texts
        octets = np.frombuffer(texts.content, np.uint8)
        spaces = np.append(np.flatnonzero(octets == ord(" ")), len(octets))
        middles = spaces[np.searchsorted(spaces, texts.starts)]
        if (middles >= texts.ends).any():
            raise ValueError("a merge is not of two tokens")
        products = [np.empty(0, np.int32)]
        for at in range(0, len(texts), CHUNK):
            chunk = slice(at, at + CHUNK)
            first, last = int(texts.starts[at]), int(texts.ends[chunk][-1])
            places = (texts.starts[chunk] - first, middles[chunk] - first, texts.ends[chunk] - first)
            ids = [table.ids(hashes) for hashes in Sums(octets[first:last]).joined(*places)]
            if min(int(values.min()) for values in ids) < 0:
                raise ValueError("a merge is of no tokens, or makes none")
            products.append(ids[2])
        targets = np.concatenate(products)
        self._order = np.argsort(targets).astype(np.int32)
        self._products = targets[self._order]

    def _pair(self, merge: str) -> Pair:
        left, space, right = merge.partition(" ")
        if not space:
            raise CheckpointError(f"{self._path}: {_KEY}.merges has {merge[:80]!r}, which are not two tokens.")
        return left, right


def _sentence_pieces(words: GgufVocabulary) -> TokenizerRecipe:
    scores = words.metadata.numbers(f"{_KEY}.scores")
    words.check("scores", len(scores))
    prefix = words.flag("add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    ending = [decoders.Strip(" ", 1, 0)] if prefix else []
    return TokenizerRecipe(
        words,
        {"unk_token": _unknown(words), "fuse_unk": True, "byte_fallback": True},
        Cuts(words, scores),
        normalizers.Sequence([*_squeezed(words), *steps, normalizers.Replace(" ", _SPACE)]),
        None,
        decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ending]),
        add_bos=True,
    )


def _merged_pieces(words: GgufVocabulary) -> TokenizerRecipe:
    """Return the recipe of pieces merged by a list: Gemma 4's, which splits text at line ends only."""
    return TokenizerRecipe(
        words,
        {"unk_token": _unknown(words), "fuse_unk": True, "byte_fallback": True},
        MergeList(words.path, words.metadata.texts(f"{_KEY}.merges")),
        normalizers.Replace(" ", _SPACE),
        pre_tokenizers.Split(tokenizers.Regex(LINES), "isolated"),
        decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]),
        add_bos=True,
    )


class Cuts:
    """Every way to cut a piece into two others, the ones with the best score first."""

    def __init__(self, words: GgufVocabulary, scores: NDArray[Any]) -> None:
        self._words, self._scores = words, scores

    @functools.cached_property
    def _ranks(self) -> NDArray[np.int32]:
        """Each piece's rank by score; among pieces of one score the vocabulary's order decides."""
        ranks = np.empty(len(self._scores), np.int32)
        ranks[np.argsort(-self._scores, kind="stable")] = np.arange(len(ranks))
        return ranks

    def whole(self, ids: Mapping[str, int]) -> list[Pair]:
        """Return all merges. Raises `CheckpointError` for pieces that can be cut in far more ways than usual ones."""
        merges = dict[int, Pair]()
        limit = MERGES_PER_PIECE * max(4096, len(ids))
        characters = sum(len(piece) ** 2 for piece, index in ids.items() if self._is_cut(piece, index))
        if characters > CUT_CHARACTERS:
            raise self._too_many(f"{characters:,} characters to cut, and at most {CUT_CHARACTERS:,} are")
        for piece in ids:
            if len(merges) > limit:
                raise self._too_many(f"more than {limit:,} merges, {MERGES_PER_PIECE} for each piece, which are")
            merges |= self.making(piece, ids)
        return [merges[rank] for rank in sorted(merges)]

    def making(self, token: str, ids: Mapping[str, int]) -> dict[int, Pair]:
        index = ids[token]
        if not self._is_cut(token, index):
            return {}
        rank, pairs = int(self._ranks[index]) << _ID_BITS, ((token[:at], token[at:]) for at in range(1, len(token)))
        return {rank + ids[left]: (left, right) for left, right in pairs if left in ids and right in ids}

    def _is_cut(self, piece: str, index: int) -> bool:
        return len(piece) <= LONGEST and int(self._words.kinds[index]) in (NORMAL, USER_DEFINED)

    def _too_many(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._words.path}: {_KEY}.tokens has pieces that consist of others in too many ways: {problem} read. "
            "Download it again"
        )


def _unigrams(words: GgufVocabulary) -> bytes:
    scores = words.metadata.numbers(f"{_KEY}.scores").tolist()
    words.check("scores", len(scores))
    pieces = list(zip(words.tokens, scores, strict=True))
    lengths = [len(token.encode()) for token in words.tokens]
    tokenizer_limits.check_text(max(lengths, default=0), tokenizer_limits.LONGEST_PIECE, words.path)
    tokenizer_limits.check_unigram(sum(lengths), len(lengths), words.path)
    ids, unknown = words.ids(), _unknown(words)
    fallback = bool((words.kinds == BYTE).any())
    unknown_id = None if unknown is None else ids[unknown]
    model = {"type": "Unigram", "unk_id": unknown_id, "vocab": pieces, "byte_fallback": fallback}
    before: list[Any] = []
    charsmap = words.metadata.numbers(f"{_KEY}.precompiled_charsmap", None)
    if charsmap is not None and charsmap.size:
        before.append(normalizers.Precompiled(charsmap.astype(np.uint8).tobytes()))
    scheme = "always" if words.flag("add_space_prefix", True) else "never"
    steps = (
        normalizers.Sequence([*before, *_squeezed(words)]),
        pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme),
        decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme),
    )
    return _definition(words, model, ids, steps, add_bos=False)


def _squeezed(words: GgufVocabulary) -> list[Any]:
    """Return the normalizers of a vocabulary that reads several spaces as one."""
    if not words.flag("remove_extra_whitespaces", False):
        return []
    return [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]


def _unknown(words: GgufVocabulary) -> str | None:
    index = words.metadata.integer(f"{_KEY}.unknown_token_id", None)
    if index is None:
        index = next(iter(np.flatnonzero(words.kinds == UNKNOWN).tolist()), None)
    return words.tokens[index] if index is not None and 0 <= index < len(words.tokens) else None


def _definition(
    words: GgufVocabulary,
    model: Mapping[str, Any],
    ids: Mapping[str, int],
    steps: tuple[Any, Any, Any],
    *,
    add_bos: bool,
) -> bytes:
    """Return the tokenizer.json of a model, its normalizer, pre-tokenizer and decoder, and of added tokens."""
    tokens = [added_token(words, index) for index in words.added().tolist()]
    # Of several with one text the id is the first one's; it is special if any of them is.
    entries = {token.content: token for token in sorted(tokens, key=lambda token: token.special)}
    normalizer, pre_tokenizer, decoder = map(section, steps)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(
            (added_section(ids[text], token) for text, token in entries.items()), key=lambda entry: entry["id"]
        ),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": section(_processor(words, ids, add_bos=add_bos)),
        "decoder": decoder,
        "model": model,
    }
    return json.dumps(content, ensure_ascii=False).encode()


def _processor(words: GgufVocabulary, ids: Mapping[str, int], *, add_bos: bool) -> Any:
    """Return the post-processor for the tokens that `encode` adds around a text; None if it adds none."""
    special = words.special()
    first = special.get("bos_token") if words.flag("add_bos_token", add_bos) else None
    last = special.get("eos_token") if words.flag("add_eos_token", False) else None
    around = [token for token in (first, last) if token is not None]
    if not around:
        return None
    single = [*([first] if first else []), "$A", *([last] if last else [])]
    pair = [*([f"{first}:0"] if first else []), "$A:0", *([f"{first}:1"] if first else []), "$B:1",
            *([f"{last}:1"] if last else [])]  # fmt: skip
    tokens = [(token, ids[token]) for token in dict.fromkeys(around)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def added_token(words: GgufVocabulary, index: int) -> AddedToken:
    """Return the entry of a token that text may spell out."""
    return AddedToken(words.tokens[index], normalized=False, special=int(words.kinds[index]) != USER_DEFINED)


_RECIPES = {"gpt2": _byte_level, "llama": _sentence_pieces, "gemma4": _merged_pieces}
