"""Prometheus metrics under vLLM's names."""

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from serving.engine import EngineStats
from serving.request import RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_LATENCY = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip

_PHASES = {
    "queue": "Time from arrival to the first step",
    "inference": "Time from the first step to the end",
    "prefill": "Time from the first step to the first token",
    "decode": "Time from the first token to the end",
}


def _token_buckets(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `limit`."""
    buckets = [step * 10**power for power in range(12) for step in (1, 2, 5)]
    return tuple(float(bucket) for bucket in buckets if bucket <= max(limit, 1))


class _EngineCollector(Collector):
    """Reads the engine's own counts when they are asked for."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        labels: tuple[str, str],
        step_buckets: tuple[float, ...],
    ) -> None:
        self._stats = stats
        self._labels = labels
        self._step_buckets = step_buckets

    def collect(self) -> Iterator[Metric]:
        """Gauges, counters and the histogram of one snapshot."""
        stats = self._stats()
        gauges = (
            ("num_requests_running", "Requests running", stats.num_running),
            ("num_requests_waiting", "Requests waiting", stats.num_waiting),
            ("kv_cache_usage_perc", "Cache in use, 0 to 1", stats.kv_cache_usage),
        )
        counters = (
            ("prompt_tokens", "Prompt tokens", stats.num_prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens from the cache", stats.prefix_cache_hits),
            ("generation_tokens", "Tokens generated", stats.num_generation_tokens),
            ("num_preemptions", "Requests preempted", stats.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found", stats.prefix_cache_hits),
        )
        for kind, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in table:
                family = kind(f"vllm:{name}", text, labels=_LABELS)
                family.add_metric(self._labels, value)
                yield family
        yield self._steps(stats.step_tokens)

    def _steps(self, counts: Mapping[int, int]) -> Metric:
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of a step", labels=_LABELS
        )
        buckets = [
            (str(limit), sum(count for size, count in counts.items() if size <= limit))
            for limit in self._step_buckets
        ]
        buckets.append(("+Inf", sum(counts.values())))
        total = sum(size * count for size, count in counts.items())
        family.add_metric(self._labels, buckets, total)
        return family


class Metrics:
    """Everything /metrics shows; one registry per server."""

    def __init__(
        self,
        *,
        model_name: str,
        max_model_len: int,
        stats: Callable[[], EngineStats],
        cache_info: Mapping[str, object] | None = None,
    ) -> None:
        """
        Args:
          model_name: label of every metric.
          max_model_len: largest bucket of token counts.
          stats: the engine's counts.
          cache_info: labels of vllm:cache_config_info.
        """
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        tokens = _token_buckets(max_model_len)
        self._registry.register(_EngineCollector(stats, self._labels, tokens))
        self._show_cache(cache_info or {})
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Time to the first token", _FIRST_TOKEN
        )
        self._next_token = self._histogram(
            "inter_token_latency_seconds", "Time between tokens", _TOKEN
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per output token", _TOKEN
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end", _LATENCY
        )
        self._phases = {
            phase: self._histogram(f"request_{phase}_time_seconds", text, _LATENCY)
            for phase, text in _PHASES.items()
        }
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens", tokens)
        self._generated = self._histogram("request_generation_tokens", "Tokens generated", tokens)
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of requests", tokens
        )
        self._n = self._histogram("request_params_n", "n of requests", (1, 2, 5, 10, 20))
        self._success = Counter(
            "vllm:request_success",
            "Finished requests",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )

    def _show_cache(self, info: Mapping[str, object]) -> None:
        gauge = Gauge(
            "vllm:cache_config_info",
            "Sizes of the caches",
            ("engine", *info),
            registry=self._registry,
        )
        gauge.labels("0", *(str(value) for value in info.values())).set(1)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self._registry
        ).labels(*self._labels)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)

    def timer(self, *, prompt_tokens: int, max_tokens: int, n: int) -> "RequestTimer":
        """Start timing one engine request."""
        return RequestTimer(self, prompt_tokens=prompt_tokens, max_tokens=max_tokens, n=n)

    def observe_token(self, *, first: bool, seconds: float) -> None:
        """One token's latency: since the arrival if it is the first, else since the last."""
        (self._first_token if first else self._next_token).observe(seconds)

    def observe_end(
        self,
        *,
        reason: str,
        seconds: float,
        phases: Mapping[str, float],
        prompt_tokens: int,
        tokens: int,
        max_tokens: int,
        n: int,
    ) -> None:
        """One finished request; `phases` has the seconds of those it went through."""
        self._latency.observe(seconds)
        for phase, spent in phases.items():
            self._phases[phase].observe(spent)
        self._prompt.observe(prompt_tokens)
        self._generated.observe(tokens)
        self._max_tokens.observe(max_tokens)
        self._n.observe(n)
        if tokens > 1:
            self._per_token.observe(phases["decode"] / (tokens - 1))
        self._success.labels(*self._labels, reason).inc()


class RequestTimer:
    """Times one engine request by its outputs."""

    def __init__(self, metrics: Metrics, *, prompt_tokens: int, max_tokens: int, n: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._n = n
        self._start = self._last = time.monotonic()
        self._begun: float | None = None
        self._first: float | None = None
        self._tokens = 0
        self._ended = False

    def output(self, output: RequestOutput) -> None:
        """Take an output as it comes."""
        now = time.monotonic()
        if self._begun is None:
            self._begun = output.begin_time
        if output.token_ids:
            first = self._first is None
            self._metrics.observe_token(first=first, seconds=now - self._last)
            self._first = now if first else self._first
            self._last = now
            self._tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self.end(output.finish_reason)

    def _phases(self, now: float) -> dict[str, float]:
        phases = {}
        if self._begun is not None:
            begun = max(self._begun, self._start)
            phases["queue"] = begun - self._start
            phases["inference"] = max(now - begun, 0.0)
            if self._first is not None:
                phases["prefill"] = max(self._first - begun, 0.0)
        if self._first is not None:
            phases["decode"] = now - self._first
        return phases

    def end(self, reason: str) -> None:
        """The request ended; a second end counts nothing."""
        if self._ended:
            return
        self._ended = True
        now = time.monotonic()
        self._metrics.observe_end(
            reason=reason,
            seconds=now - self._start,
            phases=self._phases(now),
            prompt_tokens=self._prompt_tokens,
            tokens=self._tokens,
            max_tokens=self._max_tokens,
            n=self._n,
        )
