"""What tiers that have nothing to do, and a large prefix tree, cost a decoding step, and what tiers with work bring.

    python tiers.py [--layers 4] [--hidden 256] [--rounds 80] [--new 100] [--nodes 100000]
    python tiers.py --working-set [--layers 8] [--hidden 384] [--rounds 3]

Everything happens in one session, whose prefix cache is exchanged between rounds: without tiers, with tiers in host
memory and on disk, twice, and with a large tree. Two sessions would not do: two that were opened alike differed by 3 %,
because of where their memory lay. In each round every cache serves the same requests, four that decode together, in an
order drawn anew, and gives the median time from one step to the next; shown is the median ratio over the rounds, and
the same cache twice says how far that can be trusted. Looking for cold pages, once a second, is left out there and
timed by itself. Trees are filled with pages that nobody computed: what they hold does not matter to a step.

`--working-set` is throughput when the prefixes in use need four times the device's pages, with a tier in host memory
and without: every request repeats one of many prefixes (80 % of its tokens) in turn, the worst order for any cache that
is too small. Both sessions answer the same requests, round by round in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import harness
import numpy as np

import rekindle
import rekindle._src.kvcache.writer
from rekindle._src.core.prefix import Prefix
from rekindle._src.core.records import StepResult
from rekindle._src.kvcache import CostModel, HostTier, PrefixCache, Tiers
from rekindle._src.session.session import Session

PAGE, ROWS, CHAIN = 8, 4, 100


class Kind(NamedTuple):
    """One way to run the session."""

    cache: PrefixCache
    tiers: Tiers


def use(session: Session, kind: Kind) -> None:
    """From now on; each thread exchanges its own while it does nothing else."""
    scheduler, writer = session._engine.scheduler, session._cache_writer

    def exchange() -> None:
        scheduler.cache = scheduler._ledger.cache = kind.cache

    def exchange_for_writer() -> None:
        writer.cache, writer.tiers = kind

    session._host.ask(exchange)
    writer.submit(exchange_for_writer).result()


class Steps:
    """When the steps of a session were committed; an observer."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, int]] = []  # and how many rows decoded, 0 if there were prompts

    def __call__(self, result: StepResult) -> None:
        self.ends.append((time.perf_counter(), 0 if result.plan.prefill else len(result.plan.decode)))

    def median_ms(self) -> float:
        """From one step to the next while all rows decode."""
        pairs = itertools.pairwise(self.ends)
        return 1e3 * statistics.median(
            after - before for (before, rows), (after, also) in pairs if rows == also == ROWS
        )


def step_ms(session: Session, steps: Steps, prompts: Sequence[list[int]], new: int) -> float:
    steps.ends.clear()
    session.generate_sync(list(prompts), max_tokens=new, ignore_eos=True)
    return steps.median_ms()


def look_ms(session: Session) -> float:
    """How long the session's loop does nothing else while cold pages are looked for once, as between steps."""
    writer, spent = session._cache_writer, 0.0
    host: Any = writer._loop
    ask = host.ask

    def timed(function: Callable[[], object]) -> object:
        def work() -> object:
            nonlocal spent
            start = time.perf_counter()
            try:
                return function()
            finally:
                spent += time.perf_counter() - start

        return ask(work)

    host.ask = timed
    try:
        writer.submit(lambda: writer._keep(0, cold=1.0, visited=True)).result()
    finally:
        host.ask = ask
    return 1e3 * spent


def fill(session: Session, cache: PrefixCache, nodes: int, draw: np.random.Generator) -> None:
    """Grow a tree by chains of pages, a few at a time in the session's own loop."""

    def grow() -> None:
        length = min(CHAIN, nodes - len(cache))
        tokens = draw.integers(3, 4000, length * PAGE).astype(np.int32)
        pages = cache.pool.take(length)
        published = cache.publish(cache.root, cache.keys(Prefix(tokens)), tokens, pages)
        assert published is not None, "a key was taken"
        cache.pool.release(pages)
        cache.unreference(published.node)

    while len(cache) < nodes:
        session._host.ask(grow)


def main() -> None:
    given = harness.options(
        __doc__, layers=int, hidden=int, rounds=int, new=100, nodes=100_000, working_set=False
    )  # fmt: skip
    if given.working_set:
        working_set(given.layers or 8, given.hidden or 384, given.rounds or 3)
    else:
        idle(given.layers or 4, given.hidden or 256, given.rounds or 80, given.new, given.nodes)


