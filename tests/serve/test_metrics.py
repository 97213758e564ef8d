"""/metrics: figures of sessions and of requests, in our names and in those that dashboards for vLLM read."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.asgi import get, post
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session
from rekindle.serve import app

pytest.importorskip("prometheus_client", reason="metrics are a part of the extra `serve`")
pytestmark = pytest.mark.anyio
DASHBOARDS = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket", "request_inference_time_seconds_bucket", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "iteration_tokens_total_bucket", "iteration_tokens_total_count",
    "cache_config_info",
]  # fmt: skip


async def figures(served: Any) -> dict[str, float]:
    answer = await get(served, "/metrics")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")
    lines = [line for line in answer.body.decode().splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.parametrize(("names", "prefixes"), [("rekindle", ["rekindle_"]), ("both", ["rekindle_", "vllm:"])])
async def test_counts_and_histograms(session: Session, names: Any, prefixes: list[str]) -> None:
    served = app(session, metrics_names=names)
    for streamed in (False, True):
        body = {"prompt": "Hello", "max_tokens": 5, "n": 2, "stream": streamed}
        assert (await post(served, "/v1/completions", body)).status == 200
    await post(served, "/v1/completions", {"prompt": "x", "n": 0})
    found = await figures(served)
    for prefix in prefixes:
        label = '{model_name="fake"}'
        assert {name for name in DASHBOARDS if not any(key.startswith(prefix + name) for key in found)} == set()
        assert found[f"{prefix}generation_tokens_total{label}"] == 20
        assert found[f"{prefix}prompt_tokens_total{label}"] == 20
        assert found[f"{prefix}num_requests_running{label}"] == 0
        assert found[f'{prefix}request_success_total{{finished_reason="length",model_name="fake"}}'] == 4
        assert found[f"{prefix}time_to_first_token_seconds_count{label}"] == 4
        assert found[f"{prefix}inter_token_latency_seconds_count{label}"] == 16
        assert found[f"{prefix}request_generation_tokens_sum{label}"] == 20
        assert found[f'{prefix}request_generation_tokens_bucket{{le="5.0",model_name="fake"}}'] == 4
        assert found[f'{prefix}request_generation_tokens_bucket{{le="2.0",model_name="fake"}}'] == 0
        sizes = f"{prefix}iteration_tokens_total"
        assert found[f'{sizes}_bucket{{le="+Inf",model_name="fake"}}'] == found[f"{sizes}_count{label}"] > 5
        assert found[f'{sizes}_bucket{{le="1.0",model_name="fake"}}'] == 0, "n=2: steps have two rows"
        assert found[f"{sizes}_sum{label}"] >= 20
    assert found['http_requests_total{handler="/v1/completions",status="200"}'] == 2
    assert found['http_requests_total{handler="/v1/completions",status="400"}'] == 1
    assert any(key.startswith("vllm:") for key in found) == (names == "both")
    assert any(key.startswith("vllm:lora_requests_info{") for key in found) == (names == "both")


async def test_paths_that_clients_make_up_are_one_label(session: Session) -> None:
    served = app(session, api_key="secret")
    for number in range(20):
        await get(served, f"/v1/made-up-{number}")
        await get(served, f"/made-up-{number}", headers={"authorization": "Bearer secret"})
    text = (await get(served, "/metrics", headers={"authorization": "Bearer secret"})).body.decode()
    assert "made-up" not in text


@pytest.mark.parametrize("version", ["x", "1e400", "9" * 5_000, "\u00b2", ""])
async def test_a_version_that_is_none_gets_the_plain_text(app: Any, version: str) -> None:
    for kind in ("application/openmetrics-text", "text/plain"):
        answer = await get(app, "/metrics", headers={"accept": f"{kind}; version={version}"})
        assert answer.status == 200 and b"process_resident_memory_bytes" in answer.body


async def test_asking_does_not_hold_up_a_stream(slow: Session) -> None:
    """A session's statistics wait for the turn of its loop; the server's loop goes on meanwhile."""
    import anyio

    served = app(slow)
    answers: list[Any] = []

    async def stream() -> None:
        answers.append(await post(served, "/v1/completions", {"prompt": "x", "max_tokens": 30, "stream": True}))

    async with anyio.create_task_group() as group:
        group.start_soon(stream)
        for _ in range(10):
            assert (await get(served, "/metrics")).status == 200
    assert answers[0].events[-1] == "[DONE]"


async def test_a_closed_session_has_no_figures_and_breaks_nothing(session: Session) -> None:
    served = app(session)
    session.close()
    found = await figures(served)
    assert not any(key.startswith("rekindle_steps") for key in found)
