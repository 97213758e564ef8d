"""The object of a text that followed a structure, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rekindle._src.core import html
from rekindle._src.core.guides import Guided
from rekindle._src.core.parsing import Parsing
from rekindle._src.core.records import FinishReason
from rekindle.errors import NotParsed, NotParsedReason

if TYPE_CHECKING:
    from rekindle._src.structured.spec import Structure


class Structured(NamedTuple):
    """The structure of a request's text, and the parts from which its object is made."""

    structure: Structure
    before: Sequence[int]  # tokens of the prompt that the structure covers already, as in a fork
    decode: Callable[[Sequence[int]], str]
    closes: str | None = None  # the text that ends a model's reasoning

    def parsing(self, text: str, tokens: Sequence[int], guided: Sequence[Guided], reason: FinishReason) -> Parsing:
        """Return the object of a sequence's `text` and `tokens`, which ended for `reason`."""
        if self.before:
            text = self.decode([*self.before, *tokens])
        if self.closes is not None and self.closes in text:
            text = text.partition(self.closes)[2]
        return Parsing(text, self.structure.parse, _cut(guided, reason))


def _cut(guided: Sequence[Guided], reason: FinishReason) -> NotParsed | None:
    """Return why a text is not whole; None if it is.

    A text that a bound cut is whole only if nothing could follow: 46 may be the beginning of 4600.
    """
    if reason in (FinishReason.EOS, FinishReason.GRAMMAR):
        return None
    if reason in (FinishReason.LENGTH, FinishReason.CONTEXT):
        if guided and guided[-1].ended:
            return None
        option: NotParsedReason = "max_tokens" if reason is FinishReason.LENGTH else "max_model_len"
        return NotParsed(option, f"{option} cut the text after {html.count(len(guided), 'token')}")
    if reason is FinishReason.STOP:
        return NotParsed("stop", "a stop string or a stop token ended the text")
    return NotParsed("ended", f"the request was {reason}")
