"""`session.embed`: texts as vectors, the pooled hidden states of the model's last layer."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, Unpack, get_args, overload

import numpy as np

from rekindle._src.calls.call import Call
from rekindle._src.calls.content import ReadOptions, attach, split
from rekindle._src.calls.handle import Batch, Handle
from rekindle._src.calls.prompts import Prompt, PromptLike, parse
from rekindle._src.capabilities.pooling.request import PromptPooling
from rekindle._src.core import words
from rekindle._src.core.activity import Activity, State
from rekindle._src.core.embedder import pool
from rekindle._src.core.options import check_batch, refuse_keywords, takes_keywords
from rekindle._src.core.records import Completion, EmbeddingResult, Pooling, Status, Usage, Vector
from rekindle._src.core.sampling import Sampling
from rekindle._src.core.taps import Capture
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.host import Host
from rekindle._src.dispatch.threads import Mailbox
from rekindle.errors import InvalidRequest, RekindleError

T = TypeVar("T")
log = logging.getLogger("rekindle.engine")
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
EMBEDS = "Qwen/Qwen3-Embedding-0.6B"  # its family opens, and its files say how to pool and which prompts there are


@functools.cache
def say_untrained(model: str) -> None:
    log.warning(
        "%s is a chat model: the mean of its hidden states tells texts apart, but it was not trained to bring texts of "
        'one meaning together. For a search open a model that embeds, such as "%s", in addition; pooling="mean" says '
        "that the mean is meant",
        model, EMBEDS,
    )  # fmt: skip


class Embeddings(Call[T]):
    """The call that `session.embed` returns: await it for the vectors. After that, `usage` counts its tokens."""

    _awaited = "await session.embed(…)"

    def __init__(
        self,
        batch: Batch[EmbeddingResult | Completion],
        finish: Callable[[list[EmbeddingResult | Completion | RekindleError]], T],
    ) -> None:
        self._batch, self._finish = batch, finish

    async def _result(self) -> T:
        results: list[EmbeddingResult | Completion | RekindleError] = list(await self._batch)
        return self._finish(results)

    def serve(self, caller: str) -> None:
        """Name the caller: long texts of several callers are taken in by turns."""
        for handle in self._batch.handles:
            handle.caller = caller

    def cancel(self) -> None:
        """Abort the texts that have not ended, from any thread."""
        self._batch.cancel()

    @property
    def done(self) -> bool:
        """True once all texts have been embedded, or have failed."""
        return self._batch.done

    @property
    def status(self) -> Status:
        """The state of the first unfinished text, or of the last text once all have ended."""
        handles = self._batch.handles
        running = next((handle for handle in handles if not handle.done), None)
        return running.status if running is not None else handles[-1].status if handles else Status.FINISHED

    @property
    def usage(self) -> Usage:
        """The tokens of the texts that have been embedded so far."""
        return usage_so_far(self._batch.handles)

    def __repr__(self) -> str:
        handles = self._batch.handles
        return f"<Embeddings: {sum(handle.done for handle in handles)} of {words.count(len(handles), 'text')} embedded>"


class EmbeddingMethods:
    """The part of a session that embeds."""

    _host: Host
    _front: Front

    @overload
    def embed(
        self,
        texts: PromptLike | Sequence[PromptLike],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        keep: bool = False,
        priority: int = 0,
        errors: Literal["raise"] = "raise",
        **options: Unpack[ReadOptions],
    ) -> Embeddings[Vector]: ...
    @overload
    def embed(
        self,
        texts: Sequence[PromptLike],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        keep: bool = False,
        priority: int = 0,
        errors: Literal["return"],
        **options: Unpack[ReadOptions],
    ) -> Embeddings[list[Vector | RekindleError]]: ...
    @takes_keywords(ReadOptions)
    def embed(
        self,
        texts: PromptLike | Sequence[PromptLike],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        keep: bool = False,
        priority: int = 0,
        errors: Literal["raise", "return"] = "raise",
        **options: Any,
    ) -> Embeddings[Vector] | Embeddings[list[Vector | RekindleError]]:
        """Await it for a text's vector, a float32 array; for a list of texts one array [n, numbers].

        A text is a string or a list of token ids, at most `max_model_len` tokens long. `pooling` makes one vector of
        the last layer's hidden states, after the final norm: their "mean", the state of the "last" token, or that of
        the first ("cls"). `normalize` scales it to length 1. By default both are the checkpoint's own where files of
        sentence-transformers lie next to it, and else the mean at length 1; linear layers that they name follow the
        pooling in any case. `prompt_name` is one of the prompts in these files, such as "query", which comes before
        each text, or "" for none where they have a default; token ids have none. `dimensions` keeps only the first
        numbers, for models trained for that.

        Texts run in the same steps as other requests. The prefix cache keeps keys and values, not hidden states, so
        that a mean needs every token of a text to be computed, but with pooling="last" the beginning of a text may come
        from the cache. With `keep` hidden states stay in host memory too (`capture_memory` of `open()`): then texts
        that begin alike, such as chunks after the same description of their document, compute their beginning only
        once, whatever the pooling. The first call compiles programs of its own. A text that fails ends the whole list;
        with errors="return" the result is a list, and the error stands in the place of its vector. With `adapter` (a
        name, or names with their weights, as in `generate`) the states come from the model with this adapter. With
        `images`, as in `generate`, texts have pictures.
        """
        refuse_keywords(options, EmbeddingMethods.embed)
        content, weights = split(options)
        embedder = self._front.embedder
        if pooling is None and self._front.chat is not None and not (embedder.trained or embedder.alone):
            say_untrained(self._front.model)
        size = embedder.size
        if pooling not in (None, *POOLINGS):
            raise InvalidRequest("pooling", pooling, "is not known", f"Use {' or '.join(map(repr, POOLINGS))}")
        if normalize is not None and not isinstance(normalize, bool):
            raise InvalidRequest("normalize", normalize, "is neither True nor False", "Pass one of them")
        if errors not in ("raise", "return"):
            raise InvalidRequest("errors", errors, "is not known", "Use 'raise' or 'return'")
        whole = isinstance(dimensions, int) and not isinstance(dimensions, bool)
        if dimensions is not None and not (whole and 1 <= dimensions <= (size or dimensions)):
            raise InvalidRequest(
                "dimensions", dimensions, f"is not a whole number from 1 to {size}", f"Leave it out for {size}"
            )
        prompts_by_name = {"": "", **embedder.prompts}
        name = (embedder.default_prompt or "") if prompt_name is None else prompt_name
        if not isinstance(name, str) or name not in prompts_by_name:
            known = ", ".join(map(repr, embedder.prompts)) or "none"
            fix = f"Leave it out, or use a prompt of the checkpoint: {known}"
            raise InvalidRequest("prompt_name", prompt_name, "is not a prompt of this model", fix)
        before = prompts_by_name[name]
        if not isinstance(keep, bool):
            raise InvalidRequest("keep", keep, "is neither True nor False", "Pass one of them")
        if keep and embedder.alone:
            raise InvalidRequest("keep", keep, "is not for a model that only embeds: it has no cache", "Leave it out")
        sampling = Sampling.of(None, {"max_tokens": 1, "priority": priority, **weights})
        if keep:
            sampling = dataclasses.replace(sampling, max_tokens=0, capture=Capture({"norm": True}, keep=True))
        way = pooling or embedder.pooling
        self._host.check()
        prompts, many = parse(texts, keep_errors=errors == "return")
        check_batch(len(prompts))
        prompts = attach(self._front, prompts, content, many=many, keep_errors=errors == "return")
        if errors == "return" and not many:
            raise InvalidRequest("errors", errors, "is for a list of texts", "Pass [text], or leave it out")
        if prompt_name and any(prompt.token_ids is not None for prompt in prompts):
            raise InvalidRequest("prompt_name", prompt_name, "is text, and token ids have none", "Pass strings")

        def pooled(prompt: Prompt) -> Prompt:
            text = before + prompt.text if prompt.text else prompt.text
            own = prompt.extensions if keep else prompt.extensions.plus(PromptPooling(way))
            return dataclasses.replace(prompt, text=text, extensions=own)

        handles: list[Handle[Any]] = [Handle(self._host, self, pooled(prompt), sampling) for prompt in prompts]

        def vector(one: EmbeddingResult | Completion) -> Vector:
            if isinstance(one, Completion):
                assert one.captured is not None
                states = pool(one.captured["norm"], way)
            else:
                states = one.vector
            return embedder.finish(states, dimensions, normalize=embedder.normalize if normalize is None else normalize)

        def finish(results: list[EmbeddingResult | Completion | RekindleError]) -> Any:
            if errors == "return":
                return [result if isinstance(result, RekindleError) else vector(result) for result in results]
            vectors = [vector(result) for result in results if not isinstance(result, RekindleError)]
            if not many:
                return vectors[0]
            return np.stack(vectors) if vectors else np.zeros((0, dimensions or size), np.float32)

        batch: Batch[Any] = Batch(handles, progress=texts_shown(self._front), keep_errors=errors == "return")
        call: Embeddings[Any] = Embeddings(batch, finish)
        return call

    @overload
    def embed_sync(
        self,
        texts: PromptLike | Sequence[PromptLike],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        keep: bool = False,
        priority: int = 0,
        errors: Literal["raise"] = "raise",
        **options: Unpack[ReadOptions],
    ) -> Vector: ...
    @overload
    def embed_sync(
        self,
        texts: Sequence[PromptLike],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        keep: bool = False,
        priority: int = 0,
        errors: Literal["return"],
        **options: Unpack[ReadOptions],
    ) -> list[Vector | RekindleError]: ...
    def embed_sync(self, texts: Any, **options: Any) -> Vector | list[Vector | RekindleError]:
        """Run `embed` from code without an event loop: blocks this thread until the vectors are there."""
        call: Embeddings[Any] = self.embed(texts, **options)
        vectors: Vector | list[Vector | RekindleError] = call.result_sync()
        return vectors


def usage_so_far(handles: Sequence[Handle[EmbeddingResult | Completion]]) -> Usage:
    """Return the tokens of the prompts that have ended without an error."""
    used = [handle.completion().usage for handle in handles if handle.done and handle.error is None]
    return Usage(sum(one.prompt_tokens for one in used), sum(one.cached_tokens for one in used), 0)


def texts_shown(front: Front) -> Callable[[Sequence[Mailbox]], Activity]:
    """Return a function that shows how many of a list of texts have ended."""
    return lambda mailboxes: Activity(EmbeddingProgress(mailboxes).look, quiet=front.config.quiet)


class EmbeddingProgress:
    """The progress of a list of texts: texts that ended, tokens per second, the time left."""

    def __init__(self, mailboxes: Sequence[Mailbox]) -> None:
        self._mailboxes, self._began = mailboxes, time.monotonic()

    def look(self) -> State:
        """Return the list's progress as one line, and the share that has ended."""
        ended = [mailbox for mailbox in self._mailboxes if mailbox.ended]
        line, fraction = f"{len(ended)} of {len(self._mailboxes)} texts", len(ended) / len(self._mailboxes)
        seconds = time.monotonic() - self._began
        tokens = sum(len(mailbox.prompt_ids) for mailbox in ended if mailbox.prompt_ids is not None)
        if tokens and seconds > 0:
            line += f", {tokens / seconds:,.0f} tokens/s, {seconds / fraction * (1 - fraction):.0f} s left"
        return State(line, fraction)
