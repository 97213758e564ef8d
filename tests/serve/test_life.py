"""Disconnects, full queues, aborts, limits of bodies, draining: what a server meets besides valid requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from helpers.asgi import Answer, get, post, until
from helpers.sessions import CONFIG, hold_steps
from helpers.thorough import anyio_backend, by_default  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.serve.models import ServedSession
from rekindle.serve import app
from serve.conftest import chatting_session, checked

pytestmark = pytest.mark.anyio
LONG: Any = {"prompt": "Hello", "max_tokens": 400, "temperature": 0}


async def settled(session: Session) -> None:
    """Wait until nothing runs any more."""
    await until(lambda: not session.stats().live)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", by_default([1, 3]))
async def test_a_client_that_goes_away_aborts_its_request(slow: Session, streamed: bool, n: int) -> None:
    served = app(slow)
    body = {**LONG, "stream": streamed, "n": n}
    answer = await post(served, "/v1/completions", body, leave_after=0.3)
    assert not answer.complete
    await settled(slow)
    stats = slow.stats()
    assert stats.aborted == n and stats.generated_tokens < 400
    assert not served.state.rekindle.life.active


async def test_leaving_in_the_middle_of_a_stream_of_several_prompts(slow: Session) -> None:
    body = {**LONG, "prompt": ["a", "b", "c"], "stream": True}
    await post(app(slow), "/v1/completions", body, leave=lambda answer: len(answer.events) > 4)
    await settled(slow)
    assert slow.stats().aborted == 3


async def test_abort_by_id_ends_exactly_that_request_of_the_same_sender(slow: Session) -> None:
    served = app(slow, api_key=["one", "two"])
    mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    answers: dict[str, Answer] = {}

    async def ask(name: str) -> None:
        body = {**LONG, "request_id": name, "stream": name == "ab"}
        answers[name] = await post(served, "/v1/completions", body, headers=mine)

    async with anyio.create_task_group() as group:
        for name in ("a", "ab", "abc"):
            group.start_soon(ask, name)
        await until(lambda: slow.stats().generated_tokens > 9)
        again = await post(served, "/v1/completions", {**LONG, "request_id": "a"}, headers=mine)
        assert again.status == 400 and again.error["param"] == "request_id"
        stolen = await post(served, "/abort", {"request_id": "ab"}, headers=other)
        assert stolen.json() == {"aborted": []}
        ended = await post(served, "/abort", {"request_ids": ["cmpl-ab", "nobody"]}, headers=mine)
        assert ended.json() == {"aborted": ["cmpl-ab"]}
        await until(lambda: "ab" in answers)
        assert set(answers) == {"ab"}
        await post(served, "/abort", {"request_id": "a"}, headers=mine)
        await post(served, "/abort", {"request_id": "abc"}, headers=mine)
    assert answers["ab"].status == 200 and answers["ab"].events[-1] == "[DONE]"
    assert answers["ab"].events[-2]["error"]["code"] == "aborted"
    assert answers["a"].status == 499 and answers["a"].error["code"] == "aborted"


async def test_an_id_is_its_senders_own(slow: Session) -> None:
    """Whoever holds an id of others neither stops their requests nor learns of them."""
    served = app(slow, api_key=["one", "two"])
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    answers: list[Answer] = []

    async def ask(headers: dict[str, str], **fields: Any) -> None:
        answers.append(await post(served, "/v1/completions", {**LONG, **fields}, headers=headers))

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: ask(one, request_id="cmpl-1"))
        await until(lambda: slow.stats().running == 1)
        group.start_soon(lambda: ask(two, request_id="cmpl-1", max_tokens=5))
        await until(lambda: len(answers) == 1)
        assert answers[0].status == 200, answers[0].text
        assert (await post(served, "/abort", {"request_id": "cmpl-1"}, headers=two)).json() == {"aborted": []}
        ended = await post(served, "/abort", {"request_id": "cmpl-1"}, headers=one)
        assert ended.json() == {"aborted": ["cmpl-1"]}, "it looks like an answer's id, and is the request's own"
    assert [answer.status for answer in answers] == [200, 499]


class Counted(set[Any]):
    """A set that counts how often it was gone through."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return super().__iter__()


async def test_thousands_of_ids_are_aborted_in_one_pass_over_the_requests(slow: Session) -> None:
    served = app(slow)
    active = served.state.rekindle.life.active = Counted()
    answers: list[Answer] = []

    async def ask() -> None:
        answers.append(await post(served, "/v1/completions", {**LONG, "request_id": "this"}))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until(lambda: slow.stats().running == 1)
        before = active.passes
        ids = [f"no-{number}" for number in range(5_000)]
        ended = await post(served, "/abort", {"request_ids": [*ids, "this", "cmpl-this"]})
        assert ended.json() == {"aborted": ["this", "cmpl-this"]}
        assert active.passes == before + 1
    assert answers[0].status == 499


