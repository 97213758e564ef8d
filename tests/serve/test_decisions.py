"""/v1/decisions as OpenAI's and vLLM's clients use it, and /v1/rerank as Jina's and Cohere's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

import rekindle.serve
from helpers.asgi import post, until
from helpers.sessions import engine_of, wait_until_idle
from helpers.small import TINY
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.evaluation.decisions.reading import OptionReader
from rekindle._src.serve import exchange
from rekindle._src.serve.bodies import IN_A_THREAD
from rekindle._src.serve.decisions import input_text

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("large_steps")]
QUESTIONS = [
    {"type": "predicate", "name": "late", "instructions": "The parcel is late."},
    {"type": "choice", "instructions": "Who writes?", "choices": [
        {"value": "customer", "description": "somebody who waits"}, {"value": "driver"}, {"value": False},
    ]},
    {"type": "score", "name": "anger", "instructions": "How angry?", "levels": [
        {"label": "calm"}, {"label": "cross"}, {"label": "furious", "description": "in capitals"},
    ]},
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> Iterator[Session]:
    with rekindle.open_sync("tiny", **TINY) as made:
        yield made


@pytest.fixture
def served(tiny: Session) -> Any:
    from rekindle.serve import app

    return app(tiny)


async def test_answers_have_the_shapes_of_the_api(served: Any, tiny: Session) -> None:
    body = {"model": "tiny", "input": "Where is my parcel?", "questions": QUESTIONS, "safety_identifier": "x"}
    answer = await post(served, "/v1/decisions", body)
    assert answer.status == 200
    said = answer.json()
    late, writer, anger = said["answers"]
    decided = await tiny.decide("Where is my parcel?", {
        "late": ("The parcel is late.", bool),
        "writer": ("Who writes?", {"customer": "somebody who waits", "driver": "", "false": ""}),
        "anger": ("How angry?", {"calm": "", "cross": "", "furious": "in capitals"}),
    })  # fmt: skip
    assert late == {"type": "predicate", "name": "late", "probability": pytest.approx(decided["late"].expected)}
    assert writer["type"] == "choice" and writer["name"] is None
    assert [entry["value"] for entry in writer["probabilities"]] == ["customer", "driver", False]
    shares = [entry["probability"] for entry in writer["probabilities"]]
    assert shares == pytest.approx([*decided["writer"].probabilities.values()], abs=2e-5)
    assert writer["choice"] == writer["probabilities"][shares.index(max(shares))]["value"]
    assert writer["confidence"] == pytest.approx(decided["writer"].confidence, abs=2e-5)
    levels = anger["probabilities"]
    assert [(entry["value"], entry["label"]) for entry in levels] == [(0, "calm"), (1, "cross"), (2, "furious")]
    assert anger["score"] == pytest.approx(sum(entry["value"] * entry["probability"] for entry in levels))
    assert said["model"] == "tiny" and said["usage"]["output_tokens"] == 0
    assert said["usage"]["total_tokens"] == said["usage"]["input_tokens"] > 0
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Where is my parcel?"}]}]
    again = await post(served, "/v1/decisions", {"input": parts, "questions": QUESTIONS[:1], "cache_salt": "a"})
    assert again.json()["answers"][0]["probability"] == pytest.approx(late["probability"], abs=2e-5)


def test_messages_are_apart_by_an_empty_line() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert input_text([{"role": "user", "content": parts}, {"role": "user", "content": "c"}]) == "a\nb\n\nc"


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"questions": []}, "questions", "is empty"),
        ({"questions": [{"type": "noul", "instructions": "x"}]}, "questions[0].type", "is not known"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions", "is missing"),
        ({"questions": [{"type": "choice", "instructions": "x"}]}, "questions[0].choices", "is missing"),
        ({"questions": [{"type": "score", "instructions": "x", "levels": [{"label": "a"}]}]}, "questions[0].levels",
         "fewer than 2"),
        ({"questions": [{"type": "score", "instructions": "x", "levels": [{"label": "a"}] * 2}]}, "questions[0].levels",
         "has an entry twice"),
        ({"questions": [{"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": 3}]}]},
         "questions[0].choices[1].value", "is not a text or a boolean"),
        ({"input": ""}, "input", "has 0 characters"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input[0].role", "is not known"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].text", "is missing"),
        ({"input": "word " * 5_000}, "input", "max_model_len is 256"),
        ({"questions": [{**QUESTIONS[1], "choices": [{"value": str(n)} for n in range(250)]}] * 5}, "questions",
         "have 1,250 options together"),
        ({"priority": 2}, "priority", "means nothing under policy"),
    ],
)  # fmt: skip
async def test_errors_name_the_field(served: Any, change: dict[str, Any], param: str, said: str) -> None:
    answer = await post(served, "/v1/decisions", {"input": "x", "questions": QUESTIONS, **change})
    assert answer.status == 400, answer.json()
    assert answer.error["param"] == param and said in answer.error["message"]


async def test_documents_are_ranked(served: Any, tiny: Session) -> None:
    documents = ["A cat.", {"text": "A dog barked."}, "It rained."]
    answer = await post(served, "/v1/rerank", {"query": "Who barked?", "documents": documents})
    assert answer.status == 200
    ranking = await tiny.rerank("Who barked?", ["A cat.", "A dog barked.", "It rained."])
    said = answer.json()
    assert [one["index"] for one in said["results"]] == [one.index for one in ranking]
    scores = [one["relevance_score"] for one in said["results"]]
    assert scores == pytest.approx([one.relevance for one in ranking], abs=2e-5)
    assert said["results"][0]["document"] == {"text": ranking[0].document}
    assert said["usage"]["total_tokens"] > 0 and said["id"].startswith("rerank-")
    body = {"query": "Who?", "documents": documents, "top_n": 1, "return_documents": False, "instruction": "Find it."}
    short = (await post(served, "/v1/rerank", body)).json()["results"]
    assert len(short) == 1 and "document" not in short[0]
    for change, param in (
        ({"query": ""}, "query"), ({"documents": []}, "documents"), ({"documents": [3]}, "documents[0]"),
        ({"top_n": 0}, "top_n"), ({"documents": ["x", " "]}, "documents[1]"),
    ):  # fmt: skip
        refused = await post(served, "/v1/rerank", {"query": "q", "documents": ["d"], **change})
        assert refused.status == 400 and refused.error["param"] == param


async def test_a_client_that_leaves_aborts_its_requests(
    served: Any, tiny: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves while a step is under way that goes on only then, so none of its requests can be over before."""
    runner, began, left = engine_of(tiny).runner, threading.Event(), threading.Event()
    dispatch = runner.dispatch

    def held(plan: Any) -> Any:
        began.set()
        assert left.wait(60), "the client did not leave"
        return dispatch(plan)

    monkeypatch.setattr(runner, "dispatch", held)
    before, gone = tiny.stats().scheduler.aborted, anyio.Event()
    body = {"query": "Who?", "documents": ["a long text " * 12] * 200}
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: post(served, "/v1/rerank", body, gone=gone))
        await until(began.is_set)
        gone.set()
        await until(lambda: not served.state.rekindle.life.active)
        left.set()
    wait_until_idle(tiny)
    assert tiny.stats().scheduler.aborted > before


