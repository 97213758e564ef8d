"""A shelf over HTTP: loading at the first request, waits that a stream tells of, clients that leave, the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import httpx
import pytest

from helpers.sessions import eventually, threads
from rekindle import Session
from rekindle._src.dispatch.threads import run_sync
from rekindle._src.session.session import client_of
from rekindle._src.shelf import keeper as keepers
from rekindle._src.shelf.keeper import Keeper
from rekindle._src.shelf.policy import ShelfLimits
from rekindle.errors import CheckpointError, OutOfMemory
from serve.conftest import chatting_session
from shelf.test_keeper import Gate

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]  # which the server runs on
BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}


class FakeCheckpoint:
    """A model of a shelf whose session is one of fakes; it sleeps in name alone."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.gate, self.progress = Gate(), "weights 1 of 2 MB"
        self.failure: Exception | None = None
        self.adapters: tuple[str, ...] = ()
        self.log: list[str] = []
        self.on_request: Callable[[], object] | None = None

    def plan(self, memory: int | None) -> int:
        return 10

    async def open(self) -> None:
        self.log.append("open")
        await self.gate.passed()
        if self.failure is not None:
            raise self.failure
        self.session = chatting_session(step_seconds=0.002)

    async def wake(self) -> None:
        self.log.append("wake")

    async def sleep(self, on_request: Callable[[], object], on_wait: Callable[[], object]) -> None:
        assert not self.live, "it is in use"
        self.log.append("sleep")

    async def close(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            self.log.append("close")
            if not session.closed:
                session.check_integrity()
            await session.aclose()

    @property
    def live(self) -> int:
        return 0 if self.session is None else client_of(self.session).host.limiter.inside

    @property
    def ended(self) -> bool:
        return self.session is not None and self.session.closed

    admitted = 0


class OnShelf:
    """What a server sees of one."""

    model = "/secret/folder/of/it"

    def __init__(self, keeper: Keeper, name: str, model: FakeCheckpoint) -> None:
        self._keeper, self.name, self._model = keeper, name, model

    closed = property(lambda self: self._keeper.closed)
    state = property(lambda self: str(self._keeper.entries[self.name].row.state))
    progress = property(lambda self: self._model.progress)
    adapters = property(lambda self: self._model.adapters)
    open_session = property(lambda self: self._model.session)

    def lease_now(self) -> Any:
        return self._keeper.lease_now(self.name)

    def wait(self) -> Any:
        return self._keeper.wait(self.name)

    async def unload_in_turn(self) -> None:
        await self._keeper.unload(self.name, stay=True)


class Served:
    """A server over three such models, of which one is loaded at a time."""

    def __init__(self) -> None:
        from rekindle.serve import Server

        self.models = {name: FakeCheckpoint() for name in "abc"}
        self.keeper = Keeper(self.models, ShelfLimits(max_loaded=1))
        shelf = {name: OnShelf(self.keeper, name, model) for name, model in self.models.items()}
        self.server = Server(shelf, api_key="key")
        run_sync(self.server.start())

    def client(self, key: str = "key") -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.server.url, headers={"authorization": f"Bearer {key}"}, timeout=60.0, trust_env=False
        )

    def line(self, name: str) -> int:
        return len(self.keeper.entries[name].line)

    def close(self) -> None:
        self.server.close()
        self.keeper.close()
        eventually(lambda: self.keeper.ended.filled)
        self.keeper.join(20.0)


@pytest.fixture
def served() -> Iterator[Served]:
    before = threads()
    made = Served()
    yield made
    made.close()
    assert not any(entry.leases or entry.line for entry in made.keeper.entries.values())
    eventually(lambda: threads() <= before)


def completion(name: str, **more: Any) -> dict[str, Any]:
    return {**BODY, "model": name, **more}


