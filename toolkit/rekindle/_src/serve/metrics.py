"""Reports about requests to a server: Prometheus' metrics with a Grafana dashboard, and OpenTelemetry's spans.

`/metrics` has counts and histograms of requests, and the figures of each session at scrape time. `rekindle serve
--grafana` prints the dashboard. The program that serves configures the exporter of spans.
"""

from __future__ import annotations

import bisect
import importlib.util
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from rekindle._src.core.figures import FIGURES
from rekindle._src.core.records import Completion, FinishReason, TextDelta
from rekindle._src.serve.ledger import REQUEST_MEMORY, ByteLedger
from rekindle._src.serve.life import Life
from rekindle._src.serve.models import Models
from rekindle.errors import MissingExtra, SessionClosed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Names = Literal["rekindle", "vllm", "both"]
_PREFIXES: dict[str, tuple[str, ...]] = {
    "rekindle": ("rekindle_",), "vllm": ("vllm:",), "both": ("rekindle_", "vllm:"),
}  # fmt: skip
_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_SIZES = tuple(1 << power for power in range(15))
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
FINISHED = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.GRAMMAR: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.FAILED: "error",
}


HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {  # help and buckets
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.", _SHORT),
    "inter_token_latency_seconds": ("From one token to the next.", _BETWEEN),
    "e2e_request_latency_seconds": ("From the arrival of a request to its end.", _LONG),
    "request_queue_time_seconds": ("In which a request waited.", _LONG),
    "request_prefill_time_seconds": ("From a request's admission to its first token.", _LONG),
    "request_decode_time_seconds": ("From a request's first token to its last.", _LONG),
    "request_inference_time_seconds": ("From a request's admission to its end.", _LONG),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens that a sequence generated.", _TOKENS),
}
GAUGES: dict[str, tuple[str, Callable[[Any], float]]] = {  # from session.stats()
    **{entry.gauge: (entry.words, attrgetter(entry.name)) for entry in FIGURES.values() if entry.gauge},
    "num_requests_waiting": ("Sequences that wait.", lambda s: s.waiting + s.waiting_for_a_place),
    "kv_cache_usage_perc": ("Share of the KV pages that requests hold; 1 is all.", lambda s: _share(s)),
}


def _counters(*, own: bool) -> dict[str, tuple[str, Callable[[Any], float]]]:
    entries = [entry for entry in FIGURES.values() if entry.own is own]
    return {name: (entry.words, attrgetter(entry.name)) for entry in entries for name in entry.counters}


COUNTERS = _counters(own=False)
OWN_COUNTERS: dict[str, tuple[str, Callable[[Any], float]]] = {  # rekindle's alone
    **_counters(own=True),
    "slow_steps": ("Steps that took longer than step_timeout.", attrgetter("slow_steps")),
}
_UNEVEN = "Requests sent to the replica that got most, in proportion to the mean."
_COMPUTED = "Times that the pages of a prompt could not be taken and were computed."
FLEET_GAUGES: dict[str, tuple[str, Callable[[Any], float]]] = {  # where a fleet is served
    "replicas": ("Processes that run the model.", lambda s: len(s.replicas)),
    "replicas_ready": ("Of them, those that take requests.", attrgetter("ready")),
    "replicas_imbalance": (_UNEVEN, attrgetter("imbalance")),
}
FLEET_COUNTERS: dict[str, tuple[str, Callable[[Any], float]]] = {
    "replicas_lost": ("Processes that died or hung.", attrgetter("lost")),
    "requests_moved": ("Sequences that went on in another replica.", attrgetter("moved")),
    "requests_handed_over": ("Sequences whose prompt one replica computed for another.", attrgetter("handed_over")),
    "pages_pulled": ("Pages that replicas took from each other.", attrgetter("pulled_pages")),
    "pulls_failed": (_COMPUTED, attrgetter("failed_pulls")),
}

_HEADERS = ("traceparent", "tracestate")
_TIMES = (
    ("Time to first token", "time_to_first_token_seconds"),
    ("Between tokens", "inter_token_latency_seconds"),
    ("Whole requests", "e2e_request_latency_seconds"),
    ("Waiting in the queue", "request_queue_time_seconds"),
)
_LABEL = '{model_name=~"$model_name"}'
_SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def _share(stats: Any) -> float:
    return stats.pages_held / stats.pages_total if stats.pages_total else 0.0


