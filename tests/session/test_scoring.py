"""`session.score`: the log-probabilities of a plain loop, with the prompt computed once for all of its choices."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import rekindle
from helpers import checkpoints
from helpers.driving import plain_logits
from helpers.sessions import engine_of, wait_until_idle
from helpers.small import CONTEXT, MODEL, PAGE, TINY, opening, plain, prompt
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import Score, Scores, ScoreTable, Session
from rekindle._src.programs.buckets import ProgramVariant, with_variants
from rekindle.errors import InvalidRequest, MissingExtra, PromptTooLong
from workshop import reference

pytestmark = pytest.mark.usefixtures("large_steps")
anyio_test = pytest.mark.anyio
QUESTION = prompt(1, 20)  # two pages and a half


def choices() -> list[list[int]]:
    """Three of other lengths, and the one that the model would write."""
    return [prompt(2, 1), prompt(3, 3), prompt(4, 9), list(plain(QUESTION, 3))]


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    async with opening(precompile="lazy") as made:
        yield made
        wait_until_idle(made)


@pytest.fixture(scope="module")
def texts() -> Iterator[Session]:
    with rekindle.open_sync("tiny", **TINY) as made:
        yield made


def plain_logprobs(ids: list[int]) -> np.ndarray:
    """Return the log-probabilities of the plain loop before each token of `ids` but the first [n - 1, V]."""
    logits, _ = plain_logits(MODEL, ids, reference.empty_cache(MODEL, CONTEXT))
    return np.asarray(jax.nn.log_softmax(logits[:-1], axis=-1))


def check(score: Score, before: list[int], choice: list[int]) -> None:
    expected = plain_logprobs([*before, *choice])[len(before) - 1 :]
    assert score.token_ids == tuple(choice) and score.prompt_tokens == len(before)
    assert score.logprobs == pytest.approx([row[token] for row, token in zip(expected, choice, strict=True)], abs=2e-5)
    assert score.greedy == (expected.argmax(axis=-1).tolist() == choice)
    assert score.logprob == pytest.approx(sum(score.logprobs))
    assert score.per_token == pytest.approx(np.mean(score.logprobs))


def scoring(session: Session) -> dict[str, int]:
    """The steps of programs that score prompts."""
    return {name: steps for name, steps in session.programs().steps.items() if "+prompt-logprobs" in name}


@anyio_test
async def test_only_steps_with_prompts_to_score_run_in_programs_that_score(session: Session) -> None:
    await session.generate(QUESTION, max_tokens=3, logprobs=20, temperature=1.0)
    assert not any(scoring(session).values())
    first = await session.score(QUESTION, choices())
    assert any(scoring(session).values())
    compiled, steps = session.stats().compilations, sum(scoring(session).values())
    again = await session.score(QUESTION, choices())
    assert session.stats().compilations == compiled, "the first scores made what later ones need"
    assert [one.logprobs for one in again] == [one.logprobs for one in first]
    assert sum(scoring(session).values()) > steps
    await session.generate(QUESTION[1:], max_tokens=3)
    assert session.stats().compilations == compiled


def test_programs_of_other_steps_have_no_operation_for_prompts_scores(texts: Session) -> None:
    programs = engine_of(texts).runner.programs
    plain_step = next(bucket for bucket in programs.lattice.ahead if bucket.tokens)
    (scored,) = with_variants((plain_step,), ProgramVariant.PROMPT_LOGPROBS)
    lowered = {key: programs.compiler.build(key).as_text() for key in (plain_step, scored)}
    sorts = {key: text.count("stablehlo.sort") for key, text in lowered.items()}
    assert sorts == {plain_step: 0, scored: 1}, "positions that are scored are sorted"


@anyio_test
async def test_scores_are_those_of_the_plain_loop_and_the_prompt_is_computed_once(session: Session) -> None:
    call = session.score(QUESTION, choices())
    scores = await call
    for score, choice in zip(scores, choices(), strict=True):
        check(score, QUESTION, choice)
    assert scores[-1].greedy and not scores[2].greedy
    assert scores.choose() == max(scores, key=lambda one: one.logprob)
    assert scores.rank("per_token") == sorted(range(4), key=lambda place: -scores[place].per_token)
    shared = len(QUESTION) // PAGE * PAGE
    assert [score.cached_tokens for score in scores] == [0, shared, shared, shared]
    assert [session.explain(score.id).cached_tokens for score in scores] == [0, shared, shared, shared]
    computed = session.stats().scheduler.prefill_tokens
    rest = len(QUESTION) - shared
    assert computed == len(QUESTION) + 3 * rest + sum(map(len, choices()))
    assert call.usage.cached_tokens == 3 * shared and call.done
    # Warm, each choice begins with the page that holds the prompt's last token.
    again = await session.score(QUESTION, choices())
    assert [score.cached_tokens for score in again] == [shared] * 4
    for first, second in zip(scores, again, strict=True):
        assert second.logprobs == pytest.approx(first.logprobs, abs=1e-5)


@anyio_test
async def test_lists_of_prompts_beside_generation(session: Session) -> None:
    """Prompts with a common beginning, more of them than the session runs at once."""
    questions = [prompt(10 + seed, 26, shared=17) for seed in range(6)]
    own = [[prompt(20 + seed, 1 + seed), prompt(40 + seed, 2)] for seed in range(6)]
    beside = session.submit(prompt(5, 9), max_tokens=20)
    scores = await session.score(questions, own)
    assert (await beside).token_ids == plain(prompt(5, 9), 20)
    for question, choices, result in zip(questions, own, scores, strict=True):
        for score, choice in zip(result, choices, strict=True):
            check(score, question, choice)
    assert all(score.cached_tokens >= 2 * PAGE for result in scores[1:] for score in result)
    for question, result in zip(questions, await session.score(questions, own[0]), strict=True):
        check(result[0], question, own[0][0])
        check(result[1], question, own[0][1])
    assert isinstance(scores, ScoreTable) and await session.score([], own[0]) == []


@anyio_test
async def test_prompt_logprobs_begin_where_they_are_wanted(session: Session) -> None:
    """Any start, over hits, chunks and preemptions, gives the end of what scoring the whole prompt gives."""
    ids = prompt(7, 45)
    whole = (await session.generate(ids, max_tokens=0, prompt_logprobs=2)).prompt_logprobs
    assert whole is not None
    starts = [0, 1, 2, PAGE, PAGE + 1, 17, 31, 44, 45, 60]
    many = [session.submit(ids, max_tokens=8, prompt_logprobs=2, logprob_start=start) for start in starts]
    for start, handle in zip(starts, many, strict=True):
        done = await handle
        assert done.token_ids == plain(ids, 8)
        assert done.prompt_logprobs is not None
        expected = whole[max(0, start - 1) :]
        assert [entry.token_id for entry in done.prompt_logprobs] == [entry.token_id for entry in expected]
        assert [entry.top_ids for entry in done.prompt_logprobs] == [entry.top_ids for entry in expected]
        assert [entry.logprob for entry in done.prompt_logprobs] == pytest.approx(
            [entry.logprob for entry in expected], abs=1e-5
        )
        hits = min(max(0, start - 1), len(ids)) // PAGE * PAGE
        assert done.usage.cached_tokens == (hits if start < len(ids) + 1 else 5 * PAGE)


@pytest.mark.thorough
@anyio_test
async def test_all_logits_of_a_text_are_a_mapped_file(session: Session, tmp_path: Path) -> None:
    ids, last = prompt(8, 45), MODEL.config.num_layers - 1
    await session.generate(ids, max_tokens=0)
    wanted = rekindle.Capture({"logits": -1}, positions="prompt", into=tmp_path)
    done = await session.generate(ids, max_tokens=0, prompt_logprobs=0, capture=wanted)
    (file,) = (tmp_path / "00000").glob("*.safetensors")
    logits = load_file(file)[f"logits.{last}"]
    assert isinstance(done.captured["logits", last], np.memmap)
    np.testing.assert_array_equal(done.captured["logits", last], logits)
    np.testing.assert_allclose(logits, plain_logits(MODEL, ids, reference.empty_cache(MODEL, CONTEXT))[0], atol=1e-4)
    scored = np.asarray(jax.nn.log_softmax(logits[:-1], axis=-1))[np.arange(44), ids[1:]]
    assert [entry.logprob for entry in done.prompt_logprobs or ()] == pytest.approx(scored.tolist(), abs=1e-5)
    # Of the last ones alone, what lies before comes from the cache.
    end = await session.generate(ids, max_tokens=0, capture=rekindle.Capture({"logits": -1}, slice(-5, None), tmp_path))
    assert end.usage.cached_tokens == 40
    np.testing.assert_allclose(end.captured["logits", last], logits[-5:], atol=1e-4)


@pytest.mark.thorough
def test_texts_are_encoded_as_the_model_would_meet_them(texts: Session) -> None:
    scores = texts.score_sync("Once upon a", [" time", " chair"])
    assert scores.choose().text == " time" and scores[0].greedy
    encode = texts.tokenizer.encode
    assert scores[0].token_ids == tuple(encode("Once upon a time")[len(encode("Once upon a")) :])
    # A prompt that ends with a space: its last token depends on the word after it.
    spaced = texts.score_sync("Once upon a ", ["time", "chair"])
    assert spaced[0].token_ids[-len(scores[0].token_ids) :] == scores[0].token_ids
    assert spaced.choose().text == "time"
    whole = texts.generate_sync("Once upon a time", max_tokens=0, prompt_logprobs=0).prompt_logprobs or ()
    assert scores[0].logprobs == pytest.approx([one.logprob for one in whole[-len(scores[0].logprobs) :]], abs=1e-4)
    assert scores[0].per_byte == pytest.approx(scores[0].logprob / len(" time"))
    assert scores.rank(by="per_byte")[0] == 0
    assert pickle.loads(pickle.dumps(scores)) == scores
    # Long texts are encoded in a thread of their own.
    many = texts.score_sync(["Once upon a"] * 600, [" time", " chair"])
    assert len(many) == 600 and {result.choose().text for result in many} == {" time"}


@pytest.mark.parametrize(
    ("prompt_", "choices", "field"),
    [
        ("Hey", "one", "choices"),
        ("Hey", [], "choices"),
        ("Hey", ["one", ""], "choices"),
        ("Hey", [3.5], "choices"),
        ("Hey", [1, 2], "choices"),
        ("Hey", None, "choices"),
        (["Hey", "Ho"], [["a"], ["b"], ["c"]], "choices"),
        (["Hey", "Ho"], [["a"], "b"], "choices"),
        (["Hey", 3], ["a"], "prompt"),
        (7, ["a"], "prompt"),
    ],
)
def test_what_is_no_question_is_refused(texts: Session, prompt_: Any, choices: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        texts.score(prompt_, choices)
    assert caught.value.field == field


def test_columns_of_a_table_are_lists(texts: Session) -> None:
    pandas = pytest.importorskip("pandas")
    prompts, choices = ["Once upon", "There was"], [" a time", " a cat"]
    table = pandas.DataFrame({"prompt": prompts, "choice": choices}, index=["x", "y"])
    scores = texts.score_sync(table["prompt"], table["choice"])
    frame = table.join(scores.to_pandas().add_suffix("_scored"))
    assert list(frame["prompt_scored"]) == prompts and list(frame["score_scored"]) == [
        row.choose().logprob for row in scores
    ]
    assert scores.accuracy(frame["choice_scored"]) == 1.0 == scores.accuracy(frame["place_scored"])
    listed = texts.score_sync(prompts, choices)
    assert list(listed.to_pandas().index) == [0, 1]
    assert [[one.logprob for one in row] for row in scores] == [[one.logprob for one in row] for row in listed]
    assert [done.text for done in texts.generate_sync(table["prompt"], max_tokens=2)] == [
        done.text for done in texts.generate_sync(prompts, max_tokens=2)
    ]
    with pytest.raises(InvalidRequest, match="is neither text nor token ids"):
        texts.score_sync(pandas.Series(["Once upon", None]), choices)


def scored(*logprobs: float, texts: list[str] | None = None) -> Scores:
    """The scores of one prompt's choices, of a token each, whose texts are " a", " bb", " ccc" unless given."""
    names = [" a", " bb", " ccc"][: len(logprobs)] if texts is None else texts
    return Scores(
        Score(f"r{place}", text, (place,), (logprob,), greedy=False, prompt_tokens=4, cached_tokens=0)
        for place, (text, logprob) in enumerate(zip(names, logprobs, strict=True))
    )


