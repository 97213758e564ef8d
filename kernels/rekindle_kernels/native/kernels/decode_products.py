"""The two products of decode attention, queries with keys and weights with values, and the softmax between them.

Each key and value is read where it lies in its page. The page that follows is prefetched meanwhile: the processor's own
prefetcher stops at every page.

Axes: G query heads of a kv head, K kv heads, D head size, S page size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native.kernels.attention_job import MASKED, StoredHeads, page_of
from rekindle_kernels.native.language.jit import inline
from rekindle_kernels.native.language.memory import f32, prefetch, set_f32
from rekindle_kernels.native.language.vector import (
    LANES,
    add,
    between,
    divide,
    larger,
    largest,
    load_f32,
    multiply,
    multiply_add,
    splat,
    store,
    store_four,
    subtract,
    total,
)
from rekindle_kernels.native.language.vector_math import exp, tanh

ZERO, ONE = np.float32(0), np.float32(1)


@inline
def vector_of(job: Any, r: int, key: int, part: int, k: int) -> int:
    """Return the number of the vector of `key`, counted through all pages: keys are part 0, values part 1."""
    S, K = job.page_size, job.kv_heads
    page = page_of(job, r, key // S)
    return ((page * 2 + part) * K + k) * S + key % S


@inline
def weights_of(job: Any, count: int, logits: int) -> tuple[float, float]:
    """Turn the logits of one head into weights; the largest logit and the sum of the weights."""
    scale, cap = job.scale, job.soft_cap
    until = (count + LANES - 1) // LANES * LANES
    for t in range(count, until):
        set_f32(logits, t, MASKED)
    highest, weights = splat(MASKED), splat(ZERO)
    for t in range(0, until, LANES):
        x = multiply(load_f32(logits, t), splat(scale))
        if cap > ZERO:
            x = multiply(tanh(divide(x, splat(cap))), splat(cap))
        store(logits, t, x)
        highest = larger(highest, x)
    if until > count:  # scaled and capped like the others
        store(logits, until - LANES, between(load_f32(logits, until - LANES), 0, count % LANES, MASKED))
        if cap > ZERO:
            highest = splat(MASKED)
            for t in range(0, until, LANES):
                highest = larger(highest, load_f32(logits, t))
    top = largest(highest)
    for t in range(0, until, LANES):
        x = exp(subtract(load_f32(logits, t), splat(top)))
        store(logits, t, x)
        weights = add(weights, x)
    return top, total(weights)


@inline
def scale_values(job: Any, r: int, k: int, begin: int, end: int, weights: int) -> None:
    """Multiply the weights of one head by the scales of the values [begin, end), page by page."""
    key = begin
    while key < end:
        until = min(end, (key // job.page_size + 1) * job.page_size)
        scales, here = job.scales + vector_of(job, r, key, 1, k) * 4, weights + (key - begin) * 4
        for t in range(until - key):
            set_f32(here, t, f32(here, t) * f32(scales, t))
        key = until


def fetcher(stored: StoredHeads) -> Any:
    """Return `fetch(vector)`: have one vector of a page brought into the cache."""
    length = stored.head_dim * stored.storage.size

    @inline
    def fetch(vector: int) -> None:
        for line in range(0, length, 64):
            prefetch(vector + line)

    return fetch


def logits_function(stored: StoredHeads) -> Any:
    """Return `logits_of(job, r, k, begin, end, logits)`: products of the queries of kv head k with the keys [begin,
    end)."""
    (_, load, size), D, scaled = stored
    VECTORS, fetch = D // LANES, fetcher(stored)

    @inline
    def dot(q: int, key: int) -> float:
        a = splat(ZERO)
        for i in range(VECTORS):
            a = multiply_add(load_f32(q, i * LANES), load(key, i * LANES), a)
        return total(a)

    @inline
    def two_dots(q: int, key: int) -> tuple[float, float]:
        a = b = splat(ZERO)
        for i in range(VECTORS):
            one = load(key, i * LANES)
            a = multiply_add(load_f32(q, i * LANES), one, a)
            b = multiply_add(load_f32(q, D + i * LANES), one, b)
        return total(a), total(b)

    @inline
    def logits_of(job: Any, r: int, k: int, begin: int, end: int, logits: int) -> None:
        """Plain products of queries and keys, [G, keys]."""
        S, keys = job.page_size, job.keys
        G = job.heads // job.kv_heads
        q = job.q + (r * job.heads + k * G) * D * 4
        key = begin
        while key < end:  # page by page; a division per key would cost as much as its products
            first = vector_of(job, r, key, 0, k)
            until = min(end, (key // S + 1) * S)
            following = vector_of(job, r, until, 0, k) if until < end else vector_of(job, r, begin, 1, k)
            for t in range(until - key):
                vectors = job.pages + (first + t) * D * size
                fetch(job.pages + (following + t) * D * size)
                factor = f32(job.scales, first + t) if scaled else ONE
                at = logits + (key - begin + t) * 4
                g = 0
                while g + 2 <= G:
                    a, b = two_dots(q + g * D * 4, vectors)
                    set_f32(at, g * keys, a * factor)
                    set_f32(at, (g + 1) * keys, b * factor)
                    g += 2
                if g < G:
                    set_f32(at, g * keys, dot(q + g * D * 4, vectors) * factor)
            key = until

    return logits_of


def value_sums(stored: StoredHeads) -> Any:
    """Return `weigh_heads(job, r, k, begin, end, weights, out, step)`: sums of the values [begin, end) for each
    query head of kv head k, by weights [G, keys], into rows `step` numbers apart."""
    (_, load, size), D, _ = stored
    fetch, has_four_vectors = fetcher(stored), D % (4 * LANES) == 0

    @inline
    def weigh(job: Any, r: int, k: int, begin: int, end: int, weights: int, column: int, out: int) -> None:
        """One vector of the sum of values, for one head."""
        S = job.page_size
        a = splat(ZERO)
        key = begin
        while key < end:
            values = job.pages + vector_of(job, r, key, 1, k) * D * size
            until = min(end, (key // S + 1) * S)
            following = job.pages + vector_of(job, r, min(until, end - 1), 1, k) * D * size
            for t in range(until - key):
                fetch(following + t * D * size)
                a = multiply_add(splat(f32(weights, key - begin + t)), load(values, t * D + column), a)
            key = until
        store(out, column, a)

    @inline
    def weigh_wide(job: Any, r: int, k: int, begin: int, end: int, weights: int, column: int, out: int) -> None:
        """Four vectors at once."""
        S = job.page_size
        a = b = c = d = splat(ZERO)
        key = begin
        while key < end:
            values = job.pages + vector_of(job, r, key, 1, k) * D * size
            until = min(end, (key // S + 1) * S)
            following = job.pages + vector_of(job, r, min(until, end - 1), 1, k) * D * size
            for t in range(until - key):
                fetch(following + t * D * size)
                weight, at = splat(f32(weights, key - begin + t)), t * D + column
                a = multiply_add(weight, load(values, at), a)
                b = multiply_add(weight, load(values, at + LANES), b)
                c = multiply_add(weight, load(values, at + 2 * LANES), c)
                d = multiply_add(weight, load(values, at + 3 * LANES), d)
            key = until
        store_four(out, column, a, b, c, d)

    @inline
    def weigh_two(
        job: Any, r: int, k: int, begin: int, end: int, weights: int, next_head: int, column: int, out: int, step: int
    ) -> None:
        """Four vectors of two heads at once, which share the widening of the values."""
        S = job.page_size
        a = b = c = d = e = f = g = h = splat(ZERO)
        key = begin
        while key < end:
            values = job.pages + vector_of(job, r, key, 1, k) * D * size
            until = min(end, (key // S + 1) * S)
            following = job.pages + vector_of(job, r, min(until, end - 1), 1, k) * D * size
            for t in range(until - key):
                fetch(following + t * D * size)
                one, at = splat(f32(weights, key - begin + t)), t * D + column
                two = splat(f32(weights, next_head + key - begin + t))
                v = load(values, at)
                a, e = multiply_add(one, v, a), multiply_add(two, v, e)
                v = load(values, at + LANES)
                b, f = multiply_add(one, v, b), multiply_add(two, v, f)
                v = load(values, at + 2 * LANES)
                c, g = multiply_add(one, v, c), multiply_add(two, v, g)
                v = load(values, at + 3 * LANES)
                d, h = multiply_add(one, v, d), multiply_add(two, v, h)
            key = until
        store_four(out, column, a, b, c, d)
        store_four(out, step + column, e, f, g, h)

    @inline
    def weigh_heads(job: Any, r: int, k: int, begin: int, end: int, weights: int, out: int, step: int) -> None:
        G, keys = job.heads // job.kv_heads, job.keys
        g = 0
        while g < G:
            mine, here = weights + g * keys * 4, out + g * step * 4
            if has_four_vectors and g + 2 <= G:
                for column in range(0, D, 4 * LANES):
                    weigh_two(job, r, k, begin, end, mine, keys, column, here, step)
                g += 2
                continue
            if has_four_vectors:
                for column in range(0, D, 4 * LANES):
                    weigh_wide(job, r, k, begin, end, mine, column, here)
            else:
                for column in range(0, D, LANES):
                    weigh(job, r, k, begin, end, mine, column, here)
            g += 1

    return weigh_heads
