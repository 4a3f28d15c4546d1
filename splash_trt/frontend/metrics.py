"""The metrics for Prometheus: counters and histograms are kept here, gauges are read from the engine's last status."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from splash_trt.frontend.member import Member
from splash_trt.frontend.shared_metrics import Registries, SharedMetrics
from splash_trt.link import Frames, Ready, Status, SwitchReport, Totals
from splash_trt.observe.compat import CompatNames
from splash_trt.observe.series import Distribution, Rate, Total
from splash_trt.observe.spans import Spans
from splash_trt.observe.switches import SwitchMetrics
from splash_trt.request import FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TPOT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_TOKENS = tuple(1 << shift for shift in range(18))


class Metrics:
    """A frontend's metrics, under our names and those of other systems. Events that concern spans go to `spans` too.

    member: given if the frontend is one of several, whose metrics are added up.
    """

    def __init__(self, model_name: str = "", spans: Spans | None = None, member: Member | None = None) -> None:
        self._spans = spans or Spans()
        registries = self._registries = Registries()
        ProcessCollector(registry=registries.process)
        self._engine_counters(registries.engine)
        self._request_counters(registries.requests)
        registry = self._registry = CollectorRegistry()
        self._shared = SharedMetrics(registries, member)
        self._switches = SwitchMetrics(registries.engine, self._shared.counted)
        registry.register(self._shared)
        self._compat = CollectorRegistry()
        self._compat.register(CompatNames(registry, model_name))

    def _engine_counters(self, registry: CollectorRegistry) -> None:
        layout = ["layout"]
        self._tokens = Counter("splash_tokens", "Tokens computed, prompt and output", layout, registry=registry)
        self._steps = Counter("splash_steps", "Steps completed that computed tokens", layout, registry=registry)
        self._step_seconds = Counter("splash_step_seconds", "Time that steps took on rank 0", layout, registry=registry)
        self._step_tokens = Distribution("splash_step_tokens", "Tokens computed in one step", _TOKENS)
        registry.register(self._step_tokens)
        help_text = "Requests that gave their cache up, to be computed again later"
        self._preemptions = Counter("splash_preemptions", help_text, registry=registry)
        help_text = "Times that the policy asked for another layout"
        self._decisions = Counter("splash_decisions", help_text, ["source", "target", "kind"], registry=registry)
        self._by_name = {
            "tokens": self._tokens,
            "steps": self._steps,
            "seconds": self._step_seconds,
            "preemptions": self._preemptions,
            "decisions": self._decisions,
        }
        self._restarts = Counter("splash_engine_restarts", "Engines that took another's place", registry=registry)

    def _request_counters(self, registry: CollectorRegistry) -> None:
        help_text = "Prompt tokens of what was answered; a prompt counts once, whatever n is"
        self._prompt_tokens = Counter("splash_prompt_tokens", help_text, registry=registry)
        self._output_tokens = Total("splash_output_tokens", "Tokens sent to clients")
        registry.register(self._output_tokens)
        self._requests = Counter("splash_requests", "Requests that ended, by how", ["reason"], registry=registry)
        for reason in FinishReason:
            self._requests.labels(reason.value)
        self._responses = Counter("splash_http_responses", "HTTP responses", ["path", "code"], registry=registry)
        self._rate = Rate("splash_output_tokens_per_second", "Tokens sent to clients, of the last 5 s")
        self._inter_token_s = Distribution("splash_inter_token_seconds", "From a request's token to its next", _TPOT_S)
        registry.register(self._rate)
        registry.register(self._inter_token_s)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"splash_{name}", help_text, buckets=buckets, registry=registry)

        self._ttft_s = histogram("time_to_first_token_seconds", "From request to first token", _TTFT_S)
        self._tpot_s = histogram("time_per_output_token_seconds", "Mean over a request", _TPOT_S)
        self._request_s = histogram("request_seconds", "From request to last token", _REQUEST_S)
        self._queue_s = histogram("request_queue_seconds", "Until the engine first gave a request cache", _TTFT_S)
        self._prefill_s = histogram("request_prefill_seconds", "From there to the first token", _TTFT_S)
        self._decode_s = histogram("request_decode_seconds", "From first to last token", _REQUEST_S)
        self._inference_s = histogram("request_inference_seconds", "From the queue to the last token", _REQUEST_S)
        self._prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a complete request", _TOKENS)
        self._output_length = histogram("request_output_tokens", "Output tokens of a complete request", _TOKENS)

    def watch(self, status: Callable[[], Status | None], ready: Callable[[], Ready | None] = lambda: None) -> None:
        """Gives the functions from which gauges are read when they are scraped."""
        self._registries.state.register(StatusCollector(status, ready))

    def publish(self) -> None:
        """Publishes what has been counted, for the other frontends. May be called in another thread."""
        self._shared.publish()

    def text(self) -> bytes:
        """All metrics in Prometheus's text format. May be called in another thread."""
        return generate_latest(self._registry) + generate_latest(self._compat)

    def switches(self) -> list[dict[str, object]]:
        """Records of the latest switches, newest first."""
        return self._switches.records()

    def on_restart(self) -> None:
        """A new engine answers. Its totals begin at zero, so nothing is counted twice."""
        with self._shared.counting:
            self._shared.counted.begin("")
            self._switches.on_restart()
            self._restarts.inc()

    def on_frames(self, frames: Frames) -> None:
        self._spans.on_status(frames.status)
        with self._shared.counting:
            self._go_on(frames.incarnation)
            before = self._shared.counted.totals
            missed = {key: total - before.get(key, 0.0) for key, total in (frames.totals or {}).items()}
            self._count({key: count for key, count in missed.items() if count > 0})
            self._count(frames.counts)

    def _go_on(self, incarnation: str) -> None:
        """Go on counting this engine's news where this frontend, or the one whose place it takes, has stopped."""
        counted = self._shared.counted
        if counted.incarnation != incarnation:
            if counted.incarnation:  # the engine was started anew while nobody was in this place
                self._restarts.inc()
            counted.begin(incarnation)

    def _count(self, counts: Totals) -> None:
        totals = self._shared.counted.totals
        for key, count in counts.items():
            totals[key] = totals.get(key, 0.0) + count
            name, *labels = key
            if name == "sizes":
                self._step_tokens.add(int(labels[0]), int(count), 0.0)
                continue
            if name == "tokens":
                self._step_tokens.add(0, 0, count)
            counter = self._by_name[name]
            (counter.labels(*labels) if labels else counter).inc(count)

    def on_switch(self, report: SwitchReport) -> None:
        with self._shared.counting:
            self._go_on(report.incarnation)
            self._switches.on_report(report)

    def on_response(self, path: str, code: int) -> None:
        self._responses.labels(path, str(code)).inc()

    def request(self, num_prompt: int, same_prompt: bool = False) -> RequestMeter:
        """The meter of a request that begins now. same_prompt: it is another answer to the previous one's prompt."""
        return RequestMeter(self, num_prompt, same_prompt)


