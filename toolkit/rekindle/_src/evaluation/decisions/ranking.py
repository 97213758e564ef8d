"""Ranks documents by a query: by the probability of a "yes" to the question whether a document meets it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rekindle._src.calls.prompts import from_column
from rekindle._src.core import words
from rekindle._src.core.drawable import Record
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.host import Host
from rekindle._src.evaluation.decisions.calibration import centred, probabilities
from rekindle._src.evaluation.decisions.deciding import Asking, Deciding, OptionScores, QuestionPrompt
from rekindle._src.views import html, style
from rekindle.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_DOCUMENTS = 10_000
ROWS_SHOWN = 20
# The prompt that Qwen3-Reranker was trained with; without it, its scores are nearly random.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_OPTIONS = ("yes", "no")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RankedDocument(Record):
    """One document of a ranking."""

    index: int  # of the document as it was passed
    relevance: float  # the probability of "yes" beside "no"
    document: str
    id: str  # of its request, for `session.explain`
    prompt_tokens: int
    cached_tokens: int


class Ranking(list[RankedDocument]):
    """Documents in the order of their relevance, the best one first; a list in every respect."""

    def __init__(self, documents: Any = (), *, query: str = "", trained: bool = False) -> None:
        super().__init__(documents)
        self.query: str = query
        self.trained: bool = trained  # the model is a reranker by its name; others are asked for yes or no

    def __reduce__(self) -> tuple[Any, ...]:
        return _ranking, (list(self), self.query, self.trained)

    def to_pandas(self) -> DataFrame:
        """Return a DataFrame of the documents in their order, with the columns index, relevance and document."""
        try:
            import pandas
        except ImportError:
            raise MissingExtra("pandas", "notebook") from None
        rows = [(one.index, one.relevance, one.document) for one in self]
        return pandas.DataFrame(rows, columns=["index", "relevance", "document"])

    def __repr__(self) -> str:
        best = f", the best is {words.shorten(self[0].document, 60)!r}" if self else ""
        return f"<Ranking of {words.count(len(self), 'document')}{best}>"

    def _repr_html_(self) -> str:
        rows = [
            (one.index, html.gauge(one.relevance, colour=style.BLUE), words.shorten(one.document, 120))
            for one in self[:ROWS_SHOWN]
        ]
        judge = "scores of a reranker" if self.trained else "a chat model's yes or no"
        more = f"the first {ROWS_SHOWN} are shown" if len(self) > ROWS_SHOWN else ""
        line = html.line(words.count(len(self), "document"), judge, more)
        return str(html.block(line, html.table(("place", "relevance", "document"), rows), title=self.query))


def _ranking(documents: list[RankedDocument], query: str, trained: bool) -> Ranking:
    return Ranking(documents, query=query, trained=trained)


def rerank(
    session: Any, host: Host, front: Front, query: object, documents: object, instruction: str | None, top_n: object,
    sampling: Mapping[str, Any],
) -> Deciding[Ranking]:  # fmt: skip
    """Return the call of `session.rerank`."""
    if not isinstance(query, str) or not query.strip():
        raise InvalidRequest("query", query, "is not a text, or is empty", "Pass the question as a text")
    if instruction is not None and (not isinstance(instruction, str) or not instruction.strip()):
        raise InvalidRequest("instruction", instruction, "is not a text, or is empty", "Leave it out for web searches")
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise InvalidRequest("top_n", top_n, "is not a number of documents", "Use a whole number from 1")
    texts = _documents(documents)
    head = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: "
    system = {"role": "system", "content": SYSTEM}
    asks = (QuestionPrompt([system, {"role": "user", "content": head + text}], _OPTIONS) for text in texts)
    trained = "rerank" in front.model.lower()

    def finish(answers: list[OptionScores]) -> Ranking:
        ranked = []
        for index, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            relevance = float(probabilities(centred(answer.logprobs))[0])
            ranked.append(
                RankedDocument(index, relevance, text, answer.ids[0], answer.prompt_tokens, answer.cached_tokens)
            )
        ranked.sort(key=lambda one: -one.relevance)
        return Ranking(ranked[:top_n], query=query, trained=trained)

    return Deciding(Asking(session, host, front, asks, sampling), finish, "rerank")


def _documents(documents: Any) -> list[str]:
    if isinstance(column := from_column(documents), np.ndarray):
        documents = column.tolist()
    fix = "Pass a list or a column of texts"
    if isinstance(documents, str | bytes) or not isinstance(documents, Sequence) or not documents:
        raise InvalidRequest("documents", documents, "are not a list of documents", fix)
    if len(documents) > MAX_DOCUMENTS:
        problem = f"are over {MAX_DOCUMENTS:,}"
        raise InvalidRequest("documents", f"{len(documents):,} of them", problem, "Rank them in parts")
    for place, text in enumerate(documents):
        if not isinstance(text, str) or not text.strip():
            raise InvalidRequest(f"documents[{place}]", text, "is not a text, or is empty", fix)
    return list(documents)