async def test_requests_that_a_proxy_traces_by_one_header_all_run(slow: Session) -> None:
    served = app(slow)
    answers: list[Answer] = []

    async def ask(tokens: int = 20) -> None:
        body = {**LONG, "max_tokens": tokens}
        answers.append(await post(served, "/v1/completions", body, headers={"x-request-id": "trace-1"}))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(ask)
    assert [answer.status for answer in answers] == [200] * 3
    assert {answer.headers["x-request-id"] for answer in answers} == {"trace-1"}
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(ask, 400)
        await until(lambda: slow.stats().running == 2)
        assert (await post(served, "/abort", {"request_id": "trace-1"})).json() == {"aborted": ["trace-1"]}
    assert [answer.status for answer in answers[3:]] == [499, 499]


@pytest.fixture
def crowded() -> Iterator[Session]:
    """Two places, both for requests that run."""
    config = dataclasses.replace(CONFIG, max_requests=1, max_queue=1)
    yield from checked(chatting_session(config, step_seconds=0.01))


async def test_a_full_queue_is_429_with_retry_after(crowded: Session) -> None:
    served = app(crowded)
    answers: list[Answer] = []

    async def ask() -> None:
        answers.append(await post(served, "/v1/completions", {**LONG, "max_tokens": 20}))

    async with anyio.create_task_group() as group:
        go_on = hold_steps(crowded)
        for _ in range(5):
            group.start_soon(ask)
        await until(lambda: len(answers) == 3)
        go_on.set()
    assert sorted(answer.status for answer in answers) == [200, 200, 429, 429, 429]
    refused = next(answer for answer in answers if answer.status == 429)
    assert refused.error["type"] == "rate_limit_error" and int(refused.headers["retry-after"]) >= 1
    assert "Send the request again" in refused.error["message"] and "session" not in refused.error["message"]
    too_many = await post(served, "/v1/completions", {**LONG, "n": 3})
    assert too_many.status == 400 and too_many.error["param"] == "n"


