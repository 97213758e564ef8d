"""Evaluation on held-out documents: perplexity, and exact answers to questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from rekindle._src.models.base import Graph
from rekindle._src.tiny_training import facts, general, lists, sums, unknown
from rekindle._src.tiny_training.batches import PAD, encoded, pack
from rekindle._src.tiny_training.corpus import HELD_OUT, TURN, chat, talk
from rekindle._src.tiny_training.facts import Turns
from rekindle._src.tiny_training.objective import losses

ROWS, LENGTH = 8, 512
QUESTIONS = 64
measured = jax.jit(losses, static_argnums=0)


SINGLE = {
    "general": general.question,
    "sums": sums.question,
    "lists": lists.from_sentences,
    "unknown": unknown.question,
}


class Score(NamedTuple):
    """Perplexity per token, and the share of tokens that had the highest probability."""

    perplexity: float
    accuracy: float
    tokens: int


def held_out(graph: Graph, leaves: Sequence[Any], words: Tokenizer, batches: int) -> Score:
    """Return the score over batches of held-out documents, each of 8 windows of 512 tokens."""
    stream = encoded(words, HELD_OUT)
    total, right, tokens = 0.0, 0, 0
    for _ in range(batches):
        loss, counts, correct = measured(graph, leaves, jnp.asarray(pack(stream, ROWS, LENGTH + 1)))
        total += float(loss.sum())
        right += int((counts & correct).sum())
        tokens += int(counts.sum())
    return Score(float(np.exp(total / tokens)), right / tokens, tokens)


def questions(kind: str) -> Iterator[Turns]:
    """Yield held-out conversations of one kind."""
    rng = Random(f"{HELD_OUT} {kind}")
    while True:
        if kind == "story":
            context, turns = facts.about_a_story(rng)
            yield [(f"{context}\n\n{turns[-1][0]}", turns[-1][1])] if context else turns
        elif kind in ("general", "sums", "lists", "unknown"):
            yield [SINGLE[kind](rng)]
        elif kind == "me":
            yield facts.about_me(rng, talk)
        else:
            yield {"people": facts.about_people, "comparison": facts.summary}[kind](rng)


KINDS = ("people", "me", "story", "comparison", *SINGLE)


def last_answer(words: Tokenizer, turns: Turns) -> tuple[list[int], int]:
    """Return the tokens of a conversation, and the index of its last answer's first token."""
    *before, (message, answer) = turns
    ids = words.encode(chat([*before, (message, answer)])).ids
    starts = [i for i, token in enumerate(ids) if token == words.token_to_id(TURN)]
    header = len(words.encode(f"{TURN}assistant\n").ids)
    return ids, starts[-1] + header


def exact_answers(graph: Graph, leaves: Sequence[Any], words: Tokenizer, kind: str, rows: int = QUESTIONS) -> float:
    """Return the share of questions to which greedy decoding gives exactly the expected words.

    Greedy decoding gives the expected answer if and only if each of its tokens is the most likely one after the tokens
    before it, so one forward pass over question and answer is enough.
    """
    chosen = [last_answer(words, turns) for turns in islice(questions(kind), rows)]
    windows: NDArray[np.int32] = np.full((rows, LENGTH + 1), PAD, np.int32)
    answer = np.zeros((rows, LENGTH), bool)
    for row, (ids, start) in enumerate(chosen):
        cut = max(0, len(ids) - LENGTH - 1)
        windows[row, : len(ids) - cut] = ids[cut:]
        answer[row, start - cut - 1 : len(ids) - cut - 1] = True
    right = np.concatenate(
        [np.asarray(measured(graph, leaves, jnp.asarray(part))[2]) for part in np.split(windows, rows // ROWS)]
    )
    return float((right | ~answer).all(axis=1).mean())
