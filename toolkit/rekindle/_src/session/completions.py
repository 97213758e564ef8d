"""What `await session.generate([…])` gives: a list of completions that shows itself as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from rekindle._src.core import html
from rekindle._src.core.records import Completion

T = TypeVar("T")


class Completions(list[T]):
    """A list in every respect; only a notebook sees the difference. With n above 1 its items are lists."""

    def __reduce__(self) -> tuple[type[list[T]], tuple[list[T]]]:
        return list, (list(self),)  # pickled as what it is, so that it is read without this class

    def __repr__(self) -> str:
        whole = super().__repr__()
        if len(whole) <= 200:
            return whole
        found = [done for _, done in _each(self)]
        tokens = html.count(sum(len(done.token_ids) for done in found), "token")
        return f"<Completions: a list of {html.count(len(found), 'completion')}, {tokens}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[object, ...]] = []
        tokens = 0
        for number, done in _each(self):
            tokens += len(done.token_ids)
            asked = html.shortened(done.prompt or "", 60)
            cached = f"{done.usage.cached_tokens:,} of {done.usage.prompt_tokens:,}"
            rate = done.timings.decode_rate(len(done.token_ids))
            speed = f"{rate:,.0f}" if rate else ""
            text = html.shortened(done.text, 200)
            rows.append((number, asked, text, len(done.token_ids), str(done.finish_reason), cached, speed))
        heads = ["", "prompt", "text", "tokens", "ended by", "cached", "tokens/s"]
        size = html.line(html.count(len(rows), "completion"), html.count(tokens, "token"))
        for index, one in enumerate(self):
            if isinstance(one, BaseException):  # generate(..., errors="return") puts errors in place of completions
                rows.append((str(index), "", f"{type(one).__name__}: {one}", 0, "failed", "", ""))
        rows.sort(key=lambda row: int(str(row[0]).partition(".")[0]))
        return str(html.block(size, html.table(heads, rows)))


def _each(found: list[T]) -> Iterator[tuple[str, Completion]]:
    """Completions with their places: `2`, or `2.1` for the second of several that one prompt gave."""
    for index, one in enumerate(found):
        if isinstance(one, Completion):
            yield str(index), one
        elif isinstance(one, list):
            for place, part in enumerate(one):
                if isinstance(part, Completion):
                    yield f"{index}.{place}", part
