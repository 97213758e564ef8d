"""Text to token ids and back, by a folder's tokenizer.json or a GGUF file. Without either, token ids are served."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, NoReturn

import tokenizers

from rekindle._src.core.drawable import Drawable
from rekindle._src.core.foreign_calls import TOKENIZER, ForeignNames
from rekindle._src.core.plain_files import read_plain
from rekindle._src.core.records import Completion
from rekindle._src.models.loading import tensor_files
from rekindle._src.models.loading.gguf.files import is_file
from rekindle._src.text import tokenizer_limits
from rekindle._src.text.backends import TokenizerBackend, TokenizerSections, TokenSpellings, WholeTokenizer
from rekindle._src.text.encoding_process import EncodingFailed, EncodingProcess
from rekindle._src.text.tokenizer_limits import panics_as, raise_panic
from rekindle.errors import CheckpointError, RequestFailed

MAX_FILE = 256 << 20  # bytes; the tokenizer.json of a vocabulary of 256,000 has some 35 MB
MAX_JSON = 32 << 20  # bytes of the other files of a tokenizer; parsed, each of their values takes some 60
# From this many characters on, a text goes through the call for batches, which releases the GIL. While the plain call
# encoded 1.2 million characters in 1.82 s, another thread stood still for 1.76 s; with the call for batches, 0.03 s.
# Shorter texts take a millisecond or two, and for them no threads are started.
LONG_TEXT = 4096
# Characters that one token may stand for in a pipeline that can drop some: stripped spaces, runs of unknown ones.
_DROPPING = 1024
_log = logging.getLogger("rekindle.engine")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one if there is no such file."""
    content: dict[str, Any] = tensor_files.read_json(path, dict, MAX_JSON) if os.path.exists(path) else {}
    return content


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the named special tokens of a folder, such as `{"bos_token": "<s>"}`. Chat templates read them."""
    merged = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = merged.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


class Tokenizer(Drawable, ForeignNames):
    """Encodes and decodes text, and knows which ids begin and end a sequence.

    The post-processor in tokenizer.json decides whether `encode` adds bos and eos. As in transformers 5,
    `add_bos_token` is ignored where that file exists.
    """

    _foreign = TOKENIZER

    def __init__(
        self,
        backend: TokenizerBackend | None,
        *,
        special: dict[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self._backend = backend
        self._folder = folder
        self._encoding_process = None if backend is None else _process(backend, folder)
        self.special: dict[str, str] = dict(special or {})
        named_bos, named_eos = self._id_of("bos_token"), self._id_of("eos_token")
        self.bos_id: int | None = bos_id if named_bos is None else named_bos
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos_ids, *([] if named_eos is None else [named_eos]))))

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Return the tokenizer of a folder or GGUF file. Without a vocabulary it knows ids only; see `has_text`."""
        folder = Path(folder)
        if is_file(folder):
            from rekindle._src.text.gguf import reading as gguf  # other formats don't need it

            file = gguf.read_tokenizer(folder)
            return cls(file.backend, special=file.special, eos_ids=file.eos_ids, bos_id=file.bos_id, folder=folder)
        special = special_tokens(folder)
        model, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json")
        # Chat checkpoints differ in where they name the end-of-turn token, so the tokenizer's own eos token always
        # counts, in addition to generation_config.json's list (config.json's in its absence).
        eos = generation.get("eos_token_id", model.get("eos_token_id"))
        bos = generation.get("bos_token_id", model.get("bos_token_id"))
        return cls(
            _backend(folder, special),
            special=special,
            eos_ids=_ids(eos),
            bos_id=next(iter(_ids(bos)), None),
            folder=folder,
        )

    def __repr__(self) -> str:
        size = f"{self.vocab_size:,} tokens" if self.has_text else "ids only"
        return f"<Tokenizer: {size}, bos {self.bos_id}, eos {list(self.eos_ids)}>"

    @property
    def has_text(self) -> bool:
        """True if text can be encoded. False for a folder without tokenizer.json, which takes token ids only."""
        return self._backend is not None

    @property
    def encodes_apart(self) -> bool:
        """True if a separate process encodes, so that even a short text may take seconds."""
        return self._encoding_process is not None

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers.Tokenizer` underneath; raises `CheckpointError` when the folder has none.

        For a large GGUF vocabulary it is built on first use, in seconds: nothing else here needs it.
        """
        return self._text.whole().native

    def definition(self) -> bytes:
        """Return the text of a tokenizer.json for this tokenizer. Raises and takes as long as `backend`."""
        return self._text.whole().definition()

    def spelled(self) -> TokenSpellings | None:
        """Return the tokens as they stand in texts; None if `backend` exists already."""
        return self._text.spelled()

    @property
    def _text(self) -> TokenizerBackend:
        if self._backend is None:
            where = "this model" if self._folder is None else str(self._folder)
            slow = self._folder is not None and (self._folder / "tokenizer.model").exists()
            fix = (
                "Convert its tokenizer.model with transformers' AutoTokenizer.from_pretrained() and save_pretrained()"
                if slow
                else "Pass token ids instead of text, or add the file"
            )
            raise CheckpointError(f"{where} has no tokenizer.json, so text can't be encoded or decoded. {fix}")
        return self._backend

    @property
    def vocab_size(self) -> int:
        """The number of ids that have a token, added ones included. The model's own vocabulary may be larger."""
        return self._text.size

    if not TYPE_CHECKING:

        def __call__(self, *texts: object, **options: object) -> NoReturn:
            raise TypeError(
                "a tokenizer is not called itself: write ids = session.tokenizer.encode(text), a list, and "
                "session.tokenizer.decode(ids)"
            )

    def encode(self, text: str, add_special_tokens: bool = True, **unknown: Never) -> list[int]:
        """Return the token ids of `text`. Special tokens written in it become their ids. Long texts release the GIL.

        Raises `RequestFailed` if the tokenizers library panics, as it does where a regex runs out of backtracking, and
        if a tokenizer takes too much time or memory, where these are not bounded by a text's length.
        """
        if unknown:
            raise TypeError(
                f"encode(…) has no {next(iter(unknown))}: it returns a list of ids. Write np.asarray(ids) for an array"
            )
        backend = self._text
        if self._encoding_process is not None:
            try:
                return self._encoding_process.encode(text, add_special_tokens)
            except EncodingFailed as error:
                raise RequestFailed(
                    f"A text of {len(text):,} characters could not be encoded: {error}. {error.fix}"
                ) from error
        try:
            return backend.encode(text, add_special_tokens, long=len(text) >= LONG_TEXT)
        except BaseException as error:
            if not isinstance(text, str):
                raise TypeError(_not_a_text(text)) from None
            raise_panic(error, RequestFailed, f"it encoded a text of {len(text):,} characters")
            raise

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; an id without a token contributes nothing. A panic raises `RequestFailed`."""
        backend = self._text
        try:
            with panics_as(RequestFailed, f"it decoded {len(ids):,} tokens"):
                return backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except TypeError:
            raise TypeError(_not_ids(ids)) from None

    def pair(self, first: str, second: str) -> tuple[int, int] | None:
        """Return the ids of two tokens, such as those around a model's reasoning; None unless it has both."""
        if self._backend is None:
            return None
        first_id, second_id = self._backend.id_of(first), self._backend.id_of(second)
        return None if first_id is None or second_id is None else (first_id, second_id)

    def added_id(self, text: str) -> int | None:
        """Return the id of an added token with this text, such as `<tool_call>`; None if it has none."""
        return next((i for i, token in self._text.added().items() if token.content == text), None)

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of an id, such as `Ġthe` or `<0x0A>`."""
        return self._text.token(token_id)

    @functools.cached_property
    def characters_per_token(self) -> int:
        """An upper bound on the characters of a text that one token stands for.

        A text of more than `n` times this many has more than `n` tokens, so it can be refused without being encoded.
        Where a pipeline may drop characters there is no such bound, and at least 1,024 is returned.
        """
        longest, parts, added = self._text.longest, self._text.parts, self._text.added().values()
        drops = (
            not _keeps_characters(parts.normalizer, _KEEPING_NORMALIZERS)
            or not _keeps_characters(parts.pre_tokenizer, _KEEPING_PRE_TOKENIZERS)
            or parts.model["type"] != "BPE"  # the others merge unknown characters, as BPE does with fuse_unk
            or parts.model["fuse_unk"]
            or not (parts.model["byte_fallback"] or parts.model["unk_token"] or "ByteLevel" in str(parts))
            or any(token.lstrip or token.rstrip for token in added)
        )
        # Composing (NFC, NFKC) makes one character of at most 4 that belong together in practice.
        return max(longest * 4, _DROPPING) if drops else longest * (4 if parts.normalizer else 1)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out by default."""
        return frozenset(i for i, token in self._text.added().items() if token.special)

    @functools.lru_cache(maxsize=16)  # noqa: B019 (a session has one tokenizer, which lives as long as it)
    def hidden_ids(self, visible: frozenset[str]) -> frozenset[int]:
        """Return the special ids, except the tokens in `visible`."""
        return frozenset(i for i in self.special_ids if self.token(i) not in visible)

    @property
    def parts(self) -> TokenizerSections:
        """The sections of tokenizer.json, of the model without its vocabulary."""
        return self._text.parts

    @functools.cached_property
    def decoder_kinds(self) -> frozenset[str]:
        """The kinds in the decoder section of tokenizer.json; detokenizing chooses its stream by them."""
        decoder = self._text.parts.decoder or {}
        return frozenset(str(part.get("type")) for part in decoder.get("decoders", [decoder]))

    def _id_of(self, name: str) -> int | None:
        if self._backend is None or name not in self.special:
            return None
        return self._backend.id_of(self.special[name])


def _process(backend: TokenizerBackend, path: Path | None) -> EncodingProcess | None:
    """Return the process to encode in if the tokenizer could take hours in this one; None for usual ones."""
    tokenizer_limits.check_decoder(backend.parts, path or "this model")
    reason = tokenizer_limits.unbounded_part(backend.parts)
    if reason is None:
        return None
    _log.warning("texts are encoded by a process of its own: the tokenizer of %s has %s", path or "this model", reason)
    return EncodingProcess(lambda: backend.whole().definition())


def _backend(folder: Path, special: dict[str, str]) -> WholeTokenizer | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        content = read_plain(path, MAX_FILE)
        tokenizer_limits.check_file(content, path)
        with panics_as(CheckpointError, f"it read {path}"):
            backend = WholeTokenizer(content)
    except CheckpointError:
        raise
    except Exception as error:  # the Rust side raises bare Exception
        raise CheckpointError(f"{path} can't be read as a tokenizer ({error}). Download it again") from error
    beside = folder / "tokenizer_config.json"
    listed = read_json(beside).get("added_tokens_decoder") or {}
    try:
        with panics_as(CheckpointError, f"it read {beside}"):
            _add_listed(backend, listed, special, beside)
    except CheckpointError:
        raise
    except Exception as error:  # values of any type may be in it
        problem = f"{type(error).__name__}: {error}"[:200]
        raise CheckpointError(f"the special tokens in {beside} make no sense ({problem}). Download it again") from error
    return backend


def _add_listed(backend: WholeTokenizer, listed: dict[str, Any], special: dict[str, str], path: Path) -> None:
    """Add the tokens, and the flags that make some special, which older folders have in tokenizer_config.json alone."""
    known = backend.added()
    added, size = dict[str, tokenizers.AddedToken](), backend.size
    for index, entry in sorted(((int(i), e) for i, e in listed.items()), key=lambda pair: pair[0]):
        if index in known and known[index].special == bool(entry.get("special")):
            continue
        there = backend.id_of(entry["content"])
        if index in known or there == index or index == size:
            size += there is None and entry["content"] not in added
            added[entry["content"]] = tokenizers.AddedToken(**entry)
    tokenizer_limits.check_added(sum(len(text.encode()) for text in added), len(added), path)
    backend.add([*added.values()])
    missing = [token for token in special.values() if token not in {t.content for t in known.values()}]
    backend.mark_special([token for token in missing if backend.id_of(token) is not None])


_KEEPING_NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Lowercase", "ByteLevel", "Sequence"))
_KEEPING_PRE_TOKENIZERS = frozenset(("ByteLevel", "Metaspace", "Digits", "Sequence", "Split", "Punctuation"))


def _keeps_characters(part: dict[str, Any] | None, keeping: frozenset[str]) -> bool:
    """True if a normalizer or pre-tokenizer of tokenizer.json passes every character on to the model."""
    if part is None:
        return True
    if part.get("type") == "Replace":
        return part.get("pattern") == {"String": " "} and len(part.get("content", "")) > 0
    if part.get("type") not in keeping or part.get("behavior") == "Removed":
        return False
    return all(_keeps_characters(inner, keeping) for inner in part.get("normalizers", part.get("pretokenizers", ())))


def _not_a_text(value: object) -> str:
    fix = "Pass a text"
    if isinstance(value, (list, tuple)):
        fix = "Write [session.tokenizer.encode(text) for text in texts], or session.chat_tokens(messages) for a chat"
    return f"encode(…) takes one text, and this is of type {type(value).__name__}. {fix}"


def _not_ids(value: object) -> str:
    fix = "Pass a list of token ids, such as done.token_ids"
    first = next(iter(value), None) if isinstance(value, (list, tuple)) else None
    if isinstance(value, Completion):
        fix = "Write done.text for its text; session.tokenizer.decode(done.token_ids) returns it, too"
    elif isinstance(first, Completion):
        fix = "Write [done.text for done in completions]"
    elif isinstance(first, (list, tuple)):
        fix = "Write [session.tokenizer.decode(ids) for ids in lists]"
    elif isinstance(value, int):
        fix = "Write session.tokenizer.decode([id])"
    kind = type(value).__name__ if first is None else f"{type(value).__name__}[{type(first).__name__}]"
    return f"decode(…) takes a list of token ids, and this is of type {kind}. {fix}"


def _ids(value: object) -> tuple[int, ...]:
    if isinstance(value, bool) or value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    return tuple(i for i in value if isinstance(i, int)) if isinstance(value, list) else ()