def _cumulative(step_sizes: Mapping[int, int]) -> list[tuple[str, float]]:
    """Return pairs of an upper bound and the number of steps with at most that many tokens."""
    pairs = [(str(float(size)), float(sum(n for tokens, n in step_sizes.items() if tokens <= size))) for size in _SIZES]
    return [*pairs, ("+Inf", float(sum(step_sizes.values())))]


class Histogram:
    """Counts in buckets; a bisection and two additions for each value."""

    __slots__ = ("buckets", "counts", "sum")

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.buckets, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Return pairs of an upper bound and the number of values up to it, as Prometheus wants them."""
        total, pairs = 0, []
        for bound, count in zip((*map(float, self.buckets), float("inf")), self.counts, strict=True):
            total += count
            pairs.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return pairs


class Metrics:
    """Records requests and responses on the server's loop; `text` may be called in any thread."""

    def __init__(self, models: Models, life: Life, names: Names = "rekindle", ledger: ByteLedger | None = None) -> None:
        self._models, self._life, self._prefixes = models, life, _PREFIXES[names]
        self._ledger = ledger or ByteLedger(REQUEST_MEMORY)
        self._http: Counter[tuple[str, int]] = Counter()
        self._ended: Counter[tuple[str, str]] = Counter()
        self._histograms: defaultdict[str, dict[str, Histogram]] = defaultdict(
            lambda: {name: Histogram(buckets) for name, (_, buckets) in HISTOGRAMS.items()}
        )
        self._registry: CollectorRegistry | None = None

    # Recording.

    def http(self, path: str, status: int) -> None:
        self._http[path, status] += 1

    def clock(self, model: str) -> Callable[[TextDelta], object]:
        """Return a function to call with each delta of one stream; it measures the time between tokens."""
        between = self._histograms[model]["inter_token_latency_seconds"]
        last: dict[int, float] = {}

        def take(delta: TextDelta) -> None:
            tokens = len(delta.token_ids)
            if not tokens:
                return
            now = time.perf_counter()
            previous = last.get(delta.index)
            last[delta.index] = now
            if previous is not None:
                between.observe((now - previous) / tokens, tokens)

        return take

    def record(self, model: str, completions: Sequence[Completion], *, streamed: bool) -> None:
        histograms = self._histograms[model]
        for completion in completions:
            self._ended[model, FINISHED[completion.finish_reason]] += 1
            times, tokens = completion.timings, len(completion.token_ids)
            histograms["request_prompt_tokens"].observe(completion.usage.prompt_tokens)
            histograms["request_generation_tokens"].observe(tokens)
            histograms["e2e_request_latency_seconds"].observe(times.total)
            histograms["request_queue_time_seconds"].observe(times.queued)
            histograms["request_inference_time_seconds"].observe(times.total - times.queued)
            if tokens:
                histograms["time_to_first_token_seconds"].observe(times.first_token)
                histograms["request_prefill_time_seconds"].observe(times.first_token - times.queued)
                histograms["request_decode_time_seconds"].observe(times.total - times.first_token)
            if tokens > 1 and not streamed:
                mean = (times.total - times.first_token) / (tokens - 1)
                histograms["inter_token_latency_seconds"].observe(mean, tokens - 1)

    # Exposition.

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition and its content type. This reads the sessions' figures and blocks the thread."""
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector
            from prometheus_client.exposition import choose_encoder
        except ImportError as error:
            raise MissingExtra("prometheus_client", "serve") from error
        if self._registry is None:
            self._registry = CollectorRegistry(auto_describe=False)
            ProcessCollector(registry=self._registry)
            self._registry.register(self)  # type: ignore[arg-type]
        try:
            encode, kind = choose_encoder(accept)
        except Exception:  # the library reads versions that are none with errors of any kind
            encode, kind = choose_encoder("")
        return encode(self._registry), kind

    def collect(self) -> Iterator[Any]:
        """Yield all metrics, as prometheus_client wants them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures = self._figures()
        for prefix in self._prefixes:
            yield from self._of_sessions(prefix, figures)
            yield from self._of_requests(prefix)
        waiting = GaugeMetricFamily("rekindle_queued_prompt_tokens", "Prompt tokens that wait, about.")
        waiting.add_metric([], self._life.queued_tokens)
        yield waiting
        memory = GaugeMetricFamily(
            "rekindle_request_bytes", "Bytes of requests: arriving, parsed and of their pictures."
        )
        memory.add_metric([], self._ledger.held)
        yield memory
        responses = CounterMetricFamily("http_requests", "Responses by path and status.", labels=["handler", "status"])
        for (path, status), count in sorted(self._http.items()):
            responses.add_metric([path, str(status)], count)
        yield responses

    def _figures(self) -> dict[str, Any]:
        figures = {}
        for name, served in self._models.by_name.items():
            session = served.session  # one that is loaded on demand may leave at any time
            if session is not None and not session.closed:
                try:
                    figures[name] = session.stats()
                except SessionClosed:
                    continue
        return figures

    def _of_sessions(self, prefix: str, figures: dict[str, Any]) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        tables: list[tuple[Any, dict[str, tuple[str, Callable[[Any], float]]]]] = [
            (GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS),
        ]  # fmt: skip
        if prefix == "rekindle_":
            tables.append((CounterMetricFamily, OWN_COUNTERS))
        yield from _families(prefix, tables, figures)
        fleets = {model: stats for model, stats in figures.items() if hasattr(stats, "replicas")}
        if fleets and prefix == "rekindle_":
            more = [(GaugeMetricFamily, FLEET_GAUGES), (CounterMetricFamily, FLEET_COUNTERS)]
            yield from _families(prefix, more, fleets)
        labels = ["model_name", "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"]
        info = GaugeMetricFamily(prefix + "cache_config_info", "How the KV cache is laid out.", labels=labels)
        for model in figures:
            session = self._models.by_name[model].session
            if session is not None:
                config = session.config
                layout = (config.page_size, config.device_pages, config.kv_dtype, config.prefix_cache)
                info.add_metric([model, *map(str, layout)], 1)
        yield info

        sizes = HistogramMetricFamily(prefix + "iteration_tokens_total", "Tokens of a step.", labels=["model_name"])
        for model, stats in figures.items():
            sizes.add_metric([model], buckets=_cumulative(stats.step_sizes), sum_value=stats.tokens)
        yield sizes
        if prefix == "vllm:":  # dashboards join with it
            every = [served.session for served in self._models.by_name.values()]
            sessions = [session for session in every if session is not None]
            labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
            adapters = GaugeMetricFamily(prefix + "lora_requests_info", "Adapters of running requests.", labels=labels)
            most = sum(session.config.max_adapters for session in sessions)
            waiting, running = self._models.busy_adapters()
            adapters.add_metric([str(most), ",".join(waiting), ",".join(running)], time.time())
            yield adapters

    def _of_requests(self, prefix: str) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        labels = ["model_name", "finished_reason"]
        successes = CounterMetricFamily(prefix + "request_success", "Sequences by how they ended.", labels=labels)
        for (model, reason), count in sorted(self._ended.items()):
            successes.add_metric([model, reason], count)
        yield successes
        for name, (help, _) in HISTOGRAMS.items():
            family = HistogramMetricFamily(prefix + name, help, labels=["model_name"])
            for model, histograms in sorted(self._histograms.items()):
                histogram = histograms[name]
                family.add_metric([model], buckets=histogram.cumulative(), sum_value=histogram.sum)
            yield family


def _families(
    prefix: str, tables: Sequence[tuple[Any, Mapping[str, Any]]], figures: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield the metrics that come from the figures of each model."""
    for kind, table in tables:
        for name, (help, read) in table.items():
            family = kind(prefix + name, help, labels=["model_name"])
            for model, stats in figures.items():
                family.add_metric([model], read(stats))
            yield family


def finish_of(reason: FinishReason | None) -> str | None:
    return None if reason is None else FINISHED[reason]


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
        times = [completion.timings for completion in completions]
        first, total = max(time_.first_token for time_ in times), max(time_.total for time_ in times)
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


def dashboard() -> dict[str, object]:
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
            ("sum by (status) (rate(http_requests_total[$__rate_interval]))", "{{status}}")]),
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
