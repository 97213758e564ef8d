"""OpenTelemetry spans of requests, if the package is installed. The program configures their exporter."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.core.records import Completion

_HEADERS = ("traceparent", "tracestate")


class Tracing:
    """Records one span for each request that has ended. Without OpenTelemetry it does nothing."""

    def __init__(self) -> None:
        self._tracer: Any = None
        if importlib.util.find_spec("opentelemetry") is not None:
            from opentelemetry import trace

            self._tracer = trace.get_tracer("rekindle")

    def record(
        self, scope: Mapping[str, Any], model: str, request_id: str, groups: Sequence[Sequence[Completion]]
    ) -> None:
        """Record the completions of one HTTP request. The span joins the trace in the request's headers."""
        if self._tracer is None:
            return
        from opentelemetry import propagate, trace

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        carrier = {name: headers[name] for name in _HEADERS if name in headers}
        completions = [completion for group in groups for completion in group]
        first, total = (
            max(getattr(completion.timings, name) for completion in completions) for name in ("first_token", "total")
        )
        now = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=propagate.extract(carrier) if carrier else None,
            kind=trace.SpanKind.SERVER,
            start_time=now - int(total * 1e9),
        )
        sampling = completions[0].sampling
        span.set_attributes(
            {
                "gen_ai.system": "rekindle",
                "gen_ai.response.model": model,
                "gen_ai.request.id": request_id,
                "gen_ai.request.n": len(completions),
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.usage.prompt_tokens": sum(group[0].usage.prompt_tokens for group in groups),
                "gen_ai.usage.completion_tokens": sum(completion.usage.completion_tokens for completion in completions),
                "gen_ai.latency.time_in_queue": max(completion.timings.queued for completion in completions),
                "gen_ai.latency.time_to_first_token": first,
                "gen_ai.latency.e2e": total,
                "gen_ai.response.finish_reasons": [str(completion.finish_reason) for completion in completions],
            }
        )
        span.end(end_time=now)
