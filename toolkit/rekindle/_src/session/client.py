"""The state that a session and its helpers share: the host, the engine's parts and the cache writer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rekindle._src.core.bounds import check_salt
from rekindle._src.core.records import IntArray
from rekindle._src.dispatch.host import Host
from rekindle._src.dispatch.mailbox import OneShot
from rekindle._src.dispatch.messages import Engine, Exclusive
from rekindle._src.session.cache_writer import CacheWriter
from rekindle._src.session.prompts import PromptLike, parse_one

if TYPE_CHECKING:
    from rekindle._src.session.sharing.sharer import SharedPages

T = TypeVar("T")


class Client:
    """Access to one open session. Every method may be called from any thread, and raises if the session can't be used.

    The session, its cache view and its live views hold the client; the host and its threads don't. So the session can
    close itself once nothing refers to the client any more.
    """

    def __init__(self, host: Host, engine: Engine) -> None:
        self.host: Host = host
        self.engine: Engine = engine
        self.writer: CacheWriter = CacheWriter(host, engine)
        self.pauses: int = 0  # paused() blocks that have been entered and not left
        self.shared: list[SharedPages] = []  # addresses at which the cache's pages are shared

    def ask(self, function: Callable[[], T]) -> T:
        """Run `function` on the host's loop, where nothing else changes meanwhile, and return its result. Blocks."""
        self.host.check()
        return self.host.ask(function)

    async def exclusive(self, job: Callable[[], T], after: Callable[[T], object]) -> T:
        """Run `job` on the device thread while no step is in flight, then `after` with its result on the loop."""
        self.host.check()
        reply: OneShot[T] = OneShot()
        return await self.host.send(Exclusive(job, after, reply), reply).get()

    def tokens(self, prompt: PromptLike) -> IntArray:
        """Return the token ids that a request with this prompt would have."""
        parsed = parse_one(prompt)
        if parsed.token_ids is not None:
            return parsed.token_ids
        assert parsed.text is not None, "a prompt has text or token ids"
        return np.asarray(self.engine.tokenizer.encode(parsed.text), np.int32)

    def text(self, token_ids: list[int]) -> str:
        """Return the text of tokens; empty if the tokenizer knows only ids."""
        tokenizer = self.engine.tokenizer
        return tokenizer.decode(token_ids) if tokenizer.has_text else ""

    def pin(self, prompt: PromptLike, salt: str | None = None) -> int:
        """Keep the cached pages of a prompt on the device until `unpin`. Return how many tokens they cover."""
        self.host.check()
        check_salt(salt)
        tokens = self.tokens(prompt)
        return self.ask(lambda: self.engine.scheduler.pin(tokens, salt))

    def unpin(self, prompt: PromptLike, salt: str | None = None) -> int:
        """Undo one `pin`. Return how many tokens are no longer kept."""
        self.host.check()
        check_salt(salt)
        tokens = self.tokens(prompt)
        return self.ask(lambda: self.engine.scheduler.unpin(tokens, salt))

    async def flush_cache(self) -> None:
        """Forget every cached page. Requests that run keep theirs."""
        await self.between_steps(self.engine.scheduler.flush_cache)

    async def between_steps(self, function: Callable[[], object]) -> None:
        """Call `function` on the host's loop while no step is in flight."""
        await self.exclusive(_nothing, lambda _: function())

    async def swap_weights(self, swap: Callable[[], bytes]) -> None:
        """Call `swap`, which returns the new root key of the cache, and compute the running requests' pages again."""
        scheduler = self.engine.scheduler
        await self.exclusive(swap, lambda key: scheduler.flush_cache(key, recompute=True))


def _nothing() -> None: ...
