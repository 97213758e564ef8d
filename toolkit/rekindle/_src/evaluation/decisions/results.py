"""Decisions: the answers to typed questions, with the probability of each possible answer."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rekindle._src.core import words
from rekindle._src.core.drawable import Record
from rekindle._src.evaluation.decisions.calibration import SATURATED, Calibration, centred, probabilities
from rekindle._src.evaluation.decisions.questions import Question
from rekindle._src.views import html, style
from rekindle.errors import MissingExtra

if TYPE_CHECKING:
    from pandas import DataFrame

ROWS_SHOWN = 20


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Decision(Record):
    """The answer to one question: a probability for each of its options."""

    ids: tuple[str, ...]  # of its requests, for `session.explain`
    question: str
    value: Any  # the most likely option
    probabilities: Mapping[Any, float]  # of the options, in their order; together 1
    logprobs: tuple[float, ...]  # that the model writes each option, before any calibration
    prompt_tokens: int
    cached_tokens: int  # of these, taken from the cache
    ordered: bool = False  # the options are numbers
    calibration: Calibration | None = None  # that made the probabilities of the log-probabilities

    @property
    def label_mass(self) -> float:
        """The probability that the model writes one of the options at all."""
        return min(1.0, math.fsum(map(math.exp, self.logprobs)))

    @property
    def confidence(self) -> float:
        """The probability of the most likely option, times the label mass."""
        return self.probabilities[self.value] * self.label_mass

    @property
    def expected(self) -> float | None:
        """The mean of an answer in numbers, or the probability of True; None for other options."""
        if self.ordered:
            return math.fsum(float(value) * share for value, share in self.probabilities.items())
        return self.probabilities[True] if [*self.probabilities] == [True, False] else None

    @property
    def saturated(self) -> bool:
        """True if the model leaves less than 0.0001 to all other options, so that a probability says little."""
        return 1.0 - float(probabilities(centred(self.logprobs)).max()) < SATURATED


class Decisions(dict[str, Decision]):
    """The answers to several questions about one state, by name; a dict in every respect."""

    @property
    def answers(self) -> dict[str, Any]:
        """The most likely value of each question."""
        return {name: decision.value for name, decision in self.items()}

    def __reduce__(self) -> tuple[type[Decisions], tuple[dict[str, Decision]]]:
        return Decisions, (dict(self),)

    def __repr__(self) -> str:
        parts = [f"{name}={words.shorten(repr(value), 40)}" for name, value in self.answers.items()]
        return f"<Decisions: {words.shorten(', '.join(parts), 120)}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                words.shorten(decision.question, 80),
                words.shorten(str(decision.value), 60),
                html.gauge(decision.probabilities[decision.value], colour=style.BLUE),
                f"{decision.label_mass:.3f}",
                "calibrated" if decision.calibration is not None else "saturated" if decision.saturated else "",
            )
            for decision in self.values()
        ]
        heads = ("question", "answer", "probability", "label mass", "")
        return str(html.block(html.table(heads, rows), html.line(words.count(len(self), "question"))))


class DecisionTable(list[Decisions]):
    """The decisions about several states, in their order; a list, and a table with a row for each state."""

    def __init__(self, rows: Any = (), *, states: Any = (), index: Any = None) -> None:
        super().__init__(rows)
        self._states: list[Any] = [*states] or [None] * len(self)
        self._index = index  # of the column that the states were

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(DecisionTable, states=self._states, index=self._index), (list(self),)

    def to_pandas(self) -> DataFrame:
        """Return a DataFrame with a row for each state, indexed like the states' own column.

        A question has the columns NAME and NAME_confidence, and NAME_expected if its answers are numbers or True and
        False.
        """
        try:
            import pandas
        except ImportError:
            raise MissingExtra("pandas", "notebook") from None
        columns: dict[str, Any] = {"state": self._states}
        for name in self[0] if self else ():
            decisions = [row[name] for row in self]
            columns[name] = [decision.value for decision in decisions]
            columns[f"{name}_confidence"] = [decision.confidence for decision in decisions]
            if decisions[0].expected is not None:
                columns[f"{name}_expected"] = [decision.expected for decision in decisions]
        return pandas.DataFrame(columns, index=self._index)

    def __repr__(self) -> str:
        return f"<DecisionTable of {words.count(len(self), 'state')}>"

    def _repr_html_(self) -> str:
        names = [*self[0]] if self else []
        rows = [
            (words.shorten(str(state), 100), *(words.shorten(str(row[name].value), 40) for name in names))
            for state, row in zip(self._states[:ROWS_SHOWN], self[:ROWS_SHOWN], strict=True)
        ]
        more = f"the first {ROWS_SHOWN} are shown" if len(self) > ROWS_SHOWN else ""
        return str(html.block(html.line(words.count(len(self), "state"), more), html.table(("state", *names), rows)))


class Calibrations(dict[str, Calibration]):
    """The calibrations of several questions, by name; a dict in every respect."""

    def __reduce__(self) -> tuple[type[Calibrations], tuple[dict[str, Calibration]]]:
        return Calibrations, (dict(self),)

    def __repr__(self) -> str:
        return f"<Calibrations of {words.count(len(self), 'question')}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                name,
                one.rows,
                f"{one.scale:.2f}",
                f"{one.loss_before:.3f} → {one.loss_after:.3f}",
                f"{one.accuracy_before:.0%} → {one.accuracy_after:.0%}",
                f"{one.saturated:.0%}",
            )
            for name, one in self.items()
        ]
        return str(html.table(("question", "rows", "scale", "loss", "accuracy", "saturated"), rows))


def decision_of(
    question: Question, ids: tuple[str, ...], logprobs: list[float], prompt: int, cached: int,
    calibration: Calibration | None,
) -> Decision:  # fmt: skip
    """Return the decision that the options' log-probabilities make."""
    shares = probabilities(centred(logprobs)) if calibration is None else calibration.apply(logprobs)
    return Decision(
        ids,
        question.text,
        question.options[int(shares.argmax())].value,
        {option.value: float(share) for option, share in zip(question.options, shares, strict=True)},
        tuple(logprobs),
        prompt,
        cached,
        question.ordered,
        calibration,
    )
