"""The tokenizer, chat template and defaults of sampling that a GGUF file has in its metadata.

Tokenizers of large vocabularies are stored as tokenizer.json in the cache folder. Making one of 151,000 tokens from a
file's own keys takes twice as long as reading it from tokenizer.json, and one of SentencePiece's, which computes merges
from scores, several times as long. The facts that a tokenizer of parts needs of all tokens are stored there, too: for
Gemma's they take 0.1 s to compute.

The tokenizers library takes a second or two for 262,000 tokens and their merges, while no other thread runs. A text
is cut the same way by a tokenizer that has only those tokens which are parts of it: merges make no others, and keep
their order. Hashes find these tokens (`token_table.py`), for words that no earlier text had.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers

from rekindle._src.core.config import cache_folder
from rekindle._src.core.store import Store
from rekindle._src.models.loading.fingerprint import files_digest
from rekindle._src.models.loading.gguf.header import GgufHeader, Metadata, Texts, read_header, stop_tokens
from rekindle._src.text.backends import TokenizerSections, TokenSpellings, WholeTokenizer, encode
from rekindle._src.text.gguf.token_table import SEPARATOR, TokenTable
from rekindle._src.text.gguf.vocabulary import (
    Cuts,
    GgufVocabulary,
    MergeList,
    Pair,
    TokenizerRecipe,
    added_token,
    read_definition,
    recipe,
)
from rekindle._src.text.tokenizer_limits import CUT_CHARACTERS, MERGES_PER_PIECE, byte_of_character, panics_as
from rekindle.errors import CheckpointError, InvalidRequest, RekindleError

log = logging.getLogger("rekindle.engine")

_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
    "xtc_probability": "xtc_probability", "xtc_threshold": "xtc_threshold", "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau", "mirostat_eta": "mirostat_eta",
}  # fmt: skip
_SAMPLERS = "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta", "samplers"
_SEQUENCE = "general.sampling.sequence"  # names of samplers, with semicolons between

SMALL = 1 << 20  # bytes; below this size of a header a tokenizer is built too fast to be worth storing


class FileTokenizer(NamedTuple):
    """The parts of a `Tokenizer`."""

    backend: WholeTokenizer | PartialTokenizer | None
    special: dict[str, str]
    eos_ids: tuple[int, ...]
    bos_id: int | None


def metadata_of(path: str | Path) -> Metadata:
    """Return the metadata of a file."""
    return read_header(Path(path)).metadata


def read_tokenizer(path: str | Path) -> FileTokenizer:
    """Return the tokenizer of a file; one without a vocabulary knows only the ids that end a sequence."""
    header = read_header(Path(path))
    metadata = header.metadata
    stops = stop_tokens(metadata)
    backend = _backend(header)
    special = {} if backend is None else special_tokens(metadata)
    return FileTokenizer(backend, special, tuple(stops["eos_token_id"] or ()), stops["bos_token_id"])


def _backend(header: GgufHeader) -> WholeTokenizer | PartialTokenizer | None:
    """Return the tokenizer that encodes: parts of a vocabulary where these can stand for it."""
    metadata, key = header.metadata, key_of(header)
    if (bpe := recipe(metadata)) is None:
        return load_or_make(key, metadata.path, lambda: read_definition(metadata))
    path = metadata.path

    def whole() -> WholeTokenizer:  # keeps no reference to the header, which has megabytes
        tokenizer = load_or_make(key, path, bpe.whole)
        assert tokenizer is not None, "a recipe makes one"
        return tokenizer

    with contextlib.suppress(ValueError):
        return PartialTokenizer(bpe, whole, functools.partial(_table, key))
    return whole()


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Return the named special tokens, such as `{"bos_token": "<s>"}`; chat templates read them."""
    return GgufVocabulary.of(metadata).special() if "tokenizer.ggml.tokens" in metadata else {}


def read_templates(path: str | Path) -> tuple[Mapping[str, str], dict[str, str]]:
    """Return the chat templates by name, and the special tokens that they may write."""
    metadata = metadata_of(path)
    templates = {}
    for key in metadata:
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
            templates[key[len(_TEMPLATE) + 1 :] or "default"] = metadata.text(key)
    return templates, special_tokens(metadata) if templates else {}


def read_sampling(path: str | Path) -> dict[str, object]:
    """Return the defaults of sampling as generation_config.json has them; empty where the file has none.

    A sampler that sessions don't have is left out and logged, so that the other defaults hold.
    """
    from rekindle._src.core.sampling import Sampling  # those that read a tokenizer don't need it

    metadata = metadata_of(path)
    defaults = {option: metadata.get(f"general.sampling.{key}") for option, key in _SAMPLING.items()}
    defaults = {name: value for name, value in defaults.items() if isinstance(value, (int, float))}
    if isinstance(metadata.get(_SEQUENCE), str):
        defaults["samplers"] = metadata.get(_SEQUENCE)
    for name in [name for name in _SAMPLERS if name in defaults]:
        option: Any = {name: defaults[name]}
        try:
            Sampling(**option)
        except InvalidRequest as error:
            log.warning("%s: a default of sampling is left out: %s", path, error)
            del defaults[name]
    return {"do_sample": defaults.get("temperature") != 0, **defaults} if defaults else {}