async def test_others_are_not_refused_while_many_documents_are_ranked(
    served: Any, tiny: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens counted as waiting until the last document was ranked, and others got 429 for as long."""
    life, runner, waiting = served.state.rekindle.life, engine_of(tiny).runner, list[int]()
    dispatch = runner.dispatch

    def noted(plan: Any) -> Any:
        waiting.append(life.queued_tokens)
        return dispatch(plan)

    monkeypatch.setattr(runner, "dispatch", noted)
    body = {"query": "Who?", "documents": [f"{number} is a text" for number in range(40)]}
    answer = await post(served, "/v1/rerank", body)
    assert answer.status == 200 and len(answer.json()["results"]) == 40
    assert waiting[0] > 0 == waiting[-1]


async def test_prompts_are_counted_with_all_that_is_in_each_of_them(served: Any) -> None:
    """A question with 255 options sends its prompt up to 255 times; a ranking repeats its instruction as often."""
    choices = [{"value": f"option {number}"} for number in range(255)]
    asked = [{"type": "choice", "instructions": "word " * 8_000, "choices": choices}] * 2
    answer = await post(served, "/v1/decisions", {"input": "x", "questions": asked})
    assert (answer.status, answer.error["param"]) == (400, "questions")
    assert "tokens of prompts, more than 4,194,304" in answer.error["message"]
    body = {"query": "Who?", "documents": ["a"] * 1_000, "instruction": "word " * 4_000}
    answer = await post(served, "/v1/rerank", body)
    assert (answer.status, answer.error["param"]) == (400, "documents")
    assert "tokens of prompts, more than 4,194,304" in answer.error["message"]


async def test_log_probabilities_of_options_are_held_as_memory(tiny: Session) -> None:
    served = rekindle.serve.app(tiny, request_memory=16 << 20)
    choices = [{"value": letter * 100_000} for letter in "ab"]
    body = {"input": "x", "questions": [{"type": "choice", "instructions": "Which?", "choices": choices}]}
    answer = await post(served, "/v1/decisions", body)
    assert answer.status == 413 and "8 MiB are the most of one client" in answer.error["message"]
    assert served.state.rekindle.ledger.held == 0


@pytest.mark.parametrize("large", ["body", "prompts"])
async def test_callers_take_turns_at_encoding_many_documents(
    served: Any, monkeypatch: pytest.MonkeyPatch, large: str
) -> None:
    """Each request began a thread of its own, which encoded megabytes: of its body, or of a query in all prompts."""
    begun, on, prompt = list[str](), threading.Event(), OptionReader.prompt

    def held(reader: OptionReader, messages: Any) -> Any:
        if messages[-1]["content"].endswith("a first one"):
            begun.append(messages[-1]["content"])
            assert on.wait(60)
        return prompt(reader, messages)

    monkeypatch.setattr(OptionReader, "prompt", held)
    turns, statuses = served.state.rekindle.turns, list[int]()
    body = {"query": "Who?", "documents": ["a first one", *["a b"] * 20]}
    if large == "body":
        body["user"] = "x" * IN_A_THREAD
    else:
        monkeypatch.setattr(exchange, "TOKENS_IN_A_TURN", 60)

    async def ask(number: int) -> None:
        statuses.append((await post(served, "/v1/rerank", body, address=f"10.0.0.{number}")).status)

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(ask, number)
        await until(lambda: len(begun) == 2 and bool(turns.waiting))
        await anyio.wait_all_tasks_blocked()
        assert len(begun) == 2
        on.set()
    assert len(begun) == 3 and statuses == [200] * 3


async def test_prompts_are_refused_as_soon_as_one_of_them_is_too_long(
    served: Any, tiny: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four tokens a character where one in four is expected: 70 kB of a query became 64 million tokens."""
    encoded = list[int]()
    encode = type(tiny.tokenizer).encode

    def noted(self: Any, text: str, **options: Any) -> Any:
        encoded.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(type(tiny.tokenizer), "encode", noted)
    query = "\U0001f600" * (tiny.config.max_model_len or 0)
    answer = await post(served, "/v1/rerank", {"query": query, "documents": ["a"] * 50})
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded", answer.body
    assert sum(length >= len(query) for length in encoded) <= 1


async def test_the_tokens_of_all_prompts_count_as_memory_of_the_request(
    served: Any, tiny: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = served.state.rekindle.ledger
    monkeypatch.setattr(ledger, "most_of_one", 40_000)
    body = {"query": "who " * 40, "documents": ["a"] * 4}
    assert (await post(served, "/v1/rerank", body)).status == 200
    refused = await post(served, "/v1/rerank", {**body, "documents": ["a"] * 200})
    assert refused.status == 413 and refused.error["code"] == "body_too_large", refused.body
    assert not ledger.held
