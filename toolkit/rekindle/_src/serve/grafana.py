"""A Grafana dashboard over the metrics of a server: `rekindle serve --grafana` prints it."""

from __future__ import annotations

from typing import Any

_TIMES = (
    ("Time to first token", "time_to_first_token_seconds"),
    ("Between tokens", "inter_token_latency_seconds"),
    ("Whole requests", "e2e_request_latency_seconds"),
    ("Waiting in the queue", "request_queue_time_seconds"),
)
_LABEL = '{model_name=~"$model_name"}'


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it. Its variables are the Prometheus data source and a model."""
    panels: list[dict[str, Any]] = [
        _panel("Tokens per second", "short", [
            (f"sum(rate(rekindle_generation_tokens_total{_LABEL}[$__rate_interval]))", "generated"),
            (f"sum(rate(rekindle_prompt_tokens_total{_LABEL}[$__rate_interval]))", "of prompts"),
        ]),
        _panel("Sequences", "short", [
            (f"rekindle_num_requests_running{_LABEL}", "running"),
            (f"rekindle_num_requests_waiting{_LABEL}", "waiting"),
        ]),
        _panel("KV pages held", "percentunit", [(f"rekindle_kv_cache_usage_perc{_LABEL}", "held by requests")]),
        _panel("Prompt tokens found in the prefix cache", "percentunit", [(
            f"sum(rate(rekindle_prefix_cache_hits_total{_LABEL}[$__rate_interval])) / "
            f"sum(rate(rekindle_prefix_cache_queries_total{_LABEL}[$__rate_interval]))", "share",
        )]),
    ]  # fmt: skip
    for title, name in _TIMES:
        panels.append(_panel(title, "s", [(_quantile(name, share), f"p{share}") for share in (50, 90, 99)]))
    panels += [
        _panel("Ends of sequences per second", "short", [(
            f"sum by (finished_reason) (rate(rekindle_request_success_total{_LABEL}[$__rate_interval]))",
            "{{finished_reason}}",
        )]),
        _panel("Responses per second", "short", [
            ("sum by (status) (rate(http_requests_total[$__rate_interval]))", "{{status}}"),
        ]),
        _panel("Preemptions and slow steps per minute", "short", [
            (f"60 * sum(rate(rekindle_num_preemptions_total{_LABEL}[$__rate_interval]))", "preemptions"),
            (f"60 * sum(rate(rekindle_slow_steps_total{_LABEL}[$__rate_interval]))", "slow steps"),
        ]),
        _panel("Resident memory", "bytes", [("process_resident_memory_bytes", "{{instance}}")]),
    ]  # fmt: skip
    for index, panel in enumerate(panels):
        panel |= {"id": index + 1, "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)}}
    source = {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}
    query = "label_values(rekindle_num_requests_running, model_name)"
    model = {
        "name": "model_name", "label": "model", "type": "query", "query": query, "definition": query, "refresh": 2,
        "includeAll": True, "multi": True, "datasource": _SOURCE, "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip
    return {
        "__inputs": [source],
        "title": "rekindle",
        "uid": "rekindle",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [model]},
        "panels": panels,
    }


_SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def _quantile(name: str, share: int) -> str:
    rate = f"rate(rekindle_{name}_bucket{_LABEL}[$__rate_interval])"
    return f"histogram_quantile({share / 100}, sum by (le) ({rate}))"


def _panel(title: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    targets = [
        {"expr": query, "legendFormat": legend, "refId": chr(ord("A") + index), "datasource": _SOURCE}
        for index, (query, legend) in enumerate(queries)
    ]
    defaults = {"defaults": {"unit": unit, "min": 0}, "overrides": []}
    return {"type": "timeseries", "title": title, "datasource": _SOURCE, "targets": targets, "fieldConfig": defaults}