async def test_a_request_loads_its_model_and_models_say_which_are_awake(served: Served) -> None:
    async with served.client() as client:
        texts = {}
        for name in "abca":
            answer = await client.post("/v1/completions", json=completion(name))
            assert answer.status_code == 200, answer.text
            texts[name] = answer.json()["choices"][0]["text"]
        assert len({*texts.values()}) == 1, "the fakes are alike"
        assert (await client.get("/health")).status_code == 200
        for path in ("/models", "/v1/models"):
            data = (await client.get(path)).json()["data"]
            assert {entry["id"]: entry["status"]["value"] for entry in data} == {
                "a": "loaded", "b": "sleeping", "c": "sleeping",
            }  # fmt: skip
        assert served.models["a"].log == ["open", "sleep", "wake"]
        unknown = await client.post("/v1/completions", json=completion("/etc/passwd"))
        assert unknown.status_code == 404 and "a, b, c" in unknown.json()["error"]["message"]
        chat = {"model": "b", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        tokens = await client.post("/tokenize", json={"model": "c", "prompt": "Hi"})
        assert tokens.json()["count"] == 2 and "rekindle" in (await client.get("/metrics")).text


async def test_a_model_whose_session_was_closed_is_loaded_again(served: Served) -> None:
    async with served.client() as client:
        assert (await client.post("/v1/completions", json=completion("a"))).status_code == 200
        session = served.models["a"].session
        assert session is not None
        await session.aclose()
        assert (await client.post("/v1/completions", json=completion("a"))).status_code == 200
    assert served.models["a"].log == ["open", "close", "open"]


async def test_models_are_loaded_and_unloaded_by_name(served: Served) -> None:
    async with served.client() as client:
        load = await client.post("/models/load", json={"model": "b"})
        assert load.json() == {"success": True} and served.models["b"].log == ["open"]
        assert (await client.post("/models/unload", json={"model": "b"})).json() == {"success": True}
        assert served.models["b"].log == ["open", "close"]
        for name in "ab":
            await client.post("/models/load", json={"model": name})
        assert (await client.post("/models/unload", json={"all": True})).json() == {"success": True}
        states = {entry["status"]["value"] for entry in (await client.get("/models")).json()["data"]}
        assert states == {"unloaded"}
        for path, body, status in (
            ("/models/load", {"model": "/etc/passwd"}, 404),
            ("/models/load", {"path": "/etc/passwd"}, 400),
            ("/models/unload", {"model": "nothing"}, 404),
            ("/models/unload", {}, 400),
            ("/models/unload", {"model": "a", "all": True}, 400),
        ):
            assert (await client.post(path, json=body)).status_code == status, (path, body)
    async with served.client("wrong") as client:
        for path in ("/models/load", "/models/unload"):
            assert (await client.post(path, json={"model": "a"})).status_code == 401
        assert (await client.get("/models")).status_code == 401
    assert served.models["a"].log == ["open", "sleep", "close"] and not served.models["c"].log


async def test_a_stream_says_how_far_the_loading_is(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle._src.serve import exchange

    monkeypatch.setattr(exchange, "PROGRESS_SECONDS", 0.01)
    gate = served.models["a"].gate.event
    gate.clear()
    lines: list[str] = []
    body = completion("a", stream=True)
    async with served.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith(": the model is loading, weights 1 of 2 MB"):
                gate.set()
            lines.append(line)
    assert gate.is_set() and lines[-2] == "data: [DONE]" and sum(line.startswith("data: {") for line in lines) > 1


async def test_a_client_that_leaves_while_it_waits_takes_nothing_with_it(served: Served) -> None:
    gate = served.models["a"].gate.event
    gate.clear()
    async with served.client() as client, anyio.create_task_group() as group:
        answers: list[httpx.Response] = []

        async def stays() -> None:
            answers.append(await client.post("/v1/completions", json=completion("a")))

        async def leaves() -> None:
            async with served.client() as other:
                await other.post("/v1/completions", json=completion("a"))

        with anyio.CancelScope() as gone:
            async with anyio.create_task_group() as leaving:
                leaving.start_soon(leaves)
                while served.line("a") < 1:  # noqa: ASYNC110 (the server's thread decides)
                    await anyio.sleep(0.005)
                group.start_soon(stays)
                while served.line("a") < 2:  # noqa: ASYNC110
                    await anyio.sleep(0.005)
                gone.cancel()
        await anyio.to_thread.run_sync(eventually, lambda: served.line("a") == 1)
        gate.set()
    assert answers[0].status_code == 200 and served.models["a"].log == ["open"]


async def test_a_failed_loading_is_503_without_paths(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "RETRY_AFTER", 3600.0)  # no slow machine decides
    served.models["a"].failure = CheckpointError("/secret/folder has no config.json")
    async with served.client() as client:
        for stream in (False, True):
            answer = await client.post("/v1/completions", json=completion("a", stream=stream))
            assert answer.status_code == 503 and "secret" not in answer.text
            assert answer.json()["error"]["code"] == "unavailable" and answer.headers["retry-after"]
        assert served.models["a"].log == ["open"], "the second did not try again"
        assert (await client.post("/v1/completions", json=completion("b"))).status_code == 200


async def test_what_never_fits_is_503_without_retry_after(served: Served) -> None:
    served.models["a"].failure = OutOfMemory("'a' takes 30 MiB")
    async with served.client() as client:
        answer = await client.post("/v1/completions", json=completion("a"))
    assert answer.status_code == 503 and "retry-after" not in answer.headers


async def test_a_model_does_not_sleep_while_it_streams(served: Served) -> None:
    async with served.client() as client, anyio.create_task_group() as group:
        other: list[httpx.Response] = []

        async def ask() -> None:
            other.append(await client.post("/v1/completions", json=completion("b")))

        parts = []
        async with client.stream("POST", "/v1/completions", json=completion("a", stream=True, max_tokens=60)) as answer:
            async for line in answer.aiter_lines():
                if not parts:
                    group.start_soon(ask)
                parts += [json.loads(line[6:])["choices"][0]["finish_reason"]] if line.startswith("data: {") else []
        assert parts[-1] in ("stop", "length")
    assert other[0].status_code == 200
    assert served.models["a"].log == ["open", "sleep"]


async def test_the_end_while_one_is_loaded(served: Served) -> None:
    served.models["a"].gate.event.clear()  # and it never opens
    async with served.client() as client, anyio.create_task_group() as group:
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await client.post("/v1/completions", json=completion("a")))

        group.start_soon(ask)
        while not served.line("a"):  # noqa: ASYNC110
            await anyio.sleep(0.005)
        await served.server.aclose()
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "unavailable"
    assert served.line("a") == 0


async def test_a_drain_answers_the_requests_that_wait_for_their_model(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rekindle._src.serve import exchange

    monkeypatch.setattr(exchange, "PROGRESS_SECONDS", 0.01)
    gate = served.models["a"].gate.event
    gate.clear()
    lines: list[str] = []

    async def drain() -> None:
        await served.server.aclose(drain=60.0)

    body = completion("a", stream=True)
    async with (
        served.client() as client,
        anyio.create_task_group() as group,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith(": the model is loading") and not gate.is_set():
                group.start_soon(drain)
                while not served.server.closed:  # noqa: ASYNC110
                    await anyio.sleep(0.005)
                gate.set()
            lines.append(line)
    assert lines[-2] == "data: [DONE]" and not any('"error"' in line for line in lines), lines


async def test_a_waiting_request_can_be_aborted(served: Served) -> None:
    served.models["a"].gate.event.clear()
    async with served.client() as client, anyio.create_task_group() as group:
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await client.post("/v1/completions", json=completion("a", request_id="mine")))

        group.start_soon(ask)
        while not served.line("a"):  # noqa: ASYNC110
            await anyio.sleep(0.005)
        twice = await client.post("/v1/completions", json=completion("a", request_id="mine"))
        assert twice.status_code == 400 and "lives already" in twice.text, "it does not say that loading failed"
        assert (await client.post("/abort", json={"request_id": "mine"})).json() == {"aborted": ["mine"]}
    assert answers[0].status_code == 499
    served.models["a"].gate.event.set()


async def test_adapters_are_named_as_ever(served: Served) -> None:
    """An adapter that a model is opened with has its name before the model is loaded."""
    served.models["b"].adapters = ("mine",)
    async with served.client() as client:
        names = [entry["id"] for entry in (await client.get("/v1/models")).json()["data"]]
        assert names == ["a", "b", "mine", "c"]
        answer = await client.post("/v1/completions", json=completion("b:mine"))
        assert answer.status_code == 400, "these fakes have none: but the model was loaded for it"
    assert served.models["b"].log == ["open"]