class RequestMeter:
    """Measures one request, from now until `end`."""

    def __init__(self, metrics: Metrics, num_prompt: int, same_prompt: bool) -> None:
        self._metrics = metrics
        self._span = metrics._spans.current()
        self._num_prompt = num_prompt
        self._num_own_prompt = 0 if same_prompt else num_prompt
        self._num_tokens = 0
        self._began = time.monotonic()
        self._queued_s: float | None = None
        self._first: float | None = None
        self._last = 0.0

    def tokens(self, count: int, queued_s: float | None = None) -> bool:
        """`count` more tokens came now; returns whether the first is among them. queued_s: as in TokenDelta."""
        if count == 0:
            return False
        metrics, now = self._metrics, time.monotonic()
        metrics._output_tokens.add(count)
        metrics._rate.add(count)
        self._num_tokens += count
        if self._first is not None:
            # Tokens that come together share the time since the previous ones.
            metrics._inter_token_s.observe((now - self._last) / count, count)
            self._last = now
            return False
        self._first = self._last = now
        self._span.first_token()
        metrics._prompt_tokens.inc(self._num_own_prompt)
        metrics._ttft_s.observe(now - self._began)
        if queued_s is not None:
            self._queued_s = queued_s
            metrics._queue_s.observe(queued_s)
            metrics._prefill_s.observe(max(0.0, now - self._began - queued_s))
        return True

    def end(self, reason: str) -> None:
        """The request has ended. reason: "stop", "length", "cancelled" or "error". Call it once."""
        metrics, now = self._metrics, time.monotonic()
        metrics._requests.labels(reason).inc()
        self._span.answered(self._num_own_prompt, self._num_tokens, reason)
        if reason in (FinishReason.CANCELLED.value, FinishReason.ERROR.value):
            return
        metrics._request_s.observe(now - self._began)
        metrics._prompt_length.observe(self._num_prompt)
        metrics._output_length.observe(self._num_tokens)
        if self._first is None:  # it asked only for its prompt (echo)
            metrics._prompt_tokens.inc(self._num_own_prompt)
            return
        metrics._decode_s.observe(now - self._first)
        if self._queued_s is not None:
            metrics._inference_s.observe(max(0.0, now - self._began - self._queued_s))
        if self._num_tokens > 1:
            metrics._tpot_s.observe((now - self._first) / (self._num_tokens - 1))


