"""`session.decide`, `calibrate` and `rerank`: an answer has the probability that `score` gives to its text."""

from __future__ import annotations

import copy
import enum
import math
import pickle
from collections.abc import Iterator
from typing import Any, Literal

import anyio
import numpy as np
import pytest

import rekindle
from helpers.bounds import Within
from helpers.sessions import eventually, wait_until_idle
from helpers.small import TINY
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Decision, Decisions, DecisionTable, Session
from rekindle._src.evaluation.decisions import calibration, reading
from rekindle._src.evaluation.decisions.questions import questions_of
from rekindle._src.evaluation.decisions.ranking import INSTRUCTION, SYSTEM
from rekindle.errors import InvalidRequest, MissingExtra, PromptTooLong

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("large_steps")]
STATE = "Tom and Lily went to the park."
KINDS = {"happy": bool, "mood": ["sad", "a very merry day", "merry"], "age": range(3, 7)}


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with rekindle.open_sync("tiny", **TINY) as made:
        yield made


async def scored(session: Session, messages: list[dict[str, str]], options: list[str]) -> list[float]:
    """Return the log-probabilities of options after the prompt of a chat, by `score` of token ids."""
    prompt = session.chat_tokens(messages)
    texts = [session.tokenizer.encode(option, add_special_tokens=False) for option in options]
    return [one.logprob for one in await session.score(prompt, texts)]


def softmax(values: list[float]) -> list[float]:
    weights = np.exp(np.asarray(values) - max(values))
    return (weights / weights.sum()).tolist()


async def test_probabilities_are_those_of_score(session: Session) -> None:
    decided = await session.decide(STATE, KINDS)
    assert [*decided] == [*KINDS]
    for question in questions_of(KINDS):
        decision = decided[question.name]
        message = {"role": "user", "content": f"{STATE}\n\n{question.prompt}"}
        logprobs = await scored(session, [message], [option.text for option in question.options])
        assert decision.logprobs == pytest.approx(logprobs, abs=2e-5)
        assert [*decision.probabilities] == [option.value for option in question.options]
        assert [*decision.probabilities.values()] == pytest.approx(softmax(logprobs), abs=2e-5)
        assert decision.label_mass == pytest.approx(sum(map(math.exp, logprobs)), abs=2e-5)
        assert decision.value == max(decision.probabilities, key=decision.probabilities.__getitem__)
        assert decision.confidence == decision.probabilities[decision.value] * decision.label_mass
    age, happy = decided["age"], decided["happy"]
    assert age.expected == pytest.approx(sum(number * share for number, share in age.probabilities.items()))
    assert happy.expected == happy.probabilities[True] and decided["mood"].expected is None
    assert decided.answers == {name: decision.value for name, decision in decided.items()}


async def test_the_state_is_computed_once_and_no_text_is_written(session: Session) -> None:
    call = session.decide(STATE * 6, KINDS, salt="once")
    decided = await call
    shared = [decision.cached_tokens for decision in decided.values()]
    assert shared[0] == 0 and min(shared[1:]) > 0
    assert session.explain(decided["age"].ids[0]).cached_tokens == shared[2]
    assert call.done and call.usage.prompt_tokens > 0 == call.usage.completion_tokens and (await call) == decided


