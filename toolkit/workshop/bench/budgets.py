"""What an attention budget costs and brings: perplexity and a planted fact by its size, and the pace of decoding.

    python budgets.py [--model FILE] [--text FILES] [--part loss speed] [--budgets 512 1024 2048] [--depth 4096 8000]

The tokens after `depth` tokens of a text are given to decode rows, 64 at once, as if each had just been sampled:
perplexity is theirs. A fact is planted at a third of the text and asked for at its end; the figure is the mean
log-probability of the answer's tokens, which decode rows compute. The pace is that of one stream after a prompt of that
length, in sessions that take turns; 0 is no budget. The default text is this repository's guide.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from caches import ANSWER, ROUND, planted, seconds_per_token

import rekindle
from rekindle._src.models.base import Graph, LoadedModel, merge
from rekindle._src.programs import kv_layout as paged

ROWS, CHUNK = 64, 512


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=2)
def step(graph: Graph, leaves: Sequence[Any], kv: paged.KV, tokens: Any, start: Any, decoding: bool) -> Any:
    """Return logits of tokens from a position on, of decode rows or of a prompt, and the pages with their keys."""
    count, model = tokens.shape[0], merge(graph, leaves)
    first = paged.pages_of(kv)[0]
    pages, size = first.num_pages - 1, first.page_size
    at, table = start + jnp.arange(count), 1 + jnp.arange(pages)
    sequences = count if decoding else 1
    lens = at + 1 if decoding else (start + count).reshape(1)
    ends = jnp.asarray([0] if decoding else [0, count], jnp.int32)
    prompts = jnp.asarray(0 if decoding else 1, jnp.int32)
    paging = paged.Paging(
        table[at // size], at % size, jnp.broadcast_to(table, (sequences, pages)), lens, ends, prompts, {}
    )
    attend = paged.PagedAttention(graph.config, kv, paging, count if decoding else 0, None)
    hidden = model(tokens, at, attend, lengths=at + 1)
    return model.logits(hidden if decoding else hidden[-1:]), tuple(attend.kv)


class Text:
    """A prompt in pages, whose continuations decode rows compute."""

    def __init__(self, model: LoadedModel, kv_dtype: str, page: int, tokens: Sequence[int], room: int) -> None:
        self.model, self.graph, self.length = model, with_budget(model.graph, 1 << 20), len(tokens)
        shapes = paged.abstract(self.graph.config, 2 + (len(tokens) + room) // page, page, kv_dtype)
        self.kv = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        for first in range(0, len(tokens), CHUNK):
            part = jnp.asarray(tokens[first : first + CHUNK], jnp.int32)
            last, self.kv = step(self.graph, model.leaves, self.kv, part, jnp.int32(first), False)
        self.first = np.asarray(last)

    def losses(self, tokens: Sequence[int], budget: int) -> list[float]:
        """Return the losses of the tokens that follow the prompt, all but the first computed by decode rows."""
        graph, logits = with_budget(self.graph, budget or 1 << 20), [self.first]
        for first in range(0, len(tokens) - 1, ROWS):
            part = jnp.asarray(tokens[first : first + ROWS], jnp.int32)
            found, self.kv = step(graph, self.model.leaves, self.kv, part, jnp.int32(self.length + first), True)
            logits.append(np.asarray(found))
        odds = jax.nn.log_softmax(np.concatenate(logits)[: len(tokens)].astype(np.float32), axis=-1)
        return [-float(odds[index, token]) for index, token in enumerate(tokens)]


def with_budget(graph: Graph, budget: int) -> Graph:
    return dataclasses.replace(graph, config=graph.config.with_budget(budget))


def main() -> None:
    parts, guide = ["loss", "speed"], sorted((harness.ROOT / "tutorials/guide").glob("*.md"))
    given = harness.options(
        __doc__, model=Path, text=guide, part=(parts, parts), kv_dtype="bfloat16", budgets=[512, 1024, 2048],
        depth=[4096, 8000], tokens=128, page_size=16, speed=[8000], rounds=5,
    )  # fmt: skip
    path = given.model or rekindle.tiny.folder()
    tokenizer = rekindle.models.Tokenizer.load(path)
    tokens = tokenizer.encode("\n".join(file.read_text() for file in given.text))
    budgets = [0, *given.budgets]
    model = rekindle.models.load(path, dtype="float32")
    for depth in given.depth if "loss" in given.part else []:
        text = Text(model, given.kv_dtype, given.page_size, tokens[:depth], given.tokens)
        following = tokens[depth : depth + given.tokens]
        for budget in budgets:
            perplexity = np.exp(np.mean(text.losses(following, budget)))
            print(f"budget {budget:6}{perplexity:10.3f} perplexity of {given.tokens} tokens after {depth}", flush=True)
        question = planted(tokenizer, tokens, depth)
        text = Text(model, given.kv_dtype, given.page_size, question, 64)
        answer = tokenizer.encode(ANSWER)
        for budget in budgets:
            found = -statistics.fmean(text.losses(answer, budget))
            print(f"budget {budget:6}{found:10.3f} log-probability of the fact at {depth}", flush=True)
    for length in given.speed if "speed" in given.part else []:
        options: dict[str, Any] = {"max_requests": 2, "max_model_len": length + 2 * ROUND, "disk_memory": 0}
        options |= {"quiet": True, "kv_dtype": given.kv_dtype, "page_size": given.page_size}
        sessions = {budget: rekindle.open_sync(path, **options, attention_budget=budget or None) for budget in budgets}
        paces: dict[int, list[float]] = {budget: [] for budget in budgets}
        for number, budget in harness.turns(budgets, given.rounds):
            pace = seconds_per_token(sessions[budget], tokens[:length])
            if number >= 0:  # the first one computes the prompt
                paces[budget].append(pace)
        for budget, measured in paces.items():
            against = harness.spread(harness.ratios(measured, paces[0]), ".2f")
            print(
                f"budget {budget:6}{1e3 * statistics.median(measured):8.2f} ms a token at {length}, {against} of none's"
            )
        for session in sessions.values():
            session.close()


if __name__ == "__main__":
    main()