class StatusCollector(Collector):
    """Gauges of the engine's present state. Before its first status there are none."""

    def __init__(self, status: Callable[[], Status | None], ready: Callable[[], Ready | None] = lambda: None) -> None:
        self._status = status
        self._ready = ready

    def collect(self) -> Iterator[GaugeMetricFamily]:
        ready, status = self._ready(), self._status()
        if ready is not None:
            room = GaugeMetricFamily("splash_layout_capacity_tokens", "Distinct cache tokens", labels=["layout"])
            longest = GaugeMetricFamily("splash_layout_request_tokens", "Of the longest request", labels=["layout"])
            for layout, capacity in ready.capacity.items():
                room.add_metric([layout], capacity.total)
                longest.add_metric([layout], capacity.request)
            yield room
            yield longest
        if status is not None:
            yield from _requests(status)
            yield from _cache(status)
            yield from _layout(status)


def _requests(status: Status) -> Iterator[GaugeMetricFamily]:
    yield GaugeMetricFamily("splash_running_requests", "Requests that have cache", value=status.running)
    # Not by rank as well: a request gets its rank together with its cache.
    yield GaugeMetricFamily("splash_waiting_requests", "Requests without cache yet, in total", value=status.waiting)
    yield _by_rank("splash_rank_running_requests", "Requests whose owner or home it is", status.running_by_rank)


def _cache(status: Status) -> Iterator[GaugeMetricFamily]:
    """The cache by rank and over all ranks. A token that is replicated on all ranks counts on each of them."""
    used, total = status.used_tokens, status.total_tokens
    free = tuple(most - some for most, some in zip(total, used, strict=True))
    for name, values, what in (
        ("used", used, "Cache tokens held, in whole pages"),
        ("free", free, "Cache tokens that are free"),
        ("total", total, "Cache tokens that fit"),
    ):
        yield _by_rank(f"splash_rank_cache_{name}_tokens", what, values)
        yield GaugeMetricFamily(f"splash_cache_{name}_tokens", f"{what}, all ranks together", value=sum(values))
    ratio = sum(used) / sum(total) if sum(total) else 0.0
    yield GaugeMetricFamily("splash_cache_usage_ratio", "Share of the ranks' caches that is held, 0 to 1", value=ratio)


def _layout(status: Status) -> Iterator[GaugeMetricFamily]:
    yield GaugeMetricFamily("splash_epoch", "Layout changes so far", value=status.epoch)
    current = GaugeMetricFamily("splash_layout", "1 for the layout that serves", labels=["layout", "mode"])
    current.add_metric([status.layout, status.mode], 1)
    yield current
    progress = GaugeMetricFamily("splash_switch_progress", "Share of rows moved", labels=["state", "target"])
    progress.add_metric([status.switch, status.switch_target or ""], status.switch_progress)
    yield progress


def _by_rank(name: str, help_text: str, values: tuple[int, ...]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text, labels=["rank"])
    for rank, value in enumerate(values):
        family.add_metric([str(rank)], value)
    return family
