"""The parts of a session that decide between a few answers, and rank documents by a query."""

# A str is a sequence: this overlap is meant, and the overload that is taken stands first.
# mypy: disable-error-code="overload-overlap"
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from rekindle._src.core.options import refuse_keywords, takes_keywords
from rekindle._src.core.sampling import PageOptions
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.host import Host

if TYPE_CHECKING:
    from rekindle._src.evaluation.decisions.deciding import Deciding, Kept
    from rekindle._src.evaluation.decisions.ranking import Ranking
    from rekindle._src.evaluation.decisions.results import Calibrations, Decisions, DecisionTable


class DecisionRequests:
    """The part of a session that decides."""

    _host: Host
    _front: Front

    @overload
    def decide(
        self,
        state: str | Mapping[str, object],
        questions: Mapping[str, object],
        *,
        instructions: str | None = None,
        calibrated: bool = True,
        priority: int = 0,
        **options: Unpack[PageOptions],
    ) -> Deciding[Decisions]: ...
    @overload
    def decide(
        self,
        state: Sequence[object],
        questions: Mapping[str, object],
        *,
        instructions: str | None = None,
        calibrated: bool = True,
        priority: int = 0,
        **options: Unpack[PageOptions],
    ) -> Deciding[DecisionTable]: ...
    @takes_keywords(PageOptions)
    def decide(
        self,
        state: object,
        questions: Mapping[str, object],
        *,
        instructions: str | None = None,
        calibrated: bool = True,
        priority: int = 0,
        **options: Unpack[PageOptions],
    ) -> Any:
        """Await it for the model's answers to typed questions about a state, with the probability of each answer.

            kinds = {"urgent": bool, "kind": ["bug", "question", "praise"], "stars": range(1, 6)}
            answers = await session.decide("My card was charged twice!", kinds)
            answers["urgent"].value, answers["kind"].probabilities, answers["stars"].expected

        No text is generated. A question is a name and its possible answers: bool, a list of texts, a dict of texts with
        their descriptions, a range of numbers, a Literal or an Enum; ("Is it urgent?", bool) has another wording. The
        model reads `instructions`, the state (a text, or anything that JSON can say) and one question; an option's
        probability is that of its own text as the answer, over those of all options. Options that are one token are
        read from one position, longer ones token by token, so that there may be 255 of them. The state is computed once
        for all questions.

        `label_mass` is the probability that the model answers with an option at all, and `confidence` that of the
        best option times it. After `session.calibrate`, probabilities are calibrated unless `calibrated` is False. For
        a list or a column of states, the result is a `DecisionTable` with `to_pandas()`.
        """
        from rekindle._src.evaluation.decisions.deciding import decide

        refuse_keywords(options, DecisionRequests.decide)
        sampling = {"priority": priority, **options}
        return decide(
            self, self._host, self._front, self._calibrations, state, questions, instructions, calibrated, sampling
        )

    @takes_keywords(PageOptions)
    def calibrate(
        self,
        states: Sequence[object],
        questions: Mapping[str, object],
        expected: Mapping[str, Sequence[object]],
        *,
        instructions: str | None = None,
        priority: int = 0,
        **options: Unpack[PageOptions],
    ) -> Deciding[Calibrations]:
        """Await it to calibrate the session's decisions by labelled states: `expected` has a column for each question.

            report = await session.calibrate(frame["text"], {"urgent": bool}, frame[["urgent"]])
            report["urgent"].loss_before, report["urgent"].loss_after

        For each question, a scale of the log-probabilities and a shift of each option are fitted, with a prior that
        keeps few rows from moving far; some 20 rows are enough to see an effect. The session keeps them for later calls
        of `decide` with the same question and instructions; the last calibration of a question counts. `saturated` is
        the share of rows of which the model is so sure that probabilities say little.
        """
        from rekindle._src.evaluation.decisions.deciding import calibrate

        refuse_keywords(options, DecisionRequests.calibrate)
        sampling = {"priority": priority, **options}
        return calibrate(
            self, self._host, self._front, self._calibrations, states, questions, expected, instructions, sampling
        )

    @takes_keywords(PageOptions)
    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        top_n: int | None = None,
        priority: int = 0,
        **options: Unpack[PageOptions],
    ) -> Deciding[Ranking]:
        """Await it for documents in the order of their relevance to a query, as a `Ranking`.

            ranking = await session.rerank("How do I restart it?", documents, top_n=3)
            ranking[0].index, ranking[0].relevance, ranking[0].document

        The model reads `instruction` (by default that of a web search), the query and one document, in the words that
        Qwen3-Reranker was trained with; the relevance is the probability of its "yes" beside its "no". Any chat model
        can be asked so, with less to be learned from its scores: `ranking.trained` is False then. The instruction and
        the query are computed once for all documents, which may be a column of a DataFrame.
        """
        from rekindle._src.evaluation.decisions.ranking import rerank

        refuse_keywords(options, DecisionRequests.rerank)
        sampling = {"priority": priority, **options}
        return rerank(self, self._host, self._front, query, documents, instruction, top_n, sampling)

    @property
    def _calibrations(self) -> Kept:
        kept: Kept = vars(self).setdefault("_kept_calibrations", {})
        return kept