def key_of(header: GgufHeader) -> bytes | None:
    """Return the key under which the tokenizer of a file with this header is stored, or None if not worth storing."""
    return None if header.nbytes < SMALL else header.digest


def load_or_make(key: bytes | None, path: Path, make: Callable[[], bytes | None]) -> WholeTokenizer | None:
    """Return the tokenizer stored under this key, or else one of the definition that `make` returns, which is stored.

    Raises `CheckpointError` if the file at `path` has a vocabulary that makes no tokenizer.
    """
    if key is None:
        return _made(path, make)
    stored, name = _place(key)
    with contextlib.suppress(Exception):  # damaged, or of another version of tokenizers: it is built again
        content = stored.get(name)
        if content is not None:
            with panics_as(CheckpointError, f"it read {stored.path(name)}"):
                return WholeTokenizer(content)
    tokenizer = _made(path, make)
    if tokenizer is not None:
        with contextlib.suppress(OSError):
            stored.put(name, tokenizer.definition())
    return tokenizer


def _made(path: Path, make: Callable[[], bytes | None]) -> WholeTokenizer | None:
    try:
        with panics_as(CheckpointError, f"it made the tokenizer of {path}"):
            definition = make()
            return None if definition is None else WholeTokenizer(definition)
    except RekindleError:
        raise
    except Exception as error:  # the Rust side raises bare Exception
        raise CheckpointError(
            f"{path} has a vocabulary that makes no tokenizer ({error}). Download it again"
        ) from error


def _table(key: bytes | None, texts: Texts) -> TokenTable:
    """Return the table of a vocabulary, stored or stored now under this key."""
    if key is None:
        return TokenTable(texts)
    stored, name = _place(key, "table")
    with contextlib.suppress(OSError, ValueError):  # damaged: it is made again
        content = stored.get(name)
        if content is not None:
            return TokenTable(texts, content)
    table = TokenTable(texts)
    with contextlib.suppress(OSError):
        stored.put(name, table.content())
    return table


def _place(key: bytes, kind: str = "") -> tuple[Store, str]:
    """Return the store, and the name of the entry for a key."""
    digest = hashlib.blake2b(key + _sources() + kind.encode(), digest_size=16)
    return Store(cache_folder() / "tokenizers", verified=True), digest.hexdigest()


@functools.cache
def _sources() -> bytes:
    """Return the version of the library and the digest of these modules, which decide how tokenizers are built."""
    return f"{tokenizers.__version__} {files_digest(sorted(Path(__file__).parent.glob('*.py')))}".encode()


MOST = 1 << 15  # tokens kept for later texts; a tokenizer of them is built in a tenth of a second
_CROSSING = 1 << 11  # most tokens with a space inside for which texts are looked at word by word
_WORD = re.compile(r"[^ ]+| +[^ ]*")
_SPACE = "▁"  # in SentencePiece's pieces
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_SPENT = 8  # the part that stays is rebuilt after parts for single texts took this many times its tokens
_LONG = 64  # characters; longer words are looked at each time


class TokenizerPart(NamedTuple):
    """A tokenizer, and the tokens that it has."""

    ids: frozenset[int]
    backend: tokenizers.Tokenizer


