"""`session.rollout`: many completions of each prompt as arrays that a loss function takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from rekindle._src.calls.call import Call
from rekindle._src.calls.handle import Batch, Handle, one_ended
from rekindle._src.calls.prompts import PromptLike, parse
from rekindle._src.calls.requests import shown, structured_text
from rekindle._src.core import words
from rekindle._src.core.options import check_batch, takes_options
from rekindle._src.core.records import Completion, FinishReason, IntArray, Usage
from rekindle._src.core.sampling import Sampling, SamplingOptions
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.host import Host
from rekindle._src.views import html
from rekindle.errors import InvalidRequest

NO_VERSION = -1


@dataclasses.dataclass(frozen=True, slots=True, repr=False, eq=False)
class RolloutSupport:
    """The tokens that were possible at each place of a `RolloutBatch`, one place after another.

    Line b at place t has the tokens `ids[offsets[b, t] : offsets[b, t + 1]]`; outside of completions there are none.
    """

    ids: IntArray
    offsets: NDArray[np.int64]  # [B, T + 1]

    def mask(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return True for the tokens that were possible [B, T, V], the `sampling_mask` of trainers."""
        lines, places = self.offsets.shape[0], self.offsets.shape[1] - 1
        mask = np.zeros((lines * places, vocab_size), np.bool_)
        mask[np.repeat(np.arange(lines * places), np.diff(self.offsets).reshape(-1)), self.ids] = True
        return mask.reshape(lines, places, vocab_size)

    def __repr__(self) -> str:
        counts = np.diff(self.offsets)
        used = counts[counts > 0]
        most = f", at most {used.max()} at one" if used.size else ""
        return (
            f"<RolloutSupport of {words.count(int(used.size), 'place')}, {words.count(len(self.ids), 'token')}{most}>"
        )

    def _repr_html_(self) -> str:
        return str(html.line(repr(self).strip("<>")))


