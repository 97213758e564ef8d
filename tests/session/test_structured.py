"""Structured output through the public door: objects instead of text, next to and together with every other option."""

from __future__ import annotations

import dataclasses
import gc
import json
import pickle
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers.small import TINY
from helpers.thorough import anyio_backend, by_default  # noqa: F401  the fixture
from rekindle import FinishReason, Sampling, Session
from rekindle._src.scheduling.drafting.costs import StepCosts
from rekindle.errors import InvalidRequest, RequestFailed

pytestmark = pytest.mark.usefixtures("large_steps")
pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
anyio_test = pytest.mark.anyio
PROMPT = "Tom is a boy who is six years old. As JSON:"
NEAR = "Once upon a time there was a"


@dataclasses.dataclass
class Person:
    name: str
    age: int


WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": WORD,
        "tags": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 3},
        "kind": {"enum": ["story", "poem"]},
    },
    "required": ["title", "tags", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with rekindle.open_sync("tiny", **TINY) as made:
        yield made
        made.check_integrity()


@pytest.fixture(autouse=True)
def whole(session: Session) -> Iterator[None]:
    yield
    gc.collect()
    gc.freeze()  # the next one need not look through the programs again: that took a fifth of these tests
    session.check_integrity()


@anyio_test
async def test_an_object_instead_of_text(session: Session) -> None:
    done = await session.generate(PROMPT, schema=Person, max_tokens=60, regex=None)
    assert done.finish_reason is FinishReason.GRAMMAR
    assert isinstance(done.parsed, Person) and done.parse_error is None
    assert dataclasses.asdict(done.parsed) == json.loads(done.text)
    assert done.parsed is done.parsed, "it is made once"
    again = pickle.loads(pickle.dumps(done))
    assert again.parsed == done.parsed and again.text == done.text


@anyio_test
@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"regex": "[A-Z][a-z]+ is [0-9]{1,2}\\."}, lambda text: re.fullmatch("[A-Z][a-z]+ is [0-9]{1,2}\\.", text)),
        ({"choice": ["a happy cat", "a big dog"]}, lambda text: text in ("a happy cat", "a big dog")),
        ({"grammar": 'root ::= "Tom " ("ran" | "sat") "."'}, lambda text: text in ("Tom ran.", "Tom sat.")),
        ({"schema": SCHEMA}, lambda text: json.loads(text)["kind"] in ("story", "poem")),
    ],
)
async def test_every_kind_at_temperature_one(session: Session, options: dict[str, Any], fits: Any) -> None:
    many = await session.generate(NEAR, n=6, seed=1, temperature=1.0, max_tokens=80, **options)
    for done in many:
        if done.finish_reason is not FinishReason.LENGTH:
            assert fits(done.text), done.text
            assert done.parsed is not None
            assert isinstance(done.parsed, dict if "schema" in options else str)
    assert sum(done.finish_reason is not FinishReason.LENGTH for done in many) >= 3


@anyio_test
async def test_a_text_that_was_cut_has_no_object_and_says_why(session: Session) -> None:
    done = await session.generate(PROMPT, schema=Person, max_tokens=5)
    assert (done.finish_reason, done.parsed) == (FinishReason.LENGTH, None)
    assert done.parse_error is not None and done.parse_error.reason == "max_tokens"
    assert str(done.parse_error) == "max_tokens cut the text after 5 tokens"
    assert "no object: max_tokens cut" in repr(done) and "no object: max_tokens cut" in done._repr_html_()
    done = await session.generate(PROMPT, schema=Person, max_tokens=60, stop='"age')
    assert (done.finish_reason, done.parsed) == (FinishReason.STOP, None)
    assert done.parse_error is not None and done.parse_error.reason == "stop"
    done = await session.generate(PROMPT, max_tokens=3)
    assert done.parsed is None and done.parse_error is None and done.forced == ()


