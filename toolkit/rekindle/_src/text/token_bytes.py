"""The bytes of single tokens, as APIs report them beside log-probabilities."""

from __future__ import annotations

import re
from functools import cache

from rekindle._src.text.detokenizer import BYTES
from rekindle._src.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the UTF-8 bytes of a token, which may be part of a character; empty for an id without a token."""
    spelling = tokenizer.token(token_id)
    if spelling is None:
        return b""
    if token_id in tokenizer.special_ids:
        return spelling.encode()
    kinds = _kinds(tokenizer)
    if "ByteLevel" in kinds:
        try:
            return bytes([BYTES[character] for character in spelling])
        except KeyError:  # an added token outside the alphabet is text already
            return spelling.encode()
    if (byte := _BYTE_TOKEN.fullmatch(spelling)) is not None:
        return bytes([int(byte[1], 16)])
    return (spelling.replace("▁", " ") if kinds & {"Metaspace", "Replace"} else spelling).encode()


@cache
def _kinds(tokenizer: Tokenizer) -> frozenset[str]:
    decoder = tokenizer.decoder
    return frozenset(str(part.get("type")) for part in decoder.get("decoders", [decoder]))
