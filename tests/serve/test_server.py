"""`session.serve()` over real sockets: OpenAI's own client, streams that are cut, the end of it all."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.sessions import eventually
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Server, Session
from rekindle.errors import ConfigError, SessionClosed
from serve.conftest import chatting_session, checked

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
pytestmark = pytest.mark.anyio
BODY: Any = {"prompt": "Hello", "max_tokens": 12, "temperature": 0}


@contextlib.contextmanager
def sent(server: Server, **body: Any) -> Iterator[http.client.HTTPConnection]:
    """A connection over which a request was sent."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps({**BODY, **body}), headers)
    with contextlib.closing(connection):
        yield connection


async def test_it_serves_beside_the_callers_own_requests_and_ends(session: Session) -> None:
    before = threading.active_count()
    async with await session.serve() as server:
        assert server.url == f"http://127.0.0.1:{server.port}" and "fake" in repr(server)
        assert "curl" in server._repr_html_() and "OpenAI(" in server._repr_html_()
        own = await session.generate("Hello", max_tokens=12)
        with sent(server) as connection, connection.getresponse() as response:
            text = json.load(response)["choices"][0]["text"]
        assert text == own.text
    assert server.closed
    await server.aclose()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), 1).close()
    eventually(lambda: threading.active_count() <= before + 1)


async def test_closing_the_session_closes_its_servers(session: Session) -> None:
    server = await session.serve()
    await session.aclose()
    assert server.closed
    with pytest.raises(SessionClosed):
        await session.serve()


async def test_ports_and_hosts_that_can_not_be_had(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    async with await session.serve() as server:
        with pytest.raises(ConfigError, match="port"):
            await session.serve(port=server.port)
    with pytest.raises(ConfigError, match="host"):
        await session.serve(host="no.such.host.invalid")
    with pytest.raises(ConfigError, match="port"):
        await session.serve(port=70_000)
    assert not caplog.records
    async with await session.serve(host="0.0.0.0"):
        assert "api_key" in caplog.records[-1].message


async def test_a_cut_connection_aborts(slow: Session) -> None:
    async with await slow.serve():
        server = slow._servers[-1]
        for streamed in (False, True):
            aborted = slow.stats().aborted
            with sent(server, max_tokens=400, stream=streamed) as connection:
                if streamed:
                    with connection.getresponse() as response:
                        response.read(100)
                else:
                    eventually(lambda: slow.stats().running > 0)
            eventually(lambda aborted=aborted: slow.stats().aborted > aborted and not slow.stats().live)  # type: ignore[misc]


@pytest.fixture
def stream(slow: Session) -> Iterator[Any]:
    """A server, and a stream from it that has begun."""
    server = slow.serve().result_sync()
    with sent(server, max_tokens=100, stream=True) as connection, connection.getresponse() as response:
        yield server, response
    server.close()


async def test_draining_finishes_what_runs_and_refuses_connections(stream: Any) -> None:
    server, response = stream
    await server.aclose(drain=20)
    text = response.read().decode()
    assert text.endswith("data: [DONE]\n\n") and text.count("data: ") == 101 and '"error"' not in text


async def test_closing_at_once_ends_streams_with_an_error_and_done(stream: Any) -> None:
    server, response = stream
    await server.aclose()
    text = response.read().decode()
    assert text.endswith("data: [DONE]\n\n") and '"unavailable"' in text and text.count("data: ") < 60


async def test_an_answer_that_is_cut_by_the_end_is_503_which_clients_retry(slow: Session) -> None:
    server = await slow.serve()
    with sent(server, max_tokens=400) as connection:
        eventually(lambda: slow.stats().running > 0)
        with pytest.raises(ConfigError, match="seconds"):
            await server.aclose(drain=float("inf"))
        await server.aclose()
        with connection.getresponse() as response:
            error = json.load(response)["error"]
            assert (response.status, error["code"]) == (503, "unavailable")
            assert int(response.headers["retry-after"]) >= 1


async def test_openais_own_client(session: Session) -> None:
    openai = pytest.importorskip("openai", reason="needs OpenAI's client")
    async with await session.serve(name="my-model", api_key="secret") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url + "/v1", api_key="other", max_retries=0).models.list()
        assert [model.id for model in client.models.list()] == ["my-model"]
        messages: Any = [{"role": "user", "content": "Hello"}]
        common: Any = {"model": "my-model", "temperature": 0, "max_tokens": 6}
        whole = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, n=2, **common)
        assert len(whole.choices) == 2 and whole.usage.completion_tokens == 12
        assert len(whole.choices[0].logprobs.content) == 6
        options = {"include_usage": True}
        chunks = list(client.chat.completions.create(messages=messages, stream=True, stream_options=options, **common))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content and chunks[-1].usage.completion_tokens == 6
        done = client.completions.create(prompt=["a", "b"], echo=True, logprobs=1, **common)
        assert [choice.text[0] for choice in done.choices] == ["a", "b"]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(messages=messages, **{**common, "temperature": 1e9})
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")


def test_a_session_over_fakes_is_left_whole() -> None:
    for session in checked(chatting_session()):
        server = session.serve().result_sync()
        server.close()