@dataclasses.dataclass(frozen=True, slots=True, repr=False, eq=False)
class RolloutBatch:
    """Sequences of prompts and their completions, as arrays of one line for each. Lines of one prompt are adjacent.

    Axes: B sequences, T tokens: the prompt's, then the completion's, then padding.
    """

    tokens: IntArray  # [B, T]
    completion_mask: NDArray[np.bool_]  # [B, T]: True for tokens of the completion, which a loss counts
    logprobs: NDArray[np.float32]  # [B, T]: of the completion's tokens when they were drawn; 0 elsewhere
    versions: IntArray  # [B, T]: of the weights that drew them; -1 elsewhere
    groups: IntArray  # [B]: the place of the sequence's prompt
    prompt_lengths: IntArray  # [B]
    lengths: IntArray  # [B]: of prompt and completion
    finish_reasons: tuple[FinishReason, ...]  # [B]
    completions: tuple[Completion, ...]  # [B]

    @classmethod
    def of(
        cls, completions: Sequence[Completion], groups: Sequence[int], *, pad_id: int, pad_to: int | None
    ) -> RolloutBatch:
        """Return the arrays of completions, with `pad_to` tokens each, or as many as the longest has."""
        prompts = [len(one.prompt_token_ids) for one in completions]
        lengths = [count + len(one.token_ids) for count, one in zip(prompts, completions, strict=True)]
        width = max(lengths, default=0) if pad_to is None else pad_to
        if lengths and max(lengths) > width:
            raise InvalidRequest(
                "pad_to",
                width,
                f"is less than the {max(lengths)} tokens of a sequence",
                "Raise it, or lower max_tokens",
            )
        shape = len(completions), width
        tokens, mask = np.full(shape, pad_id, np.int32), np.zeros(shape, np.bool_)
        logprobs, versions = np.zeros(shape, np.float32), np.full(shape, NO_VERSION, np.int32)
        for line, (one, start, end) in enumerate(zip(completions, prompts, lengths, strict=True)):
            tokens[line, :start], tokens[line, start:end] = one.prompt_token_ids, one.token_ids
            mask[line, start:end] = True
            logprobs[line, start:end] = [entry.logprob for entry in one.logprobs or ()]
            versions[line, start:end] = one.weights_versions
        return cls(
            tokens,
            mask,
            logprobs,
            versions,
            np.asarray(groups, np.int32),
            np.asarray(prompts, np.int32),
            np.asarray(lengths, np.int32),
            tuple(one.finish_reason for one in completions),
            tuple(completions),
        )

    @property
    def mask(self) -> NDArray[np.bool_]:
        """True for all tokens but padding [B, T]."""
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None]

    @property
    def positions(self) -> IntArray:
        """The position of each token [B, T]."""
        return np.broadcast_to(np.arange(self.tokens.shape[1], dtype=np.int32), self.tokens.shape)

    @property
    def support(self) -> RolloutSupport | None:
        """The tokens that could be drawn at each place; None if all could, since no option narrowed the choice."""
        entries = [one.logprobs or () for one in self.completions]
        if not any(entry.support for line in entries for entry in line):
            return None
        counts = np.zeros((len(self), self.tokens.shape[1]), np.int64)
        ids = [np.empty(0, np.int32)]
        for line, (start, own) in enumerate(zip(self.prompt_lengths.tolist(), entries, strict=True)):
            possible = [entry.support_ids for entry in own]
            counts[line, start : start + len(own)] = [len(one) for one in possible]
            ids += possible
        ends = counts.cumsum().reshape(counts.shape)
        first = np.concatenate([[0], ends[:-1, -1]])[: len(self), None]
        return RolloutSupport(np.concatenate(ids), np.concatenate([first, ends], axis=1))

    @property
    def texts(self) -> tuple[str, ...]:
        """The completions' texts [B]."""
        return tuple(one.text for one in self.completions)

    @property
    def usage(self) -> Usage:
        """The tokens of all sequences."""
        used = [one.usage for one in self.completions]
        names = "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"
        return Usage(*(sum(getattr(one, name) for one in used) for name in names))

    def __len__(self) -> int:
        return len(self.completions)

    def __repr__(self) -> str:
        made = int(self.completion_mask.sum())
        return f"<RolloutBatch of {words.count(len(self), 'sequence')}, {words.count(made, 'token')} generated>"

    def _repr_html_(self) -> str:
        rows = [
            (
                int(self.groups[line]),
                words.shorten(one.text, 120),
                len(one.token_ids),
                str(one.finish_reason),
                f"{self.logprobs[line].sum():.2f}",
                ", ".join(map(str, sorted(set(one.weights_versions)))),
            )
            for line, one in enumerate(self.completions)
        ]
        heads = ("prompt", "completion", "tokens", "ended by", "log-probability", "weights")
        shape = f"tokens [{' × '.join(map(str, self.tokens.shape))}]"
        return str(html.block(html.line(words.count(len(self), "sequence"), shape), html.table(heads, rows)))


class Rollout(Call[RolloutBatch]):
    """The call that `session.rollout` returns: await it for all sequences, or iterate over it for each prompt's.

    `async for` yields the `RolloutBatch` of a prompt when its last completion has ended, in the order of their ends.
    """

    _awaited = "await session.rollout(…)"

    def __init__(self, batch: Batch[Any], made: Callable[[Sequence[int]], RolloutBatch]) -> None:
        self._batch, self._made = batch, made

    async def _result(self) -> RolloutBatch:
        await self._batch
        return self._made(range(len(self._batch.handles)))

    def __aiter__(self) -> AsyncIterator[RolloutBatch]:
        return self._groups()

    async def _groups(self) -> AsyncIterator[RolloutBatch]:
        waiting: dict[int, Handle[Any]] = {}
        try:
            for place, handle in enumerate(self._batch.handles):
                await handle.admit()  # waits while the queue is full, in which others end
                waiting[place] = handle
                for ended in [number for number, one in waiting.items() if one.done]:
                    del waiting[ended]
                    yield self._made([ended])
            while waiting:
                await one_ended(list(waiting.values()))
                for ended in [number for number, one in waiting.items() if one.done]:
                    del waiting[ended]
                    yield self._made([ended])
        finally:
            self.cancel()  # ended ones stay as they are

    def cancel(self) -> None:
        """Abort the sequences that have not ended, from any thread."""
        self._batch.cancel()

    @property
    def done(self) -> bool:
        """True once all sequences have ended."""
        return self._batch.done

    def __repr__(self) -> str:
        handles = self._batch.handles
        return f"<Rollout: {sum(handle.done for handle in handles)} of {words.count(len(handles), 'prompt')} ended>"


