"""The result of `await session.generate([…])`: a list of completions that shows itself as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from rekindle._src.core import html
from rekindle._src.core.records import Completion

T = TypeVar("T")


class Completions(list[T]):
    """A list in every respect; only a notebook shows it otherwise. With n above 1 its items are lists."""

    def __reduce__(self) -> tuple[type[list[T]], tuple[list[T]]]:
        return list, (list(self),)  # pickled as a plain list, so that it is read without this class

    def __repr__(self) -> str:
        text = super().__repr__()
        if len(text) <= 200:
            return text
        completions = [completion for _, completion in _each(self)]
        tokens = html.count(sum(len(completion.token_ids) for completion in completions), "token")
        return f"<Completions: a list of {html.count(len(completions), 'completion')}, {tokens}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[object, ...]] = []
        tokens = 0
        for number, completion in _each(self):
            tokens += len(completion.token_ids)
            prompt = html.shorten(completion.prompt or "", 60)
            cached = f"{completion.usage.cached_tokens:,} of {completion.usage.prompt_tokens:,}"
            rate = completion.timings.decode_rate(len(completion.token_ids))
            speed = f"{rate:,.0f}" if rate else ""
            text = html.shorten(completion.text, 200)
            rows.append((number, prompt, text, len(completion.token_ids), str(completion.finish_reason), cached, speed))
        heads = ["", "prompt", "text", "tokens", "ended by", "cached", "tokens/s"]
        size = html.line(html.count(len(rows), "completion"), html.count(tokens, "token"))
        for index, item in enumerate(self):
            if isinstance(item, BaseException):  # generate(..., errors="return") puts errors in place of completions
                rows.append((str(index), "", f"{type(item).__name__}: {item}", 0, "failed", "", ""))
        rows.sort(key=lambda row: int(str(row[0]).partition(".")[0]))
        return str(html.block(size, html.table(heads, rows)))


def _each(found: list[T]) -> Iterator[tuple[str, Completion]]:
    """Yield completions with their places: `2`, or `2.1` for the second completion of one prompt."""
    for index, item in enumerate(found):
        if isinstance(item, Completion):
            yield str(index), item
        elif isinstance(item, list):
            for place, part in enumerate(item):
                if isinstance(part, Completion):
                    yield f"{index}.{place}", part
