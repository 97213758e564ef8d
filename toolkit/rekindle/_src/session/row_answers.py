"""The result of `session.map`: one `RowAnswer` for each row, in a list that shows itself as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rekindle._src.core import html
from rekindle._src.core.records import FinishReason
from rekindle.errors import MissingExtra, NotParsed, RekindleError


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RowAnswer(html.Record):
    """The answer to one row, or the error that stands in its place."""

    row: int  # its number, from 0
    text: str = ""
    finish_reason: FinishReason | None = None  # None for an error
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: RekindleError | None = None
    parsed: Any = None  # the object that schema=, choice= and the like make of the text; None if it is no object
    parse_error: NotParsed | None = None  # the reason why `parsed` is None although the request has a structure
    resumed: bool = False  # read from the file that an earlier call wrote

    def __str__(self) -> str:
        return self.text


class RowAnswers(list[RowAnswer]):
    """A list of answers in the order of the rows; `errors`, `texts` and `to_pandas()` are views of it."""

    def __init__(self, answers: Any = (), *, rows: Any = None) -> None:
        super().__init__(answers)
        self._rows = rows  # the DataFrame or the sequence of mappings that was answered

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # pickled as a plain list, so that it is read without this class

    @property
    def texts(self) -> list[str]:
        """The texts, in the order of the rows; empty where there is an error."""
        return [answer.text for answer in self]

    @property
    def errors(self) -> dict[int, RekindleError]:
        """The errors by the number of their row."""
        return {answer.row: answer.error for answer in self if answer.error is not None}

    def to_pandas(self) -> Any:
        """Return a DataFrame of the rows' own columns, followed by those of the answers.

        These are text, finish_reason, prompt_tokens, completion_tokens and error, and parsed if the request has a
        structure. A column whose name the rows have already begins with `answer_`. The index is that of the rows'
        DataFrame. Rows that came from an iterator are not kept: their columns are missing.
        """
        try:
            import pandas
        except ImportError:
            raise MissingExtra("pandas", "notebook") from None
        columns: dict[str, Any] = {
            "text": [answer.text if answer.error is None else None for answer in self],
            "finish_reason": [None if answer.finish_reason is None else str(answer.finish_reason) for answer in self],
            "prompt_tokens": [answer.prompt_tokens for answer in self],
            "completion_tokens": [answer.completion_tokens for answer in self],
            "error": [_problem(answer) for answer in self],
        }
        if any(answer.parsed is not None or answer.parse_error is not None for answer in self):
            columns["parsed"] = pandas.Series([answer.parsed for answer in self], dtype=object).to_numpy()
        frame = self._answered(pandas)
        for name, values in columns.items():
            while name in frame.columns:
                name = f"answer_{name}"
            frame[name] = values
        return frame

    def _answered(self, pandas: Any) -> Any:
        """Return the answered rows as a DataFrame of their own columns."""
        places = [answer.row for answer in self]
        if hasattr(self._rows, "iloc"):
            return self._rows.iloc[places].copy()
        if hasattr(self._rows, "iter_rows"):  # polars
            return pandas.DataFrame(self._rows[places].to_dict(as_series=False), index=range(len(places)))
        taken = [self._rows[place] if self._rows is not None else {} for place in places]
        return pandas.DataFrame(
            [dict(row) if isinstance(row, Mapping) else {} for row in taken], index=range(len(taken))
        )

    def _summary(self) -> tuple[str, ...]:
        resumed = sum(answer.resumed for answer in self)
        return (
            html.count(len(self), "row"),
            html.count(sum(answer.completion_tokens for answer in self), "token"),
            html.count(len(self.errors), "error") if self.errors else "",
            f"{resumed:,} of them were answered before" if resumed else "",
        )

    def __repr__(self) -> str:
        return f"<RowAnswers: {', '.join(part for part in self._summary() if part)}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                str(one.row),
                html.shorten(one.text, 200) if one.error is None else f"{type(one.error).__name__}: {one.error}",
                one.completion_tokens,
                "failed" if one.finish_reason is None else str(one.finish_reason),
            )
            for one in self
        ]
        table = html.table(["row", "text", "tokens", "ended by"], rows)
        return str(html.block(html.line(*self._summary()), table))


def _problem(answer: RowAnswer) -> str | None:
    """Return the reason why a row has no answer, or its answer no object."""
    problem = answer.error or answer.parse_error
    return None if problem is None else str(problem)
