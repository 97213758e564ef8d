"""Eviction policies, replayed offline and compared with the best choice in hindsight.

`python -m workshop.eviction` prints the table.

The figures are computed pages in percent of all pages that the requests read; less is better. Each load
has 2,000 requests; the room is in pages. The last line is how much more than in hindsight a policy computes, averaged
over the cases.

    load              room         lru  lfu-ageing   aged-root  cost-aware   hindsight
    chat sessions      306       43.8%       45.9%       44.7%       45.1%       27.5%
    chat sessions      448       34.4%       36.5%       34.3%       35.4%       19.5%
    chat sessions     1346       14.2%       16.4%       14.6%       16.2%       14.1%
    system prompts     170       64.0%       51.9%       54.1%       53.8%       41.2%
    system prompts     425       42.9%       31.6%       34.6%       34.1%       24.8%
    system prompts    1276       23.3%       21.3%       21.5%       21.4%       21.0%
    agents             108       41.9%       40.1%       39.0%       39.4%       26.4%
    agents             221       12.7%       17.5%       14.7%       15.2%        8.5%
    agents             665        7.7%        7.8%        7.7%        7.8%        7.7%
    documents          263       71.1%       63.2%       65.8%       66.2%       54.4%
    documents          659       63.5%       56.8%       58.6%       59.0%       48.2%
    documents         1979       53.7%       51.2%       51.9%       52.0%       44.0%
    mixture            194       75.4%       68.3%       70.3%       70.4%       52.9%
    mixture            481       57.0%       52.1%       52.7%       52.5%       35.4%
    mixture           1443       34.2%       32.0%       32.2%       32.3%       23.6%
    mean                         42.7%       39.5%       39.8%       40.0%       29.9%
    above hindsight              41.2%       36.5%       34.5%       36.0%        0.0%

aged-root wins and is the default (kvcache/eviction.py). lru is better by up to 2 points for agents and chats in little
room, and worse by 5 to 10 for popular system prompts and documents, which one burst of new pages evicts. Counting
attention into the cost of deep pages does not pay: it keeps chats for too long.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

Key = tuple[float, ...]  # the page with the smallest key is evicted


class Policy:
    """Ranks pages for eviction; `visit` is called for every page of a request, in order."""

    def __init__(self, trace: Trace) -> None:
        self.visits = [0] * len(trace.parents)
        self.last = [0] * len(trace.parents)
        self.depth = [0] * len(trace.parents)
        for page, parent in enumerate(trace.parents):
            self.depth[page] = 1 if parent < 0 else self.depth[parent] + 1

    def visit(self, page: int, now: int) -> None:
        self.visits[page] += 1
        self.last[page] = now

    def on_evict(self, key: Key) -> None:
        """Handle the eviction of a page with this key."""

    def key(self, page: int) -> Key:
        raise NotImplementedError


class Lru(Policy):
    """Evicts the least recently used page; among equals, the least visited."""

    def key(self, page: int) -> Key:
        return self.last[page], self.visits[page]


class LfuAgeing(Policy):
    """Evicts the least visited page; each eviction raises the score that new pages start from (dynamic ageing)."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.floor = 0.0
        self.score = [0.0] * len(trace.parents)

    def visit(self, page: int, now: int) -> None:
        super().visit(page, now)
        self.score[page] = self.floor + self.worth(page)

    def worth(self, page: int) -> float:
        return float(self.visits[page])

    def on_evict(self, key: Key) -> None:
        self.floor = key[0]

    def key(self, page: int) -> Key:
        return self.score[page], self.last[page]


class AgedRoot(LfuAgeing):
    """LfuAgeing with the square root of the visits, so that popular pages age sooner."""

    def worth(self, page: int) -> float:
        return math.sqrt(self.visits[page])


class CostAware(LfuAgeing):
    """AgedRoot times the cost of computing the page again, which attention makes higher for deep pages."""

    def worth(self, page: int) -> float:
        return math.sqrt(self.visits[page]) * (1.0 + self.depth[page] / 32)