@anyio_test
@pytest.mark.parametrize(
    "options", [{"schema": int, "max_tokens": 2}, {"regex": "[0-9]+", "max_tokens": 2}, {"choice": ["a", "ab", "abc"]}]
)
async def test_what_is_cut_is_not_whole_although_it_could_be(session: Session, options: dict[str, Any]) -> None:
    options = {"max_tokens": 1, "logit_bias": {22: 50.0, 67: 50.0}, **options}  # a 4 or an a
    done = await session.generate("4400 + 4400 =", ignore_eos=True, **options)
    assert (done.finish_reason, done.parsed) == (FinishReason.LENGTH, None), done
    assert done.parse_error is not None and done.parse_error.reason == "max_tokens"
    with pytest.raises(rekindle.NotParsed):
        raise done.parse_error


@anyio_test
async def test_an_object_is_closed_while_there_are_tokens(session: Session) -> None:
    done = await session.generate(PROMPT, schema=Person, max_tokens=36, temperature=1.0, seed=2, logit_bias={69: 50.0})
    assert isinstance(done.parsed, Person) and done.parse_error is None and len(done.token_ids) <= 36
    assert done.finish_reason is FinishReason.LENGTH and done.closed and "closed in time" in repr(done)
    longer = await session.generate(PROMPT, schema=Person, max_tokens=90)
    assert longer.finish_reason is FinishReason.GRAMMAR and not longer.closed


@anyio_test
async def test_an_empty_constraint_is_refused(session: Session) -> None:
    for name in ("choice", "allowed_token_ids"):
        empty: Any = {name: []}
        with pytest.raises(InvalidRequest, match="is empty") as caught:
            await session.generate(NEAR, **empty)
        assert caught.value.field == name