async def test_likely_options_are_read_from_one_position(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are read by a request each; the numbers are the same."""
    every = await session.decide(STATE, {"age": range(3, 7)})
    assert len(every["age"].ids) < 4, "of four numbers, some are among the 20 most likely tokens"
    monkeypatch.setattr("rekindle._src.evaluation.decisions.deciding.found", _first_alone)
    apart = await session.decide(STATE, {"age": range(3, 7)})
    assert len(apart["age"].ids) == 4
    assert apart["age"].logprobs == pytest.approx(every["age"].logprobs, abs=2e-5)


def _first_alone(encoded: reading.OptionTokens, read: reading.OptionRead, done: Any) -> dict[int, float]:
    return {read.options[0]: math.fsum(entry.logprob for entry in done.prompt_logprobs)}


async def test_an_option_that_others_begin_with_is_its_own(session: Session) -> None:
    def ids(*tokens: int) -> np.ndarray:
        return np.asarray(tokens, np.int32)

    options = [ids(1), ids(1, 2), ids(1, 2, 3), ids(4)]
    logprobs = {0: math.log(0.5), 1: math.log(0.2), 2: math.log(0.05), 3: math.log(0.1)}
    left = [math.exp(value) for value in reading.exclusive(options, logprobs)]
    assert left == pytest.approx([0.3, 0.15, 0.05, 0.1])
    # Rounding can't make a probability negative.
    assert reading.exclusive(options[:2], {0: math.log(0.1), 1: math.log(0.1)})[0] == reading.LEAST


def test_all_requests_of_a_question_are_counted_as_memory_before_the_first_is_made() -> None:
    """An option that is not among the 20 most likely tokens has a request of its own, with the prompt once more."""
    encoded = reading.OptionTokens(np.arange(1_000, dtype=np.int32), [np.int32([7]), np.int32([8]), np.int32([9, 9])])
    reads = [*reading.first_reads(encoded), *reading.later_reads(encoded, {0: -1.0, 2: -1.0})]
    kept = encoded.before.nbytes + sum(one.nbytes for one in (*encoded.options, *(read.tokens for read in reads)))
    assert len(reads) == 3 and kept <= reading.token_bytes(encoded) <= 1.1 * kept


def test_what_options_begin_with_is_found_in_linear_time(within: Within) -> None:
    """An option of 31,000 tokens held a server and all of its streams for 1.6 s, and a request may have a hundred."""
    drawn = np.random.default_rng(0)
    for _ in range(200):
        options = [drawn.integers(0, 2, drawn.integers(1, 6)).astype(np.int32) for _ in range(8)]
        texts = [tuple(ids.tolist()) for ids in options]
        places = {text: place for place, text in enumerate(texts)}
        begins = [[places[text[:size]] for size in range(len(text)) if text[:size] in places] for text in texts]
        assert reading.beginnings(options) == [known[-1] if known else None for known in begins]
    long = np.arange(1 << 18, dtype=np.int32)
    with within(2.0):
        assert reading.exclusive([long, long[:-1], long[1:]], {0: -1.0, 1: -0.5, 2: -9.0})[0] == -1.0


async def test_tokens_of_an_option_come_without_likely_ones(session: Session) -> None:
    """They took 1.7 kB each, and a question may have as many tokens of options as the context."""
    call = session.decide(STATE, {"mood": ["a very merry day", "a sad day of rain"]})
    await call
    assert len(call._asking.handles) == 2
    for handle in call._asking.handles:
        entries = handle.completion().prompt_logprobs
        assert entries is not None and len(entries) > 1 and not any(entry.top_ids for entry in entries)


async def test_a_column_of_states_is_a_table(session: Session) -> None:
    pandas = pytest.importorskip("pandas")
    column = pandas.Series([STATE, "The dog barked.", "It rained."], index=[3, 5, 8])
    table = await session.decide(column, {"happy": bool, "mood": ["sad", "merry"]})
    assert isinstance(table, DecisionTable) and len(table) == 3
    alone = await session.decide("The dog barked.", {"happy": bool})
    assert table[1]["happy"].logprobs == pytest.approx(alone["happy"].logprobs, abs=2e-5)
    frame = table.to_pandas()
    assert [*frame.index] == [3, 5, 8]
    assert [*frame.columns] == ["state", "happy", "happy_confidence", "happy_expected", "mood", "mood_confidence"]
    assert frame["mood"].tolist() == [row["mood"].value for row in table]


async def test_a_state_may_be_json_and_options_of_any_kind(session: Session) -> None:
    kinds = {
        "colour": Colour,
        "size": Literal["small", 2],
        "animal": {"dog": "it barks", "cat": "it does not"},
        "cold": ("Was it cold?", bool),
    }
    decided = await session.decide({"who": "Tom", "where": ["park"]}, kinds, instructions="You are careful.")
    assert decided["colour"].value in Colour and decided["size"].value in ("small", 2)
    assert decided["cold"].question == "Was it cold?"
    question = questions_of(kinds)[2]
    assert "dog: it barks" in question.prompt
    content = f'{{"who": "Tom", "where": ["park"]}}\n\n{question.prompt}'
    messages = [{"role": "system", "content": "You are careful."}, {"role": "user", "content": content}]
    assert decided["animal"].logprobs == pytest.approx(await scored(session, messages, ["dog", "cat"]), abs=2e-5)


@pytest.mark.parametrize(
    ("state", "questions", "field", "said"),
    [
        ("", {"a": bool}, "state", "is empty"),
        (["x", ""], {"a": bool}, "state[1]", "is empty"),
        ({"x": {1}}, {"a": bool}, "state", "neither text nor JSON"),
        ("x", {}, "questions", "are not questions by name"),
        ("x", [bool], "questions", "are not questions by name"),
        ("x", {3: bool}, "questions", "is not a name"),
        ("x", {"a": int}, "questions['a']", "is no kind of question"),
        ("x", {"a": "yes"}, "questions['a']", "is no kind of question"),
        ("x", {"a": ["one"]}, "questions['a']", "has 1 option"),
        ("x", {"a": ["one", "one"]}, "questions['a']", "is there twice"),
        ("x", {"a": ["one", " two"]}, "questions['a']", "is no option"),
        ("x", {"a": [str(n) for n in range(256)]}, "questions['a']", "has 256 options"),
        ("x", {"a": range(300)}, "questions['a']", "too few or too many numbers"),
        ("x", {"a": range(10**20)}, "questions['a']", "too few or too many numbers"),
        ("x", {"a": [["b"], ["c"]]}, "questions['a']", "can't be a key"),
        ("x", {"a": [True, 1]}, "questions['a']", "are equal in Python"),
        ("x", {"a": ("", bool)}, "questions['a']", "has an empty question"),
        ("x", {"a": ["y" * (1 << 20), "z"]}, "questions['a']", "characters with its options"),
        ("x", {str(n): bool for n in range(201)}, "questions", "are over 200"),
    ],
)
async def test_errors_name_the_field(session: Session, state: Any, questions: Any, field: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as raised:
        await session.decide(state, questions)
    assert raised.value.field == field


async def test_other_errors_are_those_of_requests(session: Session) -> None:
    with pytest.raises(PromptTooLong):
        await session.decide("word " * 5_000, {"a": bool})
    with pytest.raises(InvalidRequest, match="adapter"):
        await session.decide("x", {"a": bool}, adapter="absent")
    with pytest.raises(InvalidRequest, match="temperature"):
        session.decide("x", {"a": bool}, temperature=1)  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="instructions"):
        session.decide("x", {"a": bool}, instructions="")


async def test_cancelling_aborts_the_requests(session: Session) -> None:
    call = session.decide([STATE] * 8, KINDS)
    call.cancel()
    for _ in range(2):
        with pytest.raises(rekindle.RequestAborted):
            await call
    assert call.status == "aborted"
    before = session.stats().scheduler.aborted
    call = session.decide([f"{STATE} {number}" for number in range(64)], KINDS)

    async def aborted() -> None:
        with pytest.raises(rekindle.RequestAborted):
            await call

    async with anyio.create_task_group() as group:
        group.start_soon(aborted)
        await anyio.to_thread.run_sync(eventually, lambda: call.usage.prompt_tokens > 0)
        call.cancel()
    await anyio.to_thread.run_sync(wait_until_idle, session)
    assert session.stats().scheduler.aborted > before


async def test_a_calibration_is_kept_and_is_part_of_the_answer(session: Session) -> None:
    questions = {"wet": ("Is it wet?", bool)}
    states = [f"{weather} on day {day}." for day in range(6) for weather in ("It rained", "The sun shone")]
    raw = await session.decide(states, questions)
    right = [True, False] * 6
    report = await session.calibrate(states, questions, {"wet": right})
    fitted = report["wet"]
    assert fitted.rows == 12 and fitted.loss_after < fitted.loss_before and fitted.scale >= 0
    decided = await session.decide(states, questions)
    assert decided[0]["wet"].calibration == fitted
    losses = [-math.log(row["wet"].probabilities[value]) for row, value in zip(decided, right, strict=True)]
    assert np.mean(losses) == pytest.approx(fitted.loss_after, abs=1e-4)
    assert decided[0]["wet"].logprobs == pytest.approx(raw[0]["wet"].logprobs, abs=2e-5)
    plain = await session.decide(states[0], questions, calibrated=False)
    assert plain["wet"].calibration is None
    text = (await session.decide(np.str_(states[0]), questions))["wet"]
    assert text.calibration == fitted, "a string of NumPy's is one state"
    other = await session.decide(states[0], {"wet": bool})
    assert other["wet"].calibration is None, "another wording is another question"
    for expected, said in (
        ({"dry": right}, "has no column"),
        ({"wet": right[1:]}, "as many"),
        ({"wet": ["x"] * 12}, "no option"),
        ({"wet": [["x"]] * 12}, "no option"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            session.calibrate(states, questions, expected)
    with pytest.raises(InvalidRequest, match="at least 2 states"):
        session.calibrate(["x"], questions, {"wet": [True]})


def test_a_fit_finds_the_scale_of_a_model_that_is_too_sure() -> None:
    draw = np.random.default_rng(0)
    scores = draw.normal(size=(4_000, 3))
    places = [int(draw.choice(3, p=row)) for row in calibration.probabilities(scores)]
    fitted = calibration.fit((4.0 * scores).tolist(), places)
    assert fitted.scale == pytest.approx(0.25, abs=0.02) and np.abs(fitted.shifts).max() < 0.1
    assert fitted.loss_after < fitted.loss_before
    turned = calibration.fit((-scores).tolist(), places)
    assert turned.scale == 0.0, "a model that is wrong more often than right is not believed the other way round"
    sure = calibration.fit([[0.0, -50.0]] * 3 + [[-50.0, 0.0]], [0, 0, 0, 1])
    assert sure.saturated == 1.0 and sure.accuracy_before == 1.0


async def test_documents_are_ranked_by_yes_beside_no(session: Session) -> None:
    documents = ["The cat sat.", "A dog barked.", "Tom ate an apple."]
    ranking = await session.rerank("Who ate?", documents)
    assert sorted(one.index for one in ranking) == [0, 1, 2] and not ranking.trained
    for one in ranking:
        content = f"<Instruct>: {INSTRUCTION}\n<Query>: Who ate?\n<Document>: {documents[one.index]}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
        logprobs = await scored(session, messages, ["yes", "no"])
        assert one.relevance == pytest.approx(softmax(logprobs)[0], abs=2e-5)
        assert one.document == documents[one.index]
    assert [one.relevance for one in ranking] == sorted((one.relevance for one in ranking), reverse=True)
    assert min(one.cached_tokens for one in sorted(ranking, key=lambda one: one.cached_tokens)[1:]) > 0
    best = await session.rerank("Who ate?", documents, top_n=1, instruction="Find who ate.")
    assert len(best) == 1
    assert [*ranking.to_pandas().columns] == ["index", "relevance", "document"]
    for options, field in (
        ({"query": ""}, "query"), ({"documents": "x"}, "documents"), ({"documents": []}, "documents"),
        ({"documents": ["x", 3]}, "documents[1]"), ({"top_n": 0}, "top_n"), ({"instruction": ""}, "instruction"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as raised:
            session.rerank(**{"query": "q", "documents": ["d"], **options})
        assert raised.value.field == field


async def test_a_reranker_gets_the_prompt_that_it_was_trained_with() -> None:
    """Qwen3's template without reasoning writes what Qwen3-Reranker's model card does."""
    from rekindle._src.text.chat import ChatTemplate

    template = (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
        "{%- endif %}{%- endif %}"
    )

    class Model:
        chat, model = ChatTemplate({"default": template}), "Qwen3-Reranker-0.6B"

    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "<Instruct>: x"}]
    front: Any = Model()
    text, is_chat = reading.OptionReader(front, bool).prompt(messages)
    assert is_chat and text == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: x<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    opened = template.replace("enable_thinking is defined and enable_thinking is false", "true").replace(
        "<think>\\n\\n</think>\\n\\n", "<think>\\n"
    )
    front.chat = ChatTemplate({"default": opened + "{%- if false %}{{- '</think>' }}{%- endif %}"})
    assert reading.OptionReader(front, bool).prompt(messages)[0].endswith("<think>\n</think>\n\n")


async def test_results_are_shown_and_pickled(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    table = await session.decide([STATE, "It rained."], KINDS)
    ranking = await session.rerank("Who?", ["Tom", "Lily"])
    report = await session.calibrate([STATE, "It rained."], {"a": bool}, {"a": [True, False]})
    for value in (table, table[0], table[0]["age"], ranking, report, report["a"]):
        again = pickle.loads(pickle.dumps(value))
        assert again == value == copy.copy(value) and type(again) is type(value)
        assert repr(value) and "<table" in value._repr_html_()
    assert repr(ranking).startswith("<Ranking of 2 documents, the best is")
    assert isinstance(table[0], Decisions) and isinstance(table[0]["age"], Decision)
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    for made in (table, ranking):
        with pytest.raises(MissingExtra):
            made.to_pandas()
