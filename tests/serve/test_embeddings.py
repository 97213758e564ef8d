"""/v1/embeddings as OpenAI's clients use it, over fakes. More of its fields are in test_batch_files.py."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from helpers.asgi import post
from helpers.sessions import wait_until_idle
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.serve.completions import EMBEDDINGS

pytestmark = pytest.mark.anyio


async def test_floats_and_base64(app: Any, session: Session) -> None:
    vectors = await session.embed(["ab", "cd"])
    answer = await post(app, "/v1/embeddings", {"input": ["ab", "cd"], "model": "fake"})
    assert answer.status == 200
    assert answer.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": at, "embedding": vectors[at].tolist()} for at in range(2)],
        "model": "fake",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    one = (await post(app, "/v1/embeddings", {"input": "cd", "encoding_format": "base64"})).json()["data"][0]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(one["embedding"]), "<f4"), vectors[1])


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "is missing"),
        ({"input": ""}, "input", "has no tokens"),
        ({"input": ["x", ""]}, "input", "has no tokens"),
        ({"input": [[999]]}, "input", "is not a token id of this model"),
        ({"input": "x" * 600}, "input", "is longer than max_model_len, which is 512"),
        ({"input": "x", "pooling": "max"}, "pooling", "Use one of mean, last, cls"),
        ({"input": "x", "priority": 2}, "priority", "means nothing under policy"),
        ({"input": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "is not supported"),
    ],
)
async def test_errors_name_the_field(app: Any, body: Any, param: str, said: str) -> None:
    answer = await post(app, "/v1/embeddings", body)
    assert answer.status == 400
    assert answer.error["param"] == param and said in answer.error["message"]


async def test_a_client_that_leaves_aborts_its_texts(slow: Session) -> None:
    from rekindle.serve import app

    made = app(slow)
    await post(made, "/v1/embeddings", {"input": ["a long text " * 30] * 100}, leave_after=0.1)
    assert not made.state.rekindle.life.active
    wait_until_idle(slow)
    assert slow.stats().scheduler.aborted > 0


def test_its_fields_are_described() -> None:
    schema = EMBEDDINGS.schema()
    assert schema["required"] == ["input"] and "base64" in str(schema["properties"]["encoding_format"])