async def test_too_many_waiting_tokens_are_429_but_one_long_prompt_is_not(slow: Session) -> None:
    served = app(slow, max_queued_tokens=100)
    prompt = [97] * 300
    alone = await post(served, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert alone.status == 200
    statuses: list[int] = []

    async def ask() -> None:
        statuses.append((await post(served, "/v1/completions", {"prompt": prompt, "max_tokens": 2})).status)

    async with anyio.create_task_group() as group:
        go_on = hold_steps(slow)
        for _ in range(3):
            group.start_soon(ask)
        await until(lambda: len(statuses) == 2)
        go_on.set()
    assert sorted(statuses) == [200, 429, 429]
    assert served.state.rekindle.life.queued_tokens == 0


async def test_bodies_that_are_too_large_or_of_another_kind(session: Session) -> None:
    served = app(session, body_limit=1000)
    large = await post(served, "/v1/completions", {"prompt": "x" * 1000})
    assert large.status == 413 and "1000" not in large.error["message"]
    announced = await post(served, "/v1/completions", LONG, headers={"content-length": "99999"})
    assert announced.status == 413
    form = await post(served, "/v1/completions", LONG, headers={"content-type": "text/plain"})
    assert form.status == 415 and "application/json" in form.error["message"]


async def test_a_session_that_closes_and_one_that_still_opens_are_503(session: Session) -> None:
    served = app(session)
    assert (await get(served, "/health")).status == 200
    session.close()
    assert (await get(served, "/health")).status == 503
    assert (await post(served, "/v1/completions", LONG)).status == 503


class Later:
    """A model that opens when told to."""

    def __init__(self, session: ServedSession) -> None:
        self.session, self.ready = session, anyio.Event()

    def __await__(self) -> Any:
        return self._open().__await__()

    async def _open(self) -> ServedSession:
        await self.ready.wait()
        return self.session


async def test_while_a_model_is_loading_the_others_answer(session: Session) -> None:
    later = Later(session)
    served = app({"slow": later, "fast": session})
    async with served.router.lifespan_context(served):
        loading = await post(served, "/v1/completions", {**LONG, "model": "slow", "max_tokens": 2})
        assert loading.status == 503 and int(loading.headers["retry-after"]) >= 1
        assert (await get(served, "/health")).status == 503
        assert (await post(served, "/v1/completions", {**LONG, "model": "fast", "max_tokens": 2})).status == 200
        later.ready.set()
        await until(lambda: served.state.rekindle.models.trouble is None)
        assert (await get(served, "/health")).status == 200
        assert (await post(served, "/v1/completions", {**LONG, "model": "slow", "max_tokens": 2})).status == 200
    models = (await get(served, "/v1/models")).json()
    assert [one["id"] for one in models["data"]] == ["slow", "fast"]
    assert (await get(served, "/v1/models/fast")).json()["id"] == "fast"
    assert (await get(served, "/v1/models/none/of/them")).status == 404
    assert (await post(served, "/v1/completions", {**LONG, "model": "none"})).error["code"] == "model_not_found"


async def test_strict_refuses_what_it_does_not_know(session: Session) -> None:
    served = app(session, strict=True)
    refused = await post(served, "/v1/completions", {**LONG, "max_tokns": 3})
    assert refused.status == 400 and refused.error["param"] == "max_tokns"
    assert (await post(served, "/v1/completions", {**LONG, "max_tokens": 1, "user": "me"})).status == 200


async def test_an_unknown_field_is_logged_once(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    served = app(session)
    for _ in range(2):
        await post(served, "/v1/completions", {**LONG, "max_tokens": 1, "never_heard": 3})
    assert [record.message.count("never_heard") for record in caplog.records] == [1]


async def test_draining_refuses_new_requests_and_finishes_streams(slow: Session) -> None:
    served = app(slow)
    life = served.state.rekindle.life
    answers: list[Answer] = []

    async def ask() -> None:
        answers.append(await post(served, "/v1/completions", {**LONG, "max_tokens": 30, "stream": True}))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until(lambda: bool(life.active))
        life.draining = True
        refused = await post(served, "/v1/completions", LONG)
        assert refused.status == 503 and (await get(served, "/health")).status == 503
        assert refused.headers["connection"] == "close"
    assert answers[0].events[-1] == "[DONE]" and "error" not in answers[0].events[-2]


async def test_keys(session: Session) -> None:
    served = app(session, api_key=["first", "second"])
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first"}, {"x-api-key": "first!"}):
        refused = await get(served, "/v1/models", headers=headers)
        assert refused.status == 401 and refused.error["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
    for headers in ({"authorization": "Bearer first"}, {"authorization": "bearer  second"}, {"x-api-key": "second"}):
        assert (await get(served, "/v1/models", headers=headers)).status == 200
    assert (await get(served, "/health")).status == 200
    assert (await get(served, "/version")).status == 401


async def test_pages_of_other_origins_may_not_use_it_unless_told(session: Session) -> None:
    origin = {"origin": "https://elsewhere.example"}
    assert "access-control-allow-origin" not in (await get(app(session), "/health", headers=origin)).headers
    served = app(session, cors_origins=["https://elsewhere.example"])
    assert (await get(served, "/health", headers=origin)).headers["access-control-allow-origin"] == origin["origin"]


async def test_paths_that_are_not_there(session: Session) -> None:
    served = app(session)
    assert (await get(served, "/nothing")).error["code"] == "not_found"
    assert (await get(served, "/v1/completions")).status == 405


async def test_tokenize_and_back(session: Session) -> None:
    served = app(session)
    found = (await post(served, "/tokenize", {"prompt": "Hé", "return_token_strs": True})).json()
    assert found["tokens"] == [72, 195, 169] and found["count"] == 3 and found["token_strs"][0] == "H"
    assert (await post(served, "/detokenize", {"tokens": found["tokens"]})).json() == {"prompt": "Hé"}
    chat = (await post(served, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json()
    assert bytes(chat["tokens"]).decode() == "<user>x\n<assistant>"
    assert (await post(served, "/tokenize", {})).status == 400


async def test_a_stream_that_waits_sends_comments(crowded: Session) -> None:
    served = app(crowded)
    served.state.rekindle.heartbeat = 0.05
    answers: list[Answer] = []
    go_on = hold_steps(crowded)

    def look(answer: Answer) -> bool:
        if answer.body.count(b": waiting") >= 3:
            go_on.set()
        return False

    async def ask(**options: Any) -> None:
        body = {**LONG, "max_tokens": 50, "stream": True}
        answers.append(await post(served, "/v1/completions", body, **options))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until(lambda: crowded.stats().running == 1)
        group.start_soon(lambda: ask(leave=look))
    first, second = answers
    assert second.body.startswith(b": waiting\n\n") and second.body.count(b": waiting") >= 3
    assert len(second.events) == len(first.events) == 51
    assert second.body.endswith(b"data: [DONE]\n\n")
