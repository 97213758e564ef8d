"""Prompts that hold rows of numbers in the place of tokens' embeddings, mixed with text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import words
from rekindle._src.core.drawable import Drawable
from rekindle._src.core.extension import Extension
from rekindle._src.core.options import check_unicode
from rekindle.errors import InvalidRequest

MOST_PARTS = 1_024
MOST_TEXT = 20_000  # characters of all texts, which are encoded at once
MOST_ROWS = 1 << 20  # of one array
_FIX = "Pass texts, lists of token ids, and arrays of floats [tokens, hidden size]"


class SoftPrompt(Drawable):
    """A prompt of texts, token ids and rows of numbers: `SoftPrompt([rows, "Translate to French: cheese"])`.

    Rows are arrays of floats [tokens, hidden size], such as a trained soft prompt, of numpy, JAX or another library.
    They take the place of embeddings as the first layer reads them, with the scale that the model gives to embeddings
    (a capture of "residual_before" at layer 0 has such rows). They are copied, in float32. The first text gets the
    tokenizer's special tokens, unless `add_special_tokens` is False. Rows are no tokens: penalties and DRY do not count
    them, and entries of `prompt_logprobs` for them mean nothing (they are those of token 0).
    """

    __slots__ = ("add_special_tokens", "digests", "parts")

    def __init__(self, parts: Sequence[object], *, add_special_tokens: bool = True) -> None:
        if not isinstance(parts, list | tuple) or not 0 < len(parts) <= MOST_PARTS:
            raise InvalidRequest("parts", parts, f"are no list of 1 to {MOST_PARTS:,} parts", _FIX)
        if not isinstance(add_special_tokens, bool):
            raise InvalidRequest("add_special_tokens", add_special_tokens, "must be True or False", "Pass one of them")
        read = tuple(_read(part, f"parts[{at}]") for at, part in enumerate(parts))
        if not any(_is_rows(part) for part in read):
            raise InvalidRequest("parts", parts, "hold no rows", f"Pass the text itself. {_FIX}")
        length = sum(len(part) for part in read if isinstance(part, str))
        if length > MOST_TEXT:
            fix = "Pass token ids of long texts: session.tokenizer.encode(text)"
            raise InvalidRequest("parts", f"{length:,} characters", f"are more than {MOST_TEXT:,}", fix)
        widths = {part.shape[1] for part in read if _is_rows(part)}
        if len(widths) > 1:
            raise InvalidRequest("parts", sorted(widths), "are different hidden sizes", "Use rows of one model")
        self.parts: tuple[str | NDArray[Any], ...] = read
        self.add_special_tokens: bool = add_special_tokens
        self.digests: tuple[bytes, ...] = tuple(_digest(part) for part in self.rows)

    @property
    def rows(self) -> list[NDArray[Any]]:
        """The arrays among the parts."""
        return [part for part in self.parts if _is_rows(part)]

    @property
    def width(self) -> int:
        """The numbers of a row."""
        return int(self.rows[0].shape[1])

    def __repr__(self) -> str:
        count = sum(len(part) for part in self.rows)
        texts = [part for part in self.parts if isinstance(part, str)]
        shown = f" with {words.shorten(' … '.join(texts))!r}" if texts else ""
        return f"<SoftPrompt: {words.count(count, 'row')} of {self.width}{shown}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.parts, self.add_special_tokens)


def _made(parts: Sequence[object], add_special_tokens: bool) -> SoftPrompt:
    return SoftPrompt(parts, add_special_tokens=add_special_tokens)


def _is_rows(part: Any) -> TypeGuard[NDArray[Any]]:
    return getattr(part, "ndim", 0) == 2


def _read(part: Any, field: str) -> Any:
    """Return a part as text, as an array of token ids, or as rows in float32."""
    if isinstance(part, str):
        check_unicode(field, part, InvalidRequest)
        return part
    try:
        array = np.asarray(part)
    except Exception as error:
        raise InvalidRequest(
            field, type(part).__name__, f"can't be read as an array: {str(error)[:100]}", _FIX
        ) from None
    if array.ndim == 1 and array.dtype.kind in "iu" and 0 < len(array) <= MOST_ROWS:
        if array.min() < 0 or array.max() >= 2**31:
            raise InvalidRequest(field, part, "holds numbers that are not token ids", "Use whole numbers from 0")
        return array.astype(np.int32)
    # bfloat16 and the like are no kind of numpy's own
    floats = array.dtype.kind == "f" or array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    if array.ndim != 2 or not floats or 0 in array.shape or len(array) > MOST_ROWS:
        shown = f"{array.dtype} {list(array.shape)}"
        raise InvalidRequest(field, shown, "is no text, no token ids and no array of floats [tokens, hidden]", _FIX)
    with np.errstate(over="ignore"):  # a number too large for float32 is refused below
        rows = np.array(array, np.float32, order="C")
    if not np.isfinite(rows).all():
        at = int(np.argwhere(~np.isfinite(rows))[0, 0])
        raise InvalidRequest(
            field, f"row {at}", "holds a number that is not finite in float32", "Check how it was made"
        )
    rows.flags.writeable = False
    return rows


def _digest(rows: NDArray[Any]) -> bytes:
    return sha256(repr(rows.shape).encode() + rows.tobytes()).digest()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EmbeddedPrompt(Extension):
    """Of a submission: its soft prompt, and where its rows begin among the tokens, once intake has placed them."""

    prompt: SoftPrompt
    starts: list[int] = dataclasses.field(default_factory=list)