TABLE = ScoreTable([scored(-2.0, -1.0, -3.0), scored(-1.5)], prompts=["One", "<b>Two</b>"], index=["x", "y"])


def test_scores_of_several_prompts_are_a_table() -> None:
    """A row for each prompt, by any measure; pickled, copied and shown with its prompts and its index."""
    pandas = pytest.importorskip("pandas")
    for table in (TABLE, pickle.loads(pickle.dumps(TABLE)), copy.copy(TABLE), copy.deepcopy(TABLE)):
        assert isinstance(table, ScoreTable) and table == list(TABLE)
        frame = table.to_pandas()
        assert list(frame.columns) == ["prompt", "choice", "place", "score", "margin", "scores"]
        assert list(frame.index) == ["x", "y"] and list(frame["prompt"]) == ["One", "<b>Two</b>"]
        assert list(frame["choice"]) == [" bb", " a"] and list(frame["place"]) == [1, 0]
        assert list(frame["score"]) == [-1.0, -1.5] and list(frame["scores"]) == [(-2.0, -1.0, -3.0), (-1.5,)]
        assert frame["margin"][0:1].tolist() == [1.0] and math.isnan(frame["margin"]["y"])
    by_bytes = TABLE.to_pandas(by="per_byte").loc["x"]
    assert by_bytes["scores"] == pytest.approx((-1.0, -1 / 3, -0.75)) and by_bytes["margin"] == pytest.approx(
        0.75 - 1 / 3
    )
    shown = TABLE._repr_html_()
    assert "&lt;b&gt;Two" in shown and "<b>Two" not in shown and "2 prompts" in shown
    assert repr(TABLE) == "<ScoreTable of 2 prompts>"
    long = ScoreTable([scored(-1.0)] * 50)
    assert long._repr_html_().count("-1.000") == 20 and "the first 20 are shown" in long._repr_html_()
    assert ScoreTable([scored(-1.0, texts=[""])]).to_pandas()[["prompt", "choice"]].isna().all(axis=None), "token ids"
    none = ScoreTable().to_pandas()
    assert isinstance(none, pandas.DataFrame) and len(none) == 0 and "choice" in none.columns
    with pytest.raises(InvalidRequest, match="'length'"):
        TABLE.to_pandas(by="length")  # type: ignore[arg-type]