@anyio_test
async def test_what_does_not_validate_is_no_object(session: Session) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Even(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        number: int

        @pydantic.field_validator("number")
        @classmethod
        def _even(cls, value: int) -> int:
            raise ValueError("never even")

    done = await session.generate("Two:", schema=Even, max_tokens=30, min_p=0.0)
    if done.finish_reason is FinishReason.GRAMMAR:
        assert done.parsed is None and done.parse_error is not None
        assert done.parse_error.reason == "invalid" and "never even" in str(done.parse_error)
        assert isinstance(done.parse_error.__cause__, pydantic.ValidationError)
        assert pickle.loads(pickle.dumps(done.parse_error)).reason == "invalid"


@anyio_test
async def test_free_rows_keep_their_tokens_beside_guided_ones(session: Session) -> None:
    free: list[dict[str, Any]] = [
        {"max_tokens": 30},
        {"max_tokens": 30, "temperature": 1.0, "seed": 7},
        {"max_tokens": 30, "repetition_penalty": 1.3, "logprobs": 2},
    ]
    alone = [await session.generate(NEAR, **options) for options in free]
    guided_alone = await session.generate(PROMPT, schema=SCHEMA, max_tokens=60, temperature=1.0, seed=3)
    handles = [session.submit(PROMPT, schema=SCHEMA, max_tokens=60, temperature=1.0, seed=3)]
    handles += [session.submit(NEAR, **options) for options in free]
    results = [await handle for handle in handles]
    assert results[0].token_ids == guided_alone.token_ids
    assert [done.token_ids for done in results[1:]] == [done.token_ids for done in alone]


@anyio_test
@pytest.mark.parametrize(
    "options",
    by_default(
        [
            {"temperature": 1.0, "seed": 11},
            {"temperature": 1.0, "seed": 11, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
            {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"logit_bias": {300: 5.0, 301: -5.0}},
            {"min_tokens": 5},
            {"ignore_eos": True},
            {"logprobs": 3, "prompt_logprobs": 1},
            {"stop": ["zebra crossing"]},
            {"salt": "a"},
        ],
        3,
    ),
    ids=lambda options: next(iter(options)),
)
async def test_other_options_meet_a_schema(session: Session, options: dict[str, Any]) -> None:
    """The text follows the schema, and is the same alone, again, and alongside others."""
    sampling = Sampling(schema=SCHEMA, max_tokens=70, **options)
    alone = await session.generate(PROMPT, sampling)
    assert alone.finish_reason is FinishReason.LENGTH or json.loads(alone.text)["kind"] in ("story", "poem")
    neighbour = await session.generate(NEAR, max_tokens=25)
    handles = [session.submit(NEAR, max_tokens=25), session.submit(PROMPT, sampling), session.submit(PROMPT, sampling)]
    results = [await handle for handle in handles]
    assert results[0].token_ids == neighbour.token_ids
    assert results[1].token_ids == results[2].token_ids == alone.token_ids
    if "logprobs" in options:
        assert alone.logprobs is not None and len(alone.logprobs) == len(alone.token_ids) == len(alone.forced)


@anyio_test
async def test_combinations_that_leave_no_token_fail_that_request_with_the_reason(session: Session) -> None:
    allowed = session.tokenizer.encode("yes", add_special_tokens=False)
    firsts = [token for token in range(2048) if session.tokenizer.decode([token]) in ("y", "ye", "yes")]
    assert allowed[0] in firsts
    neighbour = session.submit(NEAR, max_tokens=20)
    barred = session.submit("Say yes:", choice=["yes"], logit_bias=dict.fromkeys(firsts, float("-inf")))
    short = session.submit("Say yes:", choice=["yes"], min_tokens=9, max_tokens=20)
    with pytest.raises(RequestFailed, match="none is left that both its grammar and logit_bias allow"):
        await barred
    with pytest.raises(RequestFailed, match="complete after"):
        await short
    assert (await neighbour).token_ids == (await session.generate(NEAR, max_tokens=20)).token_ids


@anyio_test
async def test_an_end_that_min_tokens_bars_is_said_too(session: Session) -> None:
    with pytest.raises(RequestFailed, match="min_tokens=12"):
        await session.generate("1", regex="[0-9]{1,3}", min_tokens=12, max_tokens=20)


@anyio_test
async def test_forced_tokens_are_drafted_told_and_shown(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    # Computes every draft that there is room for: on a busy machine the wait after such a step may be too long to pay.
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    before = session.stats()
    done = await session.generate(PROMPT, schema=SCHEMA, max_tokens=60)
    stats = session.stats()
    steps, drafted = stats.steps - before.steps, stats.drafted_tokens - before.drafted_tokens
    assert drafted > 0 and steps < len(done.token_ids)
    assert sum(done.forced) > 5 and len(done.forced) == len(done.token_ids)
    assert done.forced[0] and done.token_texts[0].startswith("{")
    assert f"left no choice for {sum(done.forced)} of them" in str(session.explain(done))
    assert "forced" in done._repr_html_()


@anyio_test
async def test_n_sequences_have_guides_of_their_own(session: Session) -> None:
    many = await session.generate(PROMPT, schema=Person, n=4, temperature=1.0, seed=20, max_tokens=80)
    for index, done in enumerate(many):
        single = await session.generate(PROMPT, schema=Person, temperature=1.0, seed=20 + index, max_tokens=80)
        assert done.token_ids == single.token_ids
    assert len({done.text for done in many}) > 1


@anyio_test
async def test_a_fork_goes_on_in_the_same_structure(session: Session) -> None:
    done = await session.generate(PROMPT, schema=SCHEMA, max_tokens=90)
    assert done.parsed is not None
    for at in (1, len(done.token_ids) // 2, len(done.token_ids) - 1):
        fork = await session.fork(done, at=at)
        assert fork.text and done.token_ids == (*done.token_ids[:at], *fork.token_ids)
        assert fork.parsed == done.parsed, "the object is that of the whole text"
    half = await session.fork(done, at=4, temperature=1.0, seed=5)
    again = await session.fork(half, at=2)
    assert again.parsed == half.parsed
    other = await session.fork(done, at=3, schema=None, choice=["x", "y"], max_tokens=5)
    assert other.text in ("x", "y")
    edited = await session.fork(done, at=0, edit='{"title":"sea",')
    assert edited.parsed is None or edited.parsed["title"] == "sea"
    with pytest.raises(InvalidRequest, match="does not follow the schema"):
        await session.fork(done, at=2, edit="<<<")


@anyio_test
async def test_behind_a_complete_text_only_its_end_may_come(session: Session) -> None:
    done = await session.generate(PROMPT, schema=SCHEMA, max_tokens=90)
    whole = '{"title":"sea","tags":["a"],"kind":"poem"}'
    for fork, parsed in (
        (session.fork(done, at=len(done.token_ids), max_tokens=9), done.parsed),
        (session.fork(done, at=0, edit=whole, max_tokens=9), json.loads(whole)),
        (session.fork(done, at=0, edit=whole, max_tokens=9, ignore_eos=True), json.loads(whole)),
    ):
        ended = await fork
        assert ended.text == "" and ended.finish_reason is FinishReason.EOS, ended
        assert ended.parsed == parsed
        again = await session.fork(ended, at=len(ended.token_ids), max_tokens=9)
        assert again.text == "" and again.parsed == ended.parsed


@anyio_test
async def test_errors_come_from_the_request_alone(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="oneOf") as caught:
        await session.generate("x", schema={"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]})
    assert caught.value.field == "schema"
    with pytest.raises(InvalidRequest) as caught:
        session.generate("x", schema=memoryview)
    assert caught.value.field == "schema", "a type is refused where it is passed"
    results = await session.generate(["x", "y"], regex="(", errors="return")
    assert [type(one) for one in results] == [InvalidRequest] * 2


@anyio_test
async def test_streams_and_chats(session: Session) -> None:
    text = "".join([delta.text async for delta in session.stream(PROMPT, schema=SCHEMA, max_tokens=90)])
    assert json.loads(text)["kind"] in ("story", "poem")
    reply = await session.chat([{"role": "user", "content": "Yes or no?"}], choice=["yes", "no"])
    assert reply.parsed in ("yes", "no")
    chat = session.conversation()
    assert (await chat.say("Yes or no?", choice=["yes", "no"])).parsed in ("yes", "no")


@anyio_test
async def test_cancelling_guided_requests_gives_everything_back(session: Session) -> None:
    for count in range(6):
        handle = session.submit(PROMPT, schema=SCHEMA, max_tokens=90, temperature=1.0, seed=count)
        seen = 0
        async for delta in handle:
            seen += len(delta.token_ids)
            if seen >= count * 2:
                break
        handle.cancel()
    done = await session.generate(PROMPT, schema=Person, max_tokens=60)
    assert done.parsed is not None


@anyio_test
async def test_single_steps_of_a_paused_session(session: Session) -> None:
    async with session.paused():
        handle = session.submit(PROMPT, schema={"type": "object", "properties": {"q": WORD}}, max_tokens=20)
        reports = []
        while (report := await session.step()) is not None:
            reports.append(report)
    done = await handle
    assert sum(len(report.rows) for report in reports) >= len(done.token_ids)


def test_texts_are_embedded_in_the_steps_of_guided_rows(session: Session) -> None:
    texts = [f"{NEAR} {number} " * 8 for number in range(4)]
    alone = session.generate_sync(PROMPT, schema=SCHEMA, max_tokens=60).text
    vectors = session.embed_sync(texts)
    for _ in range(100):  # until the program is ready, the texts wait while the guided rows go on
        guided = [session.submit(PROMPT, schema=SCHEMA, max_tokens=60) for _ in range(2)]
        beside = session.embed_sync(texts)
        assert [handle.result_sync().text for handle in guided] == [alone, alone]
        np.testing.assert_allclose(beside, vectors, atol=1e-5)
        if any(name.endswith(("+pooling+forward", "+pooling+gated")) for name in session.programs().steps):
            break
    assert any(program.name.endswith(("+pooling+forward", "+pooling+gated")) for program in session.programs()), (
        "no step did both"
    )