class RolloutRequests:
    """The part of a session that makes rollouts."""

    _host: Host
    _front: Front

    @takes_options(Sampling, returns="Rollout")
    def rollout(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling: Sampling | None = None,
        /,
        *,
        n: int | None = None,
        pad_id: int = 0,
        pad_to: int | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Rollout:
        """Await it for `n` completions of each prompt (8 by default), as the arrays of a `RolloutBatch`.

            batch = await session.rollout(prompts, n=8, max_tokens=64)
            rewards = np.array([score(text) for text in batch.texts]).reshape(-1, 8)

        Or iterate with `async for`: each prompt's sequences come when the last of them has ended. A prompt is computed
        once for all of its completions. Drawn at temperature 1 unless an option says otherwise; defaults of the
        checkpoint are not applied. Log-probabilities belong to the distribution that was drawn from.

        Weights may be swapped meanwhile: sequences go on with the new ones, and `versions` has each token's version.
        Lines are padded at their ends with `pad_id`, to the longest one or to `pad_to` tokens, which keeps the shapes
        of a compiled loss.
        """
        if sampling is None:
            given = {"temperature": 1.0, **{name: value for name, value in options.items() if value is not None}}
            base = Sampling.of(None, {"n": 8 if n is None else n, **given})
        else:
            base = Sampling.of(sampling, {**options, **({} if n is None else {"n": n})})
        drawn: Any = "raw" if draws_plainly(base) else "sampled"
        wanted = dataclasses.replace(base, logprobs=base.logprobs or 0, logprobs_of=drawn)
        for name, value, least in (("pad_id", pad_id, 0), ("pad_to", pad_to, 1)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InvalidRequest(name, value, f"must be a whole number of at least {least}", "Pass an int")
        self._host.check()
        parsed, _ = parse(prompts)
        check_batch(len(parsed), wanted.n)
        text = structured_text(self._front, wanted)
        handles: list[Handle[Any]] = [Handle(self._host, self, one.plus(text), wanted) for one in parsed]

        def made(places: Sequence[int]) -> RolloutBatch:
            completions = [_as_list(handles[place].completion()) for place in places]
            groups = [place for place, group in zip(places, completions, strict=True) for _ in group]
            return RolloutBatch.of(list(itertools.chain(*completions)), groups, pad_id=pad_id, pad_to=pad_to)

        return Rollout(Batch(handles, progress=shown(self._front, wanted)), made)

    @takes_options(Sampling)
    def rollout_sync(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling: Sampling | None = None,
        /,
        *,
        n: int | None = None,
        pad_id: int = 0,
        pad_to: int | None = None,
        **options: Unpack[SamplingOptions],
    ) -> RolloutBatch:
        """Run `rollout` from code without an event loop: blocks this thread until the arrays are there."""
        return self.rollout(prompts, sampling, n=n, pad_id=pad_id, pad_to=pad_to, **options).result_sync()


def one_each(
    session: RolloutRequests, prompts: Sequence[str | Sequence[int]], options: SamplingOptions
) -> list[Completion]:
    """Return a completion of each prompt. Of a prompt that stands several times, each has a seed of its own."""
    keys = [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]
    counts, done = Counter(keys), dict[Any, list[Completion]]()
    for count in sorted(set(counts.values())):
        same = [key for key, times in counts.items() if times == count]
        batch = session.rollout_sync([key if isinstance(key, str) else list(key) for key in same], n=count, **options)
        done |= {key: list(batch.completions[place * count : (place + 1) * count]) for place, key in enumerate(same)}
    return [done[key].pop(0) for key in keys]


def draws_plainly(sampling: Sampling) -> bool:
    """True if tokens are drawn from the model's own distribution, so that its log-probabilities are also the draws'."""
    unchanged = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    shaped = sampling.penalised or sampling.logit_bias or sampling.min_tokens or sampling.processors
    return unchanged and not (shaped or sampling.extended or sampling.restricted or sampling.structured)


def _as_list(completion: Any) -> list[Completion]:
    return list(completion) if isinstance(completion, list) else [completion]