def idle(layers: int, hidden: int, rounds: int, new: int, nodes: int) -> None:
    rekindle._src.kvcache.writer.TICK_SECONDS = 1e6
    draw = np.random.default_rng(0)
    room = 4 * (100 + (rounds + 1) * ROWS * (new // PAGE + 8))  # what the rounds leave in the trees
    model = harness.llama(layers, hidden, vocab_size=4096, num_key_value_heads=1, max_position_embeddings=4096)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        session = stack.enter_context(
            rekindle.open_sync(
                model, cache_dir=folder,
                page_size=PAGE, max_requests=ROWS, max_tokens_per_step=128, max_model_len=2048, quiet=True,
                device_pages=nodes + room, host_memory=1 << 30, disk_memory=1 << 30, precompile="all",
            )
        )  # fmt: skip
        kept: PrefixCache = session._engine.scheduler.cache
        tiers = session._cache_writer.tiers
        assert tiers is not None
        nothing = Tiers(HostTier(0), CostModel(PAGE))
        kinds = []
        for below, count in ((tiers, 100), (tiers, 100), (nothing, 100), (tiers, nodes)):
            cache = PrefixCache(kept.pool, PAGE, kept.root_key, host_tier=below)
            fill(session, cache, count, draw)
            kinds.append(Kind(cache, below))
        steps = Steps()
        session._client.observe(steps)
        times: list[list[float]] = [[] for _ in kinds]
        for turn in range(rounds + 1):
            prompts = [draw.integers(3, 4000, 24).tolist() for _ in range(ROWS)]
            for index in draw.permutation(len(kinds)):
                use(session, kinds[index])
                found = step_ms(session, steps, prompts, new)
                if turn:  # the first is for warming up
                    times[index].append(found)
        for what, left, right in (
            ("the same twice", 0, 1),
            ("without and with tiers", 2, 0),
            (f"100 and {nodes} nodes", 0, 3),
        ):
            pairs = harness.ratios(times[right], times[left])
            low, middle, high = statistics.quantiles(pairs, n=4)
            error = 1.25 * (high - low) / 1.35 / len(pairs) ** 0.5  # of a median
            one, other = statistics.median(times[left]), statistics.median(times[right])
            print(f"{what:26}{one:7.3f} and {other:7.3f} ms, ratio {middle:.4f} ± {error:.4f}", flush=True)
        looks = []
        for index in (0, 3):
            use(session, kinds[index])
            looks.append(statistics.median(look_ms(session) for _ in range(9)))
        print(f"looking for cold pages: {looks[0]:.2f} and {looks[1]:.2f} ms of the loop, once a second")
        if any(kind.cache.statistics().evicted_pages for kind in kinds):
            print("pages were evicted: give more device pages")


def working_set(layers: int, hidden: int, rounds: int) -> None:
    page, prefix, own, new, device_pages = 32, 512, 128, 4, 160
    model = harness.llama(layers, hidden, vocab_size=8192, num_attention_heads=6, num_key_value_heads=2)
    draw = np.random.default_rng(0)
    prefixes = [draw.integers(3, 8000, prefix).tolist() for _ in range(4 * device_pages * page // prefix)]
    options: dict[str, Any] = {
        "page_size": page, "device_pages": device_pages, "max_requests": 2, "max_tokens_per_step": 128,
        "max_model_len": 1024, "disk_memory": 0, "precompile": "all",
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        options["cache_dir"] = stack.enter_context(tempfile.TemporaryDirectory())
        sessions = {
            name: stack.enter_context(rekindle.open_sync(model, host_memory=memory, **options))
            for name, memory in (("without", 0), ("with host memory", 1 << 30))
        }
        rates: dict[str, list[float]] = {name: [] for name in sessions}
        for turn in range(rounds + 1):
            prompts = [one + draw.integers(3, 8000, own).tolist() for one in prefixes]
            for name, session in sessions.items():
                start = time.perf_counter()
                for handle in [session.submit(prompt, max_tokens=new) for prompt in prompts]:
                    handle.result_sync()
                if turn:  # the first one fills the caches and compiles
                    rates[name].append(len(prompts) * (prefix + own + new) / (time.perf_counter() - start))
        for name, session in sessions.items():
            stats = session.cache.stats()
            print(
                f"{name:18}{statistics.median(rates[name]):9.0f} tokens/s (median of {rounds}), "
                f"{stats.saved_tokens} tokens saved, {stats.offloaded_pages} pages left, {stats.rates}"
            )
        print(f"with / without: {harness.spread(harness.ratios(rates['with host memory'], rates['without']), '.2f')}")


if __name__ == "__main__":
    main()
