"""Text to token ids and back, from a folder's tokenizer.json; a folder without one still serves token ids."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from rekindle._src.core import html
from rekindle.errors import CheckpointError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or an empty one when there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read as JSON ({error}). Download it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__} where an object is expected. Download it again")
    return found


def special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens of a folder, such as `{"bos_token": "<s>"}`; chat templates read them."""
    merged = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    named = {}
    for name in SPECIAL_TOKENS:
        value = merged.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    return named


class Tokenizer:
    """Encodes and decodes; knows which ids begin and end a sequence.

    Whether `encode` adds bos and eos is up to tokenizer.json's post-processor, as in transformers 5, where
    `add_bos_token` does not count beside that file.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        *,
        special: dict[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self._backend = backend
        self._folder = folder
        self.special: dict[str, str] = dict(special or {})
        named_bos, named_eos = self._id_of("bos_token"), self._id_of("eos_token")
        self.bos_id: int | None = bos_id if named_bos is None else named_bos
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos_ids, *([] if named_eos is None else [named_eos]))))

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """From a folder. Without a tokenizer.json the result only knows the eos and bos ids; see `has_text`."""
        folder = Path(folder)
        special = special_tokens(folder)
        model, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json")
        # Chat checkpoints differ in where they name the end-of-turn token, so the tokenizer's own eos token always
        # counts, beside generation_config.json's list (config.json's in its absence).
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

    def _repr_html_(self) -> str:
        return html.block(html.line(repr(self)), html.pairs(self.special))

    @property
    def has_text(self) -> bool:
        """False for a folder without tokenizer.json, which can be asked with token ids only."""
        return self._backend is not None

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers.Tokenizer` underneath; raises `CheckpointError` when the folder has none."""
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
        """Ids that have a token, added ones included; the model's own vocabulary may be padded beyond it."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in the text become their ids."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; an id without a token contributes nothing."""
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id, such as `Ġthe` or `<0x0A>`."""
        return self.backend.id_to_token(token_id)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @functools.cached_property
    def decoder(self) -> dict[str, Any]:
        """The decoder of tokenizer.json, described; detokenizing chooses its way by it."""
        described = json.loads(self.backend.to_str()).get("decoder") if self.backend.decoder is not None else None
        return described or {}

    def _id_of(self, name: str) -> int | None:
        if self._backend is None or name not in self.special:
            return None
        return self._backend.token_to_id(self.special[name])


def _backend(folder: Path, special: dict[str, str]) -> tokenizers.Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception
        raise CheckpointError(f"{path} can't be read as a tokenizer ({error}). Download it again") from error
    backend.no_padding()
    backend.no_truncation()
    # Older folders keep added tokens, or the flag that makes one special, in tokenizer_config.json alone.
    known = backend.get_added_tokens_decoder()
    listed = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    for index, entry in sorted(((int(i), e) for i, e in listed.items()), key=lambda pair: pair[0]):
        if index in known and known[index].special == bool(entry.get("special")):
            continue
        if index in known or backend.token_to_id(entry["content"]) == index or index == backend.get_vocab_size():
            backend.add_tokens([tokenizers.AddedToken(**entry)])
    missing = [token for token in special.values() if token not in {t.content for t in known.values()}]
    backend.add_special_tokens([token for token in missing if backend.token_to_id(token) is not None])
    return backend


def _ids(value: object) -> tuple[int, ...]:
    if isinstance(value, bool) or value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    return tuple(i for i in value if isinstance(i, int)) if isinstance(value, list) else ()
