"""The weights' version of each token over HTTP, in whole answers and in streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import rekindle
from helpers.asgi import post
from helpers.driving import tiny_model
from helpers.small import MODEL, OPTIONS, prompt
from rekindle.serve import app

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_programs", "large_steps")]


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with rekindle.open_sync(MODEL, **OPTIONS | {"precompile": "lazy"}) as opened:
        yield opened


async def test_tokens_have_the_version_of_their_weights(session: Any) -> None:
    served = app(session)
    body = {"prompt": prompt(1, 9), "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    start = session.generate_sync(prompt(1, 9), max_tokens=1).weights_versions[0]
    for version in (start, start + 1):
        answer = await post(served, "/v1/completions", body)
        assert answer.status == 200, answer.body
        choice = answer.json()["choices"][0]
        assert len(choice["token_ids"]) == 4 and choice["weights_versions"] == [version] * 4
        chunks = (await post(served, "/v1/completions", {**body, "stream": True})).events[:-1]
        streamed = [chunk["choices"][0] for chunk in chunks]
        assert [token for one in streamed for token in one["token_ids"]] == choice["token_ids"]
        assert [number for one in streamed for number in one["weights_versions"]] == [version] * 4
        await session.swap_weights(tiny_model(seed=6))
    plain = await post(served, "/v1/completions", {**body, "return_token_ids": False})
    assert "weights_versions" not in plain.json()["choices"][0]
