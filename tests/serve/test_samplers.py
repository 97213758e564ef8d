"""llama.cpp's samplers over HTTP, by the names that its server and vLLM use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import rekindle
from helpers.asgi import post
from helpers.small import TINY
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle.serve import app

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("large_steps")]
FIELDS: dict[str, Any] = {
    "typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.5, "xtc_threshold": 0.05, "dry_multiplier": 0.8,
    "dry_base": 1.5, "dry_allowed_length": 1, "dry_penalty_last_n": 200, "dry_sequence_breakers": ["."],
    "dynatemp_range": 0.2, "dynatemp_exponent": 1.5,
}  # fmt: skip
PROMPT = "Once upon a time there was a fire. Once upon a time there was"


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with rekindle.open_sync("tiny", **TINY, drafts="none") as opened:
        yield opened


MIROSTAT = {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2}
ORDER = {"samplers": ["top_k", "temperature"], "top_k": 4}


@pytest.mark.parametrize("fields", [FIELDS, MIROSTAT, ORDER], ids=["all", "mirostat", "samplers"])
async def test_fields_are_the_options_of_the_session(session: Any, fields: dict[str, Any]) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_tokens": 12}
    expected = (await session.generate(PROMPT, **options, **fields)).text
    answer = await post(app(session), "/v1/completions", {"prompt": PROMPT, **options, **fields})
    assert answer.status == 200, answer.body
    assert answer.json()["choices"][0]["text"] == expected


@pytest.mark.parametrize("fields", [FIELDS, MIROSTAT, ORDER], ids=["all", "mirostat", "samplers"])
async def test_fields_are_those_of_a_chat_too(session: Any, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    options: dict[str, Any] = {"temperature": 1.5, "seed": 4, "max_tokens": 24, "top_p": 1.0}
    expected = await session.chat(messages, **options, **fields)
    plain = await session.chat(messages, **options)
    assert expected.token_ids != plain.token_ids, "the options change the text"
    body = {"messages": messages, **options, **fields}
    answer = await post(app(session), "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    assert answer.json()["choices"][0]["message"]["content"] == expected.content
    streamed = await post(app(session), "/v1/chat/completions", {**body, "stream": True})
    lines = [line[6:] for line in streamed.body.decode().split("\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == expected.content


async def test_neutral_values_of_other_servers_are_accepted(session: Any) -> None:
    """Clients of llama.cpp send every field."""
    neutral = {"typical_p": 1, "top_n_sigma": -1, "xtc_probability": 0, "dry_multiplier": 0, "dynatemp_range": 0,
               "mirostat": 0, "adaptive_target": -1}  # fmt: skip
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6}
    served = app(session)
    plain, same = await post(served, "/v1/completions", body), await post(served, "/v1/completions", body | neutral)
    assert same.status == 200, same.body
    assert same.json()["choices"] == plain.json()["choices"]


async def test_a_text_that_repeats_itself_ends(session: Any) -> None:
    body = {"prompt": "a", "temperature": 0, "max_tokens": 200, "stop_repeats": 3, "ignore_eos": True}
    token = session.tokenizer.encode("fire", add_special_tokens=False)[0]
    answer = await post(app(session), "/v1/completions", body | {"logit_bias": {str(token): 100}})
    choice = answer.json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repeats")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mirostat", 1), ("mirostat", 3), ("samplers", ["top_q"]), ("samplers", "top_k"), ("typical_p", 2),
        ("dry_base", 0.5), ("dry_penalty_last_n", 10_000), ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["x"] * 17), ("xtc_threshold", -1), ("stop_repeats", 1), ("until", "x"),
    ],
)  # fmt: skip
async def test_a_wrong_value_is_refused_with_its_field(session: Any, field: str, value: Any) -> None:
    answer = await post(app(session), "/v1/completions", {"prompt": "a", "max_tokens": 2, field: value})
    assert answer.status == 400, answer.body
    error = answer.json()["error"]
    assert error["param"].startswith(field) and field in error["message"]
