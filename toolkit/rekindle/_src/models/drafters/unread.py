"""Heads in a model's checkpoint that are not read: their tensors are no surprise there."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HEADS = (r"mtp\..*", r"model\.mtp_(emb_norm|hidden_norm|linear_proj|block)\..*")  # of most families; of ERNIE's


def draft_heads(names: Iterable[str], layers: int) -> tuple[str, ...]:
    """Return patterns for tensors of draft heads in a model with so many layers.

    Some are blocks after the last layer. What joins a hidden state to an embedding, `eh_proj`, tells such a block.
    """
    joins = (name.partition(".eh_proj.") for name in names)
    blocks = {block.removesuffix(".nextn") for block, joins_inputs, _ in joins if joins_inputs}
    numbers = ((block, block.rpartition(".")[2]) for block in sorted(blocks))
    later = (block for block, number in numbers if number.isdecimal() and int(number) >= layers)
    return *_HEADS, *(rf"{re.escape(block)}\..*" for block in later)
