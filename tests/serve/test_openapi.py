"""The OpenAPI document says what the server does: its schemas allow what is accepted, and refuse what is not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.asgi import get, post
from helpers.thorough import anyio_backend, by_default  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.serve import app as app_module
from rekindle._src.serve.app import GETS, POSTS
from rekindle._src.serve.fields import Endpoint
from rekindle._src.serve.metrics import dashboard
from rekindle.serve import app as make_app


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A named function: hypothesis parses the source of a lambda, and CPython 3.11 can fail at that on a deep stack."""
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "text", "function", "auto", "json_object", 2**63, -(2**63), 1e308]),
    _nested,
    max_leaves=6,
)  # fmt: skip
MESSAGES = [{"role": "user", "content": "Hi"}]
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
    "/abort": {"request_id": "x"},
}
UNLIKE = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize")  # in the fields that they share


@pytest.mark.anyio
async def test_every_path_and_field_is_in_it(app: Any) -> None:
    found = (await get(app, "/openapi.json")).json()
    assert set(found["paths"]) == {endpoint.path for endpoint, _, _ in POSTS} | {path for path, _, _ in GETS}
    for endpoint, _, _ in POSTS:
        body = found["paths"][endpoint.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(body["properties"]) == set(endpoint.by_name)
    assert "security" not in found


@pytest.mark.anyio
async def test_it_names_the_key_where_one_is_needed(session: Session) -> None:
    served = make_app(session, api_key="secret")
    assert (await get(served, "/openapi.json")).status == 401
    found = (await get(served, "/openapi.json", headers={"x-api-key": "secret"})).json()
    assert found["security"] == [{"bearer": []}]


def test_every_endpoint_has_a_request_here() -> None:
    assert set(RIGHT) <= {endpoint.path for endpoint, _, _ in POSTS}


@pytest.mark.anyio
@pytest.mark.parametrize(
    "endpoint",
    by_default((endpoint for endpoint, _, _ in POSTS if endpoint.path in RIGHT), lambda each: each.path in UNLIKE),
    ids=lambda e: e.path,
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_no_value_of_any_field_is_an_error_of_the_server(app: Any, endpoint: Endpoint, data: Any) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(endpoint.by_name)), max_size=3, unique=True))
    body = {**RIGHT[endpoint.path], **{name: data.draw(VALUES) for name in names}}
    for field, value in body.items():
        if field in ("n", "best_of") and isinstance(value, int | float) and value > 4:
            body[field] = 2
        if field in ("max_tokens", "max_output_tokens", "max_completion_tokens") and value is None:
            body[field] = 1
    answer = await post(app, endpoint.path, body)
    assert answer.status < 500, (body, answer.body)
    if answer.status >= 400:
        assert isinstance(answer.error["message"], str), json.dumps(answer.json())


def test_every_field_of_todays_clients_is_known() -> None:
    """Applied, refused by name or ignored: a new field of a client is decided about here."""
    openai = pytest.importorskip("openai.types", reason="needs OpenAI's client")
    anthropic = pytest.importorskip("anthropic.types", reason="needs Anthropic's client")
    tables = {endpoint.path: endpoint.by_name for endpoint, _, _ in POSTS}
    for path, params in (
        ("/v1/chat/completions", openai.chat.completion_create_params.CompletionCreateParamsBase),
        ("/v1/completions", openai.completion_create_params.CompletionCreateParamsBase),
        ("/v1/responses", openai.responses.response_create_params.ResponseCreateParamsBase),
        ("/v1/messages", anthropic.message_create_params.MessageCreateParamsBase),
        ("/v1/messages/count_tokens", anthropic.message_count_tokens_params.MessageCountTokensParams),
    ):
        assert set(params.__annotations__) - set(tables[path]) == set(), path
        assert path.endswith("count_tokens") or "stream" in tables[path]


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    from rekindle._src.serve.metrics import COUNTERS, GAUGES, HISTOGRAMS, OWN_COUNTERS

    known = {f"rekindle_{name}" for name in GAUGES}
    known |= {f"rekindle_{name}_total" for name in (*COUNTERS, *OWN_COUNTERS, "request_success")}
    known |= {f"rekindle_{name}_bucket" for name in HISTOGRAMS}
    asked = re.findall(r"rekindle_\w+", json.dumps(dashboard()["panels"]))
    assert asked and set(asked) <= known


@pytest.mark.anyio
async def test_the_document_is_written_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred requests for it took ten seconds in which others waited."""
    written, dumps = list[Any](), app_module.dumps
    monkeypatch.setattr(app_module, "dumps", lambda value: written.append(value) or dumps(value))
    served = make_app(session)
    answers = [(await get(served, "/openapi.json")).json() for _ in range(2)]
    assert answers == written * 2
