"""A row of logits without what its mask forbids: blocks of the vocabulary that keep a token, one behind the other.

A grammar mostly allows a few tokens or almost all. What a block of forbidden tokens adds to any sum is 0, so a draw
from the gathered blocks gives the token that it gives with minus infinity everywhere else.

A mask has a bit for each token, the lowest bit of a word of 32 first; 1 allows the token.
"""

from __future__ import annotations

import numpy as np

from rekindle_kernels.native.language.jit import inline
from rekindle_kernels.native.language.memory import f32, i32, set_f32, set_i32
from rekindle_kernels.native.language.vector import LANES, load_f32, splat, store, where_bits

BITS = 32
NEVER = np.float32(-np.inf)


@inline
def allows_all(mask: int, words: int) -> bool:
    """Whether every bit is 1."""
    bits = -1
    for word in range(words):
        bits &= i32(mask, word)
    return bits == -1


@inline
def allows(mask: int, token: int) -> bool:
    """Whether the bit of a token is 1."""
    return (i32(mask, token // BITS) >> (token % BITS)) & 1 != 0


@inline
def gather(logits: int, mask: int, vocabulary: int, size: int, values: int, blocks: int) -> int:
    """The logits of blocks of `size` tokens that have an allowed one, minus infinity for those that are not.

    Returns how many there are. `blocks` gets the numbers of those blocks; the last of them is filled up."""
    words, kept = (vocabulary + BITS - 1) // BITS, 0
    for block in range((vocabulary + size - 1) // size):
        begin, some = block * size, 0
        for word in range(begin // BITS, min(words, (begin + size) // BITS)):
            some |= i32(mask, word)
        if some == 0:
            continue
        set_i32(blocks, kept // size, block)
        for at in range(begin, begin + size, LANES):
            if at + LANES <= vocabulary:
                bits = i32(mask, at // BITS) >> (at % BITS)
                store(values, kept + at - begin, where_bits(bits, load_f32(logits, at), splat(NEVER)))
            else:
                for token in range(at, at + LANES):
                    set_f32(values, kept + token - begin, NEVER)
                    if token < vocabulary and allows(mask, token):
                        set_f32(values, kept + token - begin, f32(logits, token))
        kept += size
    return kept


@inline
def first_never(logits: int, mask: int, vocabulary: int) -> int:
    """The first token that is forbidden or whose logit is minus infinity: what is taken where nothing else is left.

    It is the last token if there is none, which is so where all are NaN."""
    for token in range(vocabulary):
        if not allows(mask, token) or f32(logits, token) == NEVER:
            return token
    return vocabulary - 1
