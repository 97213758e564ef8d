"""Tokens are not decoded one by one: the deltas of a stream add up to the text of all its tokens.

Upstream: https://github.com/exo-explore/exo/pull/1691
Each token was decoded alone, and emoji became replacement characters.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.thorough import by_default
from helpers.vocabularies import of_kind
from rekindle._src.text import Detokenizer

BYTE_TOKENIZERS = {kind: of_kind(kind) for kind in ("byte-level", "metaspace", "metaspace without strip")}
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]


def token_of(kind: str, byte: int) -> int:
    if kind == "byte-level":
        spelling = chr(byte) if byte in PRINTABLE else chr(0x100 + OTHERS.index(byte))
    else:
        spelling = f"<0x{byte:02X}>"
    return BYTE_TOKENIZERS[kind].backend.token_to_id(spelling)


@pytest.mark.parametrize("kind", by_default(BYTE_TOKENIZERS, 2))
@settings(max_examples=400, deadline=None)
@given(
    data=st.one_of(st.binary(max_size=24), st.text(max_size=12).map(lambda text: text.encode("utf-8", "surrogatepass")))
)
@example(data="👩‍👩‍👧‍👦🏳️‍🌈".encode())
@example(data="e\u0301n\u0303 नमस्ते 你好 ﷽".encode())
@example(data=b"\xf0\x9f\x98 \xf0\x9f\x98\x80\xff\xfe ok \xe4\xbd")
@example(data=b"\xed\xa0\x80\xc0\xaf\xf4\x90\x80\x80")
def test_any_bytes_stream_as_they_decode(kind: str, data: bytes) -> None:
    tokenizer = BYTE_TOKENIZERS[kind]
    ids = [token_of(kind, byte) for byte in data]
    detokenizer = Detokenizer(tokenizer)
    streamed = "".join(detokenizer.push([token]).text for token in ids) + detokenizer.flush()
    assert streamed == tokenizer.decode(ids)
    if kind == "byte-level":
        assert streamed == data.decode("utf-8", "replace")