def test_accuracy_counts_the_expected_choices() -> None:
    """Against texts or places, of lists, arrays and columns; equal texts are one choice."""
    pandas = pytest.importorskip("pandas")
    table = ScoreTable([scored(-2.0, -1.0, -3.0), scored(-1.0, -1.5), scored(-1.0, -0.5, texts=[" a", " a"])])
    texts, places = [" bb", " bb", " a"], [1, 1, 0]
    assert table.accuracy(texts) == 2 / 3, "the first of two equal texts is meant, and the second one is the best"
    assert table.accuracy(places) == 1 / 3
    assert table.accuracy([" bb", 0, np.int64(1)]) == 1.0
    for make in (tuple, np.asarray, pandas.Series, lambda values: pandas.Series(values, index=[7, 7, 0])):
        assert table.accuracy(make(texts)) == 2 / 3 and table.accuracy(make(places)) == 1 / 3
    assert table.accuracy(pandas.Series(texts, dtype="category")) == 2 / 3
    assert table.accuracy([0, 0, 0]) == table.accuracy([0, 0, 0], by="per_token") == 1 / 3
    assert ScoreTable([scored(-1.0, -1.4)]).accuracy([" bb"], by="per_byte") == 1.0, "of 2 and 3 bytes"


@pytest.mark.parametrize(
    ("expected", "field", "words"),
    [
        ([" a"], "expected", "has 1 entries for 2 prompts"),
        (" a", "expected", "is not a column"),
        (None, "expected", "is not a column"),
        (["bb", " a"], "expected[0]", "Did you mean ' bb'?"),
        ([" bb", " dd"], "expected[1]", "It has ' a'"),
        ([1, 1], "expected[1]", "is no place among 1 choices"),
        ([-1, 0], "expected[0]", "is no place among 3 choices"),
        ([True, 0], "expected[0]", "is neither text nor a place"),
        ([1.0, math.nan], "expected[0]", "is neither text nor a place"),
    ],
)
def test_an_expectation_that_is_none_is_refused(expected: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TABLE.accuracy(expected)
    assert caught.value.field == field and words in str(caught.value)
    with pytest.raises(InvalidRequest, match="at least one"):
        ScoreTable().accuracy([])


def test_without_pandas_a_table_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"rekindle\[notebook\]"):
        TABLE.to_pandas()
    assert TABLE.accuracy([1, 0]) == 1.0


