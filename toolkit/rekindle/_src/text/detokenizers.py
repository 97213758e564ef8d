"""The detokenizer of each request, by its sampling options."""

from __future__ import annotations

from collections.abc import Callable

from rekindle._src.core.contracts import DetokenizerLike
from rekindle._src.core.sampling import Sampling
from rekindle._src.text.detokenizer import Detokenizer
from rekindle._src.text.tokenizer import Tokenizer


def real_detokenizer(tokenizer: Tokenizer) -> Callable[..., DetokenizerLike]:
    """Return the factory of a session's detokenizers: one per request, from its sampling options and `visible`."""

    def new(sampling: Sampling, visible: frozenset[str] = frozenset()) -> DetokenizerLike:
        detokenizer = Detokenizer(
            tokenizer,
            sampling.stop,
            visible=visible,
            include_stop=sampling.include_stop,
            min_tokens=sampling.min_tokens,
        )
        if sampling.until is None and not sampling.stop_repeats:
            return detokenizer
        from rekindle._src.text.text_ends import WatchedText  # few requests need it

        least = sampling.min_tokens
        return WatchedText(detokenizer, until=sampling.until, repeats=sampling.stop_repeats, min_tokens=least)

    return new
