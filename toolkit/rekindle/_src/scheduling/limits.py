"""The numbers that bound a step, a request and the queue."""

from __future__ import annotations

import dataclasses

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import FinishReason, Request
from rekindle._src.kvcache.pool import pages_for
from rekindle.errors import OutOfPages, PromptTooLong


def how_to_fit(max_model_len: int, longest: int | None) -> str:
    """Return the remedy for a prompt that is too long; `longest` is how many positions the model has."""
    if longest is not None and max_model_len >= longest:
        return f"Shorten it: the model itself has {longest:,} positions"
    return "Shorten it, or raise max_model_len in open()" + (f", up to {longest:,}" if longest is not None else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that are fixed while a session lives."""

    max_requests: int  # slots
    max_tokens_per_step: int  # shared by decode rows and prefill chunks
    max_model_len: int
    page_size: int
    max_prefill_rows: int = 1 << 30  # sequences that prefill in one step
    max_queue: int = 1024
    prompt_lookup: int = 0  # draft tokens of one request in a step, at most
    max_beside_decode: int = 1 << 30  # prompt tokens of a step that has decode rows, which wait for them
    longest: int | None = None  # positions of the model; None: not known
    edge: int = 1  # prompts are cut at multiples of it, if their model has states
    whole: bool = False  # prompts are not cut: tokens see those behind them
    window: int = 0  # tokens that layers see which give pages back; 0: none does

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        max_prefill_rows: int,
        padded: bool = True,
        edge: int = 1,
        whole: bool = False,
        window: int = 0,
    ) -> Limits:
        """Return the limits of a resolved config; `padded` if a step costs its program's size, however few its rows.

        Prompts are cut at multiples of `edge` if a step has room for that beside all decode rows.
        """
        assert config.max_model_len is not None, "the config is not resolved"
        assert config.page_size is not None, "the config is not resolved"
        beside = config.max_tokens_per_step if padded else -(-config.max_tokens_per_step // 2)
        fits = edge <= min(beside, config.max_tokens_per_step - config.max_requests)
        return cls(
            max_requests=config.max_requests,
            max_tokens_per_step=config.max_tokens_per_step,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
            max_prefill_rows=max_prefill_rows,
            max_beside_decode=beside,
            max_queue=config.max_queue,
            prompt_lookup=config.prompt_lookup,
            edge=edge if fits else 1,
            whole=whole,
            window=window,
        )

    def room(self, request: Request, usable_pages: int) -> tuple[int, FinishReason]:
        """Return how many tokens `request` may sample alone on `usable_pages`, and its finish reason at that bound.

        It is at least 1: a request for no tokens samples one, which is left out of its result.

        Raises `PromptTooLong` or `OutOfPages` if not even one fits; an embedding generates none. The last
        token is sampled but its keys are never computed, so a sequence may be one token longer than its pages.
        """
        length, max_tokens = request.prompt_length, request.sampling.max_tokens
        if not request.generates and length > self.max_model_len:
            raise PromptTooLong(
                "prompt",
                f"{length} tokens",
                f"is longer than max_model_len, which is {self.max_model_len}",
                how_to_fit(self.max_model_len, self.longest),
            )
        if request.generates and length >= self.max_model_len + (max_tokens == 0):
            raise PromptTooLong(
                "prompt",
                f"{length} tokens",
                f"leaves no room for a new token, max_model_len is {self.max_model_len}",
                how_to_fit(self.max_model_len, self.longest),
            )
        if pages_for(length, self.page_size) > usable_pages:
            raise OutOfPages(
                f"The prompt's {length} tokens need {pages_for(length, self.page_size)} KV pages of {self.page_size}, "
                f"{usable_pages} can be used. Raise device_memory or device_pages, or unpin prefixes."
            )
        if not request.generates:
            return 0, FinishReason.LENGTH
        room = min(self.max_model_len, usable_pages * self.page_size + 1) - length
        if max_tokens <= room:
            return max(1, max_tokens), FinishReason.LENGTH
        return room, FinishReason.CONTEXT