def test_a_choice_beyond_the_context_fails_with_its_reason(texts: Session) -> None:
    with pytest.raises(PromptTooLong):
        texts.score_sync("Hey", [" you", " one two" * 200])
    assert texts.score_sync("Hey", [" you"])[0].logprob < 0
    with pytest.raises(InvalidRequest, match="by"):
        Scores(texts.score_sync("Hey", [" you"])).rank("length")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="texts"):
        texts.score_sync("Hey", [[5]]).rank("per_byte")


@pytest.mark.filterwarnings("ignore")  # transformers deprecates as it likes
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_the_choices_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Four-way questions with a shared beginning, in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = checkpoints.write(tmp_path / "model", checkpoints.CASES[family], seed=3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    vocab = theirs.config.vocab_size
    stem = rng.integers(3, vocab, 40).tolist()
    questions = [[*stem, *rng.integers(3, vocab, rng.integers(1, 20)).tolist()] for _ in range(24)]
    choices = [[rng.integers(3, vocab, rng.integers(1, 5)).tolist() for _ in range(4)] for _ in questions]

    def logprob(question: list[int], choice: list[int]) -> float:
        with torch.no_grad():
            logits = theirs(torch.tensor([[*question, *choice]])).logits[0].log_softmax(-1).numpy()
        return float(sum(logits[len(question) - 1 + place, token] for place, token in enumerate(choice)))

    options: dict[str, Any] = {"dtype": "float32", "max_requests": 4, "max_tokens_per_step": 64, "max_model_len": 96}
    with rekindle.open_sync(
        str(folder), precompile="lazy", page_size=8, cache_dir=str(tmp_path / "cache"), **options
    ) as opened:
        scores = opened.score_sync(questions, choices)
    for question, entries, result in zip(questions, choices, scores, strict=True):
        expected = [logprob(question, choice) for choice in entries]
        assert [score.logprob for score in result] == pytest.approx(expected, abs=1e-3)
        assert result.rank()[0] == int(np.argmax(expected))
