"""OpenTelemetry spans: one for each request, in the trace that its headers name."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.asgi import post
from rekindle import Session
from rekindle.serve import app

trace = pytest.importorskip("opentelemetry.trace", reason="spans need OpenTelemetry")
pytestmark = pytest.mark.anyio


class Span:
    def __init__(self, name: str, context: Any) -> None:
        self.name, self.context, self.ended = name, context, False

    def set_attributes(self, attributes: dict[str, Any]) -> None:
        self.attributes = attributes

    def end(self, end_time: int) -> None:
        self.ended = True


class Tracer:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def start_span(self, name: str, *, context: Any, kind: Any, start_time: int) -> Span:
        self.spans.append(Span(name, context))
        return self.spans[-1]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_span_for_each_request(session: Session, streamed: bool) -> None:
    served, tracer = app(session), Tracer()
    served.state.rekindle.tracing._tracer = tracer
    header = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    body = {"prompt": "Hello", "max_tokens": 4, "n": 2, "stream": streamed}
    assert (await post(served, "/v1/completions", body, headers=header)).status == 200
    (span,) = tracer.spans
    assert span.ended and span.attributes["gen_ai.usage.completion_tokens"] == 8
    assert span.attributes["gen_ai.response.model"] == "fake" and span.attributes["gen_ai.usage.prompt_tokens"] == 5
    parent = trace.get_current_span(span.context).get_span_context()
    assert f"{parent.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
