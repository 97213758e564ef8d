"""Synthetic but typical loads, as the pages that each request reads, for comparing eviction policies."""

from __future__ import annotations

import random
from collections.abc import Callable

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
    "chat sessions": chats,
    "system prompts": system_prompts,
    "agents": agents,
    "documents": documents,
    "mixture": mixture,
}