class Hindsight(Policy):
    """Evicts the page that is needed last (Belady), which is optimal when all pages cost the same."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.uses: dict[int, deque[int]] = defaultdict(deque)
        for now, request in enumerate(trace.requests):
            for page in request:
                self.uses[page].append(now)

    def visit(self, page: int, now: int) -> None:
        super().visit(page, now)
        while self.uses[page] and self.uses[page][0] <= now:
            self.uses[page].popleft()

    def key(self, page: int) -> Key:
        return (-self.uses[page][0] if self.uses[page] else -float("inf"),)


POLICIES: dict[str, Callable[[Trace], Policy]] = {
    "lru": Lru, "lfu-ageing": LfuAgeing, "aged-root": AgedRoot, "cost-aware": CostAware, "hindsight": Hindsight,
}  # fmt: skip
DEFAULT = "aged-root"  # the policy of kvcache/eviction.py


def replay(trace: Trace, policy: Policy, capacity: int) -> float:
    """Return the share of pages that had to be computed. As in the tree, only leaves are evicted."""
    cached: set[int] = set()
    below = [0] * len(trace.parents)  # cached children
    heap: list[tuple[Key, int]] = []
    computed = total = 0
    for now, request in enumerate(trace.requests):
        for page in request:
            policy.visit(page, now)
        hits = 0
        while hits < len(request) and request[hits] in cached:
            hits += 1
        computed += len(request) - hits
        total += len(request)
        for page in request[hits:]:
            cached.add(page)
            if trace.parents[page] >= 0:
                below[trace.parents[page]] += 1
        heapq.heappush(heap, (policy.key(request[-1]), request[-1]))
        postponed: list[tuple[Key, int]] = []
        current = set(request)
        while len(cached) > capacity and heap:
            key, page = heapq.heappop(heap)
            if page not in cached or below[page]:
                continue
            if key != policy.key(page):
                heapq.heappush(heap, (policy.key(page), page))
                continue
            if page in current:
                postponed.append((key, page))
                continue
            cached.remove(page)
            policy.on_evict(key)
            parent = trace.parents[page]
            if parent >= 0:
                below[parent] -= 1
                if not below[parent]:
                    heapq.heappush(heap, (policy.key(parent), parent))
        for entry in postponed:
            heapq.heappush(heap, entry)
    return computed / total


def study(requests: int, *, seed: int = 0, shares: Sequence[float] = (0.02, 0.05, 0.15)) -> str:
    """Return a table of computed pages in percent, for caches that hold a share of all pages of a trace."""
    lines = [f"{'load':16}{'room':>6}" + "".join(f"{name:>12}" for name in POLICIES)]
    sums, excess = dict.fromkeys(POLICIES, 0.0), dict.fromkeys(POLICIES, 0.0)
    cases = len(TRACES) * len(shares)
    for title, make in TRACES.items():
        trace = make(random.Random(seed), requests)
        longest = max(map(len, trace.requests))
        for share in shares:
            capacity = max(2 * longest, int(share * len(trace.parents)))
            results = {name: replay(trace, policy(trace), capacity) for name, policy in POLICIES.items()}
            for name, result in results.items():
                sums[name] += result / cases
                excess[name] += (result / results["hindsight"] - 1) / cases
            lines.append(f"{title:16}{capacity:6}" + "".join(f"{100 * value:11.1f}%" for value in results.values()))
    lines.append(f"{'mean':22}" + "".join(f"{100 * value:11.1f}%" for value in sums.values()))
    lines.append(f"{'above hindsight':22}" + "".join(f"{100 * value:11.1f}%" for value in excess.values()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m workshop.eviction", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="requests of each load (default 2000)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(study(arguments.requests, seed=arguments.seed))


if __name__ == "__main__":
    main()


Request = list[int]  # pages from the root on; a page's number stands for its whole prefix


class Trace:
    """Requests over a growing set of pages."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.parents: list[int] = []  # the parent of each page, -1 at the root
        self._page_ids: dict[tuple[int, object], int] = {}

    def extend(self, pages: Request, *labels: object) -> Request:
        """Return the prompt continued with one page per label; equal labels after equal prefixes are the same page."""
        longer = list(pages)
        for label in labels:
            parent = longer[-1] if longer else -1
            page = self._page_ids.setdefault((parent, label), len(self.parents))
            if page == len(self.parents):
                self.parents.append(parent)
            longer.append(page)
        return longer

    def fresh(self, pages: Request, count: int) -> Request:
        """Return the prompt continued with `count` pages that no other request has."""
        return self.extend(pages, *((len(self.parents), at) for at in range(count)))