class PartialTokenizer:
    """A tokenizer with the same results as one of all tokens, which `whole` builds."""

    def __init__(
        self,
        bpe: TokenizerRecipe,
        whole: Callable[[], WholeTokenizer],
        table_of: Callable[[Texts], TokenTable] = TokenTable,
    ) -> None:
        """Raise `ValueError` for a vocabulary that parts can't stand for."""
        words, self._make_whole = bpe.words, whole
        self._words, self._tokens = words, words.tokens
        self._table = table = table_of(words.tokens)
        self._bytewise = isinstance(bpe.decoder, decoders.ByteLevel)
        self._prefix = ""
        always = {table.id_of(token) for token in words.special().values()}
        if isinstance(bpe.merges, MergeList):
            bpe.merges.sort(table)
        if not self._bytewise:
            always |= self._fallbacks(bpe.options["unk_token"])
        if isinstance(bpe.merges, Cuts):
            _check_cuts(words.tokens)
            self._prefix = _SPACE if words.flag("add_space_prefix", True) else ""
            if words.flag("remove_extra_whitespaces", False):
                raise ValueError("spaces are dropped, so that words are not known one by one")
        self._recipe = bpe
        added = words.added()
        if not table.first[added].all():
            raise ValueError("a token that text may spell out is there twice")
        self._added = frozenset(added.tolist())
        crossing = _crossing(words.tokens, self._spelled(" ")) | (_crossing(words.tokens, " ") & self._added)
        self._by_word = len(crossing) <= _CROSSING
        needed = {self._tokens[index] for index in always if index is not None}
        needed |= {self._tokens[index] for index in crossing if self._by_word}
        self._always = frozenset(table.inside(SEPARATOR.join(token.encode() for token in needed)))
        self._texts = dict[
            int, str
        ]()  # texts of the tokens that parts needed, by their ids; and the ranks of their merges
        self._ranks = dict[int, list[int]]()
        self._pairs = dict[int, Pair]()  # by their ranks
        self._lock = threading.Lock()  # guards the fields below
        self._part_words = set[str]()  # words with all their tokens in the part
        self._part = self._build(self._always)
        self._waiting = set[int]()  # tokens that texts needed since it was built
        self._new = set[str]()  # their words
        self._spent_tokens = 0  # tokens of parts for single texts since then
        self._whole: WholeTokenizer | None = None
        self.parts = TokenizerSections.of(self._part.backend)  # whatever its tokens

    def encode(self, text: str, add_special_tokens: bool, *, long: bool) -> list[int]:
        """Return the ids of a text. Long texts release the GIL."""
        return encode(self._for(text), text, add_special_tokens, long=long)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids."""
        hidden = self._special if skip_special_tokens else frozenset()
        tokens = (self.token(int(token_id)) for token_id in ids if token_id not in hidden)
        return str(self._recipe.decoder.decode([token for token in tokens if token is not None]))

    def token(self, token_id: int) -> str | None:
        """Return the spelling of an id."""
        if token_id < 0:
            raise OverflowError(f"{token_id} is no id of a token")
        if token_id >= len(self._tokens) or not self._table.first[token_id]:
            return None
        return self._tokens[token_id]

    def id_of(self, token: str) -> int | None:
        """Return the id of a token."""
        return self._table.id_of(token)

    @functools.cached_property
    def size(self) -> int:
        """The number of tokens."""
        return int(self._table.first.sum())

    @functools.cached_property
    def longest(self) -> int:
        """The number of characters of the longest token."""
        octets = np.frombuffer(self._tokens.content, np.uint8)
        begins = np.append(0, np.cumsum((octets & 0xC0) != 0x80))
        return int((begins[self._tokens.ends] - begins[self._tokens.starts]).max(initial=0))

    def added(self) -> dict[int, AddedToken]:
        """Return the tokens that text may spell out, by their ids."""
        return {index: added_token(self._words, index) for index in sorted(self._added)}

    def whole(self) -> WholeTokenizer:
        """Return the library's own tokenizer of all tokens. Building it takes seconds."""
        with self._lock:
            if self._whole is None:
                self._whole = self._make_whole()
            return self._whole

    def spelled(self) -> TokenSpellings | None:
        """Return the tokens as they stand in texts; None if a text's first word is spelled in another way."""
        if self._prefix:
            return None
        tokens = self._bytewise_spelled() if self._bytewise else self._piecewise_spelled()
        for index, added in self.added().items():
            tokens[index] = added.content.encode()
        for index in np.flatnonzero(~self._table.first).tolist():
            tokens[index] = b""
        return TokenSpellings(tokens, sorted(self._special))

    def _bytewise_spelled(self) -> list[bytes]:
        octets = {ord(character): byte for character, byte in byte_of_character().items()}
        between = "\uffff"  # no character of the byte-level alphabet
        texts = between.join(self._tokens).translate(octets).split(between)
        return [text.encode("latin-1", "ignore") for text in texts]

    def _piecewise_spelled(self) -> list[bytes]:
        tokens = [token.replace(_SPACE, " ").encode() for token in self._tokens]
        for byte in range(256):
            index = self._table.id_of(f"<0x{byte:02X}>")
            if index is not None:
                tokens[index] = bytes([byte])
        return tokens

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(index for index, token in self.added().items() if token.special)

    def _for(self, text: str) -> tokenizers.Tokenizer:
        """Return a tokenizer with every token that is part of a text."""
        words = {text} if not self._by_word or _SPACE in text else set(_WORD.findall(text))
        with self._lock:
            if self._whole is not None:
                return self._whole.native
            new = words - self._part_words
            if not new:
                return self._part.backend
            ids = self._inside(new)
            if ids is not None:
                return self._part_with(ids, words, new).backend
        return self.whole().native

    def _part_with(self, ids: frozenset[int], words: set[str], new: set[str]) -> TokenizerPart:
        """Return a part with `ids`, the tokens in new words of a text, and the tokens of its other words.

        The part that stays is rebuilt once parts for single texts have cost a few times as much as rebuilding will.
        """
        if not ids <= self._part.ids:
            self._waiting |= ids - self._part.ids
            self._new |= new
            grown = len(self._part.ids) + len(self._waiting)
            if self._spent_tokens < _SPENT * grown:
                part = self._build(self._always | (self._inside(words) or ids))
                self._spent_tokens += len(part.ids)
                return part
            if grown > MOST:
                self._part, self._new = self._build(self._always | (self._inside(words) or ids)), words
                self._part_words.clear()
            else:
                self._part = self._build(self._part.ids | self._waiting)
            new, self._waiting, self._new, self._spent_tokens = self._new, set(), set(), 0
        if len(self._part_words) + len(new) > 2 * MOST:
            self._part_words.clear()
        self._part_words |= {word for word in new if len(word) <= _LONG}
        return self._part

    def _inside(self, words: set[str]) -> frozenset[int] | None:
        """Return the tokens that are parts of words as written or as merges see them; None if that is unknown.

        Words are composed one by one. Texts are composed the same way: nothing is composed with a space. But a
        character that follows a token which text may spell out would be composed with the token's last one.
        """
        plain, composed = SEPARATOR.join(word.encode() for word in words), words
        if self._bytewise and self._recipe.normalizer is not None:
            pairs = {word: self._recipe.normalizer.normalize_str(word) for word in words}
            changed = SEPARATOR.join(word.encode() for word, normal in pairs.items() if word != normal)
            if changed and self._table.inside(changed) & self._added:
                return None
            composed = {*pairs.values()}
        spelled = SEPARATOR.join(self._spelled(word).encode() for word in composed)
        return frozenset(self._table.inside(plain + SEPARATOR + spelled, self._prefix.encode()))

    def _spelled(self, text: str) -> str:
        """Return a text in the spelling of tokens."""
        if not self._bytewise:
            return text.replace(" ", _SPACE)
        return "".join(piece for piece, _ in _BYTES.pre_tokenize_str(text))

    def _build(self, ids: frozenset[int]) -> TokenizerPart:
        """Return the part with these tokens. They contain no other tokens."""
        if len(self._texts) > 2 * MOST:
            self._texts.clear()
            self._ranks.clear()
            self._pairs.clear()
        for index in ids - self._texts.keys():
            self._texts[index] = self._tokens[index]
        tokens = {self._texts[index]: index for index in ids}
        for index in ids - self._ranks.keys():
            pairs = self._recipe.merges.making(self._texts[index], tokens)
            self._ranks[index] = [*pairs]
            self._pairs |= pairs
        ranks = sorted(itertools.chain.from_iterable(map(self._ranks.__getitem__, ids)))
        merges = [*map(self._pairs.__getitem__, ranks)]
        return TokenizerPart(ids, self._recipe.make(tokens, merges, sorted(ids & self._added)))

    def _fallbacks(self, unknown: str | None) -> set[int | None]:
        """Return the tokens of bytes and of unknown characters, for characters that are not tokens."""
        content, names = self._tokens.content, [f"<0x{byte:02X}>" for byte in range(256)]
        ids = [index for token in names if (index := self._table.id_of(token)) is not None]
        if content.count(b"<0x") != len(ids) or (unknown and content.count(unknown.encode()) != 1):
            raise ValueError("a token contains a character that stands for unknown ones")
        return {*ids, None if unknown is None else self._table.id_of(unknown)}


def _crossing(texts: Texts, space: str) -> frozenset[int]:
    """Return the tokens with a space after another character."""
    pattern = space.encode()
    octets = np.frombuffer(texts.content, np.uint8)
    count = len(octets) - len(pattern) + 1
    if count <= 0:
        return frozenset()
    here = octets[:count] == pattern[0]
    for at, octet in enumerate(pattern[1:], start=1):
        here &= octets[at : at + count] == octet
    places = np.flatnonzero(here)
    after = here[places - len(pattern)] & (places >= len(pattern))  # another space, or a byte before the token
    tokens = np.searchsorted(texts.starts, places, side="right") - 1
    inside = (tokens >= 0) & (places < texts.ends[tokens]) & (places > texts.starts[tokens])
    return frozenset(tokens[inside & ~after].tolist())


def _check_cuts(texts: Texts) -> None:
    """Raise `ValueError` for pieces that may consist of others in too many ways; the whole tokenizer decides."""
    lengths = (texts.ends - texts.starts).astype(np.int64)
    if lengths.sum() > MERGES_PER_PIECE * max(4096, len(texts)) or (lengths**2).sum() > CUT_CHARACTERS:
        raise ValueError("pieces that are cut in many ways")