def zipf(draw: random.Random, count: int) -> int:
    """Return a number from 0 to count - 1; small ones are more frequent."""
    return min(count - 1, int(count ** draw.random()) - 1)


def chats(draw: random.Random, requests: int) -> Trace:
    """Return conversations under three system prompts; 24 are open at a time, each turn repeats the text before it."""
    trace = Trace()
    systems = [trace.fresh([], 4) for _ in range(3)]
    talks = [systems[0]] * 24
    for _ in range(requests):
        index = zipf(draw, len(talks))
        talks[index] = trace.fresh(talks[index], draw.randint(1, 3))
        trace.requests.append(talks[index])
        talks[index] = trace.fresh(talks[index], draw.randint(1, 4))
        if draw.random() < 0.15:
            talks[index] = draw.choice(systems)
            draw.shuffle(talks)
    return trace


def system_prompts(draw: random.Random, requests: int) -> Trace:
    """Return forty long shared prompts of very different popularity, each followed by a question asked once."""
    trace = Trace()
    systems = [trace.fresh([], draw.randint(6, 24)) for _ in range(40)]
    for _ in range(requests):
        trace.requests.append(trace.fresh(systems[zipf(draw, 40)], draw.randint(2, 6)))
    return trace


def agents(draw: random.Random, requests: int) -> Trace:
    """Return ten agents in tool loops: each call repeats the whole transcript; finished ones never come again."""
    trace = Trace()
    tools = [trace.fresh([], 12) for _ in range(5)]
    running: list[tuple[Request, int]] = []
    for _ in range(requests):
        while len(running) < 10:
            running.append((trace.fresh(draw.choice(tools), 2), draw.randint(4, 20)))
        index = draw.randrange(len(running))
        transcript, calls_left = running[index]
        trace.requests.append(transcript)
        running[index] = trace.fresh(transcript, draw.randint(1, 3)), calls_left - 1
        if calls_left == 1:
            del running[index]
    return trace


def documents(draw: random.Random, requests: int) -> Trace:
    """Return prompts of three of sixty documents in any order: only the first ones are often a shared prefix."""
    trace = Trace()
    system = trace.fresh([], 2)
    for _ in range(requests):
        picks: list[int] = []
        while len(picks) < 3:
            document = zipf(draw, 60)
            if document not in picks:
                picks.append(document)
        draw.shuffle(picks)
        prompt = system
        for document in picks:
            prompt = trace.extend(prompt, *((document, part) for part in range(4)))
        trace.requests.append(trace.fresh(prompt, 1))
    return trace


def mixture(draw: random.Random, requests: int) -> Trace:
    """Return all of these loads, mixed in one cache."""
    trace = Trace()
    parts = [make(draw, requests // 4) for make in (chats, system_prompts, agents, documents)]
    order = [index for index, part in enumerate(parts) for _ in part.requests]
    draw.shuffle(order)
    todo = [iter(part.requests) for part in parts]
    for index in order:
        trace.requests.append(trace.extend([], *((index, page) for page in next(todo[index]))))
    return trace


TRACES: dict[str, Callable[[random.Random, int], Trace]] = {
    "chat sessions": chats, "system prompts": system_prompts, "agents": agents, "documents": documents,
    "mixture": mixture,
}  # fmt: skip
